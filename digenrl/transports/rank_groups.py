"""Workers of several processes: every rank gets the worker's jobs, and they report as one worker. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from digenrl.records import Job, JobFailed
from digenrl.training.ranks.rank import Rank
from digenrl.transports.contract import Gone, InputsLost, Message, Report, Transport
from digenrl.worker.assignment import Assignment, PeersLost, StartFailed, rank_device, rank_names

# A rank fails at once if it loses another one, whose end or error may be known only later.
NOTICE_S = 5.0


@dataclass(slots=True)
class _RankGroup:
    """The ranks of one worker, and the reports received so far for each job that was sent to all of them."""

    ranks: tuple[str, ...]
    reports: dict[int | None, dict[str, Report]] = field(default_factory=dict)  # by job, then by rank


class RankGroupTransport:
    """Wraps another transport, to which a worker of several ranks is `trainer/0`, `trainer/1` and so on.

    A job for `trainer` goes to every rank; its report is that of rank 0, or the first failure. A job for
    `trainer/1` goes to that rank only. If one rank is gone, the others are killed and the worker is gone, also if
    another rank has just failed: probably because of that. Likewise if a rank says that it lost the others, and
    none of them reports an error of its own.
    """

    def __init__(self, transport: Transport, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._transport, self._monotonic = transport, monotonic
        self._groups: dict[str, _RankGroup] = {}
        self._epoch = 0

    def start(self, assignment: Assignment) -> None:
        names = rank_names(assignment)
        if len(names) == 1:
            self._transport.start(assignment)
            return
        self._epoch += 1
        self._groups[assignment.name] = _RankGroup(tuple(names), {None: {}})
        for index, name in enumerate(names):
            rank = Rank(index, len(names))
            device = rank_device(assignment.device, index)
            cores = _rank_cores(assignment.cores, rank)
            self._transport.start(
                replace(assignment, name=name, device=device, cores=cores, rank=rank, epoch=self._epoch)
            )

    def has_room(self, assignment: Assignment) -> bool:
        return self._transport.has_room(assignment)

    def send(self, worker: str, job: Job) -> None:
        group = self._groups.get(worker)
        if group is None:
            self._transport.send(worker, job)
            return
        group.reports[job.id] = {}
        for index, name in enumerate(group.ranks):
            self._transport.send(name, job.for_rank(index))

    def receive(self, timeout_s: float) -> Sequence[Message]:
        """Reports of groups are complete; the result is empty if those that arrived completed none."""
        if not self._groups:
            return self._transport.receive(timeout_s)
        arrived = list(self._transport.receive(timeout_s))
        failed = {_group_of(each) for each in arrived if _has_failed(each)} & self._groups.keys()
        deadline_s = self._monotonic() + NOTICE_S
        while not failed <= _groups_with_losses(arrived) and (left_s := deadline_s - self._monotonic()) > 0:
            arrived += self._transport.receive(left_s)
        lost = _groups_with_losses(arrived)
        messages: list[Message] = []
        for message in sorted(arrived, key=lambda each: isinstance(each.report, PeersLost)):  # after errors
            worker = _group_of(message)
            if not worker:
                messages.append(message)
            elif worker in self._groups and not (_has_failed(message) and worker in lost):
                messages += self._add_report(worker, message)  # otherwise the group was just ended
        return messages

    def end(self, worker: str) -> None:
        if worker not in self._groups:
            self._transport.end(worker)
            return
        for name in self._groups.pop(worker).ranks:
            self._transport.end(name)

    def stop(self) -> None:
        self._transport.stop()

    def _add_report(self, worker: str, message: Message) -> list[Message]:
        group, job_id, report = self._groups[worker], message.job_id, message.report
        if isinstance(report, Gone | PeersLost):
            lost = f"lost its rank {group.ranks.index(message.worker)}, which {report.reason}"
            gone = Gone(report.reason) if isinstance(report, PeersLost) else Gone(lost, report.fault)
            return [self._end_group(worker, None, gone)]
        if job_id not in group.reports:  # sent to this rank only
            return [message]
        if isinstance(report, JobFailed | StartFailed):  # the other ranks may wait for this one forever
            return [self._end_group(worker, job_id, report)]
        reports = group.reports[job_id]
        reports[message.worker] = report
        if len(reports) < len(group.ranks):
            return []
        lacking = [each for each in reports.values() if isinstance(each, InputsLost)]
        if 0 < len(lacking) < len(reports):  # some ranks ran the job and some did not
            gone = Gone(f"lost {', '.join(lacking[0].names)} on some ranks", fault=False)
            return [self._end_group(worker, None, gone)]
        del group.reports[job_id]
        return [Message(worker, job_id, reports[group.ranks[0]])]

    def _end_group(self, worker: str, job_id: int | None, report: Report) -> Message:
        self.end(worker)
        return Message(worker, job_id, report)


def _group_of(message: Message) -> str:
    """The worker of several ranks that a message comes from, or nothing."""
    worker, slash, _ = message.worker.partition("/")
    return worker if slash else ""


def _groups_with_losses(messages: Sequence[Message]) -> set[str]:
    return {_group_of(each) for each in messages if isinstance(each.report, Gone)}


def _has_failed(message: Message) -> bool:
    """Whether a rank has failed, perhaps because another one was lost."""
    report = message.report
    if isinstance(report, JobFailed | StartFailed) and report.user_error:
        return False
    return bool(_group_of(message)) and isinstance(report, JobFailed | StartFailed | PeersLost)


def _rank_cores(cores: tuple[int, ...] | None, rank: Rank) -> tuple[int, ...] | None:
    """This rank's share of the group's cores."""
    if cores is None:
        return None
    each = len(cores) // rank.count
    return cores[rank.index * each : (rank.index + 1) * each]
