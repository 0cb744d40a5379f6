"""One distribution: a process group among exactly those that send and receive one version, gone when it ends.

Members meet in the sender's store under the distribution's epoch. No default process group is touched. On the CPU
every socket listens on the host that was given or, at a receiver, on the address by which it reaches the sender.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)

from digenrl.exchange.flat_weights import BUCKET_BYTES

SENDER = 0
WHOLE = "whole"
POLL_S = 0.005
# A communicator takes its process down when an operation outlasts its own timeout: ours must come first.
GRACE_S = 60.0


class BroadcastError(RuntimeError):
    """Weights did not arrive. At the sender, `unconfirmed` are the receivers not known to have them."""

    def __init__(self, message: str, unconfirmed: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.unconfirmed = unconfirmed


@dataclass(frozen=True, slots=True)
class Seat:
    """A member's place: the sender has rank 0, receivers count from 1."""

    epoch: int
    rank: int
    size: int

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"no such seat: {self}"


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a member waits: for the whole, and with nothing moving at all once everybody is there."""

    ends_s: float  # of the monotonic clock
    stall_s: float

    @classmethod
    def starting_now(cls, timeout_s: float, stall_s: float) -> Patience:
        """Patience of so long in all."""
        return cls(time.monotonic() + timeout_s, stall_s)

    def left_s(self) -> float:
        """What is left of the whole."""
        return self.ends_s - time.monotonic()

    def next_s(self) -> float:
        """What the next move may take; raises when nothing is left."""
        left_s = self.left_s()
        if left_s <= 0:
            raise BroadcastError("the time is up")
        return min(left_s, self.stall_s)


def host_store(host: str) -> TCPStore:
    """A store that listens on this host alone, at a free port."""
    family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(place[:2], family=family)
    port = listener.getsockname()[1]
    # By itself the store would listen on all addresses.
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def reach_store(address: str, patience: Patience) -> tuple[TCPStore, str]:
    """The sender's store, and the address of this machine by which it is reached."""
    host, _, port = address.rpartition(":")
    # First by hand: the store's own client retries for twice its timeout where nobody listens.
    with socket.create_connection((host, int(port)), timeout=patience.next_s()) as connection:
        own_host: str = connection.getsockname()[0]
    timeout = timedelta(seconds=patience.next_s())
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout), own_host


class Distribution:
    """A member's view of one distribution, for the time of a `with` block.

    Who leaves the block with an error tells the others why, if they can still be told.
    """

    def __init__(self, store: Store, seat: Seat, patience: Patience, device: torch.device) -> None:
        self.seat = seat
        self._store = PrefixStore(prefix_of(seat.epoch), store)
        self._patience = patience
        self._device = device
        self._group: Any = None
        self._work: Any = None  # keeps the group's sockets open, hence no local of a frame that an error keeps
        self._staging: Tensor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._group is not None and self._device.type == "cuda":
            self._group.shutdown() if error is None else self._group.abort()
        self._group = self._work = None  # closes its sockets: members that wait for this one are told
        if error is not None:
            with suppress(RuntimeError):  # the sender is gone, and its store with it
                self.report(reason_of(error))

    def gather(self, host: str) -> None:
        """Waits until every member is there, and opens the group. Its own sockets listen on this host."""
        self._store.set(f"here/{self.seat.rank}", "")
        keys = {rank: f"here/{rank}" for rank in range(self.seat.size)}
        if not self._appear(list(keys.values()), self._patience.left_s()):
            absent = [rank for rank, key in keys.items() if not self._store.check([key])]
            raise BroadcastError(f"{members(absent)} did not come in time")
        self._group = self._open(host)

    def carry(self, bucket: Tensor, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Fills everybody's bucket, on the CPU, with the sender's bytes; calls `meanwhile` while they travel."""
        staged = self._staged(bucket)
        if staged is not bucket and self.seat.rank == SENDER:
            staged.copy_(bucket)
        options = BroadcastOptions()
        options.rootRank = SENDER
        limit_s = self._patience.next_s()
        options.timeout = timedelta(seconds=limit_s)
        self._work = self._group.broadcast([staged], options)
        meanwhile()
        self._work.wait()
        if self._device.type == "cuda":
            self._wait_for_card(limit_s)
        if staged is not bucket and self.seat.rank != SENDER:
            bucket.copy_(staged)

    def report(self, outcome: str = WHOLE) -> None:
        """Says what came of it here. The last thing a member does."""
        self._store.set(f"report/{self.seat.rank}", outcome)

    def await_reports(self) -> None:
        """Waits until every receiver has said that all arrived; raises BroadcastError if one did not."""
        self._appear([f"report/{rank}" for rank in range(1, self.seat.size)], self._patience.next_s())
        failures = self.unconfirmed()
        if failures:
            raise BroadcastError("; ".join(f"receiver {rank}: {why}" for rank, why in failures.items()))

    def unconfirmed(self) -> dict[int, str]:
        """The receivers that have not said, so far, that all arrived, and what they said instead."""
        keys = {rank: f"report/{rank}" for rank in range(1, self.seat.size)}
        reports = {
            rank: self._store.get(key).decode() if self._store.check([key]) else "did not confirm in time"
            for rank, key in keys.items()
        }
        return {rank: report for rank, report in reports.items() if report != WHOLE}

    def _appear(self, keys: list[str], within_s: float) -> bool:
        """Whether all keys appear in time."""
        # Asked again and again: who waits in a store blocks it for other threads.
        ends_s = time.monotonic() + within_s
        given_up = f"report/{SENDER}"
        while not self._store.check(keys):
            if self._store.check([given_up]):
                raise BroadcastError(f"the sender gave up: {self._store.get(given_up).decode()}")
            if time.monotonic() >= ends_s:
                return False
            time.sleep(POLL_S)
        return True

    def _wait_for_card(self, limit_s: float) -> None:
        """Waits until a broadcast is over on the card too, where its `wait` only puts what follows behind it."""
        over = torch.cuda.Event()  # type: ignore[no-untyped-call]
        over.record()
        ends_s = time.monotonic() + limit_s
        while not over.query():  # type: ignore[no-untyped-call]
            if time.monotonic() >= ends_s:
                raise BroadcastError(f"nothing moved for {limit_s:.1f} s")
            time.sleep(POLL_S / 10)

    def _open(self, host: str) -> Any:
        timeout_s = self._patience.next_s()
        store, seat = self._store, self.seat
        if self._device.type == "cpu":
            options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timedelta(seconds=timeout_s)
            options._devices = [ProcessGroupGloo.create_device(hostname=host)]
            return ProcessGroupGloo(store, seat.rank, seat.size, options)
        from torch.distributed import ProcessGroupNCCL  # not in builds without CUDA

        if self._device.index is not None:
            torch.cuda.set_device(self._device)  # for this thread
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s + GRACE_S)
        return ProcessGroupNCCL(store, seat.rank, seat.size, options)

    def _staged(self, bucket: Tensor) -> Tensor:
        """The bucket where the group can send it from: itself, or a place on the card."""
        if self._device.type == "cpu":
            return bucket
        if self._staging is None or len(self._staging) < len(bucket):
            self._staging = torch.empty(max(len(bucket), BUCKET_BYTES), dtype=torch.uint8, device=self._device)
        return self._staging[: len(bucket)]


def prefix_of(epoch: int) -> str:
    """Under what a distribution's keys lie in the store."""
    return f"weights-{epoch}"


def forget(store: Store, epoch: int) -> None:
    """Removes what a distribution left in the store, but for the sender's word that it gave up."""
    kept = f"{prefix_of(epoch)}/report/{SENDER}"
    for key in store.list_keys():
        if key.startswith(f"{prefix_of(epoch)}/") and key != kept:
            store.delete_key(key)


def members(ranks: list[int]) -> str:
    """Ranks, for people."""
    return ", ".join("the sender" if rank == SENDER else f"receiver {rank}" for rank in ranks)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns what sockets, stores and groups raise, and damage found, into a BroadcastError of one line."""
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        raise BroadcastError(f"{what}: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """The one line of an error that tells people something."""
    first, *_ = str(error).splitlines() or [""]
    plain = re.sub(r"^\[[^\]]*\] ", "", first)  # where in the library's source
    return plain.split(". This is typically caused")[0] or repr(error)
