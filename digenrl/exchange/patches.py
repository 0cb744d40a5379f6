"""Patches: weight versions coded as their change from the version before. The result is the same to the last bit.

sender:    base = last.replace(version)               # None: this version is sent whole
           patch = make_patch(base, version)
receiver:  content = apply_patch(patch, held)         # `held` is the version that it has
"""

from __future__ import annotations

import json
import threading
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from digenrl.byte_codecs import Bytes, decode_change, encode_change

WHOLE_EVERY = 100
LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class VersionBytes:
    """All bytes of one weight version, which are not modified any more.

    `checksum` is their CRC-32, continued from `checksum_before`, that of a header which precedes them.
    """

    name: str
    content: Bytes
    checksum: int
    item_bytes: int
    checksum_before: int = 0


@dataclass(frozen=True, slots=True)
class Patch:
    """Turns the version `base` into the version `name`. `bytes` and `checksum` are those of the result."""

    base: str
    name: str
    bytes: int
    checksum: int
    item_bytes: int
    pieces: tuple[bytes, ...]

    def encode(self) -> bytes:
        """The patch as bytes: the length of a JSON header, the header, and the pieces."""
        lengths = [len(piece) for piece in self.pieces]
        facts = [self.base, self.name, self.bytes, self.checksum, self.item_bytes, lengths]
        header = json.dumps(facts).encode()
        return b"".join((len(header).to_bytes(LENGTH_BYTES, "little"), header, *self.pieces))

    @classmethod
    def decode(cls, encoded: bytes) -> Patch:
        """Parses an encoded patch. Raises ValueError if it is malformed."""
        offset = LENGTH_BYTES + int.from_bytes(encoded[:LENGTH_BYTES], "little")
        try:
            base, name, size, checksum, item_bytes, lengths = json.loads(encoded[LENGTH_BYTES:offset])
            pieces = []
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
    if (len(content), found_checksum) != (patch.bytes, patch.checksum):
        raise ValueError(
            f"{patch.name}: arrived damaged, {len(content)} bytes with checksum {found_checksum}; expected "
            f"{patch.bytes} bytes with checksum {patch.checksum}"
        )
    return VersionBytes(patch.name, content, found_checksum, patch.item_bytes, checksum_before)


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


def item_bytes_of(tensors: Iterable[Tensor]) -> int:
    """The size of one number in most of these tensors, by bytes."""
    sizes: Counter[int] = Counter()
    for tensor in tensors:
        sizes[tensor.itemsize] += tensor.numel() * tensor.itemsize
    return sizes.most_common(1)[0][0] if sizes else 1
