"""Workers as processes of this machine, started in milliseconds by a fork server that has torch loaded.

Signals are handled by the driver: a terminal and most supervisors send them to every process of a run. A worker
ignores them, and exits when the driver is gone.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import SimpleQueue
from selectors import EVENT_READ, DefaultSelector

from digenrl.exchange.folder import ExchangeFolder
from digenrl.logs import configure_logging
from digenrl.records import Job
from digenrl.transports.active_clock import ActiveClock
from digenrl.transports.contract import Gone, Message
from digenrl.transports.process_setup import TORCH_ENVIRONMENT, log_file, redirect_output
from digenrl.worker.assignment import Assignment

PRELOADED_MODULES = ["digenrl.transports.preloading", "digenrl.worker.worker"]
LAST_PRELOADED_MODULE = "digenrl.transports.frozen_memory"
EXIT_TIMEOUT_S = 5.0  # for workers that were asked to exit
MAX_HEARTBEAT_INTERVAL_S = 1.0
DRIVER_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def set_threads(threads: int) -> None:
    """Sets torch's number of threads, for this process or a fork server, before torch is imported there."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    for name, value in TORCH_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def prepare_fork_server(threads: int) -> None:
    """Sets the environment that workers inherit, and starts the fork server."""
    set_threads(threads)
    multiprocessing.get_context("forkserver").set_forkserver_preload([*PRELOADED_MODULES, LAST_PRELOADED_MODULE])
    with _ignored(DRIVER_SIGNALS):  # child processes inherit ignored signals
        forkserver.ensure_running()


@contextmanager
def _ignored(signals: Sequence[signal.Signals]) -> Iterator[None]:
    before = {each: signal.signal(each, signal.SIG_IGN) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class Outbox:
    """Sends messages in a thread, in order: the pipe of a worker that is loading or hangs may be full."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: SimpleQueue[bytes | memoryview | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def put(self, message: object) -> None:
        """Does not wait."""
        self._messages.put(ForkingPickler.dumps(message))

    def close(self) -> None:
        """Ends the thread after what was sent before, or as soon as the other end is closed. Has a timeout."""
        self._messages.put(None)
        self._thread.join(EXIT_TIMEOUT_S)

    def _send(self) -> None:
        with suppress(OSError):  # the process has ended, which `receive` reports
            while (message := self._messages.get()) is not None:
                self._connection.send_bytes(message)


@dataclass(slots=True)
class _WorkerProcess:
    process: BaseProcess
    connection: Connection
    outbox: Outbox
    lifeline: Connection  # closed when the driver ends, which the worker notices at its other end
    heartbeats: ctypes.c_uint64  # counted by the worker
    heartbeat_timeout_s: float
    clock: ActiveClock
    heartbeats_seen: int = 0
    seen_s: float = 0.0  # when the last heartbeat was seen, on the clock

    def is_unresponsive(self) -> bool:
        """Whether it has been silent for too long."""
        now_s, heartbeats = self.clock(), self.heartbeats.value
        if heartbeats != self.heartbeats_seen:
            self.heartbeats_seen, self.seen_s = heartbeats, now_s
        return now_s - self.seen_s > self.heartbeat_timeout_s


class ProcessTransport:
    """Worker processes, each with a pipe. The output of each goes to its own file in `logs`."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._workers: dict[str, _WorkerProcess] = {}
        self._selector = DefaultSelector()  # of all pipes and of all processes that may end
        self._context = multiprocessing.get_context("forkserver")

    def start(self, assignment: Assignment) -> None:
        assert assignment.name not in self._workers, f"{assignment.name} is already running"
        self._logs.mkdir(parents=True, exist_ok=True)
        ours, theirs = self._context.Pipe()
        their_lifeline, our_lifeline = self._context.Pipe(duplex=False)
        heartbeats = self._context.RawValue(ctypes.c_uint64, 0)
        process = self._context.Process(
            target=serve,
            args=(assignment, theirs, their_lifeline, heartbeats, log_file(self._logs, assignment.name)),
            name=f"digenrl {assignment.name}",
            daemon=True,
        )
        process.start()
        theirs.close()
        their_lifeline.close()
        for each in (ours, process.sentinel):
            self._selector.register(each, EVENT_READ, assignment.name)
        timeout_s = assignment.recipe.lanes.patience_s
        self._workers[assignment.name] = _WorkerProcess(
            process, ours, Outbox(ours), our_lifeline, heartbeats, timeout_s, ActiveClock(timeout_s / 4)
        )

    def has_capacity(self, assignment: Assignment) -> bool:
        return True

    def send(self, worker: str, job: Job) -> None:
        if worker in self._workers:
            self._workers[worker].outbox.put(job)

    def receive(self, timeout_s: float) -> Sequence[Message]:
        """The next report of every worker. All reports of a worker that ended come before its Gone."""
        ready: dict[str, list[object]] = {}
        for key, _ in self._selector.select(timeout_s):
            ready.setdefault(key.data, []).append(key.fileobj)
        messages: list[Message] = []
        for name, files in ready.items():
            messages += self._receive_from(name, ended=self._workers[name].process.sentinel in files)
        return [*messages, *self._end_unresponsive()]

    def _end_unresponsive(self) -> list[Message]:
        """Kills processes that are stopped, or stuck in a state in which none of their threads can run."""
        unresponsive = [name for name, each in self._workers.items() if each.is_unresponsive()]
        for name in unresponsive:
            self.end(name)
        return [Message(name, None, Gone("stopped sending heartbeats and was killed")) for name in unresponsive]

    def _receive_from(self, name: str, ended: bool) -> list[Message]:
        """Its next report, or all that are left if its process has ended."""
        worker = self._workers[name]
        messages: list[Message] = []
        try:
            while worker.connection.poll() if ended else not messages:
                messages.append(Message(name, *worker.connection.recv()))
        except (EOFError, OSError):
            _end_process(worker.process, EXIT_TIMEOUT_S)
            ended = True
        if ended:
            self._forget(name)
            messages.append(Message(name, None, Gone(describe_exit(worker.process.exitcode))))
        return messages

    def end(self, worker: str) -> None:
        if worker in self._workers:
            _end_process(self._workers[worker].process, 0.0)
            self._forget(worker)

    def stop(self) -> None:
        """Asks every worker to exit, and kills those that do not in time."""
        try:
            for worker in self._workers.values():
                worker.outbox.put(None)
            deadline_s = time.monotonic() + EXIT_TIMEOUT_S
            for worker in self._workers.values():
                _end_process(worker.process, max(0.0, deadline_s - time.monotonic()))
        finally:  # also if the user interrupts the wait: without its lifeline a worker exits by itself
            for name in list(self._workers):
                self._forget(name)
            self._selector.close()

    def _forget(self, name: str) -> None:
        worker = self._workers.pop(name)
        for each in (worker.connection, worker.process.sentinel):
            self._selector.unregister(each)
        worker.lifeline.close()
        worker.outbox.close()
        worker.connection.close()
        if not worker.process.is_alive():
            worker.process.join()


def serve(
    assignment: Assignment, connection: Connection, lifeline: Connection, heartbeats: ctypes.c_uint64, log: Path
) -> None:
    """The main function of a worker process."""
    assert assignment.exchange is not None
    for each in DRIVER_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    redirect_output(log)
    configure_logging(assignment.name, verbose=assignment.recipe.logging.verbose)
    threading.Thread(target=_exit_with_driver, args=(lifeline, assignment.exchange), daemon=True).start()
    interval_s = min(MAX_HEARTBEAT_INTERVAL_S, assignment.recipe.lanes.patience_s / 4)
    threading.Thread(target=_beat, args=(heartbeats, interval_s), daemon=True).start()
    _select_cores_and_device(assignment)
    from digenrl.exchange.tensors import TensorExchange
    from digenrl.worker.worker import start_worker  # already loaded by the fork server

    exchange = ExchangeFolder(assignment.exchange)
    worker, report = start_worker(assignment, TensorExchange(exchange), _rendezvous(assignment))
    connection.send((None, report))
    while worker is not None and (job := connection.recv()) is not None:
        connection.send((job.id, worker.handle(job)))


def _select_cores_and_device(assignment: Assignment) -> None:
    """Pins the process to its cores, and selects its GPU. A worker on the CPU sees no GPU."""
    if assignment.cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, assignment.cores)
    if assignment.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif assignment.device.startswith("cuda:"):
        import torch

        torch.cuda.set_device(assignment.device)


def _rendezvous(assignment: Assignment) -> str:
    """Ranks of one machine meet in a file, a new one whenever they start again."""
    if assignment.rank is None:
        return ""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    return f"file://{assignment.exchange}/ranks-{assignment.epoch}"


def _beat(heartbeats: ctypes.c_uint64, interval_s: float) -> None:
    while True:
        heartbeats.value += 1
        time.sleep(interval_s)


def _exit_with_driver(lifeline: Connection, exchange: Path) -> None:
    """Ends a worker, even a busy one, when the driver is gone."""
    with suppress(EOFError, OSError):
        lifeline.recv_bytes()
    ExchangeFolder(exchange).remove()
    os._exit(1)


def _end_process(process: BaseProcess, timeout_s: float) -> None:
    """Joins a process, and kills it if it does not exit in time."""
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()


def describe_exit(exit_code: int | None) -> str:
    """How a process has ended, in words."""
    if exit_code is not None and exit_code < 0:
        killed = ", as the system does if the machine's memory runs out" if -exit_code == signal.SIGKILL else ""
        return f"ended by signal {-exit_code} ({signal.Signals(-exit_code).name}{killed})"
    return f"ended with exit code {exit_code}"
