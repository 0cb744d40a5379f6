"""The process group of one broadcast: the sender and its receivers, for a single attempt.

Members meet in the sender's store, under the epoch of the attempt. The default process group is not touched.
They form a chain: each receiver forwards what it gets to the next one, so the sender's link carries the weights
once, however many receivers there are behind it.
Sockets listen only on the sender's given host and on the addresses through which receivers reach it.
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

from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

from digenrl.exchange.deliveries import BroadcastLimits

SENDER_RANK = 0
RECEIVED = "received"
POLL_INTERVAL_S = 0.005
# How fast the slowest receiver applies a patch and computes the checksum: about a fifth of one core's rate.
CHECK_BYTES_PER_S = 200e6
TAG = 0  # of all messages: they arrive in the order in which they are sent


class BroadcastError(RuntimeError):
    """The weights of a broadcast did not reach every receiver, or did not reach this one."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The limits of a broadcast that has begun. Times are on the monotonic clock."""

    ends_s: float
    join_ends_s: float
    stall_timeout_s: float

    @classmethod
    def after(cls, limits: BroadcastLimits) -> Deadline:
        """The deadline of a broadcast that begins now."""
        now_s = time.monotonic()
        return cls(now_s + limits.timeout_s, now_s + limits.join_timeout_s, limits.stall_timeout_s)

    def remaining_to_join_s(self) -> float:
        return min(self.ends_s, self.join_ends_s) - time.monotonic()

    def remaining_s(self) -> float:
        return self.ends_s - time.monotonic()

    def next_timeout_s(self) -> float:
        """The timeout of the next operation. Raises BroadcastError if the deadline has passed."""
        remaining_s = self.remaining_s()
        if remaining_s <= 0:
            raise BroadcastError("timed out")
        return min(remaining_s, self.stall_timeout_s)


def create_store(host: str) -> TCPStore:
    """A store that listens on this host only, on a free port."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family)
    port = listener.getsockname()[1]
    # Without a socket of ours the store would listen on all interfaces.
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def connect_to_store(address: str, deadline: Deadline) -> tuple[TCPStore, str]:
    """The sender's store, and the local address through which it is reached."""
    host, _, port = address.rpartition(":")
    # A plain connection first: the store's client retries for twice its timeout if nothing listens.
    with socket.create_connection((host, int(port)), timeout=deadline.next_timeout_s()) as connection:
        own_host: str = connection.getsockname()[0]
    timeout = timedelta(seconds=deadline.next_timeout_s())
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout), own_host


class BroadcastGroup:
    """One member's part in one broadcast, as a context manager. The sender has rank 0, receivers count from 1.

    A member that leaves the block with an error records the reason in the store for the others. The sender removes
    everything else that the broadcast left there.
    """

    def __init__(self, store: Store, epoch: int, rank: int, size: int, deadline: Deadline) -> None:
        assert 0 <= rank < size, f"rank {rank} of {size}"
        self._rank, self._size, self._deadline = rank, size, deadline
        self._root_store, self._prefix = store, f"weights-{epoch}"
        self._store = PrefixStore(self._prefix, store)
        self._group: Any = None
        # Transfers keep the group's sockets open, so they must not live in a frame of a traceback.
        self._receiving: Any = None
        self._forwarding: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        # Closes the sockets, which interrupts members that wait for this one.
        self._group = self._receiving = self._forwarding = None
        if error is not None:
            with suppress(RuntimeError):  # the sender is gone, and the store with it
                self.confirm(error_summary(error))
        if self._rank == SENDER_RANK:
            self._remove_keys()

    def join(self, host: str, held: str = "") -> None:
        """Waits for all members and opens the process group, whose sockets listen on `host`.

        `held` is the weight version that a receiver has already.
        """
        self._store.set(f"joined/{self._rank}", held)
        keys = {rank: f"joined/{rank}" for rank in range(self._size)}
        if not self._wait_for_keys(list(keys.values()), self._deadline.remaining_to_join_s()):
            missing = [rank for rank, key in keys.items() if not self._store.check([key])]
            raise BroadcastError(f"{_describe(missing)} did not join in time")
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=self._deadline.next_timeout_s())
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        self._group = ProcessGroupGloo(self._store, self._rank, self._size, options)

    def all_receivers_hold(self, name: str) -> bool:
        return all(self._store.get(f"joined/{rank}").decode() == name for rank in range(1, self._size))

    def broadcast(self, bucket: Tensor, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Sends the bucket, or fills it with the sender's bytes; calls `meanwhile` during the transfer.

        A bucket is forwarded while the next one arrives, so it must not change before the member confirms.
        """
        if self._rank > SENDER_RANK:
            self._receiving = self._group.recv([bucket], self._rank - 1, TAG)
            meanwhile()
            self._receiving.wait(self._timeout(hops=self._rank))
        self._wait_until_forwarded()
        if self._rank + 1 < self._size:
            self._forwarding = self._group.send([bucket], self._rank + 1, TAG)

    def _wait_until_forwarded(self) -> None:
        if self._forwarding is not None:
            self._forwarding.wait(self._timeout())

    def _timeout(self, hops: int = 1) -> timedelta:
        """For a bucket that takes this many hops, each of which may be slow."""
        return timedelta(seconds=min(self._deadline.remaining_s(), hops * self._deadline.next_timeout_s()))

    def confirm(self, outcome: str = RECEIVED) -> None:
        """Records this member's outcome. The last thing that a member does."""
        with suppress(RuntimeError):  # the next member records its own outcome
            self._wait_until_forwarded()
        self._store.set(f"outcome/{self._rank}", outcome)

    def wait_for_receivers(self, weights_bytes: int) -> None:
        """Waits until all receivers have confirmed that they hold weights of this size.

        Raises BroadcastError if one failed or did not confirm in time.
        """
        self._wait_until_forwarded()
        keys = {rank: f"outcome/{rank}" for rank in range(1, self._size)}
        timeout_s = self._timeout(hops=len(keys)).total_seconds() + weights_bytes / CHECK_BYTES_PER_S
        self._wait_for_keys(list(keys.values()), min(timeout_s, self._deadline.remaining_s()))
        outcomes = {
            rank: self._store.get(key).decode() if self._store.check([key]) else "did not confirm in time"
            for rank, key in keys.items()
        }
        failures = [f"{_describe([rank])}: {outcome}" for rank, outcome in outcomes.items() if outcome != RECEIVED]
        if failures:
            raise BroadcastError("; ".join(failures))

    def _wait_for_keys(self, keys: list[str], timeout_s: float) -> bool:
        """Whether all keys are set in time. Raises BroadcastError if the sender gives up."""
        # Polls, because a blocking wait would not notice that the sender gives up.
        ends_s = time.monotonic() + timeout_s
        sender_outcome = f"outcome/{SENDER_RANK}"
        while not self._store.check(keys):
            if self._store.check([sender_outcome]):
                raise BroadcastError(f"the sender gave up: {self._store.get(sender_outcome).decode()}")
            if time.monotonic() >= ends_s:
                return False
            time.sleep(POLL_INTERVAL_S)
        return True

    def _remove_keys(self) -> None:
        """Removes the keys of this broadcast, except for the reason why the sender gave up."""
        kept = f"{self._prefix}/outcome/{SENDER_RANK}"
        for key in self._root_store.list_keys():
            if key.startswith(f"{self._prefix}/") and key != kept:
                self._root_store.delete_key(key)


def _describe(ranks: list[int]) -> str:
    return ", ".join("the sender" if rank == SENDER_RANK else f"receiver {rank}" for rank in ranks)


@contextmanager
def as_broadcast_error(what: str) -> Iterator[None]:
    """Turns errors of sockets, stores and process groups, and damaged data, into a BroadcastError of one line."""
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        raise BroadcastError(f"{what}: {error_summary(error)}") from error


def error_summary(error: BaseException) -> str:
    """The informative part of an error's first line."""
    first, *_ = str(error).splitlines() or [""]
    plain = re.sub(r"^\[[^\]]*\] ", "", first)  # the location in the library's source
    return plain.split(". This is typically caused")[0] or repr(error)
