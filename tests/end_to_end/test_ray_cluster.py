"""Workers as actors of a Ray cluster: tensors, lost inputs, lost workers and weight broadcasts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import ray
from counted_pickle import CountedPickle
from ray_clusters import (
    AddUp,
    Did,
    Inspect,
    Inspected,
    Leave,
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
from digenrl.config.recipes.recipe import Recipe
from digenrl.config.rewards.table import parse_rewards
from digenrl.records import Export, Exported, Job, Publish, Published, WeightsReference
from digenrl.training.ranks.rank import Rank
from digenrl.transports.contract import Gone, InputsLost, Message, Report
from digenrl.transports.ray import transport as ray_transport
from digenrl.transports.ray import weight_broadcast
from digenrl.transports.ray.joining import RayCluster
from digenrl.transports.ray.package_versions import check_versions
from digenrl.transports.ray.placing import place_on_cluster
from digenrl.transports.ray.transport import RayTransport
from digenrl.transports.ray.weight_broadcast import WeightTransfer
from digenrl.worker.assignment import Assignment, Ready, StartFailed

FAR_NODE = {"labels": {"zone": "far", "site": "far"}, "num_cpus": 2}
CLUSTER = {
    "generators": [
        {"name": "near", "resources": {"near": 1}},
        {"name": "far", "labels": {"zone": "far"}, "up_to": 3},
    ],
    "trainer": {"resources": {"near": 1}},
    "start_timeout_s": 6,
}
LARGE = 5_000_000
NUMBERS = 1000  # of 8 bytes each: less than what object stores keep by default
SUM = NUMBERS * (NUMBERS - 1) / 2


@pytest.fixture(scope="module")
def joined() -> Iterator[tuple[SeveralNodes, RayCluster]]:
    with several_nodes(num_cpus=4, resources={"near": 4}, labels={"site": "near"}) as (nodes, cluster):
        yield nodes, cluster


@pytest.fixture(scope="module")
def far(joined: tuple[SeveralNodes, RayCluster]) -> Any:
    """A second node."""
    return joined[0].add(**FAR_NODE)


class Setting:
    """A transport and the workers of a recipe, with two generators on different nodes."""

    def __init__(self, cluster: RayCluster, recipe: Recipe, logs: Path) -> None:
        self.transfers: list[WeightTransfer] = []
        self.transport = RayTransport(cluster, recipe, logs, self.transfers.append, build=build_abacus)
        self.logs = logs
        self.workers = place_on_cluster(recipe, cluster.resources())
        self.near, self.distant, *self.others = self.workers.generators
        self._processes: dict[str, Inspected] = {}
        self._job_ids = count()

    def start(self, *assignments: Assignment) -> None:
        """Starts workers, and waits until they are ready."""
        for assignment in assignments:
            self.transport.start(assignment)
        messages = wait_for(self.transport, len(assignments))
        assert {(each.worker, each.job_id, each.report) for each in messages} == {
            (each.name, None, Ready()) for each in assignments
        }
        for assignment in assignments:
            (report,) = self.run((assignment, Inspect()))
            assert isinstance(report, Inspected)
            self._processes[assignment.name] = report

    def start_missing(self, *assignments: Assignment) -> None:
        """Starts those whose processes have ended."""
        self.start(*(each for each in assignments if not self.is_running(each)))

    def is_running(self, worker: Assignment) -> bool:
        return worker.name in self._processes and is_alive(self._processes[worker.name].pid)

    def process(self, worker: Assignment) -> Inspected:
        return self._processes[worker.name]

    def send(self, worker: Assignment, job: Job) -> int:
        """Sends a job; returns its id."""
        job_id = next(self._job_ids)
        self.transport.send(worker.name, replace(job, id=job_id))
        return job_id

    def run(self, *jobs: tuple[Assignment, Job]) -> list[Report]:
        """The reports of some jobs, in the order of the jobs."""
        ids = [self.send(worker, job) for worker, job in jobs]
        reports = {message.job_id: message.report for message in wait_for(self.transport, len(jobs))}
        return [reports[job_id] for job_id in ids]

    def values(self, *jobs: tuple[Assignment, Job]) -> list[float]:
        """The values that some jobs report, in the order of the jobs."""
        reports = self.run(*jobs)
        assert all(isinstance(report, Did) for report in reports)
        return [report.value for report in reports if isinstance(report, Did)]

    def kill(self, worker: Assignment) -> Gone:
        """Kills the process of a worker, and waits for the message."""
        os.kill(self.process(worker).pid, signal.SIGKILL)
        return self.wait_for_gone(worker)

    def wait_for_gone(self, worker: Assignment) -> Gone:
        (message,) = wait_for(self.transport, 1)
        assert (message.worker, message.job_id) == (worker.name, None) and isinstance(message.report, Gone)
        return message.report

    def export_weights(self, trainer: Assignment, version: int) -> WeightsReference:
        """Exports the weights of a trainer."""
        (report,) = self.run((trainer, Export(0, 0, version)))
        assert isinstance(report, Exported)
        return report.weights


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
    """Both generators are running, and idle."""
    shared.start_missing(shared.near, shared.distant)
    yield shared
    assert shared.transport.receive(0) == []


def test_tensors_go_from_worker_to_worker_and_the_driver_gets_only_reports(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, distant, transport = setting.near, setting.distant, setting.transport
    reports = CountedPickle()
    monkeypatch.setattr(ray_transport, "pickle", reports)
    assert setting.values((near, Leave("a", NUMBERS)), (near, Leave("b", 3, first=1.0))) == [0, 0]
    assert setting.values((distant, Sleep(0.1)), (distant, AddUp(("a", "b")))) == [0, SUM + 6]
    assert setting.process(near).node_id != setting.process(distant).node_id
    references = [transport.artifacts.get(name) for name in ("a", "b")]
    assert all(where["node_ids"] for where in ray.experimental.get_object_locations(references).values())
    assert 0 < reports.bytes_read < 8 * NUMBERS
    assert (setting.logs / f"{near.name}.log").read_text() == f"{near.name} has started\n"


def test_dropped_tensors_are_freed(setting: Setting) -> None:
    near, artifacts = setting.near, setting.transport.artifacts
    setting.run((near, Leave("large", LARGE)))
    until(lambda: stored_bytes(setting.process(near).node_id) >= 8 * LARGE)
    free = until(artifacts.free_bytes)
    artifacts.drop("large")
    artifacts.drop("large")
    until(lambda: stored_bytes(setting.process(near).node_id) < 8 * LARGE)
    until(lambda: artifacts.free_bytes() >= free)


def test_adapters_travel_whole_to_a_worker_that_joined_and_as_a_patch_to_one_that_has_the_version_before(
    setting: Setting,
) -> None:
    near, distant = setting.near, setting.distant

    def bytes_sent(weights: WeightsReference, version: int) -> int:
        (report,) = setting.run((distant, publish(version, weights)))
        assert_loaded(report, version)
        transfer = setting.transfers.pop()
        assert transfer == WeightTransfer(
            weights.name, (distant.name,), transfer.bytes, sum_of_weights(version), weights.bytes
        )
        return transfer.bytes

    first = setting.export_weights(near, 1)
    assert bytes_sent(first, 1) == first.bytes
    second, again = setting.export_weights(near, 2), setting.export_weights(near, 2)
    assert bytes_sent(second, 2) == second.patch_bytes < second.bytes
    assert bytes_sent(second, 2) == second.bytes, "the worker has no longer the base"
    assert again == replace(second, base="", patch_bytes=0)
    third = setting.export_weights(near, 3)
    setting.kill(distant)
    setting.start(distant)
    assert bytes_sent(third, 3) == third.bytes
    fourth = setting.export_weights(near, 4)
    assert bytes_sent(fourth, 4) == fourth.patch_bytes
    setting.run((distant, Leave("weights-5.patch", NUMBERS)))
    wrong = replace(fourth, name="weights-5", base="weights-4", patch_bytes=1)
    assert setting.run((distant, publish(5, wrong)))[0] == InputsLost(("weights-5",))


def publish(version: int, weights: WeightsReference) -> Publish:
    return Publish(0, 0, version, (0,), weights)


def assert_loaded(report: Report, version: int) -> None:
    assert isinstance(report, Published) and report.job.version == version
    assert report.seconds == sum_of_weights(version)


def test_a_job_cannot_read_what_was_never_left(setting: Setting) -> None:
    with pytest.raises(AssertionError, match="nothing"):
        setting.send(setting.near, AddUp(("nothing",)))


def test_a_killed_worker_is_gone_with_its_jobs_and_its_tensors_remain(setting: Setting) -> None:
    near, distant = setting.near, setting.distant
    setting.run((near, Leave("a", NUMBERS)))
    setting.send(near, Sleep(60))
    setting.send(near, Sleep(60))
    assert setting.kill(near).fault
    setting.send(near, Sleep(0))
    assert setting.values((distant, AddUp(("a",)))) == [SUM]


def test_a_stopped_worker_is_unresponsive_and_ended(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    transport, near, distant = setting.transport, setting.near, setting.distant
    pid = setting.process(near).pid
    monkeypatch.setattr(transport, "_heartbeat_timeout_s", 3.0)
    sleep = Sleep(4.5)
    job_id = setting.send(distant, sleep)  # busy for longer than the timeout, but responsive
    os.kill(pid, signal.SIGSTOP)
    assert wait_for(transport, 2) == [
        Message(near.name, None, Gone("sent no heartbeat for 3 s")),
        Message(distant.name, job_id, Did(0, replace(sleep, id=job_id))),
    ]
    until(lambda: not is_alive(pid))
    until(lambda: transport.has_capacity(near))


def test_room_is_counted_with_workers_that_were_just_requested_until_they_are_ended(setting: Setting) -> None:
    transport = setting.transport
    second, third = setting.workers.reserve
    assert transport.has_capacity(second)
    transport.start(second)
    assert not transport.has_capacity(third)
    transport.start(third)
    reports = {message.worker: message.report for message in wait_for(transport, 2)}
    gone = reports.pop(third.name)
    assert isinstance(gone, Gone) and not gone.fault and "{CPU: 1, label zone=far}" in gone.reason
    assert reports == {second.name: Ready()}
    setting.send(second, Sleep(60))
    transport.end(second.name)
    until(lambda: transport.has_capacity(third))
    assert transport.receive(0.5) == [], "an ended worker sends no more messages"


def test_ranks_get_the_same_rendezvous_and_one_that_is_killed_while_idle_is_gone(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIGENRL_REWARD_TOKEN", "of the driver")
    trainer, served = setting.workers.trainer, parse_rewards({"name": "http", "url": "http://127.0.0.1:9"})
    trainer = replace(trainer, recipe=trainer.recipe.model_copy(update={"rewards": served}))
    ranks = [replace(trainer, name=f"trainer/{index}", rank=Rank(index, 2), epoch=7) for index in range(2)]
    setting.start(*ranks)
    first, second = (setting.process(rank) for rank in ranks)
    assert first.rendezvous == second.rendezvous and first.rendezvous.startswith("tcp://127.0.0.1:")
    assert (first.threads, first.gpus) == ("1", "")
    assert first.token == "of the driver", "its recipe names the variable"
    assert setting.process(setting.near).token == ""
    assert setting.kill(ranks[0]).fault
    setting.transport.end(ranks[1].name)


def test_pools_that_do_not_fit_are_rejected(joined: tuple[SeveralNodes, RayCluster], far: Any) -> None:
    resources = joined[1].resources()
    for pool, message in (
        ({"accelerator": "H100"}, r"pool 'a'.*accelerator_type:H100"),
        ({"count": 9}, r"needs 9 x \{CPU: 1\}.* 6 CPU on 2 nodes"),
    ):
        with pytest.raises(ConfigError, match=message):
            place_on_cluster(cluster_recipe(cluster={"generators": [{"name": "a", **pool}]}), resources)


def test_nodes_with_other_versions_are_named(joined: tuple[SeveralNodes, RayCluster]) -> None:
    resources = joined[1].resources()
    check_versions(resources, 10)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1 \(node [0-9a-f]{8}\) has torch .*1\.0"):
        check_versions(resources, 10, expected={"torch": "1.0"})
    with pytest.raises(ConfigError, match=r"does not answer within 0 s; .*cluster\.start_timeout_s"):
        check_versions(resources, 0)


def test_a_lost_node_takes_its_workers_and_tensors_with_it(
    setting: Setting, joined: tuple[SeveralNodes, RayCluster], far: Any
) -> None:
    near, distant = setting.near, setting.distant
    setting.run((distant, Leave("lost", NUMBERS)), (near, Leave("kept", NUMBERS)))
    joined[0].kill(far)
    assert not setting.wait_for_gone(distant).fault
    lost, kept = setting.run((near, AddUp(("kept", "lost"))), (near, AddUp(("kept",))))
    assert lost == InputsLost(("lost",))
    assert isinstance(kept, Did) and kept.value == SUM


def test_adapters_enter_a_site_once_and_are_copied_again_if_the_node_that_has_them_is_lost(
    shared: Setting, joined: tuple[SeveralNodes, RayCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, distant, other = shared.near, shared.distant, shared.workers.reserve[0]
    added = [joined[0].add(**FAR_NODE | {"num_cpus": 1}) for _ in range(2)]
    nodes = {node.node_id: node for node in added}
    with monkeypatch.context() as patched:
        patched.setattr("digenrl.transports.ray.transport.versions_here", lambda: {"torch": "1.0"})
        shared.transport.start(distant)
        (message,) = wait_for(shared.transport, 1)
    shared.transport.end(distant.name)
    refused = message.report
    assert isinstance(refused, StartFailed) and refused.user_error, "nodes that join are checked, too"
    assert "has torch" in refused.reason and "1.0" in refused.reason
    shared.start_missing(near, distant, other)
    far = {shared.process(each).node_id for each in (distant, other)}
    assert len(far) == 2

    weights = shared.export_weights(near, 6)
    for report in shared.run((distant, publish(6, weights)), (other, publish(6, weights))):
        assert_loaded(report, 6)
    (where,) = ray.experimental.get_object_locations([shared.transport.artifacts.get(weights.name)]).values()
    assert len(far & set(where["node_ids"])) == 1

    weights = shared.export_weights(near, 7)
    assert_loaded(shared.run((other, publish(7, weights)))[0], 7)
    joined[0].kill(nodes[shared.process(other).node_id])
    shared.wait_for_gone(other)
    assert_loaded(shared.run((distant, publish(7, weights)))[0], 7)

    weights = shared.export_weights(distant, 8)
    joined[0].kill(nodes[shared.process(distant).node_id])
    shared.wait_for_gone(distant)
    assert shared.run((near, publish(8, weights))) == [InputsLost((weights.name,))]


def test_full_weights_reach_all_workers_that_lack_them_and_a_stopped_pool_delays_no_other(
    joined: tuple[SeveralNodes, RayCluster], shared: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_broadcast, "MIN_TIMEOUT_S", 4.0)
    shared.transport.stop()
    pools = [{"name": "near", "count": 2, "resources": {"near": 1}}, {"name": "apart", "resources": {"near": 1}}]
    cluster = {"generators": pools, "encoder": {"cpus": 0}, "rewards": {"cpus": 0}, "weight_patches": "always"}
    full = Setting(joined[1], cluster_recipe(cluster=cluster, training={"lora": None}), shared.logs)
    trainer, near, other, transport = full.workers.trainer, full.near, full.distant, full.transport
    (apart,) = full.others
    full.start(trainer, near, other, apart)
    first = full.export_weights(trainer, 1)
    for report in full.run(*((worker, publish(1, first)) for worker in (near, other, apart))):
        assert_loaded(report, 1)
    until(lambda: transport.receive(0.1) or len(full.transfers) == 2)
    assert {(each.name, frozenset(each.receivers), each.bytes) for each in full.transfers} == {
        (first.name, frozenset({near.name, other.name}), first.bytes),
        (first.name, frozenset({apart.name}), first.bytes),
    }

    second = full.export_weights(trainer, 2)
    os.kill(full.process(apart).pid, signal.SIGSTOP)
    jobs = {worker.name: full.send(worker, publish(2, second)) for worker in (apart, near, other)}
    os.kill(full.process(other).pid, signal.SIGKILL)
    messages = {message.worker: message for message in wait_for(transport, 2)}
    assert isinstance(messages[other.name].report, Gone)
    os.kill(full.process(apart).pid, signal.SIGCONT)
    messages |= {message.worker: message for message in wait_for(transport, 1)}
    for worker in (near, apart):
        assert messages[worker.name].job_id == jobs[worker.name]
        assert_loaded(messages[worker.name].report, 2)
    until(lambda: transport.receive(0.1) or len(full.transfers) == 4)
    assert all(each.bytes < each.whole_bytes == second.bytes for each in full.transfers[2:]), "no patch was sent"

    third = full.export_weights(trainer, 3)
    os.kill(full.process(trainer).pid, signal.SIGKILL)
    job_id = full.send(near, publish(3, third))
    full.wait_for_gone(trainer)
    full.start(trainer)
    assert full.export_weights(trainer, 3) == third
    (message,) = wait_for(transport, 1)
    assert (message.worker, message.job_id) == (near.name, job_id)
    assert_loaded(message.report, 3)

    unknown = replace(third, name="weights-0")  # weights that the trainer does not have
    assert full.run((near, publish(0, unknown))) == [InputsLost((unknown.name,))]
    transport.stop()
