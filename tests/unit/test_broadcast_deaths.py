"""Weight broadcasts among processes: if one dies or stops, the others fail, and succeed without it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from broadcasts import LOOPBACK, TIMEOUT_S, bits, broadcast, receive_weights, same, weights, within
from torch import Tensor

from digenrl.exchange import flat_weights
from digenrl.exchange.broadcast import WeightsSender
from digenrl.exchange.broadcast_exchange import BroadcastExchange
from digenrl.exchange.broadcast_group import BroadcastError, BroadcastGroup
from digenrl.exchange.deliveries import BroadcastLimits
from digenrl.records import WeightsReference
from digenrl.transports.processes import prepare_fork_server

PROCESSES = multiprocessing.get_context("forkserver")
STALL_TIMEOUT_S = 3.0
MIDDLE = 6  # of 16 buckets: 2 for the header, 14 of 1 MB, more than socket buffers hold
LARGE = 100_000


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def large_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_weights, "BUCKET_BYTES", 1 << 20)


def at_bucket(count: int, act: Callable[[], object]) -> None:
    """Makes this process act after `count` buckets of its next broadcast."""
    transfer, buckets = BroadcastGroup.broadcast, iter(range(1, 1 << 30))

    def transfer_and_act(
        self: BroadcastGroup, bucket: Tensor, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        transfer(self, bucket, meanwhile)
        if next(buckets) == count:
            act()

    BroadcastGroup.broadcast = transfer_and_act  # type: ignore[method-assign]


def signal_myself(number: int) -> None:
    os.kill(os.getpid(), number)


def listening_sockets() -> set[str]:
    """The local addresses on which this process listens, in the kernel's notation."""
    mine = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            mine.add(str(descriptor.readlink()))
        except OSError:  # the descriptor of the folder, closed since
            continue
    tables = [Path(f"/proc/self/net/{kind}").read_text().splitlines() for kind in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    return {line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in mine}


def receiving_process(
    pipe: Connection, address: str, rank: int, size: int, reference: WeightsReference, fault: str
) -> None:
    """Receives in epoch 1 and then as the pipe says; reports each time what it has received."""
    faults: dict[str, Callable[[], object]] = {
        "killed": lambda: signal_myself(signal.SIGKILL),
        "stopped": lambda: signal_myself(signal.SIGSTOP),
        "sockets": lambda: pipe.send(listening_sockets()),
    }
    if fault:
        at_bucket(MIDDLE, faults[fault])
    place: tuple[str, int, int, int] | None = (address, 1, rank, size)
    while place is not None:
        try:
            received = receive_weights(*place, reference, TIMEOUT_S, STALL_TIMEOUT_S)
            pipe.send({name: bits(tensor) for name, tensor in received.items()})
        except BroadcastError as error:
            pipe.send(str(error))
        place = pipe.recv()


def sending_process(pipe: Connection, fault: str) -> None:
    flat_weights.BUCKET_BYTES = 1 << 20
    sender = WeightsSender(LOOPBACK)
    reference = sender.stage("weights-1", weights(0, LARGE))
    at_bucket(MIDDLE, lambda: signal_myself(signal.SIGKILL if fault == "killed" else signal.SIGSTOP))
    pipe.send((sender.address, reference))
    sender.send("weights-1", 1, 2, within(TIMEOUT_S, STALL_TIMEOUT_S))


def forwarding_process(pipe: Connection, address: str, reference: WeightsReference) -> None:
    """Receives in epoch 1, and is killed in the middle of forwarding in epoch 2."""
    exchange = BroadcastExchange(None, LOOPBACK)
    limits = BroadcastLimits(TIMEOUT_S, TIMEOUT_S, STALL_TIMEOUT_S)
    exchange.receive(address, 1, 1, 2, reference, limits)
    at_bucket(MIDDLE, lambda: signal_myself(signal.SIGKILL))
    pipe.send(exchange.address)
    exchange.send(reference.name, 2, 2, limits)


def memory_process(pipe: Connection, address: str, reference: WeightsReference) -> None:
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    receive_weights(address, 1, 1, 2, reference, TIMEOUT_S)
    pipe.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) << 10)


def collecting_process(pipe: Connection) -> None:
    """Reports the memory that a garbage collection copies: each page fault copies a page of the fork server."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    gc.collect()
    pipe.send((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize())


@contextmanager
def process(target: Callable[..., None], *arguments: object) -> Iterator[tuple[BaseProcess, Connection]]:
    prepare_fork_server(threads=1)
    here, there = PROCESSES.Pipe()
    started = PROCESSES.Process(target=target, args=(there, *arguments), daemon=True)
    started.start()
    there.close()
    try:
        yield started, here
    finally:
        started.kill()
        started.join()
        here.close()


@pytest.mark.parametrize("fault", ["killed", "stopped"])
@pytest.mark.parametrize("faulty", [1, 3])
def test_a_receiver_dies_and_the_survivors_get_the_weights_in_a_new_epoch(
    faulty: int, fault: str, large_buckets: None
) -> None:
    sender = WeightsSender(LOOPBACK)
    model = weights(0, LARGE)
    reference = sender.stage("weights-1", model)
    places = [(sender.address, rank, 4, reference, fault if rank == faulty else "") for rank in (1, 2, 3)]
    with (
        process(receiving_process, *places[0]) as first,
        process(receiving_process, *places[1]) as second,
        process(receiving_process, *places[2]) as third,
    ):
        with pytest.raises(BroadcastError, match="weights-1 was not sent in epoch 1: "):
            sender.send("weights-1", 1, 3, within(TIMEOUT_S, STALL_TIMEOUT_S))
        survivors = [pipe for rank, (_, pipe) in enumerate((first, second, third), start=1) if rank != faulty]
        for rank, pipe in enumerate(survivors, start=1):
            outcome = pipe.recv()
            assert isinstance(outcome, dict) or "weights-1 did not arrive in epoch 1" in outcome
            pipe.send((sender.address, 2, rank, 3))
        sender.send("weights-1", 2, 2, within(TIMEOUT_S, STALL_TIMEOUT_S))
        for pipe in survivors:
            assert pipe.recv() == {name: bits(tensor) for name, tensor in model.items()}
            pipe.send(None)


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_a_sender_dies_and_its_successor_serves_the_receivers(
    fault: str, threads: ThreadPoolExecutor, large_buckets: None
) -> None:
    with process(sending_process, fault) as (_, pipe):
        address, reference = pipe.recv()
        outcomes = [
            threads.submit(receive_weights, address, 1, rank, 3, reference, TIMEOUT_S, STALL_TIMEOUT_S)
            for rank in (1, 2)
        ]
        for outcome in outcomes:
            with pytest.raises(BroadcastError, match="weights-1 did not arrive in epoch 1: "):
                outcome.result()
    model, successor = weights(0, LARGE), WeightsSender(LOOPBACK)
    assert successor.stage("weights-1", model) == reference
    assert all(same(found, model) for found in broadcast(successor, reference, 2, 2, threads))


def test_a_receiver_dies_while_it_forwards_and_the_sender_serves_the_others(
    threads: ThreadPoolExecutor, large_buckets: None
) -> None:
    model, sender = weights(0, LARGE), WeightsSender(LOOPBACK)
    reference = sender.stage("weights-1", model)
    with process(forwarding_process, sender.address, reference) as (_, pipe):
        sender.send("weights-1", 1, 1, within(TIMEOUT_S))
        address = pipe.recv()
        outcomes = [
            threads.submit(receive_weights, address, 2, rank, 3, reference, TIMEOUT_S, STALL_TIMEOUT_S)
            for rank in (1, 2)
        ]
        for outcome in outcomes:
            with pytest.raises(BroadcastError, match="weights-1 did not arrive in epoch 2: "):
                outcome.result()
    assert all(same(found, model) for found in broadcast(sender, reference, 3, 2, threads))


def test_nothing_listens_beyond_loopback(large_buckets: None) -> None:
    sender = WeightsSender(LOOPBACK)
    reference = sender.stage("weights-1", weights(0, LARGE))
    before = listening_sockets()
    found: list[set[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BroadcastGroup, "broadcast", BroadcastGroup.broadcast)  # restored afterwards
        at_bucket(MIDDLE, lambda: found.append(listening_sockets()))
        with process(receiving_process, sender.address, 1, 2, reference, "sockets") as (_, pipe):
            sender.send("weights-1", 1, 1, within(TIMEOUT_S))
            found.append(pipe.recv())
            pipe.recv()
            pipe.send(None)
    assert before and found[0] - before and found[1], "the store listens, and so do both ends of the group"
    loopback = "0100007F"
    assert {address.split(":")[0][-8:] for address in before | found[0] | found[1]} == {loopback}


def test_receiving_takes_the_memory_of_one_copy() -> None:
    sender = WeightsSender(LOOPBACK)
    reference = sender.stage("weights-1", {"w": torch.zeros(160 << 20, dtype=torch.uint8)})
    with process(memory_process, sender.address, reference) as (_, pipe):
        sender.send("weights-1", 1, 1, within(TIMEOUT_S))
        assert 150 << 20 < pipe.recv() < 240 << 20


def test_a_garbage_collection_in_a_worker_copies_little_of_what_the_fork_server_has_loaded() -> None:
    with process(collecting_process) as (_, pipe):
        assert pipe.recv() < 10 << 20
