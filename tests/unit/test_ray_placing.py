"""Who works on a cluster, on what, and what is said when there is not enough: without Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray_clusters import cluster_recipe

from digenrl.config.reading import ConfigError
from digenrl.transports.ray.capacity import ClusterFacts, Need, NodeFacts, Packing, check_capacity
from digenrl.transports.ray.placing import cpus_wanted, need_of, place_on_cluster, threads_of


def node(name: str, labels: dict[str, str] | None = None, **resources: float) -> NodeFacts:
    """A machine with nothing on it. Two underscores stand for a colon."""
    amounts = {kind.replace("__", ":"): amount for kind, amount in resources.items()}
    return NodeFacts(name, f"10.0.0.{len(name)}", amounts, amounts, labels or {})


H100 = node("a", {"zone": "east"}, CPU=8, GPU=4, accelerator_type__H100=1)
A6000 = node("b", {"zone": "west"}, CPU=8, GPU=2, accelerator_type__A6000=1)
PLAIN = node("c", CPU=4, disk=1)
MIXED = ClusterFacts((H100, A6000, PLAIN))


def test_pools_become_generators_that_are_numbered_through_with_a_reserve_after_all_of_them(
    tmp_path: Path,
) -> None:
    pools = [
        {"name": "fast", "count": 2, "up_to": 3, "accelerator": "H100"},
        {"name": "slow", "accelerator": "A6000", "up_to": 2, "slowdown": 2},
    ]
    recipe = cluster_recipe(cluster={"generators": pools}, lanes={"device": "auto", "rewards": 2})
    crew = place_on_cluster(recipe, MIXED, checkpoint=tmp_path / "step-3", run=tmp_path)
    placed = [(g.name, g.pool, g.slowdown, g.device) for g in (*crew.generators, *crew.reserve)]
    assert placed == [
        ("generator-0", "fast", 1, "cuda"),
        ("generator-1", "fast", 1, "cuda"),
        ("generator-2", "slow", 2, "cuda"),
        ("generator-3", "fast", 1, "cuda"),
        ("generator-4", "slow", 2, "cuda"),
    ]
    assert (crew.trainer.device, crew.trainer.checkpoint) == ("cuda", tmp_path / "step-3")
    assert [reward.name for reward in crew.rewards] == ["reward-0", "reward-1"]
    assert crew.encoder is not None and crew.encoder.device == "cpu"
    assert {(each.run, each.exchange) for each in crew.initial()} == {(tmp_path, None)}
    assert need_of(crew.generators[2]) == Need(
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
def test_duties_are_those_of_one_machine(
    changes: dict[str, Any], trainer: set[str], generator: set[str], rewards: int
) -> None:
    lanes = {"lanes": {"generators": 1} | changes.get("lanes", {})}
    crew = place_on_cluster(cluster_recipe(**changes | lanes), MIXED)
    assert (set(crew.trainer.duties), set(crew.generators[0].duties)) == (trainer, generator)
    assert len(crew.rewards) == rewards


@pytest.mark.parametrize(
    ("device", "cluster", "expected"),
    [
        ("auto", MIXED, "cuda"),
        ("auto", ClusterFacts((PLAIN,)), "cpu"),
        ("cpu", MIXED, "cpu"),
        ("cuda", MIXED, "cuda"),
    ],
)
def test_by_default_a_lane_has_a_card_where_there_are_any(
    device: str, cluster: ClusterFacts, expected: str
) -> None:
    crew = place_on_cluster(cluster_recipe(lanes={"generators": 1, "device": device}), cluster)
    assert crew.generators[0].device == crew.trainer.device == expected
    assert need_of(crew.generators[0]).resources == ({"GPU": 1, "CPU": 1} if expected == "cuda" else {"CPU": 1})


def test_a_worker_has_as_many_threads_as_cpus_unless_the_recipe_says() -> None:
    place = {"trainer": {"cpus": 3.5}, "encoder": {"cpus": 0.5}}
    crew = place_on_cluster(cluster_recipe(cluster=place), MIXED)
    assert crew.encoder is not None
    assert (threads_of(crew.trainer), threads_of(crew.encoder)) == (3, 1)
    crew = place_on_cluster(cluster_recipe(cluster=place, lanes={"generators": 1, "threads": 2}), MIXED)
    assert threads_of(crew.trainer) == 2


def test_all_ranks_and_all_who_may_join_later_count_as_wanted() -> None:
    pools = [{"name": "a", "count": 1, "up_to": 4, "cpus": 0.5}]
    recipe = cluster_recipe(cluster={"generators": pools}, lanes={"ranks": 3, "rewards": 1, "device": "cpu"})
    assert cpus_wanted(recipe) == 3 + 2 + 1 + 1
    crew = place_on_cluster(recipe, MIXED)
    assert need_of(crew.trainer).count == 3


@pytest.mark.parametrize(
    ("pool", "complaint"),
    [
        ({"accelerator": "B200"}, r"has the accelerator B200; there are A6000, H100$"),
        ({"labels": {"zone": "moon"}}, r"has the label zone=moon; there are zone=east, zone=west$"),
        ({"labels": {"zone": "west"}, "accelerator": "H100"}, r"has all of these labels and accelerators"),
        ({"resources": {"tape": 1}}, r"has any tape; there are CPU, GPU, disk$"),
        ({"resources": {"disk": 2}}, r"the most disk on one is 1; use less$"),
        ({"gpus": 5}, r"the most GPU on one is 4; use less$"),
        (
            {"count": 5, "accelerator": "H100"},
            r"pool 'p': needs 5 x \{GPU: 1, CPU: 1, accelerator_type:H100\}, room is for 4; "
            r"the cluster has 4 H100, 8 CPU on 1 node; add machines, or use fewer$",
        ),
        ({"count": 6}, r"needs 6 x \{GPU: 1, CPU: 1\}, room is for 5; the cluster has 6 GPU, 20 CPU on 3 nodes"),
    ],
)
def test_what_the_cluster_does_not_have_is_named_with_what_it_has(pool: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as raised:
        place_on_cluster(
            cluster_recipe(cluster={"generators": [{"name": "p", **pool}]}, lanes={"device": "auto"}), MIXED
        )
    assert "\n" not in str(raised.value)


def test_devices_by_name_are_refused_on_a_cluster() -> None:
    with pytest.raises(ConfigError, match=r"lanes.generators: \[cpu, cpu\] names devices of one machine"):
        place_on_cluster(cluster_recipe(lanes={"generators": ["cpu", "cpu"]}), MIXED)


def test_who_has_the_least_choice_is_placed_first_and_who_needs_no_card_takes_none_away() -> None:
    small, large = node("small", CPU=1, GPU=1), node("large", CPU=2, disk=1)
    anywhere, with_card, with_disk = (
        Need("x", 1, {"CPU": 1}),
        Need("y", 1, {"GPU": 1, "CPU": 1}),
        Need("z", 1, {"disk": 1, "CPU": 1}),
    )
    check_capacity([anywhere, with_card, with_disk], ClusterFacts((small, large)))
    packing = Packing((small, large), {each.id: each.free for each in (small, large)})
    assert [packing.put(anywhere), packing.put(with_card)] == ["large", "small"]
    with pytest.raises(ConfigError, match=r"x: needs 2 x \{CPU: 1\}, room is for 1"):
        check_capacity([Need("x", 2, {"CPU": 1}), with_card, with_disk], ClusterFacts((small, large)))


def test_fractions_of_a_card_add_up() -> None:
    packing = Packing((node("a", GPU=1),), {"a": {"GPU": 1.0}})
    third = Need("x", 1, {"GPU": 0.1})
    assert [packing.put(third) for _ in range(11)] == ["a"] * 10 + [None]


def test_placing_needs_neither_ray_nor_torch() -> None:
    code = (
        "import sys, digenrl.transports.ray.placing, digenrl.transports.ray.joining;"
        "sys.exit('ray' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
