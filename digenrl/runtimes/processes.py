"""Workers as processes of this machine. They come from a fork server that has torch loaded, in milliseconds.

A worker ignores Ctrl-C, which is the driver's to handle, and leaves by itself when the driver is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from digenrl.config.reading import ConfigError
from digenrl.exchange.folder import ExchangeFolder
from digenrl.runtimes.transport import Gone, Message
from digenrl.workers.assignment import Assignment
from digenrl.workers.orders import Order, OrderFailed, Ready

PRELOADED = ["digenrl.workers.worker"]
PATIENCE_S = 5.0  # for a worker that was asked to leave
# Read when torch is imported, which the fork server does once for all workers.
QUIET = {"ONEDNN_JIT_PROFILE": "0", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}


def set_threads(threads: int) -> None:
    """How many threads torch will have, where it is not imported yet: here, or in a fork server not yet started."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


def prepare_fork_server(threads: int) -> None:
    """Sets what workers inherit."""
    set_threads(threads)
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)


@dataclass(slots=True)
class _Member:
    process: BaseProcess
    connection: Connection
    lifeline: Connection  # its other end tells the worker that the driver lives


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
        process = self._context.Process(
            target=serve,
            args=(assignment, theirs, their_lifeline, self._logs / f"{assignment.name}.log"),
            name=f"digenrl {assignment.name}",
            daemon=True,
        )
        process.start()
        theirs.close()
        their_lifeline.close()
        self._members[assignment.name] = _Member(process, ours, our_lifeline)

    def send(self, worker: str, order: Order) -> None:
        """A worker that died meanwhile is reported by `receive`."""
        member = self._members.get(worker)
        if member is not None:
            with suppress(OSError):
                member.connection.send(order)

    def receive(self, timeout_s: float) -> Sequence[Message]:
        """All reports that are there, those of a worker that died before the news of its death."""
        handles = {m.connection: name for name, m in self._members.items()}
        sentinels = {m.process.sentinel: name for name, m in self._members.items()}
        messages: list[Message] = []
        ready = wait([*handles, *sentinels], timeout_s)
        for name in dict.fromkeys(handles.get(each) or sentinels[each] for each in ready):  # type: ignore[call-overload, index]
            messages += self._reports_of(name)
        return messages

    def _reports_of(self, name: str) -> list[Message]:
        member = self._members[name]
        dead = not member.process.is_alive()  # asked first: what it sent before it died is still in the pipe
        messages = []
        try:
            while member.connection.poll():
                messages.append(Message(name, member.connection.recv()))
        except (EOFError, OSError):
            member.process.join(PATIENCE_S)
            dead = True
        if dead:
            self._release(name)
            messages.append(Message(name, Gone(_ending(member.process.exitcode))))
        return messages

    def pids(self) -> dict[str, int]:
        """The processes there are, by worker."""
        return {name: m.process.pid for name, m in self._members.items() if m.process.pid is not None}

    def stop(self) -> None:
        """Asks every worker to leave, and ends those that do not."""
        for member in self._members.values():
            with suppress(OSError):
                member.connection.send(None)
        for member in self._members.values():
            member.process.join(PATIENCE_S)
            if member.process.is_alive():
                member.process.kill()
                member.process.join()
        for name in list(self._members):
            self._release(name)

    def _release(self, name: str) -> None:
        member = self._members.pop(name)
        member.connection.close()
        member.lifeline.close()
        if not member.process.is_alive():
            member.process.join()


def serve(assignment: Assignment, connection: Connection, lifeline: Connection, log: Path) -> None:
    """A worker process, from beginning to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _print_to(log)
    threading.Thread(target=_leave_with_the_driver, args=(lifeline, assignment.exchange), daemon=True).start()
    if assignment.cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, assignment.cores)
    from digenrl.workers.worker import build_worker, failure  # loaded by the fork server already

    try:
        worker = build_worker(assignment)
    except ConfigError as error:
        connection.send(OrderFailed(Order(), str(error), mistake=True))
        return
    except Exception as error:  # the driver tells it, and ends the run
        connection.send(failure(Order(), error))
        return
    connection.send(Ready())
    while (order := connection.recv()) is not None:
        connection.send(worker.handle(order))


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


def _ending(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"ended by signal {-exit_code} ({signal.Signals(-exit_code).name})"
    return f"ended with exit code {exit_code}"
