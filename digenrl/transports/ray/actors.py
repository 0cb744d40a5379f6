"""The Ray actor of a worker. Torch is imported when the worker is built, not before."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray

from digenrl.exchange.deliveries import BroadcastLimits, Delivery
from digenrl.logs import configure_logging
from digenrl.records import Job, JobFailed, WeightsReference
from digenrl.transports.contract import InputsLost, Report
from digenrl.transports.process_setup import loading_modules, redirect_output
from digenrl.transports.ray.package_versions import difference, versions_here
from digenrl.worker.assignment import Assignment, StartFailed

if TYPE_CHECKING:
    from digenrl.exchange.payloads import PayloadExchange
    from digenrl.exchange.tensors import Exchange

# Concurrency groups of an actor. Jobs run one at a time, in the default group; broadcasts to several pools run at
# the same time.
HEARTBEAT, BROADCAST = "heartbeat", "broadcast"
BROADCAST_THREADS = 8


class JobRunner(Protocol):
    """The part of a worker that an actor uses."""

    def handle(self, job: Job) -> Report:
        """Runs a job and returns its report."""


Builder = Callable[[Assignment, "Exchange", str], tuple[JobRunner | None, Report]]


def build_worker(assignment: Assignment, exchange: Exchange, rendezvous: str) -> tuple[JobRunner | None, Report]:
    """The worker of an assignment, and its first report."""
    with loading_modules():
        from digenrl.worker.worker import start_worker

    return start_worker(assignment, exchange, rendezvous)


def make_exchange(assignment: Assignment, host: str) -> PayloadExchange:
    """The exchange of a worker on this host. Full weights are too large to travel with jobs, and are broadcast."""
    with loading_modules():
        from digenrl.exchange.broadcast import WeightsSender
        from digenrl.exchange.broadcast_exchange import BroadcastExchange
        from digenrl.exchange.payloads import PayloadExchange

    if assignment.recipe.training.lora is not None:
        return PayloadExchange()
    is_first_rank = assignment.rank is None or assignment.rank.is_first
    patches = assignment.recipe.cluster.weight_patches
    sends = assignment.commits and is_first_rank
    return BroadcastExchange(WeightsSender(host, patches=patches) if sends else None, host)


@dataclass(frozen=True, slots=True)
class ActorLocation:
    """Where an actor runs."""

    node_id: str
    address: str


@dataclass(frozen=True, slots=True)
class ProcessEnvironment:
    """Environment variables, some with tokens, and folders to search for modules, such as a user's own reward.

    `versions` are those that the machine must have, if it was not checked before.
    """

    variables: Mapping[str, str] = field(repr=False)
    search_path: tuple[str, ...]
    versions: Mapping[str, str]


class WorkerActor:
    """Runs jobs. Tensors that a job reads are arguments, and those that it leaves are returned with its report."""

    def __init__(
        self, assignment: Assignment, environment: ProcessEnvironment, log: Path | None, build: Builder
    ) -> None:
        self._assignment, self._build, self._versions = assignment, build, environment.versions
        self._exchange: PayloadExchange
        self._worker: JobRunner | None = None
        os.environ.update(environment.variables)  # torch is not imported yet
        sys.path += [place for place in environment.search_path if place not in sys.path]
        with suppress(ValueError):  # signals are handled by the driver; only the main thread may change this
            for each in (signal.SIGINT, signal.SIGHUP):
                signal.signal(each, signal.SIG_IGN)
        if log is not None and log.parent.is_dir():  # otherwise this machine does not share the run's folder
            redirect_output(log)
        configure_logging(assignment.name, verbose=assignment.recipe.logging.verbose)

    def locate(self) -> ActorLocation:
        """Where the actor runs. The first call to it, which returns once it has a process."""
        return ActorLocation(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())

    def choose_rendezvous(self) -> str:
        """A free address of this machine, where the ranks of a trainer can meet."""
        host = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"

    def build(self, rendezvous: str) -> bytes:
        """Loads the worker; returns its first report."""
        other = difference(versions_here(), self._versions) if self._versions else ""
        if other:
            where = f"cluster: the machine {ray.util.get_node_ip_address()}"
            return pickle.dumps(StartFailed(f"{where} {other}", user_error=True))
        self._exchange = make_exchange(self._assignment, ray.util.get_node_ip_address())
        self._worker, report = self._build(self._assignment, self._exchange, rendezvous)
        return pickle.dumps(report)

    def run_job(self, message: bytes, *payloads: Any) -> Any:
        """Returns the report and, in the order of their names, the payloads that the job left, or None for each.

        `message` is a job, the names of the payloads and of its outputs, and whether its weights are patched.
        It and the report are pickled here, because Ray takes several times as long for such small objects.
        """
        job, names, writes, patches = pickle.loads(message)
        assert self._worker is not None, f"{self._assignment.name} was not built, and got {job}"
        inputs = zip(names, payloads, strict=True)
        self._exchange.begin_job({name: payload for name, payload in inputs if payload is not None}, patches)
        report = self._worker.handle(job)
        if isinstance(report, JobFailed) and self._exchange.lost:
            report = InputsLost(self._exchange.lost)
        outputs = self._exchange.end_job()
        assert outputs.keys() <= set(writes), f"{job} left {sorted(outputs)}, expected {writes}"
        pickled = pickle.dumps(report)
        return (pickled, *(outputs.get(name) for name in writes)) if writes else pickled

    def ping(self) -> None:
        """Returns as long as the process responds."""

    def broadcast_address(self) -> str:
        """Where receivers of weights find this worker."""
        address: str = self._broadcasts().address
        return address

    def send_weights(
        self,
        name: str,
        epoch: int,
        receivers: int,
        limits: BroadcastLimits,
        held: str,
        link_bytes_per_s: float | None,
    ) -> Delivery:
        """Sends weights to the receivers of this epoch, which are expected to hold the version `held`."""
        delivery: Delivery = self._broadcasts().send(name, epoch, receivers, limits, held, link_bytes_per_s)
        return delivery

    def receive_weights(
        self, address: str, epoch: int, rank: int, size: int, reference: WeightsReference, limits: BroadcastLimits
    ) -> None:
        """Receives weights for a job that may already wait for them."""
        self._broadcasts().receive(address, epoch, rank, size, reference, limits)

    def give_up_weights(self, name: str) -> None:
        """Fails the job that waits for these weights."""
        self._broadcasts().give_up(name)

    def _broadcasts(self) -> Any:
        return self._exchange
