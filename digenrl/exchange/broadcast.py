"""Broadcasts full weights, too large for an object store, from the trainer to the workers that lack them.

Sender and receiver each run in a thread of their own, beside training and generation:

    sender:    stage("weights-7", tensors) -> reference
               send("weights-7", epoch=12, receivers=2)
    receiver:  receive_weights(address, epoch=12, rank=1, size=3, reference) -> tensors

An epoch is one attempt. If a member dies, the attempt fails for all others, and the survivors join a new epoch.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor

from digenrl.exchange.broadcast_group import (
    SENDER_RANK,
    BroadcastError,
    BroadcastGroup,
    Deadline,
    as_broadcast_error,
    connect_to_store,
    create_store,
)
from digenrl.exchange.flat_weights import FlatWeights, crc32, decode_header, flatten, make_header, tensor_views
from digenrl.records import WeightsReference

STALL_TIMEOUT_S = 15.0
MAX_HEADER_BYTES = 1 << 28


class WeightsSender:
    """The trainer's side of a broadcast. Stages one weight version, and hosts the store in which members meet.

    `host` is the address of this machine that receivers can reach; nothing listens on any other. The staged
    version takes one copy of the weights. A second copy exists only while an older version is still being sent.
    """

    def __init__(self, host: str, stall_timeout_s: float = STALL_TIMEOUT_S) -> None:
        self._host = host
        self._stall_timeout_s = stall_timeout_s
        self._store = create_store(host)
        self._lock = threading.Lock()
        self._staged: FlatWeights | None = None
        self._last_epoch = -1

    @property
    def address(self) -> str:
        """Where receivers find the store, as host:port."""
        return f"{self._host}:{self._store.port}"

    def stage(self, name: str, tensors: Mapping[str, Tensor]) -> WeightsReference:
        """Copies weights so that they can be sent, and drops the version staged before."""
        header = make_header(name, tensors)
        with self._lock:
            self._staged = None  # freed before the copy is made, unless it is being sent
        weights = flatten(header, tensors)
        with self._lock:
            self._staged = weights
        return weights.reference

    def send(self, name: str, epoch: int, receivers: int, timeout_s: float) -> float:
        """Sends the staged weights; returns the seconds until all receivers have confirmed them.

        Raises BroadcastError if a receiver dies, does not join in time, or finds the weights damaged: after
        `timeout_s` at the latest, earlier if there is no progress for the stall timeout. The weights can then be
        sent again, in a new epoch.
        """
        started_s = time.monotonic()
        weights = self._take(name, epoch)
        deadline = Deadline.after(timeout_s, self._stall_timeout_s)
        with (
            as_broadcast_error(f"{name} was not sent in epoch {epoch}"),
            BroadcastGroup(self._store, epoch, SENDER_RANK, receivers + 1, deadline) as group,
        ):
            group.join(self._host)
            _send_header(group, weights.header)
            for bucket in weights.buckets():
                group.broadcast(bucket)
            group.wait_for_receivers()
        return time.monotonic() - started_s

    def _take(self, name: str, epoch: int) -> FlatWeights:
        with self._lock:
            assert epoch > self._last_epoch, f"epoch {epoch} was used before: an epoch is one attempt"
            staged = self._staged
            if staged is None or staged.reference.name != name:
                found = "nothing" if staged is None else staged.reference.name
                raise BroadcastError(f"{name} is not staged; staged: {found}")
            self._last_epoch = epoch
            return staged


def receive_weights(
    address: str,
    epoch: int,
    rank: int,
    size: int,
    reference: WeightsReference,
    timeout_s: float,
    stall_timeout_s: float = STALL_TIMEOUT_S,
) -> dict[str, Tensor]:
    """Joins one broadcast as receiver `rank` (from 1) of `size` members; returns the verified weights.

    Raises BroadcastError if they did not arrive complete and undamaged.
    """
    assert rank != SENDER_RANK, "rank 0 is the sender"
    deadline = Deadline.after(timeout_s, stall_timeout_s)
    with as_broadcast_error(f"{reference.name} did not arrive in epoch {epoch}"):
        store, own_host = connect_to_store(address, deadline)
        with BroadcastGroup(store, epoch, rank, size, deadline) as group:
            group.join(own_host)
            tensors = _receive_tensors(group, reference)
            with suppress(RuntimeError):  # the sender has died since, but the weights are complete
                group.confirm()
    return tensors


def _send_header(group: BroadcastGroup, header: bytes) -> None:
    group.broadcast(torch.frombuffer(bytearray(len(header).to_bytes(8, "little")), dtype=torch.uint8))
    group.broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8))


def _receive_header(group: BroadcastGroup) -> bytes:
    length = torch.zeros(8, dtype=torch.uint8)
    group.broadcast(length)
    header_bytes = int.from_bytes(bytes(length.tolist()), "little")
    if not 0 < header_bytes <= MAX_HEADER_BYTES:
        raise ValueError(f"damaged: a header of {header_bytes:,} bytes was announced")
    header = torch.zeros(header_bytes, dtype=torch.uint8)
    group.broadcast(header)
    return bytes(header.numpy())


def _receive_tensors(group: BroadcastGroup, reference: WeightsReference) -> dict[str, Tensor]:
    """The weights as views of one buffer. Raises ValueError if they are not those of the reference."""
    encoded = _receive_header(group)
    header = decode_header(encoded, reference)
    flat = torch.empty(reference.bytes, dtype=torch.uint8)
    found, previous = zlib.crc32(encoded), flat[:0]

    def add_previous() -> None:
        nonlocal found
        found = crc32(previous, found)

    for offset in range(0, reference.bytes, header.bucket_bytes):
        bucket = flat[offset : offset + header.bucket_bytes]
        group.broadcast(bucket, meanwhile=add_previous)
        previous = bucket
    add_previous()
    if found != reference.checksum:
        raise ValueError(f"{reference.name}: arrived damaged, with checksum {found}; expected {reference}")
    return tensor_views(flat, header)
