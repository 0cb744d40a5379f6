"""Patches: weight versions coded as their change from the version before. The result is the same to the last bit.

sender:    base = last.replace(version)               # None: this version is sent whole
           patch = make_patch(base, version)
receiver:  content = apply_patch(patch, held)         # `held` is the version that it has
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from digenrl.byte_codecs import THREADS, Bytes, decode_change, encode_change
from digenrl.config.recipes.cluster import WeightPatches

WHOLE_EVERY = 100
LENGTH_BYTES = 8
BYTES_PER_S_OF_A_THREAD = 60e6


@dataclass(frozen=True, slots=True)
class VersionBytes:
    """All bytes of one weight version, which are not modified any more.

    `checksum` is their CRC-32, continued from that of a header, if one precedes them.
    """

    name: str
    content: Bytes
    checksum: int
    item_bytes: int


@dataclass(frozen=True, slots=True)
class Patch:
    """Turns the version `base` into the version `name`. `result_bytes` and `checksum` are those of the result."""

    base: str
    name: str
    result_bytes: int
    checksum: int
    item_bytes: int
    pieces: tuple[bytes | memoryview, ...]

    def encode(self) -> bytes:
        """The patch as bytes: the length of a JSON header, the header, and the pieces."""
        lengths = [len(piece) for piece in self.pieces]
        facts = [self.base, self.name, self.result_bytes, self.checksum, self.item_bytes, lengths]
        header = json.dumps(facts).encode()
        return b"".join((len(header).to_bytes(LENGTH_BYTES, "little"), header, *self.pieces))

    @classmethod
    def decode(cls, encoded: bytes | memoryview) -> Patch:
        """Parses an encoded patch. Raises ValueError if it is malformed."""
        offset = LENGTH_BYTES + int.from_bytes(encoded[:LENGTH_BYTES], "little")
        try:
            base, name, size, checksum, item_bytes, lengths = json.loads(bytes(encoded[LENGTH_BYTES:offset]))
            pieces: list[bytes | memoryview] = []
            for length in lengths:
                pieces.append(encoded[offset : offset + length])
                offset += length
        except (ValueError, TypeError) as error:
            raise ValueError(f"a patch arrived damaged, its header cannot be read ({error!r})") from error
        return cls(base, name, size, checksum, item_bytes, tuple(pieces))


def make_patch(base: VersionBytes, version: VersionBytes) -> Patch:
    """The patch from one version to the next. Both must have the same length."""
    pieces = encode_change(base.content, version.content, version.item_bytes)
    size = len(version.content)
    return Patch(base.name, version.name, size, version.checksum, version.item_bytes, tuple(pieces))


def apply_patch(patch: Patch, held: VersionBytes | None, checksum_before: int = 0) -> VersionBytes:
    """The version that the patch leads to. Raises ValueError if its base is not held, or the result is damaged."""
    if held is None or held.name != patch.base:
        found = "nothing" if held is None else held.name
        raise ValueError(f"{patch.name}: its patch applies to {patch.base}, and {found} is held; send it whole")
    content = decode_change(held.content, patch.pieces, patch.item_bytes)
    found_checksum = zlib.crc32(content.data, checksum_before)
    if (len(content), found_checksum) != (patch.result_bytes, patch.checksum):
        raise ValueError(
            f"{patch.name}: arrived damaged, {len(content)} bytes with checksum {found_checksum}; expected "
            f"{patch.result_bytes} bytes with checksum {patch.checksum}"
        )
    return VersionBytes(patch.name, content, found_checksum, patch.item_bytes)


class LastPublished:
    """The sender's last version, which is the base of the next one's patch.

    Every `whole_every`-th version has no patch, so that receivers do not depend on an endless chain of them.
    """

    def __init__(self, whole_every: int = WHOLE_EVERY) -> None:
        self._whole_every = whole_every
        self._lock = threading.Lock()
        self._last: VersionBytes | None = None
        self._patches = 0

    def replace(self, version: VersionBytes) -> VersionBytes | None:
        """Keeps the version as the last one; returns the base for its patch, or None if it must be sent whole."""
        with self._lock:
            base, self._last = self._last, version
            fits = base is not None and base.name != version.name and len(base.content) == len(version.content)
            self._patches = self._patches + 1 if fits and self._patches + 1 < self._whole_every else 0
            return base if self._patches else None


class PatchMaker:
    """Makes the patch of the staged version when it is first needed, for receivers that hold the version before.

    With `auto`, only for links on which making and sending the patch is faster than sending the whole version.
    """

    def __init__(self, setting: WeightPatches, whole_every: int = WHOLE_EVERY) -> None:
        self._setting = setting
        self._last = LastPublished(whole_every)
        self._lock, self._encoding = threading.Lock(), threading.Lock()
        self._base: VersionBytes | None = None
        self._version: VersionBytes | None = None
        self._encoded: Tensor | None = None
        self._bytes_per_s = THREADS * BYTES_PER_S_OF_A_THREAD  # of making patches, until it is measured
        self._ratio = 0.5  # of a patch and the whole version, likewise

    def drop_base(self) -> None:
        """Frees the base of the current patch, before the next version is staged."""
        with self._lock:
            self._base = self._version = self._encoded = None

    def stage(self, version: VersionBytes) -> None:
        """The next version to send; its base is the version staged before."""
        if self._setting == "never":
            return
        with self._lock:
            self._base, self._version, self._encoded = self._last.replace(version), version, None

    def encoded(self, name: str, held: str, link_bytes_per_s: float | None) -> Tensor | None:
        """The patch from `held` to `name`, or None if there is none, or if it does not pay on this link."""
        with self._lock:
            base, version, encoded = self._base, self._version, self._encoded
        if base is None or version is None or (base.name, version.name) != (held, name):
            return None
        if encoded is None:
            if not self._pays(link_bytes_per_s):
                return None
            encoded = self._encode_once(base, version)
        return encoded if len(encoded) < len(version.content) else None

    def _encode_once(self, base: VersionBytes, version: VersionBytes) -> Tensor:
        """Makes the patch, or waits while another thread makes it. The next version can be staged meanwhile."""
        with self._encoding:
            with self._lock:
                made = self._encoded if self._version is version else None
            if made is not None:
                return made
            encoded = self._make(base, version)
            with self._lock:
                if self._version is version:
                    self._encoded = encoded
            return encoded

    def _pays(self, link_bytes_per_s: float | None) -> bool:
        if self._setting == "always":
            return True
        return link_bytes_per_s is not None and link_bytes_per_s < (1 - self._ratio) * self._bytes_per_s

    def _make(self, base: VersionBytes, version: VersionBytes) -> Tensor:
        started_s, size = time.monotonic(), max(1, len(version.content))
        encoded = torch.frombuffer(bytearray(make_patch(base, version).encode()), dtype=torch.uint8)
        self._bytes_per_s = size / max(1e-9, time.monotonic() - started_s)
        self._ratio = min(1.0, len(encoded) / size)
        return encoded


def item_bytes_of(tensors: Iterable[Tensor]) -> int:
    """The size of one number in most of these tensors, by bytes."""
    sizes: Counter[int] = Counter()
    for tensor in tensors:
        sizes[tensor.itemsize] += tensor.numel() * tensor.itemsize
    return sizes.most_common(1)[0][0] if sizes else 1
