"""Weights for workers in several sites: each site's link carries a version once, whatever is lost on the way.

The driver's broadcaster is the real one, and weights go through real broadcasts. Only Ray is replaced: actors are
exchanges in this process, and their calls run in threads.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from broadcasts import LOOPBACK, same, weights

from digenrl.config.reading import ConfigError
from digenrl.exchange.broadcast import WeightsSender
from digenrl.exchange.broadcast_exchange import BroadcastExchange
from digenrl.exchange.broadcast_group import BroadcastError
from digenrl.exchange.deliveries import Delivery
from digenrl.records import Export, Exported, Publish, WeightsReference, weights_name
from digenrl.transports.ray import weight_broadcast
from digenrl.transports.ray.capacity import ClusterResources, NodeResources, ResourceRequest
from digenrl.transports.ray.sites import Sites, check_site_labels
from digenrl.transports.ray.weight_broadcast import WeightBroadcaster, WeightTransfer
from digenrl.transports.ray.weight_routes import Route, WeightReceiver, choose_routes

TRAINER, HOME, FAR, THIRD = "trainer", "home", "far", "third"


# --- Routes ------------------------------------------------------------------------------------------------------


def test_pools_of_another_site_receive_together_and_pools_of_the_trainers_separately() -> None:
    receivers = [
        WeightReceiver("a", "fast", "", "w1"),
        WeightReceiver("b", "slow", "", "w1"),
        WeightReceiver("c", "fast", FAR, "w1"),
        WeightReceiver("d", "slow", FAR, "w1"),
        WeightReceiver("e", "slow", THIRD, "w1"),
    ]
    assert choose_routes(receivers, TRAINER, {}, ()) == [
        Route(TRAINER, "pool fast", "", "w1", ("a",)),
        Route(TRAINER, "pool slow", "", "w1", ("b",)),
        Route(TRAINER, "site far", FAR, "w1", ("c", "d")),
        Route(TRAINER, "site third", THIRD, "w1", ("e",)),
    ]


def test_one_that_joined_waits_for_the_patch_of_the_others_and_gets_the_whole_version_from_them() -> None:
    receivers = [
        WeightReceiver("new", "p", FAR, ""),
        WeightReceiver("newer", "p", FAR, ""),
        WeightReceiver("old", "p", FAR, "w1"),
    ]
    assert choose_routes(receivers, TRAINER, {}, ()) == [Route(TRAINER, "site far", FAR, "w1", ("old",))]
    assert choose_routes(receivers[:2], TRAINER, {}, {FAR}) == []
    assert choose_routes(receivers[:2], TRAINER, {FAR: "old"}, ()) == [
        Route("old", "inside far", FAR, "", ("new", "newer"))
    ]


# --- Labels of machines ------------------------------------------------------------------------------------------


def machine(name: str, site: str | None, **resources: float) -> NodeResources:
    labels = {} if site is None else {"site": site}
    return NodeResources(name, f"address-of-{name}", resources, resources, labels)


def test_a_machine_that_joins_has_a_site_and_one_without_label_or_that_is_unknown_has_none() -> None:
    machines = [machine("a", HOME), machine("b", FAR), machine("c", None)]
    sites = Sites(lambda: ClusterResources(tuple(machines)))
    assert [sites.beyond_a_link(each, "a") for each in ("a", "b", "c", "d", None)] == ["", FAR, "", "", ""]
    machines[1:] = [machine("e", FAR)]
    assert [sites.beyond_a_link(each, "a") for each in ("b", "e")] == [FAR, FAR]
    assert sites.beyond_a_link("b", "e") == "" and sites.beyond_a_link("b", "c") == FAR


def test_a_machine_without_a_site_beside_others_is_reported() -> None:
    generators = [ResourceRequest("generators", 1, {"GPU": 1})]
    cluster = ClusterResources((machine("a", HOME, GPU=1), machine("b", None, GPU=1), machine("c", None, CPU=1)))
    with pytest.raises(ConfigError, match=r"address-of-b.*home"):
        check_site_labels(generators, cluster)
    check_site_labels([ResourceRequest("rewards", 1, {"CPU": 1})], cluster)
    check_site_labels(generators, ClusterResources(cluster.nodes[:1]))
    check_site_labels(generators, ClusterResources(cluster.nodes[1:]))


# --- Broadcasts --------------------------------------------------------------------------------------------------


class RemoteMethod:
    """A method of an actor that runs in a thread. Arguments may be results of other calls."""

    def __init__(self, method: Callable[..., Any], threads: ThreadPoolExecutor) -> None:
        self._method, self._threads = method, threads

    def options(self, concurrency_group: str) -> RemoteMethod:
        return self

    def remote(self, *arguments: Any) -> Future[Any]:
        return self._threads.submit(self._call, *arguments)

    def _call(self, *arguments: Any) -> Any:
        return self._method(*(each.result() if isinstance(each, Future) else each for each in arguments))


class ActorInThreads:
    """The actor of a worker. Tests can let it fail or wait before it sends or receives weights."""

    def __init__(self, exchange: BroadcastExchange, threads: ThreadPoolExecutor) -> None:
        self.exchange, self.sent = exchange, 0
        self.before_sending: Callable[[], object] = lambda: None
        self.before_receiving: Callable[[], object] = lambda: None
        self.broadcast_address = RemoteMethod(lambda: exchange.address, threads)
        self.send_weights = RemoteMethod(self._send, threads)
        self.receive_weights = RemoteMethod(self._receive, threads)

    def _send(self, *arguments: Any) -> Delivery:
        self.before_sending()
        delivery = self.exchange.send(*arguments)
        self.sent += 1
        return delivery

    def _receive(self, *arguments: Any) -> None:
        self.before_receiving()
        self.exchange.receive(*arguments)


class RayInThreads:
    """The functions of Ray that the broadcaster calls."""

    exceptions = ray.exceptions

    @staticmethod
    def get(call: Future[Any]) -> Any:
        try:
            return call.result()
        except Exception as error:
            raise ray.exceptions.RayError(str(error)) from error

    @staticmethod
    def wait(calls: Sequence[Future[Any]], num_returns: int, timeout: float) -> tuple[list[Future[Any]], None]:
        return [call for call in calls if call.done()], None


class SeveralSites:
    """A trainer, and generators by their sites and pools: `far/slow` is in the site far and in the pool slow."""

    def __init__(self, threads: ThreadPoolExecutor, generators: Sequence[str]) -> None:
        self._threads, self.transfers = threads, list[WeightTransfer]()
        self.trainer = ActorInThreads(BroadcastExchange(WeightsSender(LOOPBACK, patches="always")), threads)
        self._workers: dict[str, Any] = {TRAINER: self._worker(self.trainer, HOME, "", commits=True)}
        for each in generators:
            self.add(each)
        nodes = ClusterResources(tuple(machine(site, site) for site in (HOME, FAR, THIRD)))
        self.broadcaster = WeightBroadcaster(self._workers, Sites(lambda: nodes), self.transfers.append)

    def add(self, name: str) -> None:
        site, pool = name.rstrip("0123456789").split("/")
        actor = ActorInThreads(BroadcastExchange(None, LOOPBACK), self._threads)
        self._workers[name] = self._worker(actor, site, pool)

    def _worker(self, actor: ActorInThreads, site: str, pool: str, commits: bool = False) -> Any:
        assignment = SimpleNamespace(pool=pool, commits=commits)
        return SimpleNamespace(actor=actor, assignment=assignment, ready=True, node_id=site)

    def actor(self, name: str) -> ActorInThreads:
        actor: ActorInThreads = self._workers[name].actor
        return actor

    def publish(self, version: int, *names: str) -> WeightsReference:
        """Stages a version, and sends the jobs that need it."""
        reference = self.trainer.exchange.put_weights(weights_name(version), values(version))
        self.broadcaster.report_received(TRAINER, Exported(0, Export(0, 0, version), reference))
        for name in names:
            self.broadcaster.job_sent(name, Publish(0, 0, version, (0,), reference))
        return reference

    def until_idle(self) -> None:
        self.broadcaster.advance()
        while calls := list(self.broadcaster.awaited()):
            wait(calls, timeout=30)
            self.broadcaster.advance()

    def crossings(self) -> Counter[str]:
        """How often the trainer has sent weights to each site."""
        sent = Counter(each.receivers[0].split("/")[0] for each in self.transfers)
        return sent - Counter({FAR: self.forwarded(FAR), THIRD: self.forwarded(THIRD)})

    def forwarded(self, site: str) -> int:
        return sum(each.actor.sent for name, each in self._workers.items() if name.startswith(f"{site}/"))

    def has(self, version: int, reference: WeightsReference, *names: str) -> bool:
        return all(same(self.actor(name).exchange.get_weights(reference), values(version)) for name in names)


def values(version: int) -> dict[str, Any]:
    return {name: tensor + version * 1e-6 for name, tensor in weights().items()}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadPoolExecutor]:
    monkeypatch.setattr(weight_broadcast, "ray", RayInThreads)
    with ThreadPoolExecutor(16) as pool:
        yield pool


def lost() -> None:
    raise BroadcastError("lost")


def test_a_version_crosses_the_link_to_a_site_once_for_all_its_pools(threads: ThreadPoolExecutor) -> None:
    names = ["home/fast", "home/slow", "far/fast", "far/slow1", "far/slow2", "third/fast"]
    sites = SeveralSites(threads, names)
    for version in (1, 2):
        reference = sites.publish(version, *names)
        sites.until_idle()
        assert sites.has(version, reference, *names)
        assert sites.crossings() == {HOME: 2 * version, FAR: version, THIRD: version}
    assert sites.forwarded(FAR) == 0, "they formed a chain"
    assert all(each.bytes < each.whole_bytes for each in sites.transfers[4:]), "patches"


def test_the_names_of_versions_that_were_sent_long_ago_are_forgotten(threads: ThreadPoolExecutor) -> None:
    sites, sizes = SeveralSites(threads, ["home/fast", "far/fast"]), []
    for version in range(1, 7):
        sites.publish(version, "home/fast", "far/fast")
        sites.until_idle()
        sizes.append(len(repr(sites.broadcaster._held)))
    assert len(set(sizes[1:])) == 1
    sites.publish(6, "home/fast")
    sites.until_idle()
    assert sites.crossings() == {HOME: 6, FAR: 6}, "it is not sent again"


def test_one_that_asks_later_or_has_joined_gets_the_version_inside_its_site(threads: ThreadPoolExecutor) -> None:
    sites = SeveralSites(threads, ["far/fast", "far/slow"])
    sites.publish(1, "far/fast")
    sites.broadcaster.advance()
    reference = sites.publish(1, "far/slow")
    sites.until_idle()
    assert sites.has(1, reference, "far/fast", "far/slow")
    sites.add("far/slow2")
    reference = sites.publish(2, "far/slow2", "far/fast", "far/slow")
    sites.until_idle()
    assert sites.has(2, reference, "far/fast", "far/slow", "far/slow2")
    assert sites.crossings() == {FAR: 2} and sites.forwarded(FAR) == 2
    assert [each.bytes < each.whole_bytes for each in sites.transfers] == [False, False, True, False]


def test_if_a_forwarder_fails_the_rest_of_the_site_receives_from_the_trainer(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = SeveralSites(threads, ["far/fast", "far/slow"])
    sites.publish(1, "far/fast")
    sites.until_idle()
    sites.actor("far/fast").before_sending = lost
    with monkeypatch.context() as patch:
        patch.setattr(weight_broadcast, "MIN_TIMEOUT_S", 1.0)
        reference = sites.publish(1, "far/slow")
        sites.until_idle()
    assert sites.has(1, reference, "far/slow")
    assert sites.crossings() == {FAR: 2} and sites.forwarded(FAR) == 0
    reference = sites.publish(2, "far/fast", "far/slow")
    sites.until_idle()
    assert sites.has(2, reference, "far/fast", "far/slow")
    assert sites.crossings() == {FAR: 3}, "the next version crosses once again"


def test_a_pool_that_is_lost_in_a_site_and_a_slow_site_delay_no_other(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_broadcast, "MIN_TIMEOUT_S", 1.0)
    names = ["far/fast", "far/slow", "third/fast", "home/fast"]
    sites, continued = SeveralSites(threads, names), threading.Event()
    sites.actor("far/slow").before_receiving = lost
    sites.actor("third/fast").before_receiving = continued.wait
    reference = sites.publish(1, *names)
    sites.broadcaster.advance()
    while not any("far/fast" in each.receivers for each in sites.transfers):
        wait(list(sites.broadcaster.awaited()), timeout=0.1)
        sites.broadcaster.advance()
    assert sites.has(1, reference, "far/fast", "home/fast") and sites.crossings()[THIRD] == 0
    continued.set()
    sites.actor("far/slow").before_receiving = lambda: None
    sites.until_idle()
    assert sites.has(1, reference, *names)
