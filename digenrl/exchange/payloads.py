"""Tensors that travel with jobs and results, each name as one byte array that an object store can hold."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load
from torch import Tensor

from digenrl.exchange.folder import check_weights
from digenrl.exchange.patches import LastPublished, Patch, VersionBytes, apply_patch, item_bytes_of, make_patch
from digenrl.exchange.tensor_bytes import tensor_bytes
from digenrl.records import WeightsReference, patch_name

Payload = NDArray[np.uint8]
LENGTH_BYTES = 8  # a payload starts with the length of its content
# Ray returns smaller objects inline, to the driver, instead of keeping them in the object store.
MIN_PAYLOAD_BYTES = 128 << 10


class PayloadExchange:
    """A worker's exchange for the duration of one job: the payloads it reads, and those it leaves.

    `lost` are the names that the current job needed and that will not arrive. Weights of jobs with `patches`
    are kept: the trainer makes the next version's patch from them, and generators apply it to them.
    """

    def __init__(self) -> None:
        self._inputs: dict[str, Payload] = {}
        self._outputs: dict[str, Payload] = {}
        self.lost: tuple[str, ...] = ()
        self._patches = False
        self._last = LastPublished()
        self._held: VersionBytes | None = None

    def begin_job(self, inputs: Mapping[str, Payload], patches: bool = False) -> None:
        """Starts a job with the payloads that were sent with it."""
        self._inputs, self._outputs, self.lost, self._patches = dict(inputs), {}, (), patches

    def end_job(self) -> dict[str, Payload]:
        """Ends the job; returns the payloads that it leaves."""
        outputs = self._outputs
        self._inputs, self._outputs = {}, {}
        return outputs

    def put(self, name: str, tensors: Mapping[str, Tensor]) -> int:
        return self._put(name, tensors)[0]

    def get(self, name: str) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = load(_content(self._inputs[name]))
        return tensors

    def drop(self, name: str) -> None:
        self._outputs.pop(name, None)

    def put_weights(self, name: str, tensors: Mapping[str, Tensor]) -> WeightsReference:
        reference = WeightsReference(name, *self._put(name, tensors))
        return self._with_patch(reference, item_bytes_of(tensors.values())) if self._patches else reference

    def get_weights(self, reference: WeightsReference) -> dict[str, Tensor]:
        whole = self._inputs.get(reference.name)
        content = self._patched(reference) if whole is None else _content(whole)
        check_weights(reference, len(content), zlib.crc32(content))
        if self._patches:
            self._held = _version(reference, content)
        tensors: dict[str, Tensor] = load(content)
        return tensors

    def _put(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        content = b"".join(tensor_bytes(tensors))
        self._outputs[name] = _payload(content)
        return len(content), zlib.crc32(content)

    def _with_patch(self, reference: WeightsReference, item_bytes: int) -> WeightsReference:
        """Leaves a patch too, if there is a version before this one and the patch is smaller."""
        version = _version(reference, _content(self._outputs[reference.name]), item_bytes)
        base = self._last.replace(version)
        encoded = b"" if base is None else make_patch(base, version).encode()
        if base is None or len(encoded) >= reference.bytes:
            return reference
        self._outputs[patch_name(reference.name)] = _payload(encoded)
        return replace(reference, base=base.name, patch_bytes=len(encoded))

    def _patched(self, reference: WeightsReference) -> bytes:
        try:
            patch = Patch.decode(_content(self._inputs[patch_name(reference.name)]))
            return apply_patch(patch, self._held).content.tobytes()
        except ValueError:
            self.lost = (reference.name,)  # the driver sends them again, whole
            raise


def _version(reference: WeightsReference, content: bytes, item_bytes: int = 1) -> VersionBytes:
    return VersionBytes(reference.name, np.frombuffer(content, np.uint8), reference.checksum, item_bytes)


def _payload(content: bytes) -> Payload:
    payload = np.zeros(max(LENGTH_BYTES + len(content), MIN_PAYLOAD_BYTES), np.uint8)
    payload[:LENGTH_BYTES] = np.frombuffer(len(content).to_bytes(LENGTH_BYTES, "little"), np.uint8)
    payload[LENGTH_BYTES : LENGTH_BYTES + len(content)] = np.frombuffer(content, np.uint8)
    return payload


def _content(payload: Payload) -> bytes:
    length = int.from_bytes(payload[:LENGTH_BYTES].tobytes(), "little")
    return payload[LENGTH_BYTES : LENGTH_BYTES + length].tobytes()
