"""The transport contract: how jobs reach workers and results come back. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from digenrl.config.recipes.recipe import Recipe
from digenrl.records import Job, Result
from digenrl.worker.assignment import Assignment, DeviceFailed, PeersLost, Ready, StartFailed, Workers


@dataclass(frozen=True, slots=True)
class Gone:
    """The worker is gone; its jobs get no result. `fault` is False if its machine was lost."""

    reason: str
    fault: bool = True


@dataclass(frozen=True, slots=True)
class InputsLost:
    """The job did not run: tensors that it reads were lost with the machine that held them."""

    names: tuple[str, ...]


Report = Result | Ready | StartFailed | Gone | InputsLost | PeersLost | DeviceFailed


@dataclass(frozen=True, slots=True)
class Message:
    """A report from a worker, matched to its job by id.

    `job_id` is None for the first report after a start (`Ready` or `StartFailed`) and for `Gone`.
    `waited_ns` is the time between the report and its receipt, where the driver was too busy to receive it.
    """

    worker: str
    job_id: int | None
    report: Report
    waited_ns: int = 0


class Transport(Protocol):
    """Starts workers by name, sends jobs to them and receives their reports.

    A worker runs its jobs in the order in which they were sent. Reports carry the id of their job.
    """

    def start(self, assignment: Assignment) -> None:
        """Starts a worker; its first report is Ready, or StartFailed if it cannot be built."""

    def has_capacity(self, assignment: Assignment) -> bool:
        """Whether there is capacity to start this worker now."""

    def send(self, worker: str, job: Job) -> None:
        """Sends a job without waiting for the worker; does nothing if it is gone."""

    def receive(self, timeout_s: float) -> Sequence[Message]:
        """Messages that have arrived, at least the first of every worker; waits for one up to the timeout.

        A worker that sends no heartbeat for the recipe's `lanes.patience_s` is killed and reported as gone.
        """

    def end(self, worker: str) -> None:
        """Kills a worker. It sends no more reports, not even that it is gone."""

    def stop(self) -> None:
        """Ends all workers. Safe to call twice."""


class ArtifactStore(Protocol):
    """The driver's side of an exchange: names that it can drop, never tensors.

    `holds_weights` is False if weights are sent from worker to worker and take no space in the store.
    """

    holds_weights: bool

    def drop(self, name: str) -> None:
        """Removes a name; does nothing if it is unknown."""

    def free_bytes(self) -> int:
        """Free space."""

    def where(self) -> str:
        """The place, for messages."""


@dataclass(frozen=True, slots=True)
class RunResources:
    """What one run works with. `close` ends its workers and frees their tensors; it is safe to call twice.

    `network_metrics` returns metrics of the weights sent over the network since the last call, if there are any.
    """

    transport: Transport
    artifacts: ArtifactStore
    workers: Workers
    close: Callable[[], None]
    network_metrics: Callable[[], dict[str, float]] = dict


class Backend(Protocol):
    """The hardware of a run, validated for a recipe before anything is written or loaded."""

    def prepare(self, recipe: Recipe, run: Path, checkpoint: Path | None) -> RunResources:
        """Creates the resources of a run, which may resume from a checkpoint. Workers are started later."""

    def close(self) -> None:
        """Releases the hardware."""
