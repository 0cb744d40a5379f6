"""Tensors that travel with jobs and results, each name as one byte array that an object store can hold."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load
from torch import Tensor

from digenrl.exchange.folder import check_weights
from digenrl.exchange.tensor_bytes import tensor_bytes
from digenrl.records import WeightsReference

Payload = NDArray[np.uint8]
LENGTH_BYTES = 8  # a payload starts with the length of its content
# Ray returns smaller objects inline, to the driver, instead of keeping them in the object store.
MIN_PAYLOAD_BYTES = 128 << 10


class PayloadExchange:
    """A worker's exchange for the duration of one job: the payloads it reads, and those it leaves.

    `lost` are the names that the current job needed and that will not arrive.
    """

    def __init__(self) -> None:
        self._inputs: dict[str, Payload] = {}
        self._outputs: dict[str, Payload] = {}
        self.lost: tuple[str, ...] = ()

    def begin_job(self, inputs: Mapping[str, Payload]) -> None:
        """Starts a job with the payloads that were sent with it."""
        self._inputs, self._outputs, self.lost = dict(inputs), {}, ()

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
        return WeightsReference(name, *self._put(name, tensors))

    def get_weights(self, reference: WeightsReference) -> dict[str, Tensor]:
        content = _content(self._inputs[reference.name])
        check_weights(reference, len(content), zlib.crc32(content))
        tensors: dict[str, Tensor] = load(content)
        return tensors

    def _put(self, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
        content = b"".join(tensor_bytes(tensors))
        payload = np.zeros(max(LENGTH_BYTES + len(content), MIN_PAYLOAD_BYTES), np.uint8)
        payload[:LENGTH_BYTES] = np.frombuffer(len(content).to_bytes(LENGTH_BYTES, "little"), np.uint8)
        payload[LENGTH_BYTES : LENGTH_BYTES + len(content)] = np.frombuffer(content, np.uint8)
        self._outputs[name] = payload
        return len(content), zlib.crc32(content)


def _content(payload: Payload) -> bytes:
    length = int.from_bytes(payload[:LENGTH_BYTES].tobytes(), "little")
    return payload[LENGTH_BYTES : LENGTH_BYTES + length].tobytes()
