"""A worker of several processes: all its ranks get what it is ordered, and they answer as one. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from digenrl.records import Job, JobFailed
from digenrl.transports.contract import Gone, InputsLost, Message, Report, Transport
from digenrl.worker.assignment import Assignment, Ranks, StartFailed, rank_device, rank_names


@dataclass(slots=True)
class _Group:
    """The ranks of one worker, and the reports received so far for each job that was sent to all of them."""

    members: tuple[str, ...]
    reports: dict[int | None, dict[str, Report]] = field(default_factory=dict)  # by job, then by rank


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
        self._groups[assignment.name] = _Group(tuple(members), {None: {}})
        for index, member in enumerate(members):
            ranks = Ranks(index, len(members), self._epoch)
            device = rank_device(assignment.device, index)
            cores = _share(assignment, ranks)
            self._transport.start(replace(assignment, name=member, device=device, cores=cores, ranks=ranks))

    def has_room(self, assignment: Assignment) -> bool:
        """Whether all ranks would find a place."""
        return self._transport.has_room(assignment)

    def send(self, worker: str, job_id: int, order: Job) -> None:
        """Sends to every rank of a group, or to the one rank that is named."""
        group = self._groups.get(worker)
        if group is None:
            self._transport.send(worker, job_id, order)
            return
        group.reports[job_id] = {}
        for index, member in enumerate(group.members):
            self._transport.send(member, job_id, order.for_rank(index))

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
        group, job_id, report = self._groups[name], message.job_id, message.report
        if isinstance(report, Gone):
            reason = f"lost its rank {group.members.index(message.worker)}, which {report.reason}"
            return [self._end_group(name, None, Gone(reason, report.fault))]
        if job_id not in group.reports:  # sent to this rank alone
            return [message]
        if isinstance(report, JobFailed | StartFailed):  # the other ranks may wait for this one forever
            return [self._end_group(name, job_id, report)]
        reports = group.reports[job_id]
        reports[message.worker] = report
        if len(reports) < len(group.members):
            return []
        lost = [each for each in reports.values() if isinstance(each, InputsLost)]
        if 0 < len(lost) < len(reports):  # the ranks no longer agree on what has run
            gone = Gone(f"lost {', '.join(lost[0].names)} on some ranks", fault=False)
            return [self._end_group(name, None, gone)]
        del group.reports[job_id]
        return [Message(name, job_id, reports[group.members[0]])]

    def _end_group(self, name: str, job_id: int | None, report: Report) -> Message:
        self.end(name)
        return Message(name, job_id, report)


def _group_name(worker: str) -> str:
    return worker.partition("/")[0]


def _share(assignment: Assignment, ranks: Ranks) -> tuple[int, ...] | None:
    """A rank's part of the cores that are the group's."""
    if assignment.cores is None:
        return None
    each = len(assignment.cores) // ranks.count
    return assignment.cores[ranks.index * each : (ranks.index + 1) * each]
