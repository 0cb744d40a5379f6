"""Workers of several processes: every rank gets the worker's jobs, and they report as one worker. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from digenrl.records import Job, JobFailed
from digenrl.training.ranks.rank import Rank
from digenrl.transports.contract import Gone, InputsLost, Message, Report, Transport
from digenrl.worker.assignment import Assignment, DeviceFailed, PeersLost, StartFailed, rank_device, rank_names

# A rank fails at once if it loses another one, whose end or error may be known only later. Failures wait for it.
NOTICE_S = 5.0


@dataclass(slots=True)
class _RankGroup:
    """The ranks of one worker, and the reports received so far for each job that was sent to all of them."""

    ranks: tuple[str, ...]
    reports: dict[int | None, dict[str, Report]] = field(default_factory=dict)  # by job, then by rank
    failures: list[Message] = field(default_factory=list)  # held until `report_at_s`: another rank may be lost
    report_at_s: float = 0.0


class RankGroupTransport:
    """Wraps another transport, to which a worker of several ranks is `trainer/0`, `trainer/1` and so on.

    A job for `trainer` goes to every rank; its report is that of rank 0, or the first failure. If only some ranks
    fail, or for different reasons, the worker is gone as well. A job for `trainer/1` goes to that rank only.

    If one rank is gone, the others are killed and the worker is gone, also if another rank has just failed:
    probably because of that. Likewise if a rank says that it lost the others, and none of them reports an error of
    its own.
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

    def has_capacity(self, assignment: Assignment) -> bool:
        return self._transport.has_capacity(assignment)

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
        messages: list[Message] = []
        for message in self._transport.receive(timeout_s):
            worker = _group_of(message)
            if not worker:
                messages.append(message)
            elif worker in self._groups:  # otherwise the group was just ended
                messages += self._add_report(worker, message)
        for worker, group in list(self._groups.items()):
            if group.failures and self._monotonic() >= group.report_at_s:
                messages += self._report_failures(worker)
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
        if isinstance(report, Gone | DeviceFailed):
            lost = f"lost its rank {group.ranks.index(message.worker)}, which {report.reason}"
            fault = isinstance(report, DeviceFailed) or report.fault
            return [self._end_group(worker, None, Gone(lost, fault))]
        if isinstance(report, JobFailed | StartFailed | PeersLost):
            return self._hold_failure(worker, message, report)
        if job_id not in group.reports:  # sent to this rank only
            return [message]
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

    def _hold_failure(
        self, worker: str, message: Message, failure: JobFailed | StartFailed | PeersLost
    ) -> list[Message]:
        """Waits for its cause. Ranks that all fail for the same reason are still in step: they report at once."""
        group, job_id = self._groups[worker], message.job_id
        group.failures.append(message)
        group.report_at_s = self._monotonic() + NOTICE_S
        same = [each for each in group.failures if each.job_id == job_id and _reason(each) == failure.reason]
        if job_id not in group.reports or len(same) < len(group.ranks):
            return []
        group.failures = [each for each in group.failures if each not in same]
        del group.reports[job_id]
        return [Message(worker, job_id, failure)]

    def _report_failures(self, worker: str) -> list[Message]:
        """Failures of which no lost rank is the cause. If it was a job of all ranks, others may wait forever."""
        group = self._groups[worker]
        messages: list[Message] = []
        failures, group.failures = group.failures, []
        for message in sorted(failures, key=lambda each: isinstance(each.report, PeersLost)):  # after errors
            report = message.report
            if isinstance(report, PeersLost):
                return [*messages, self._end_group(worker, None, Gone(report.reason))]
            if message.job_id in group.reports:
                messages.append(self._end_group(worker, message.job_id, report))
                if isinstance(report, JobFailed):  # the failed job is counted, not its worker
                    messages.append(
                        Message(worker, None, Gone("was ended after one of its ranks failed", fault=False))
                    )
                return messages
            messages.append(message)
        return messages

    def _end_group(self, worker: str, job_id: int | None, report: Report) -> Message:
        self.end(worker)
        return Message(worker, job_id, report)


def _group_of(message: Message) -> str:
    """The worker of several ranks that a message comes from, or nothing."""
    worker, slash, _ = message.worker.partition("/")
    return worker if slash else ""


def _reason(failure: Message) -> str:
    report = failure.report
    return report.reason if isinstance(report, JobFailed | StartFailed) else ""


def _rank_cores(cores: tuple[int, ...] | None, rank: Rank) -> tuple[int, ...] | None:
    """This rank's share of the group's cores."""
    if cores is None:
        return None
    each = len(cores) // rank.count
    return cores[rank.index * each : (rank.index + 1) * each]
