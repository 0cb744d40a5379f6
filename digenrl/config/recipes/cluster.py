"""Placement of a run's workers on a Ray cluster, one pool per class of cards or machines."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from digenrl.config.generator_pools import GeneratorPool
from digenrl.config.limits import Text
from digenrl.config.reading import Frozen

NAME = r"^[a-z0-9][a-z0-9_-]*$"

SITE_LABEL = "site"  # of `ray start --labels`: machines with the same value are close together

WeightPatches = Literal["auto", "always", "never"]


def host_and_port(address: str) -> tuple[str, int]:
    """Of an address such as 10.0.0.1:6379 or [::1]:6379. Raises ValueError if it is not one."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"'{address}' is not auto, local or HOST:PORT; write it like 10.0.0.1:6379")
    return host.strip("[]"), int(port)


class WorkerResources(Frozen):
    """The resources of one worker, and the machines that may host it.

    `gpus` defaults to 1 if the run uses CUDA (`lanes.device`), else to 0. `accelerator` is Ray's name of a card,
    such as H100 or A6000; `labels` match those of `ray start --labels`; `resources` are amounts of custom ones.
    """

    gpus: Annotated[float, Field(ge=0)] | None = None
    cpus: float = Field(default=1.0, ge=0)
    accelerator: Text | None = None
    labels: dict[str, str] = Field(default={})
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default={})

    @field_validator("gpus")
    @classmethod
    def _is_a_share_of_a_card_or_whole(cls, gpus: float | None) -> float | None:
        if gpus is not None and gpus > 1 and gpus != int(gpus):
            raise ValueError(f"Ray gives a worker a share of one GPU or several whole ones, got {gpus:g}")
        return gpus


class CpuWorkerResources(WorkerResources):
    """Resources of a worker that needs no card unless `gpus` says so; a fraction shares a card."""

    gpus: Annotated[float, Field(ge=0)] | None = 0.0


class ClusterGeneratorPool(WorkerResources, GeneratorPool):
    """A pool of generators on the cluster.

    With `up_to`, more lanes join during the run as machines are added, up to that number. `slowdown` multiplies
    the time of every slice, to emulate slower cards on equal machines.
    """

    name: str = Field(default="generator", pattern=NAME)
    up_to: PositiveInt | None = None
    slowdown: float = Field(default=1.0, ge=1)

    @model_validator(mode="after")
    def _up_to_is_not_less_than_count(self) -> ClusterGeneratorPool:
        if self.up_to is not None and self.up_to < self.count:
            raise ValueError(f"up_to = {self.up_to} is less than count = {self.count}; raise it, or leave it out")
        return self


class ClusterSettings(Frozen):
    """The Ray cluster of `mode: ray`. The numbers of trainer ranks and reward lanes are in `lanes`.

    `address` is that of a running cluster, such as 10.0.0.1:6379; `auto` joins the cluster of this machine or
    starts one; `local` always starts one. Without `generators`, `lanes.generators` lanes are placed wherever there
    is room.

    With `weight_patches`, new weights are sent as their change from the version before, which is exact: `auto`
    does so to other machines, where that is faster.
    """

    address: Text = "auto"
    generators: tuple[ClusterGeneratorPool, ...] = ()
    trainer: WorkerResources = WorkerResources()
    rewards: CpuWorkerResources = CpuWorkerResources()
    encoder: CpuWorkerResources = CpuWorkerResources()
    start_timeout_s: float = Field(default=30.0, gt=0, description="how long to wait for the cluster to answer")
    weight_patches: WeightPatches = "auto"

    @field_validator("address")
    @classmethod
    def _address_has_a_port(cls, address: str) -> str:
        if address not in ("auto", "local"):
            host_and_port(address)
        return address

    @field_validator("generators", mode="before")
    @classmethod
    def _single_pool_as_list(cls, pools: Any) -> Any:
        return [pools] if isinstance(pools, dict) else pools

    @model_validator(mode="after")
    def _pool_names_are_unique(self) -> ClusterSettings:
        names = [pool.name for pool in self.generators]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"generators: two pools are called '{twice}'; rename one of them")
        return self
