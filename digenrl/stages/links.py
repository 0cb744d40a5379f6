"""The links of one stage to the stages before and after it."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Literal

import torch
import torch.distributed as dist

from digenrl.stages.channels import LinkError, Receiver, Sender, Wire
from digenrl.stages.codec_choice import LinkCodecs
from digenrl.stages.messages import States
from digenrl.stages.pacing import PacedLink

Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """How a link is used, in both directions.

    A link over which nothing arrives for `deadline_s` is lost. `bytes_per_s` emulates a slow link.
    """

    codecs: LinkCodecs = LinkCodecs()  # noqa: RUF009  it is frozen
    deadline_s: float = 60.0
    bytes_per_s: float | None = None

    def pace(self) -> PacedLink | None:
        return None if self.bytes_per_s is None else PacedLink(self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class Arrival:
    """The states of a micro-batch from the stage before, or their gradients from the stage after."""

    direction: Direction
    index: int
    states: States


@dataclass(frozen=True, slots=True)
class Traffic:
    """One direction of a link so far, as its sender and its receiver have counted it.

    A stage knows what it has sent in one direction, and the rate at which it has received in the other; rates are
    0 if nothing was received.
    """

    values: float = 0.0  # of a message
    value_bytes: float = 0.0  # of a value, coded
    bytes_per_s: float = 0.0


class StageLinks:
    """Stage `index` of `count`, connected to its neighbors. Use it in a `with` block, which closes the links.

    `codecs` are those of all links, of which this stage has two at most.
    """

    def __init__(self, index: int, count: int, device: torch.device, codecs: tuple[LinkCodecs, ...]) -> None:
        self.index, self.count, self.device, self.codecs = index, count, device, codecs
        self._senders: dict[Direction, Sender] = {}
        self._receivers: dict[Direction, Receiver] = {}
        self._arrived: queue.SimpleQueue[Arrival | LinkError] = queue.SimpleQueue()
        self._lost: LinkError | None = None

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @property
    def sent_bytes(self) -> dict[Direction, int]:
        """The bytes of coded values that this stage has sent so far."""
        return {direction: sender.sent_bytes for direction, sender in self._senders.items()}

    def send(self, direction: Direction, index: int, states: States) -> None:
        """Sends states to the stage after, or gradients to the stage before; does not wait."""
        self._senders[direction].put(index, states)

    def receive(self, *, wait: bool) -> Arrival | None:
        """The next arrival; None if there is none and `wait` is false.

        Raises LinkError if a link is lost and nothing else is left to do: `wait` is true.
        """
        if self._lost is None:
            try:
                arrival = self._arrived.get(block=wait)
            except queue.Empty:
                return None
            if isinstance(arrival, Arrival):
                return arrival
            self._lost = arrival
        if wait:
            raise self._lost
        return None

    @property
    def traffic(self) -> dict[Direction, Traffic]:
        """What this stage has sent and received, by direction."""
        found: dict[Direction, Traffic] = {}
        for direction, sender in self._senders.items():
            messages, values = max(1, sender.messages), max(1, sender.sent_values)
            found[direction] = Traffic(sender.sent_values / messages, sender.sent_bytes / values)
        for direction, receiver in self._receivers.items():
            rate = receiver.received_bytes / receiver.receiving_s if receiver.receiving_s else 0.0
            found[direction] = replace(found.get(direction, Traffic()), bytes_per_s=rate)
        return found

    def use_codecs(self, codecs: tuple[LinkCodecs, ...]) -> None:
        """Codes what is sent from now on with these, one for each link. Receivers need not know."""
        assert len(codecs) == self.count - 1, f"{len(codecs)} codecs for {self.count} stages"
        self.codecs = codecs
        if not self.is_last:
            self._senders["forward"].codec = codecs[self.index].activations
        if not self.is_first:
            self._senders["backward"].codec = codecs[self.index - 1].gradients

    def abandon(self, reason: object) -> None:
        """Tells the neighbors that this stage cannot continue, without waiting for them."""
        self._lost = self._lost or LinkError(f"stage {self.index} has failed: {reason}")
        for sender in self._senders.values():
            sender.put_last()

    def close(self) -> None:
        """Closes all links; waits for the neighbors to do the same unless a link is lost."""
        for sender in self._senders.values():
            sender.close()
        if self._lost is None:
            for receiver in self._receivers.values():
                receiver.join()

    def __enter__(self) -> StageLinks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abandon(error)
        self.close()

    def connect(self, link: int, settings: LinkSettings, up: dist.ProcessGroup, down: dist.ProcessGroup) -> None:
        """Starts the threads of the link between the stages `link` and `link + 1`, of which this is one."""
        before = self.index == link
        peer = link + 1 if before else link
        forward = Wire(f"stage {link} -> stage {link + 1}", up, peer, settings.deadline_s)
        backward = Wire(f"stage {link + 1} -> stage {link}", down, peer, settings.deadline_s)
        sending: Direction = "forward" if before else "backward"
        arriving: Direction = "backward" if before else "forward"
        out, back = (forward, backward) if before else (backward, forward)
        codec = settings.codecs.activations if before else settings.codecs.gradients
        report: Callable[[LinkError], None] = self._arrived.put
        self._senders[sending] = Sender(out, self.device, codec, settings.pace(), report)
        self._receivers[arriving] = Receiver(back, self.device, partial(self._deliver, arriving), report)

    def _deliver(self, direction: Direction, index: int, states: States) -> None:
        self._arrived.put(Arrival(direction, index, states))


def connect_stages(
    settings: LinkSettings | Sequence[LinkSettings] = LinkSettings(),  # noqa: B008  it is frozen
    device: torch.device | str = "cpu",
) -> StageLinks:
    """Connects all ranks of torch's default process group, as stages in the order of their ranks. A collective.

    The settings are the same on all ranks: one for all links, or one for each. Every direction of a link has its
    own process group, hence its own connection. Messages pass through host memory.
    """
    index, count = dist.get_rank(), dist.get_world_size()
    each = [settings] * (count - 1) if isinstance(settings, LinkSettings) else list(settings)
    if len(each) != count - 1:
        raise ValueError(f"{count} stages have {count - 1} links, got settings of {len(each)}")
    links = StageLinks(index, count, torch.device(device), tuple(own.codecs for own in each))
    groups = []
    for link, own in enumerate(each):
        timeout = timedelta(seconds=own.deadline_s)
        pair = [link, link + 1]
        groups.append([dist.new_group(pair, timeout=timeout, backend="gloo") for _ in range(2)])
    for link, (up, down) in enumerate(groups):
        if index in (link, link + 1):
            links.connect(link, each[link], up, down)
    return links
