"""Broadcasts full weights, too large for an object store, from the trainer to the workers that lack them.

Sender and receiver each run in a thread of their own, beside training and generation:

    sender:    stage("weights-7", tensors) -> reference
               send("weights-7", epoch=12, receivers=2, limits)
    receiver:  receive_version(address, epoch=12, rank=1, size=3, reference, limits, held) -> weights

A receiver can forward a version that it has received, to workers that are close to it.

An epoch is one attempt. If a member dies, the attempt fails for all others, and the survivors join a new epoch.
Several attempts may run at the same time, each with its own receivers. Receivers that all hold the version before
get a patch, if that is faster.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from digenrl.config.recipes.cluster import WeightPatches
from digenrl.exchange.broadcast_group import (
    SENDER_RANK,
    BroadcastError,
    BroadcastGroup,
    Deadline,
    as_broadcast_error,
    connect_to_store,
    create_store,
)
from digenrl.exchange.deliveries import BroadcastLimits, Delivery
from digenrl.exchange.flat_weights import FlatWeights, WeightsHeader, crc32, decode_header, flatten, make_header
from digenrl.exchange.patches import Patch, PatchMaker, VersionBytes, apply_patch
from digenrl.records import WeightsReference

MAX_HEADER_BYTES = 1 << 28
REMEMBERED_EPOCHS = 100  # several attempts run at the same time, and may begin in any order


class WeightsSender:
    """The sender's side of a broadcast. Stages one weight version, and hosts the store in which members meet.

    `host` is the address of this machine that receivers can reach; nothing listens on any other. The staged
    version takes one copy of the weights; with patches there is a second one, of the version before. Another copy
    exists only while an older version is still being sent.
    """

    def __init__(self, host: str, patches: WeightPatches = "never") -> None:
        self._host = host
        self._store = create_store(host)
        self._lock = threading.Lock()
        self._staged: FlatWeights | None = None
        self._patches = PatchMaker(patches)
        self._epochs: deque[int] = deque(maxlen=REMEMBERED_EPOCHS)

    @property
    def address(self) -> str:
        """Where receivers find the store, as host:port."""
        return f"{self._host}:{self._store.port}"

    def stage(self, name: str, tensors: Mapping[str, Tensor]) -> WeightsReference:
        """Copies weights so that they can be sent, and drops the version staged before."""
        header = make_header(name, tensors)
        with self._lock:
            self._staged = None  # freed before the copy is made, unless it is being sent or the base of a patch
        self._patches.drop_base()
        weights = flatten(header, tensors)
        self._patches.stage(weights.version_bytes())
        with self._lock:
            self._staged = weights
        return weights.reference

    def send(
        self,
        name: str,
        epoch: int,
        receivers: int,
        limits: BroadcastLimits,
        held: str = "",
        link_bytes_per_s: float | None = None,
    ) -> Delivery:
        """Sends the staged weights; returns when all receivers have confirmed them.

        `held` is the version that all receivers are expected to have, and `link_bytes_per_s` what was measured on
        the way to them; a patch is made before they join. Raises BroadcastError if a receiver dies, does not join
        in time, or finds the weights damaged: when the limits are reached at the latest. The weights can then be
        sent again, in a new epoch.
        """
        started_s = time.monotonic()
        weights = self._take(name)
        deadline = Deadline.after(limits)
        patch = self._patches.encoded(name, held, link_bytes_per_s)
        delivery = self._broadcast(weights, epoch, receivers, deadline, patch, held)
        return replace(delivery, seconds=time.monotonic() - started_s)

    def forward(self, weights: FlatWeights, epoch: int, receivers: int, limits: BroadcastLimits) -> Delivery:
        """Sends a version that this worker has received, whole. See `send`."""
        return self._broadcast(weights, epoch, receivers, Deadline.after(limits))

    def _broadcast(
        self,
        weights: FlatWeights,
        epoch: int,
        receivers: int,
        deadline: Deadline,
        patch: Tensor | None = None,
        held: str = "",
    ) -> Delivery:
        started_s = time.monotonic()
        with self._lock:
            assert epoch not in self._epochs, f"epoch {epoch} was used before: an epoch is one attempt"
            self._epochs.append(epoch)
        with as_broadcast_error(f"{weights.reference.name} was not sent in epoch {epoch}"):
            # A group that waits for its members blocks a connection to the store, so each broadcast has its own.
            store, _ = connect_to_store(self.address, deadline)
            with BroadcastGroup(store, epoch, SENDER_RANK, receivers + 1, deadline) as group:
                group.join(self._host)
                joined_s = time.monotonic()
                if patch is not None and not group.all_receivers_hold(held):
                    patch = None
                sent = _send(group, weights, patch)
                group.wait_for_receivers(weights.reference.bytes)
        now_s = time.monotonic()
        return Delivery(sent, now_s - started_s, now_s - joined_s)

    def _take(self, name: str) -> FlatWeights:
        with self._lock:
            staged = self._staged
            if staged is None or staged.reference.name != name:
                found = "nothing" if staged is None else staged.reference.name
                raise BroadcastError(f"{name} is not staged; staged: {found}")
            return staged


def receive_version(
    address: str,
    epoch: int,
    rank: int,
    size: int,
    reference: WeightsReference,
    limits: BroadcastLimits,
    held: FlatWeights | None = None,
) -> FlatWeights:
    """Joins one broadcast as receiver `rank` (from 1) of `size` members; returns the verified weights.

    `held` is an older version, to which a patch can be applied. Raises BroadcastError if the weights did not
    arrive complete and undamaged.
    """
    assert rank != SENDER_RANK, "rank 0 is the sender"
    deadline = Deadline.after(limits)
    with as_broadcast_error(f"{reference.name} did not arrive in epoch {epoch}"):
        store, own_host = connect_to_store(address, deadline)
        with BroadcastGroup(store, epoch, rank, size, deadline) as group:
            group.join(own_host, "" if held is None else held.reference.name)
            weights = _receive(group, reference, None if held is None else held.version_bytes())
            with suppress(RuntimeError):  # the sender has died since, but the weights are complete
                group.confirm()
    return weights


def _send(group: BroadcastGroup, weights: FlatWeights, patch: Tensor | None) -> int:
    """Sends the lengths of the header and of a patch, or 0, then the header, then the patch or the whole weights.

    Returns the bytes of the last of them.
    """
    group.broadcast(torch.tensor([len(weights.header), 0 if patch is None else len(patch)]))
    group.broadcast(torch.frombuffer(bytearray(weights.header), dtype=torch.uint8))
    content = weights.flat if patch is None else patch
    for offset in range(0, len(content), weights.bucket_bytes):
        group.broadcast(content[offset : offset + weights.bucket_bytes])
    return len(content)


def _receive(group: BroadcastGroup, reference: WeightsReference, held: VersionBytes | None) -> FlatWeights:
    """The weights, whole or patched. Raises ValueError if they are not those of the reference."""
    lengths = torch.zeros(2, dtype=torch.int64)
    group.broadcast(lengths)
    header_bytes, patch_bytes = lengths.tolist()
    if not 0 < header_bytes <= MAX_HEADER_BYTES or not 0 <= patch_bytes <= reference.bytes:
        raise ValueError(
            f"damaged: a header of {header_bytes:,} bytes and a patch of {patch_bytes:,} bytes were announced"
        )
    announced = torch.zeros(header_bytes, dtype=torch.uint8)
    group.broadcast(announced)
    encoded = bytes(announced.numpy())
    header = decode_header(encoded, reference)
    if patch_bytes:
        flat, found = _receive_patched(group, header, held, patch_bytes, zlib.crc32(encoded))
    else:
        flat, found = _receive_whole(group, header, zlib.crc32(encoded))
    if found != reference.checksum:
        raise ValueError(f"{reference.name}: arrived damaged, with checksum {found}; expected {reference}")
    return FlatWeights(reference, encoded, header.bucket_bytes, flat)


def _receive_whole(group: BroadcastGroup, header: WeightsHeader, checksum_before: int) -> tuple[Tensor, int]:
    flat = torch.empty(header.total_bytes, dtype=torch.uint8)
    found, previous = checksum_before, flat[:0]

    def add_previous() -> None:
        nonlocal found
        found = crc32(previous, found)

    for offset in range(0, len(flat), header.bucket_bytes):
        bucket = flat[offset : offset + header.bucket_bytes]
        group.broadcast(bucket, meanwhile=add_previous)
        previous = bucket
    add_previous()
    return flat, found


def _receive_patched(
    group: BroadcastGroup, header: WeightsHeader, held: VersionBytes | None, patch_bytes: int, checksum_before: int
) -> tuple[Tensor, int]:
    encoded = torch.empty(patch_bytes, dtype=torch.uint8)
    for offset in range(0, patch_bytes, header.bucket_bytes):
        group.broadcast(encoded[offset : offset + header.bucket_bytes])
    version = apply_patch(Patch.decode(np.asarray(encoded).data), held, checksum_before)
    return torch.from_numpy(version.content), version.checksum
