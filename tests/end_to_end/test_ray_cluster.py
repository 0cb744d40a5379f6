"""Workers as actors of a real Ray cluster: what arrives, what is lost, and who is noticed to be gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from digenrl.worker.orders import LayOutWeights, LoadWeights, Ready, WeightsLaidOut, WeightsLoaded
from ray_clusters import (
    AddUp,
    Did,
    Leave,
    LookAround,
    Saw,
    SeveralNodes,
    Sleep,
    build_abacus,
    cluster_recipe,
    is_alive,
    several_nodes,
    stored_bytes,
    sum_of_weights,
    until,
    wait_for,
)

from digenrl.config.reading import ConfigError
from digenrl.config.recipe import Recipe
from digenrl.records import WeightsReference
from digenrl.transports.contract import Gone, InputsLost, Message
from digenrl.transports.ray import weight_broadcast as wire
from digenrl.transports.ray.joining import RayCluster
from digenrl.transports.ray.package_versions import check_versions
from digenrl.transports.ray.placing import place_on_cluster
from digenrl.transports.ray.transport import RayTransport
from digenrl.transports.ray.weight_broadcast import Delivery
from digenrl.worker.assignment import Assignment, Ranks, Workers

FAR = {"labels": {"zone": "far"}, "num_cpus": 2}
CLUSTER = {
    "generators": [
        {"name": "near", "resources": {"near": 1}},
        {"name": "far", "labels": {"zone": "far"}, "up_to": 3},
    ],
    "trainer": {"resources": {"near": 1}},
    "start_timeout_s": 3,
}
LARGE = 5_000_000
TENSOR = 1000  # numbers, 8 bytes each: less than what object stores keep unasked


@pytest.fixture(scope="module")
def joined() -> Iterator[tuple[SeveralNodes, RayCluster]]:
    with several_nodes(num_cpus=4, resources={"near": 4}) as (nodes, cluster):
        yield nodes, cluster


@pytest.fixture(scope="module")
def far(joined: tuple[SeveralNodes, RayCluster]) -> Any:
    """A second machine."""
    return joined[0].add(**FAR)


class Setting:
    """A transport, a crew for it, and two generators on it, each on a machine of its own."""

    def __init__(
        self, cluster: RayCluster, recipe: Recipe, logs: Path, deliveries: Callable[[Delivery], None] = print
    ) -> None:
        self.transport, self.logs = RayTransport(cluster, recipe, logs, deliveries, build=build_abacus), logs
        self.crew: Workers = place_on_cluster(recipe, cluster.facts())
        self.near, self.distant = self.crew.generators

    def start(self, *assignments: Assignment) -> None:
        """Those of them who are not there."""
        absent = [each for each in assignments if each.name not in self.transport.births()]
        for assignment in absent:
            self.transport.start(assignment)
        messages = wait_for(self.transport, len(absent))
        assert {message.worker: message.report for message in messages} == {a.name: Ready() for a in absent}

    def export_initial_weights(self, version: int) -> WeightsReference:
        """The trainer has weights of this version."""
        self.transport.send(self.crew.trainer.name, 1, LayOutWeights(version))
        (message,) = wait_for(self.transport, 1)
        assert isinstance(message.report, WeightsLaidOut)
        return message.report.weights

    def pid(self, worker: Assignment) -> int:
        """The process of a worker."""
        pid: int = self.transport.births()[worker.name].pid
        return pid


@pytest.fixture(scope="module")
def shared(
    joined: tuple[SeveralNodes, RayCluster], far: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Setting]:
    lanes = {"generators": 1, "device": "cpu", "patience_s": 20.0}
    logs = tmp_path_factory.mktemp("run") / "logs"
    setting = Setting(joined[1], cluster_recipe(cluster=CLUSTER, lanes=lanes), logs)
    yield setting
    setting.transport.stop()
    setting.transport.stop()


@pytest.fixture
def setting(shared: Setting) -> Iterator[Setting]:
    """Both generators are there and have nothing to do."""
    shared.start(shared.near, shared.distant)
    yield shared
    assert shared.transport.receive(0) == []


def test_what_one_worker_leaves_another_reads_and_the_driver_gets_reports_alone(setting: Setting) -> None:
    transport, near, distant = setting.transport, setting.near, setting.distant
    transport.send(near.name, 2, Leave("a", TENSOR))
    transport.send(near.name, 3, Leave("b", 3, first=1.0))
    assert wait_for(transport, 2) == [Message(near.name, 2, Did()), Message(near.name, 3, Did())]
    transport.send(distant.name, 4, Sleep(0.1))
    transport.send(distant.name, 5, AddUp(("a", "b")))
    assert [m.report for m in wait_for(transport, 2)] == [Did(), Did(TENSOR * (TENSOR - 1) / 2 + 6)]
    assert transport.births()[near.name].node_id != transport.births()[distant.name].node_id
    kept = [transport.shelf.get(name) for name in ("a", "b")]
    assert all(where["node_ids"] for where in ray.experimental.get_object_locations(kept).values())  # in a store
    assert 0 < transport.driver_bytes < 8 * TENSOR
    assert (setting.logs / f"{near.name}.log").read_text() == f"{near.name} is here\n"


def test_what_is_dropped_is_freed(setting: Setting) -> None:
    near, shelf = setting.near, setting.transport.shelf
    setting.transport.send(near.name, 6, Leave("large", LARGE))
    wait_for(setting.transport, 1)
    until(lambda: stored_bytes(setting.transport.births()[near.name].node_id) >= 8 * LARGE)
    free = until(shelf.free_bytes)
    shelf.drop("large")
    shelf.drop("large")
    until(lambda: stored_bytes(setting.transport.births()[near.name].node_id) < 8 * LARGE)
    until(lambda: shelf.free_bytes() >= free)


def test_an_order_that_reads_what_nobody_left_is_a_mistake_of_who_gives_it(setting: Setting) -> None:
    near = setting.near
    with pytest.raises(AssertionError, match="nobody left"):
        setting.transport.send(near.name, 7, AddUp(("nothing",)))


def test_a_worker_that_ended_is_gone_with_all_its_orders_and_what_it_left_is_not(setting: Setting) -> None:
    transport, near, distant = setting.transport, setting.near, setting.distant
    transport.send(near.name, 8, Leave("a", TENSOR))
    wait_for(transport, 1)
    transport.send(near.name, 9, Sleep(60))
    transport.send(near.name, 10, Sleep(60))
    os.kill(setting.pid(near), signal.SIGKILL)
    (message,) = wait_for(transport, 1)
    assert message.worker == near.name and isinstance(message.report, Gone) and message.report.fault
    transport.send(near.name, 11, Sleep(0))
    transport.send(distant.name, 12, AddUp(("a",)))
    assert wait_for(transport, 1) == [Message(distant.name, 12, Did(TENSOR * (TENSOR - 1) / 2))]
    setting.start(near)


def test_a_worker_that_ends_with_nothing_to_do_is_noticed_too(setting: Setting) -> None:
    near = setting.near
    os.kill(setting.pid(near), signal.SIGKILL)
    (message,) = wait_for(setting.transport, 1)
    assert isinstance(message.report, Gone) and message.report.fault


def test_a_stopped_worker_is_noticed_by_its_silence_and_ended(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, near, distant = setting.transport, setting.near, setting.distant
    pid = setting.pid(near)
    monkeypatch.setattr(transport, "_patience_s", 3.0)
    transport.send(distant.name, 13, Sleep(4.5))  # busy for longer than anybody's patience, and not silent
    os.kill(pid, signal.SIGSTOP)
    assert wait_for(transport, 2) == [
        Message(near.name, None, Gone("gave no sign of life for 3 s")),
        Message(distant.name, 13, Did()),
    ]
    until(lambda: not is_alive(pid))
    until(lambda: transport.has_room(near))


def test_room_is_counted_with_those_that_were_just_asked_for(setting: Setting) -> None:
    transport, crew = setting.transport, setting.crew
    second, third = crew.reserve
    assert transport.has_room(second)
    transport.start(second)
    assert not transport.has_room(third)
    transport.start(third)  # has no place, and is told so
    reports = {message.worker: message.report for message in wait_for(transport, 2)}
    needs = "{CPU: 1, label zone=far}"
    assert reports.pop(third.name) == Gone(f"found no room: no machine had {needs} free within 3 s", fault=False)
    assert reports == {second.name: Ready()}
    transport.end(second.name)
    until(lambda: transport.has_room(third))


def test_who_was_ended_says_nothing_any_more(setting: Setting) -> None:
    near = setting.near
    pid = setting.pid(near)
    setting.transport.send(near.name, 14, Sleep(60))
    setting.transport.end(near.name)
    until(lambda: not is_alive(pid))
    assert setting.transport.receive(0.5) == []


def test_ranks_are_told_where_to_meet_before_they_are_built(setting: Setting) -> None:
    trainer = setting.crew.trainer
    ranks = [replace(trainer, name=f"trainer/{index}", ranks=Ranks(index, 2, 7)) for index in range(2)]
    setting.start(*ranks)
    for rank in ranks:
        setting.transport.send(rank.name, 15, LookAround())
    seen = [message.report for message in wait_for(setting.transport, 2)]
    assert all(isinstance(each, Saw) for each in seen)
    assert seen[0] == seen[1]
    assert seen[0].rendezvous.startswith("tcp://127.0.0.1:")
    assert (seen[0].threads, seen[0].cards) == ("1", "")
    for rank in ranks:
        setting.transport.end(rank.name)


def test_pools_that_the_cluster_cannot_hold_are_refused_before_anything_starts(
    joined: tuple[SeveralNodes, RayCluster], far: Any
) -> None:
    facts = joined[1].facts()
    with pytest.raises(ConfigError, match=r"pool 'a'.*accelerator_type:H100.*there are no accelerators"):
        place_on_cluster(cluster_recipe(cluster={"generators": [{"name": "a", "accelerator": "H100"}]}), facts)
    with pytest.raises(
        ConfigError, match=r"needs 9 x \{CPU: 1\}.*room is for \d; the cluster has 6 CPU on 2 nodes"
    ):
        place_on_cluster(cluster_recipe(cluster={"generators": [{"name": "a", "count": 9}]}), facts)


def test_machines_with_other_code_are_refused_by_name(joined: tuple[SeveralNodes, RayCluster]) -> None:
    facts = joined[1].facts()
    check_versions(facts, 10)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1 \(node [0-9a-f]{8}\) has torch .*, here it is 1\.0"):
        check_versions(facts, 10, here={"torch": "1.0"})
    with pytest.raises(ConfigError, match="does not answer, asked for 0 s"):
        check_versions(facts, 0)


def test_a_machine_that_goes_away_takes_workers_and_what_they_left_along(
    setting: Setting, joined: tuple[SeveralNodes, RayCluster], far: Any
) -> None:
    transport, near, distant = setting.transport, setting.near, setting.distant
    transport.send(distant.name, 16, Leave("lost", TENSOR))
    transport.send(near.name, 17, Leave("kept", TENSOR))
    wait_for(transport, 2)
    joined[0].kill(far)
    (message,) = wait_for(transport, 1)
    assert message.worker == distant.name and isinstance(message.report, Gone) and not message.report.fault
    transport.send(near.name, 18, AddUp(("kept", "lost")))
    transport.send(near.name, 19, AddUp(("kept",)))
    assert wait_for(transport, 2) == [
        Message(near.name, 18, InputsLost(("lost",))),
        Message(near.name, 19, Did(TENSOR * (TENSOR - 1) / 2)),
    ]


def test_full_weights_reach_all_who_lack_them_whoever_dies_meanwhile(
    joined: tuple[SeveralNodes, RayCluster], shared: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SHORTEST_TIMEOUT_S", 4.0)
    shared.transport.stop()
    pools = {"generators": [{"name": "near", "count": 2, "resources": {"near": 1}}], "encoder": {"cpus": 0}}
    recipe, deliveries = cluster_recipe(cluster=pools, training={"lora": None}), []
    full = Setting(joined[1], recipe, shared.logs, deliveries.append)
    trainer, near, other, transport = full.crew.trainer, full.near, full.distant, full.transport
    full.start(trainer, near, other)
    first = full.export_initial_weights(1)
    for worker in (near, other):
        transport.send(worker.name, 20, LoadWeights(1, first))
    assert {m.worker: m.report for m in wait_for(transport, 2)} == dict.fromkeys(
        (near.name, other.name), WeightsLoaded(1, sum_of_weights(1))
    )
    until(lambda: transport.receive(0.1) or deliveries)
    assert [(d.name, set(d.receivers), d.bytes) for d in deliveries] == [
        (first.name, {near.name, other.name}, first.bytes)
    ]

    second = full.export_initial_weights(2)
    for worker in (near, other):
        transport.send(worker.name, 21, LoadWeights(2, second))
    os.kill(full.pid(other), signal.SIGKILL)
    reports = {m.worker: m.report for m in wait_for(transport, 2)}
    assert isinstance(reports[other.name], Gone)
    assert reports[near.name] == WeightsLoaded(2, sum_of_weights(2))

    third = full.export_initial_weights(3)
    os.kill(full.pid(trainer), signal.SIGKILL)
    transport.send(near.name, 22, LoadWeights(3, third))
    (message,) = wait_for(transport, 1)
    assert message.worker == trainer.name and isinstance(message.report, Gone)
    full.start(trainer)
    assert full.export_initial_weights(3) == third
    assert wait_for(transport, 1) == [Message(near.name, 22, WeightsLoaded(3, sum_of_weights(3)))]

    never = replace(third, name="weights-0")  # which the trainer does not have
    transport.send(near.name, 23, LoadWeights(0, never))
    assert wait_for(transport, 1) == [Message(near.name, 23, InputsLost((never.name,)))]
    transport.stop()
