"""A worker's process on some machine of the cluster. Torch is imported when the worker is built, not before."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray

from digenrl.records import Job, JobFailed, WeightsReference
from digenrl.transports.contract import InputsLost, Report
from digenrl.worker.assignment import Assignment

if TYPE_CHECKING:
    from digenrl.exchange.carried import CarriedTensors
    from digenrl.exchange.tensors import Exchange

# Beside orders, which are carried out one after the other, an actor does these, each in a thread of its own.
PULSE, WIRE = "pulse", "wire"


class Handler(Protocol):
    """What carries out orders: a worker."""

    def handle(self, order: Job) -> Report:
        """The report of an order."""


Builder = Callable[[Assignment, "Exchange", str], tuple[Handler | None, Report]]


def build_worker(assignment: Assignment, exchange: Exchange, rendezvous: str) -> tuple[Handler | None, Report]:
    """The worker of an assignment, and its first report."""
    from digenrl.worker.worker import start_worker

    return start_worker(assignment, exchange, rendezvous)


@dataclass(frozen=True, slots=True)
class Birth:
    """Where an actor came to be."""

    node_id: str
    address: str
    pid: int


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a process finds: variables, and where else to look for modules, as for a user's own reward."""

    environment: Mapping[str, str]
    search_path: tuple[str, ...]


def letter_of(order: Job, names: tuple[str, ...]) -> bytes:
    """An order, and the names of what travels beside it."""
    return pickle.dumps((order, names))


def open_letter(letter: bytes) -> tuple[Job, tuple[str, ...]]:
    """What `letter_of` put into it."""
    content: tuple[Job, tuple[str, ...]] = pickle.loads(letter)
    return content


class WorkerActor:
    """Carries out orders. What they read comes as arguments, what they leave goes back beside the report."""

    def __init__(
        self, assignment: Assignment, surroundings: Surroundings, log: Path | None, build: Builder
    ) -> None:
        self._assignment, self._build = assignment, build
        self._tensors: CarriedTensors
        self._worker: Handler | None = None
        os.environ.update(surroundings.environment)  # in time: nothing here has imported torch
        sys.path += [place for place in surroundings.search_path if place not in sys.path]
        with suppress(ValueError):  # signals are the driver's to handle; only a main thread may say so
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if log is not None and log.parent.is_dir():  # else this machine does not see the run's folder
            _print_to(log)

    def tell_birth(self) -> Birth:
        """The first thing that an actor is asked: by then it has its place."""
        context = ray.get_runtime_context()
        return Birth(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid())

    def choose_rendezvous(self) -> str:
        """Where the ranks of a trainer can meet: an address of this machine that is free now."""
        host = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"

    def build(self, rendezvous: str) -> bytes:
        """Loads everything; the first report."""
        from digenrl.transports.ray.worker_exchange import make_exchange

        self._tensors = make_exchange(self._assignment, ray.util.get_node_ip_address())
        self._worker, report = self._build(self._assignment, self._tensors, rendezvous)
        return pickle.dumps(report)

    def carry_out(self, letter: bytes, *parcels: Any) -> Any:
        """The report and, in the order of `leaves()`, what the order left; None where it did not.

        Job and report are bytes: Ray takes several times as long as pickle to pack so little.
        """
        order, names = open_letter(letter)
        assert self._worker is not None, f"{self._assignment.name} could not be built, and got {order}"
        came = {name: parcel for name, parcel in zip(names, parcels, strict=True) if parcel is not None}
        self._tensors.open(came)
        report = self._worker.handle(order)
        if isinstance(report, JobFailed) and (lost := getattr(self._tensors, "lost", ())):
            report = InputsLost(lost)
        left, leaves = self._tensors.close(), order.writes()
        assert left.keys() <= set(leaves), f"{order} left {sorted(left)}, expected {leaves}"
        answer = pickle.dumps(report)
        return (answer, *(left.get(name) for name in leaves)) if leaves else answer

    def ping(self) -> None:
        """A sign of life."""

    def wire_address(self) -> str:
        """Where receivers of weights meet this one, which sends them."""
        address: str = self._wired().sender_address()
        return address

    def send_weights(self, name: str, epoch: int, receivers: int, timeout_s: float) -> tuple[int, float]:
        """Sends what was laid out under a name to all who receive in this epoch: bytes and seconds."""
        sent: tuple[int, float] = self._wired().send(name, epoch, receivers, timeout_s)
        return sent

    def receive_weights(
        self, address: str, epoch: int, rank: int, size: int, reference: WeightsReference, timeout_s: float
    ) -> None:
        """Receives them; the order that loads them may be waiting already."""
        self._wired().receive(address, epoch, rank, size, reference, timeout_s)

    def give_up_weights(self, name: str) -> None:
        """These will not come any more."""
        self._wired().give_up(name)

    def _wired(self) -> Any:
        return self._tensors


def _print_to(log: Path) -> None:
    target = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor in (1, 2):
        os.dup2(target, descriptor)
    os.close(target)
