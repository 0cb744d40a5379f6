"""Workers as processes of this machine. They come from a fork server that has torch loaded, in milliseconds.

Signals are the driver's to handle: a terminal and most supervisors send theirs to every process of a run. A worker
ignores them, and leaves by itself when the driver is gone.
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
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from digenrl.exchange.folder import ExchangeFolder
from digenrl.logs import configure_logging
from digenrl.records import Job
from digenrl.transports.contract import Gone, Message
from digenrl.worker.assignment import Assignment

PRELOADED = ["digenrl.worker.worker"]
PATIENCE_S = 5.0  # for workers that were asked to leave
SIGN_EVERY_S = 1.0  # of life, which every worker gives
FOR_THE_DRIVER = (signal.SIGINT, signal.SIGTERM)
# Read when torch is imported, which the fork server does once for all workers. Libraries ask whether there is a
# card when they are imported; with the NVML check that does not start CUDA, which a fork could not use then.
ENVIRONMENT = {
    "ONEDNN_JIT_PROFILE": "0",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


def set_threads(threads: int) -> None:
    """How many threads torch has where it is imported from now on: here, or in a fork server not yet started."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def prepare_fork_server(threads: int) -> None:
    """Sets what workers inherit, and starts it."""
    set_threads(threads)
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    with _ignored(FOR_THE_DRIVER):  # what is ignored when a process starts, it and its children ignore
        forkserver.ensure_running()


@contextmanager
def _ignored(signals: Sequence[signal.Signals]) -> Iterator[None]:
    before = {each: signal.signal(each, signal.SIG_IGN) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@dataclass(slots=True)
class _Member:
    process: BaseProcess
    connection: Connection
    lifeline: Connection  # its other end tells the worker that the driver lives
    sign: ctypes.c_double  # when the worker last gave a sign of life, by the monotonic clock
    patience_s: float


class ProcessTransport:
    """Worker processes, each with a pipe. What they print goes to a file of their own in `logs`."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._members: dict[str, _Member] = {}
        self._context = multiprocessing.get_context("forkserver")

    def start(self, assignment: Assignment) -> None:
        """Starts a process; one of the same name must be gone."""
        assert assignment.name not in self._members, f"{assignment.name} is there already"
        self._logs.mkdir(parents=True, exist_ok=True)
        ours, theirs = self._context.Pipe()
        their_lifeline, our_lifeline = self._context.Pipe(duplex=False)
        sign = self._context.RawValue(ctypes.c_double, time.monotonic())
        log = self._logs / f"{assignment.name.replace('/', '-')}.log"
        process = self._context.Process(
            target=serve,
            args=(assignment, theirs, their_lifeline, sign, log),
            name=f"digenrl {assignment.name}",
            daemon=True,
        )
        process.start()
        theirs.close()
        their_lifeline.close()
        patience_s = assignment.recipe.lanes.patience_s
        self._members[assignment.name] = _Member(process, ours, our_lifeline, sign, patience_s)

    def has_room(self, assignment: Assignment) -> bool:
        """This machine always has: who may be on it was settled before."""
        return True

    def send(self, worker: str, job_id: int, order: Job) -> None:
        """A worker that died meanwhile is reported by `receive`."""
        member = self._members.get(worker)
        if member is not None:
            with suppress(OSError):
                member.connection.send((job_id, order))

    def receive(self, timeout_s: float) -> Sequence[Message]:
        """All reports that are there, those of a worker that died before the news of its death."""
        handles = {m.connection: name for name, m in self._members.items()}
        sentinels = {m.process.sentinel: name for name, m in self._members.items()}
        messages: list[Message] = []
        ready = wait([*handles, *sentinels], timeout_s)
        for name in dict.fromkeys(handles.get(each) or sentinels[each] for each in ready):  # type: ignore[call-overload, index]
            messages += self._reports_of(name)
        return [*messages, *self._end_the_silent()]

    def _end_the_silent(self) -> list[Message]:
        """A process that is stopped, or stuck where no thread of it can run, is not coming back."""
        now_s = time.monotonic()
        silent = [name for name, m in self._members.items() if now_s - m.sign.value > m.patience_s]
        for name in silent:
            self.end(name)
        return [Message(name, None, Gone("gave no sign of life any more and was ended")) for name in silent]

    def _reports_of(self, name: str) -> list[Message]:
        member = self._members[name]
        dead = not member.process.is_alive()  # asked first: what it sent before it died is still in the pipe
        messages = []
        try:
            while member.connection.poll():
                messages.append(Message(name, *member.connection.recv()))
        except (EOFError, OSError):
            _end(member.process, PATIENCE_S)
            dead = True
        if dead:
            self._release(name)
            messages.append(Message(name, None, Gone(_ending(member.process.exitcode))))
        return messages

    def end(self, worker: str) -> None:
        """Kills the process, whatever it is at."""
        member = self._members.get(worker)
        if member is not None:
            _end(member.process, 0.0)
            self._release(worker)

    def pids(self) -> dict[str, int]:
        """The processes there are, by worker."""
        return {name: m.process.pid for name, m in self._members.items() if m.process.pid is not None}

    def stop(self) -> None:
        """Asks every worker to leave, and ends those that do not."""
        try:
            for member in self._members.values():
                with suppress(OSError):
                    member.connection.send(None)
            deadline_s = time.monotonic() + PATIENCE_S
            for member in self._members.values():
                _end(member.process, max(0.0, deadline_s - time.monotonic()))
        finally:  # whoever is in a hurry interrupts the waiting: without its lifeline a worker leaves by itself
            for name in list(self._members):
                self._release(name)

    def _release(self, name: str) -> None:
        member = self._members.pop(name)
        member.connection.close()
        member.lifeline.close()
        if not member.process.is_alive():
            member.process.join()


def serve(
    assignment: Assignment, connection: Connection, lifeline: Connection, sign: ctypes.c_double, log: Path
) -> None:
    """A worker process, from beginning to end."""
    assert assignment.exchange is not None
    for each in FOR_THE_DRIVER:
        signal.signal(each, signal.SIG_IGN)
    _print_to(log)
    threading.Thread(target=_leave_with_the_driver, args=(lifeline, assignment.exchange), daemon=True).start()
    threading.Thread(target=_give_signs, args=(sign,), daemon=True).start()
    configure_logging(assignment.name, verbose=assignment.recipe.logging.verbose)
    _take_place(assignment)
    from digenrl.exchange.tensors import TensorExchange
    from digenrl.worker.worker import start_worker  # loaded by the fork server already

    exchange = ExchangeFolder(assignment.exchange)
    worker, report = start_worker(assignment, TensorExchange(exchange), _rendezvous(assignment))
    connection.send((None, report))
    while worker is not None and (job := connection.recv()) is not None:
        job_id, order = job
        connection.send((job_id, worker.handle(order)))


def _take_place(assignment: Assignment) -> None:
    """A worker's own cores, and the one card that `cuda` or `auto` means to it; a worker on the CPU sees none."""
    if assignment.cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, assignment.cores)
    if assignment.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif assignment.device.startswith("cuda:"):
        import torch

        torch.cuda.set_device(assignment.device)


def _rendezvous(assignment: Assignment) -> str:
    """Ranks of one machine meet in a file; they start again under another epoch, in another file."""
    if assignment.ranks is None:
        return ""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # they need no other machine
    return f"file://{assignment.exchange}/ranks-{assignment.ranks.epoch}"


def _give_signs(sign: ctypes.c_double) -> None:
    while True:
        sign.value = time.monotonic()
        time.sleep(SIGN_EVERY_S)


def _leave_with_the_driver(lifeline: Connection, exchange: Path) -> None:
    """A busy worker survives its driver's death, unless somebody watches."""
    with suppress(EOFError, OSError):
        lifeline.recv_bytes()
    ExchangeFolder(exchange).remove()
    os._exit(1)


def _print_to(log: Path) -> None:
    target = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(target, stream.fileno())
    os.close(target)


def _end(process: BaseProcess, patience_s: float) -> None:
    """Waits for a process that is about to leave; one that does not is ended."""
    process.join(patience_s)
    if process.is_alive():
        process.kill()
        process.join()


def _ending(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"ended by signal {-exit_code} ({signal.Signals(-exit_code).name})"
    return f"ended with exit code {exit_code}"
