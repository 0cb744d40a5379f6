"""One direction of a link between two stages: a thread that sends, and on the other side one that receives.

A message is sent in small pieces, and an idle sender sends a sign of life four times per deadline. So a receiver
that gets nothing for a whole deadline knows that the link, or the stage behind it, is lost. A sender is also idle
while the device still computes what it is to send.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from time import monotonic, perf_counter, sleep

import torch
import torch.distributed as dist
from torch import Tensor

from digenrl.stages.codec_choice import Codec
from digenrl.stages.device_streams import beside_computing, used_for_computing, when_computed
from digenrl.stages.messages import Packed, States, pack, unpack
from digenrl.stages.pacing import PacedLink

PIECE_BYTES = 1 << 20
SIGNS_PER_DEADLINE = 4
POLL_S = 5e-4
MESSAGE, SIGN_OF_LIFE, CLOSED = range(3)


class LinkError(RuntimeError):
    """A link between two stages is lost."""


@dataclass(frozen=True, slots=True)
class Wire:
    """A process group of two ranks that carries one direction, and the global rank of the other side."""

    name: str  # as "stage 0 -> stage 1"
    group: dist.ProcessGroup
    peer: int
    deadline_s: float

    def error(self, problem: object) -> LinkError:
        """With the name of the link in its message."""
        return LinkError(f"link {self.name}: {problem}")


class Sender:
    """Sends states in the order in which they are given, and counts them. Calls `report` if the link is lost.

    `sent_bytes` are those of coded values, `sent_values` their number.
    """

    def __init__(
        self,
        wire: Wire,
        device: torch.device,
        codec: Codec,
        pace: PacedLink | None,
        report: Callable[[LinkError], None],
    ) -> None:
        self.codec = codec
        self.messages = self.sent_values = self.sent_bytes = 0
        self._wire, self._device, self._pace, self._report = wire, device, pace, report
        self._waiting: queue.SimpleQueue[tuple[int, States, Callable[[], bool]] | None] = queue.SimpleQueue()
        self._thread = Thread(target=self._run, name=f"send {wire.name}", daemon=True)
        self._thread.start()

    def put(self, index: int, states: States) -> None:
        """Sends the states of a micro-batch; does not wait."""
        self._waiting.put((index, states, when_computed(self._device)))

    def put_last(self) -> None:
        """Tells the other side, after what is waiting, that nothing follows; does not wait."""
        self._waiting.put(None)

    def close(self) -> None:
        """Sends what is waiting, and tells the other side that nothing follows."""
        self.put_last()
        self._thread.join(self._wire.deadline_s)

    def _run(self) -> None:
        try:
            with beside_computing(self._device):
                self._send_all()
        except Exception as error:  # no caller would see it: this is the top of a thread
            self._report(self._wire.error(_first_line(error)))

    def _send_all(self) -> None:
        while True:
            try:
                item = self._waiting.get(timeout=self._sign_s)
            except queue.Empty:
                self._send_header(SIGN_OF_LIFE)
                continue
            if item is None:
                self._send_header(CLOSED)
                return
            index, states, computed = item
            self._wait_until(computed)
            self._send(index, pack(states, self.codec))
            self.messages += 1
            self.sent_values += sum(value.numel() for value in states if value is not None)

    @property
    def _sign_s(self) -> float:
        return self._wire.deadline_s / SIGNS_PER_DEADLINE

    def _wait_until(self, computed: Callable[[], bool]) -> None:
        last = monotonic()
        while not computed():
            if monotonic() - last > self._sign_s:
                self._send_header(SIGN_OF_LIFE)
                last = monotonic()
            sleep(POLL_S)

    def _send(self, index: int, packed: Packed) -> None:
        description = torch.frombuffer(bytearray(packed.description), dtype=torch.uint8)
        self._send_header(MESSAGE, index, len(description), len(packed.payload))
        for content in (description, packed.payload):
            for piece in torch.split(content, PIECE_BYTES):
                self._send_piece(piece)
        self.sent_bytes += len(packed.payload)

    def _send_header(self, kind: int, index: int = 0, description_bytes: int = 0, payload_bytes: int = 0) -> None:
        self._send_piece(torch.tensor([kind, index, description_bytes, payload_bytes]))

    def _send_piece(self, piece: Tensor) -> None:
        if not piece.numel():
            return
        if self._pace is not None:
            self._pace.pass_through(piece.nbytes)
        dist.send(piece, self._wire.peer, group=self._wire.group)


class Receiver:
    """Hands every message that arrives to `deliver`. Calls `report` if the link is lost or closed.

    `received_bytes` have taken `receiving_s`, counted from the first bytes of each message on.
    """

    def __init__(
        self,
        wire: Wire,
        device: torch.device,
        deliver: Callable[[int, States], None],
        report: Callable[[LinkError], None],
    ) -> None:
        self.received_bytes, self.receiving_s = 0, 0.0
        self._wire, self._device, self._deliver, self._report = wire, device, deliver, report
        self._thread = Thread(target=self._run, name=f"receive {wire.name}", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Waits until the other side has closed the link, one deadline at most."""
        self._thread.join(self._wire.deadline_s)

    def _run(self) -> None:
        try:
            with beside_computing(self._device):
                self._receive_all()
        except Exception as error:  # no caller would see it: this is the top of a thread
            self._report(self._wire.error(_first_line(error)))

    def _receive_all(self) -> None:
        while True:
            kind, index, description_bytes, payload_bytes = self._receive(4, torch.int64).tolist()
            if kind == CLOSED:
                self._report(self._wire.error("the other stage has closed it"))
                return
            if kind == MESSAGE:
                began = perf_counter()
                description = bytes(self._receive(description_bytes, torch.uint8).tolist())
                packed = Packed(description, self._receive(payload_bytes, torch.uint8))
                self.receiving_s += perf_counter() - began
                self.received_bytes += description_bytes + payload_bytes
                self._deliver(index, used_for_computing(unpack(packed, self._device)))

    def _receive(self, count: int, dtype: torch.dtype) -> Tensor:
        whole = torch.empty(count, dtype=dtype)
        for piece in torch.split(whole, PIECE_BYTES // dtype.itemsize) if count else ():
            dist.recv(piece, self._wire.peer, group=self._wire.group)
        return whole


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
