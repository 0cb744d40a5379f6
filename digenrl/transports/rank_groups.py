"""A worker of several processes: all its ranks get what it is ordered, and they answer as one. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from digenrl.transports.contract import Gone, Message, TensorsLost, Transport
from digenrl.worker.assignment import Assignment, Ranks, rank_device, rank_names
from digenrl.worker.orders import Order, OrderFailed, Report


@dataclass(slots=True)
class _Group:
    """Ranks that work together, each with the names whose reports it owes, in order: the group's or its own."""

    members: tuple[str, ...]
    owed: dict[str, deque[str]]
    answers: dict[str, list[Report]] = field(default_factory=dict)  # by rank, of the group's orders


class RankGroupTransport:
    """Passes everything on to another transport; a worker of several ranks is `trainer/0`, `trainer/1` there.

    An order to `trainer` goes to every rank, and its report is that of the first, or the first failure. An order
    to `trainer/1` goes to that rank alone. When one rank is gone, the others are ended and the worker is gone.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._groups: dict[str, _Group] = {}
        self._epoch = 0

    def start(self, assignment: Assignment) -> None:
        """All ranks; they meet when they are built."""
        members = rank_names(assignment)
        if len(members) == 1:
            self._transport.start(assignment)
            return
        self._epoch += 1
        self._groups[assignment.name] = _Group(
            tuple(members), {member: deque([assignment.name]) for member in members}, {m: [] for m in members}
        )
        for index, member in enumerate(members):
            ranks = Ranks(index, len(members), self._epoch)
            device = rank_device(assignment.device, index)
            cores = _share(assignment, ranks)
            self._transport.start(replace(assignment, name=member, device=device, cores=cores, ranks=ranks))

    def has_room(self, assignment: Assignment) -> bool:
        """Whether all ranks would find a place."""
        return self._transport.has_room(assignment)

    def send(self, worker: str, order: Order) -> None:
        """To every rank, or to the one that is named."""
        if worker in self._groups:
            group = self._groups[worker]
            for index, member in enumerate(group.members):
                group.owed[member].append(worker)
                self._transport.send(member, order.for_rank(index))
            return
        if _group_name(worker) in self._groups:
            self._groups[_group_name(worker)].owed[worker].append(worker)
        self._transport.send(worker, order)

    def receive(self, timeout_s: float) -> Sequence[Message]:
        """What arrived, ranks put together; a round of which nothing is whole yet is empty."""
        messages: list[Message] = []
        for message in self._transport.receive(timeout_s):
            name = _group_name(message.worker)
            if name == message.worker:
                messages.append(message)
            elif name in self._groups:  # else it was ended a moment ago
                messages += self._put_together(name, message)
        return messages

    def end(self, worker: str) -> None:
        """All its ranks."""
        if worker not in self._groups:
            self._transport.end(worker)
            return
        for member in self._groups.pop(worker).members:
            self._transport.end(member)

    def stop(self) -> None:
        """Everybody."""
        self._transport.stop()

    def _put_together(self, name: str, message: Message) -> list[Message]:
        group, member, report = self._groups[name], message.worker, message.report
        if isinstance(report, Gone):
            reason = f"lost its rank {group.members.index(member)}, which {report.reason}"
            return [self._end_group(name, Gone(reason, report.fault))]
        if group.owed[member].popleft() != name:
            return [message]
        group.answers[member].append(report)
        heads = [answers[0] for answers in group.answers.values() if answers]
        failed = next((head for head in heads if isinstance(head, OrderFailed)), None)
        if failed is not None:  # the others may wait for it in vain
            return [self._end_group(name, failed)]
        if len(heads) < len(group.members):
            return []
        lost = [head for head in heads if isinstance(head, TensorsLost)]
        if 0 < len(lost) < len(heads):  # some carried the order out and some did not
            return [self._end_group(name, Gone(f"lost {', '.join(lost[0].names)} on some ranks", fault=False))]
        for answers in group.answers.values():
            del answers[0]
        return [Message(name, heads[0])]

    def _end_group(self, name: str, report: Report) -> Message:
        self.end(name)
        return Message(name, report)


def _group_name(worker: str) -> str:
    return worker.partition("/")[0]


def _share(assignment: Assignment, ranks: Ranks) -> tuple[int, ...] | None:
    """A rank's part of the cores that are the group's."""
    if assignment.cores is None:
        return None
    each = len(assignment.cores) // ranks.count
    return assignment.cores[ranks.index * each : (ranks.index + 1) * each]
