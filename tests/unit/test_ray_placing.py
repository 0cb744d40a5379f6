"""Workers of a cluster, their resources, and errors if the cluster lacks them. Without Ray."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray_clusters import cluster_recipe

from digenrl.config.reading import ConfigError
from digenrl.transports.ray import backend
from digenrl.transports.ray.capacity import (
    ClusterResources,
    FreeResources,
    NodeResources,
    ResourceRequest,
    check_capacity,
)
from digenrl.transports.ray.placing import place_on_cluster, resource_request, torch_threads, total_cpus
from digenrl.worker.assignment import Assignment


def node(name: str, labels: dict[str, str] | None = None, **resources: float) -> NodeResources:
    """An empty machine. Two underscores stand for a colon."""
    amounts = {kind.replace("__", ":"): amount for kind, amount in resources.items()}
    return NodeResources(name, f"10.0.0.{len(name)}", amounts, amounts, labels or {})


H100 = node("a", {"zone": "east"}, CPU=8, GPU=4, accelerator_type__H100=1)
A6000 = node("b", {"zone": "west"}, CPU=8, GPU=2, accelerator_type__A6000=1)
PLAIN = node("c", CPU=4, disk=1)
MIXED = ClusterResources((H100, A6000, PLAIN))


REAL_RESERVE = FreeResources.reserve


class FakeCluster:
    """A cluster that the run has started here, or found."""

    def __init__(self, started_here: bool) -> None:
        self.started_here = started_here

    def resources(self) -> ClusterResources:
        return MIXED

    def close(self) -> None:
        pass


def test_versions_are_compared_only_with_machines_of_a_cluster_that_was_there_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = pytest.importorskip("digenrl.transports.ray.package_versions")
    compared: list[bool] = []
    monkeypatch.setattr(versions, "check_versions", lambda resources, timeout_s: compared.append(True))
    monkeypatch.setattr(backend, "prepare_fork_server", lambda threads: None)
    monkeypatch.setattr(backend, "inspect", lambda recipe: None)
    for started_here, expected in ((True, []), (False, [True])):
        monkeypatch.setattr(backend, "open_cluster", lambda *_, here=started_here: FakeCluster(here))
        backend.RayBackend.find(cluster_recipe())
        assert compared == expected


def test_workers_that_wait_for_room_look_at_the_cluster_once(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = pytest.importorskip("digenrl.transports.ray.transport")
    monkeypatch.setattr(transport, "CHECK_INTERVAL_S", math.inf)
    looks, tries = list[ClusterResources](), list[ResourceRequest]()

    def look() -> ClusterResources:
        looks.append(MIXED)
        return MIXED

    def reserve(free: FreeResources, request: ResourceRequest) -> str | None:
        tries.append(request)
        return REAL_RESERVE(free, request)

    monkeypatch.setattr(FreeResources, "reserve", reserve)
    pools = [
        {"name": "fast", "accelerator": "H100", "gpus": 8, "count": 50},
        {"name": "slow", "accelerator": "A6000", "gpus": 2, "count": 50},
    ]
    recipe = cluster_recipe(cluster={"generators": pools}, lanes={"device": "auto"})
    workers = transport.RayTransport(SimpleNamespace(resources=look), recipe)
    looks_before = len(looks)
    assignments = [
        Assignment(f"g-{pool}-{index}", frozenset({"generate"}), "cuda", recipe, None, pool=pool)
        for pool in ("fast", "slow")
        for index in range(50)
    ]
    assert [workers.has_capacity(each) for each in assignments] == [False] * 50 + [True] * 50
    assert len(looks) - looks_before == 1
    assert len(tries) == 1 + 50, "equal requests are tried once, if they do not fit"


def test_generators_of_all_pools_are_numbered_and_the_reserve_comes_last(tmp_path: Path) -> None:
    pools = [
        {"name": "fast", "count": 2, "up_to": 3, "accelerator": "H100"},
        {"name": "slow", "accelerator": "A6000", "up_to": 2, "slowdown": 2},
    ]
    recipe = cluster_recipe(cluster={"generators": pools}, lanes={"device": "auto", "rewards": 2})
    workers = place_on_cluster(recipe, MIXED, checkpoint=tmp_path / "step-3", run=tmp_path)
    placed = [(g.name, g.pool, g.slowdown, g.device) for g in (*workers.generators, *workers.reserve)]
    assert placed == [
        ("generator-0", "fast", 1, "cuda"),
        ("generator-1", "fast", 1, "cuda"),
        ("generator-2", "slow", 2, "cuda"),
        ("generator-3", "fast", 1, "cuda"),
        ("generator-4", "slow", 2, "cuda"),
    ]
    assert (workers.trainer.device, workers.trainer.checkpoint) == ("cuda", tmp_path / "step-3")
    assert [reward.name for reward in workers.rewards] == ["reward-0", "reward-1"]
    assert workers.encoder is not None and workers.encoder.device == "cpu"
    assert {(each.run, each.exchange) for each in workers.initial()} == {(tmp_path, None)}
    assert resource_request(workers.generators[2]) == ResourceRequest(
        "cluster.generators: pool 'slow'", 1, {"GPU": 1, "CPU": 1}, accelerator="A6000"
    )


@pytest.mark.parametrize(
    ("changes", "trainer", "generator", "rewards"),
    [
        ({}, {"train", "generate"}, {"generate"}, 1),
        ({"techniques": {"tag": "none"}}, {"train"}, {"generate"}, 1),
        ({"lanes": {"rewards": 0, "device": "cpu"}}, {"train", "generate", "score"}, {"generate", "score"}, 0),
        ({"lanes": {"ranks": 2, "device": "cpu"}, "training": {"lora": None}}, {"train"}, {"generate"}, 1),
    ],
)
def test_duties_are_the_same_as_on_one_machine(
    changes: dict[str, Any], trainer: set[str], generator: set[str], rewards: int
) -> None:
    lanes = {"lanes": {"generators": 1} | changes.get("lanes", {})}
    workers = place_on_cluster(cluster_recipe(**changes | lanes), MIXED)
    assert (set(workers.trainer.duties), set(workers.generators[0].duties)) == (trainer, generator)
    assert len(workers.rewards) == rewards


@pytest.mark.parametrize(
    ("device", "cluster", "expected"),
    [
        ("auto", MIXED, "cuda"),
        ("auto", ClusterResources((PLAIN,)), "cpu"),
        ("cpu", MIXED, "cpu"),
        ("cuda", MIXED, "cuda"),
    ],
)
def test_by_default_a_lane_has_a_gpu_if_the_cluster_has_any(
    device: str, cluster: ClusterResources, expected: str
) -> None:
    workers = place_on_cluster(cluster_recipe(lanes={"generators": 1, "device": device}), cluster)
    assert workers.generators[0].device == workers.trainer.device == expected
    resources = {"GPU": 1, "CPU": 1} if expected == "cuda" else {"CPU": 1}
    assert resource_request(workers.generators[0]).resources == resources


def test_a_worker_has_one_thread_per_cpu_unless_the_recipe_sets_the_number() -> None:
    place = {"trainer": {"cpus": 3.5}, "encoder": {"cpus": 0.5}}
    workers = place_on_cluster(cluster_recipe(cluster=place), MIXED)
    assert workers.encoder is not None
    assert (torch_threads(workers.trainer), torch_threads(workers.encoder)) == (3, 1)
    workers = place_on_cluster(cluster_recipe(cluster=place, lanes={"generators": 1, "threads": 2}), MIXED)
    assert torch_threads(workers.trainer) == 2


def test_total_cpus_include_all_ranks_and_the_reserve() -> None:
    pools = [{"name": "a", "count": 1, "up_to": 4, "cpus": 0.5}]
    recipe = cluster_recipe(cluster={"generators": pools}, lanes={"ranks": 3, "rewards": 1, "device": "cpu"})
    assert total_cpus(recipe) == 3 + 2 + 1 + 1
    assert resource_request(place_on_cluster(recipe, MIXED).trainer).count == 3


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ({"accelerator": "B200"}, r"accelerator B200; .*A6000, H100$"),
        ({"labels": {"zone": "moon"}}, r"label zone=moon; .*zone=east, zone=west$"),
        ({"labels": {"zone": "west"}, "accelerator": "H100"}, r"labels and accelerators"),
        ({"resources": {"tape": 1}}, r"any tape; .*CPU, GPU, disk$"),
        ({"resources": {"disk": 2}}, r"enough disk; .* is 1;"),
        ({"gpus": 5}, r"enough GPU; .* is 4;"),
        (
            {"count": 5, "accelerator": "H100"},
            r"pool 'p': needs 5 x \{GPU: 1, CPU: 1, accelerator_type:H100\}, .*room for 4; "
            r".* 4 H100, 8 CPU on 1 node;",
        ),
        ({"count": 6}, r"needs 6 x \{GPU: 1, CPU: 1\}, .*room for 5; .* 6 GPU, 20 CPU on 3 nodes"),
    ],
)
def test_an_error_names_what_is_missing_and_what_the_cluster_has(pool: dict[str, Any], message: str) -> None:
    recipe = cluster_recipe(cluster={"generators": [{"name": "p", **pool}]}, lanes={"device": "auto"})
    with pytest.raises(ConfigError, match=message) as raised:
        place_on_cluster(recipe, MIXED)
    assert "\n" not in str(raised.value)


def test_scarce_machines_are_kept_for_workers_that_need_them() -> None:
    small, large = node("small", CPU=1, GPU=1), node("large", CPU=2, disk=1)
    cluster = ClusterResources((small, large))
    anywhere = ResourceRequest("x", 1, {"CPU": 1})
    with_gpu = ResourceRequest("y", 1, {"GPU": 1, "CPU": 1})
    with_disk = ResourceRequest("z", 1, {"disk": 1, "CPU": 1})
    check_capacity([anywhere, with_gpu, with_disk], cluster)
    free = FreeResources(cluster.nodes, {each.id: each.free for each in cluster.nodes})
    assert [free.reserve(anywhere), free.reserve(with_gpu)] == ["large", "small"]
    with pytest.raises(ConfigError, match=r"x: needs 2 x \{CPU: 1\}, .*room for 1"):
        check_capacity([ResourceRequest("x", 2, {"CPU": 1}), with_gpu, with_disk], cluster)


def test_fractions_of_a_gpu_add_up() -> None:
    free = FreeResources((node("a", GPU=1),), {"a": {"GPU": 1.0}})
    tenth = ResourceRequest("x", 1, {"GPU": 0.1})
    assert [free.reserve(tenth) for _ in range(11)] == ["a"] * 10 + [None]


@pytest.mark.slow
def test_placing_needs_neither_ray_nor_torch() -> None:
    code = (
        "import sys, digenrl.transports.ray.placing, digenrl.transports.ray.joining;"
        "sys.exit('ray' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
