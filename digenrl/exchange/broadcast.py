"""Full weights, too large for an object store: sent by broadcast, from the trainer to every generator that waits.

Both sides work in a thread of the caller's, beside training and generating:

    sender                                     a receiver
    stage("weights-7", tensors) -> reference
    send("weights-7", epoch=12, receivers=2)   receive(address, epoch=12, rank=1, size=3, reference)
                                               wait_for("weights-7") -> tensors

An epoch is one attempt. Members come and die at any time: after a failure the survivors take part in a new epoch.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from digenrl.exchange.distribution import (
    SENDER,
    BroadcastError,
    Distribution,
    Patience,
    Seat,
    explained,
    forget,
    host_store,
    reach_store,
)
from digenrl.exchange.flat_weights import FlatWeights, Header, checksum, flatten, header_of, read_header, views
from digenrl.records import WeightsReference

__all__ = ["BroadcastError", "Sent", "WeightsReceiver", "WeightsSender"]

STALL_S = 15.0
LARGEST_HEADER_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Sent:
    """A distribution that reached everybody: the bytes of the weights, and how long it took in all."""

    bytes: int
    seconds: float


class WeightsSender:
    """The trainer's side. Stages one version at a time, and hosts the store in which members meet.

    `host` is the address of this machine that generators reach; nothing listens on any other. A version costs one
    copy of the weights; there are two only while an older one is still being sent.

    With a CUDA device, on all sides, buckets pass through it and NCCL; weights are staged on the CPU all the same.
    NCCL chooses its sockets itself (NCCL_SOCKET_IFNAME), and ends every process whose peer died, unless all run
    with TORCH_NCCL_ASYNC_ERROR_HANDLING=0, TORCH_NCCL_DUMP_ON_TIMEOUT=0 and
    TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=100.
    """

    def __init__(self, host: str, device: str = "cpu", stall_s: float = STALL_S) -> None:
        self._host = host
        self._device = torch.device(device)
        self._stall_s = stall_s
        self._store = host_store(host)
        self._lock = threading.Lock()
        self._staged: FlatWeights | None = None
        self._epochs: set[int] = set()

    @property
    def address(self) -> str:
        """Where receivers find the store, as host:port."""
        return f"{self._host}:{self._store.port}"

    def stage(self, reference_name: str, tensors: Mapping[str, Tensor]) -> WeightsReference:
        """Copies weights, to be sent from now on. Drops older ones first; those just being sent go when sent."""
        header = header_of(reference_name, tensors)
        with self._lock:
            self._staged = None
        weights = flatten(header, tensors)
        with self._lock:
            self._staged = weights
        return weights.reference

    def send(self, name: str, epoch: int, receivers: int, timeout_s: float) -> Sent:
        """Sends staged weights to so many receivers; returns once all of them have confirmed every byte.

        Raises BroadcastError if one died, found damage, or did not come in time; then the same weights can be sent
        again in a new epoch, to those that are left. It says so at the latest when `timeout_s` have passed, and
        earlier where nothing moves for the stall time.
        """
        return self._distribute(self._take(name, epoch), Seat(epoch, SENDER, receivers + 1), timeout_s)

    def _distribute(self, weights: FlatWeights, seat: Seat, timeout_s: float) -> Sent:
        began_s = time.monotonic()
        patience = Patience.starting_now(timeout_s, self._stall_s)
        distribution = Distribution(self._store, seat, patience, self._device)
        try:
            with explained(f"{weights.reference.name} was not sent in epoch {seat.epoch}"), distribution:
                distribution.gather(self._host)
                _carry_header(distribution, weights.header)
                for bucket in weights.buckets():
                    distribution.carry(bucket)
                distribution.await_reports()
        except BroadcastError as error:
            raise BroadcastError(str(error), tuple(distribution.unconfirmed())) from error
        finally:
            forget(self._store, seat.epoch)
        return Sent(weights.reference.bytes, time.monotonic() - began_s)

    def _take(self, name: str, epoch: int) -> FlatWeights:
        with self._lock:
            assert epoch not in self._epochs, f"epoch {epoch} was used before: an epoch is one attempt"
            staged = self._staged
            if staged is None or staged.reference.name != name:
                known = "nothing" if staged is None else staged.reference.name
                raise BroadcastError(f"{name} is not staged; staged: {known}")
            self._epochs.add(epoch)
            return staged


@dataclass(frozen=True, slots=True)
class OnTheWay:
    """Being received."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """Whole and verified."""

    epoch: int
    reference: WeightsReference
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Lost:
    """Will not come: failed, or dropped because a newer version is there."""

    epoch: int
    why: str


class WeightsReceiver:
    """A generator's side. Keeps the newest version that arrived whole; nothing else is ever served.

    May be used by several threads. A version that arrives costs one copy of the weights, beside one that arrived
    before and is dropped then.
    """

    def __init__(self, device: str = "cpu", stall_s: float = STALL_S) -> None:
        self._device = torch.device(device)
        self._stall_s = stall_s
        self._changed = threading.Condition()
        self._versions: dict[str, OnTheWay | Arrived | Lost] = {}
        self._newest_epoch = -1

    def receive(
        self, address: str, epoch: int, rank: int, size: int, reference: WeightsReference, timeout_s: float
    ) -> None:
        """Takes part in one distribution, as `rank` (from 1) of `size` members with the sender.

        Raises BroadcastError if the weights did not arrive whole. Who has them already takes part all the same,
        for the others, and keeps what it has.
        """
        assert rank != SENDER, "rank 0 is the sender's"
        seat = Seat(epoch, rank, size)
        patience = Patience.starting_now(timeout_s, self._stall_s)
        held = self._expect(reference, epoch)
        try:
            with explained(f"{reference.name} did not arrive in epoch {epoch}"):
                store, own_host = reach_store(address, patience)
                with Distribution(store, seat, patience, self._device) as distribution:
                    distribution.gather(own_host)
                    tensors = _take_buckets(distribution, reference, held)
                    self._settle(reference.name, Arrived(epoch, reference, tensors))
                    with suppress(RuntimeError):  # the sender died now; the weights are whole
                        distribution.report()
        except BroadcastError as error:
            self._settle(reference.name, Lost(epoch, str(error)))
            raise

    def wait_for(self, name: str, timeout_s: float) -> dict[str, Tensor]:
        """The weights of a name, once they are there, whole. They are to be copied from, not to be changed.

        Raises BroadcastError if they do not come in time, as soon as their distribution failed (and no other has
        begun), or when they were dropped for newer ones.
        """
        with self._changed:
            self._changed.wait_for(lambda: isinstance(self._versions.get(name), Arrived | Lost), timeout_s)
            match self._versions.get(name):
                case Arrived(tensors=tensors):
                    return dict(tensors)
                case Lost(why=why):
                    raise BroadcastError(why)
                case OnTheWay(epoch=epoch):
                    raise BroadcastError(
                        f"{name} did not arrive within {timeout_s:g} s; epoch {epoch} is under way"
                    )
                case None:
                    raise BroadcastError(
                        f"{name} did not arrive within {timeout_s:g} s; nobody has begun to send it"
                    )

    def has(self, name: str) -> bool:
        """Whether the weights of this name are there, whole."""
        with self._changed:
            return isinstance(self._versions.get(name), Arrived)

    def drop(self, name: str) -> None:
        """Forgets a name, also one that is on its way. Dropping what is not there does nothing."""
        with self._changed:
            self._versions.pop(name, None)

    def _expect(self, reference: WeightsReference, epoch: int) -> dict[str, Tensor] | None:
        """Notes that weights are coming; returns them if they are here already."""
        with self._changed:
            version = self._versions.get(reference.name)
            if isinstance(version, Arrived) and version.reference == reference:
                return version.tensors
            self._versions[reference.name] = OnTheWay(epoch)
            return None

    def _settle(self, name: str, outcome: Arrived | Lost) -> None:
        """Serves what arrived, unless it was dropped on its way or something newer is there."""
        with self._changed:
            version = self._versions.get(name)
            if isinstance(outcome, Arrived) and outcome.epoch < self._newest_epoch:
                outcome = Lost(outcome.epoch, f"{name} came too late: newer weights are there")
            expected = isinstance(version, OnTheWay) and version.epoch == outcome.epoch
            again = isinstance(version, Arrived) and isinstance(outcome, Arrived)
            if not expected and not again:
                return
            self._versions[name] = outcome
            if isinstance(outcome, Arrived):
                self._newest_epoch = outcome.epoch
                self._drop_older(name)
            self._changed.notify_all()

    def _drop_older(self, newest: str) -> None:
        """Drops what arrived before; of what was lost, only the last is remembered."""
        for name, version in list(self._versions.items()):
            if name != newest and isinstance(version, Arrived):
                self._versions[name] = Lost(version.epoch, f"{name} was dropped: {newest} has arrived since")
            elif isinstance(version, Lost):
                del self._versions[name]


def _carry_header(distribution: Distribution, header: bytes) -> None:
    distribution.carry(torch.frombuffer(bytearray(len(header).to_bytes(8, "little")), dtype=torch.uint8))
    distribution.carry(torch.frombuffer(bytearray(header), dtype=torch.uint8))


def _take_header(distribution: Distribution) -> bytes:
    length = torch.zeros(8, dtype=torch.uint8)
    distribution.carry(length)
    header_bytes = int.from_bytes(bytes(length.tolist()), "little")
    if not 0 < header_bytes <= LARGEST_HEADER_BYTES:
        raise ValueError(f"a header of {header_bytes:,} bytes was announced: damaged")
    header = torch.zeros(header_bytes, dtype=torch.uint8)
    distribution.carry(header)
    return bytes(header.numpy())


def _take_buckets(
    distribution: Distribution, reference: WeightsReference, held: dict[str, Tensor] | None
) -> dict[str, Tensor]:
    """The weights, verified; raises ValueError if they are not those of the reference.

    Each bucket is summed while the next one travels. For who holds the weights two buckets are memory enough.
    """
    encoded = _take_header(distribution)
    header = read_header(encoded, reference)
    memory_bytes = reference.bytes if held is None else min(reference.bytes, 2 * header.bucket_bytes)
    flat = torch.empty(memory_bytes, dtype=torch.uint8)
    found = zlib.crc32(encoded)
    last = flat[:0]

    def sum_last() -> None:
        nonlocal found
        found = checksum(last, found)

    for offset in range(0, reference.bytes, header.bucket_bytes):
        bucket = _bucket_at(flat, offset, header)
        distribution.carry(bucket, meanwhile=sum_last)
        last = bucket
    sum_last()
    if found != reference.checksum:
        raise ValueError(f"{reference.name}: arrived damaged, with checksum {found}; expected {reference}")
    return views(flat, header) if held is None else held


def _bucket_at(flat: Tensor, offset: int, header: Header) -> Tensor:
    """The memory for the bytes that begin at this offset of the weights; begins anew where it is too short."""
    length = min(header.bucket_bytes, header.total_bytes - offset)
    start = offset % len(flat)
    return flat[start : start + length]
