"""Several ranks as one worker: jobs go to all of them, and they report and end together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_recipes import fake_recipe

from digenrl.driver.placement import place
from digenrl.records import Commit, Committed, Job, JobFailed, RoleSwitched, SwitchRole
from digenrl.training.ranks.rank import Rank
from digenrl.transports.contract import Gone, InputsLost, Message, Report
from digenrl.transports.rank_groups import NOTICE_S, RankGroupTransport
from digenrl.worker.assignment import Assignment, DeviceFailed, Machine, PeersLost, Ready, StartFailed

TO_GENERATE, TO_TRAIN = SwitchRole(1, 0, "generate"), SwitchRole(2, 0, "train")
GENERATING, TRAINING = RoleSwitched(0, TO_GENERATE), RoleSwitched(0, TO_TRAIN)


class FakeTransport:
    """Records what it is asked to do, and delivers the messages of a test."""

    def __init__(self) -> None:
        self.started: dict[str, Assignment] = {}
        self.sent: list[tuple[str, Job]] = []
        self.ended: list[str] = []
        self.batches: list[list[Message]] = []
        self.now_s = 0.0

    def start(self, assignment: Assignment) -> None:
        self.started[assignment.name] = assignment

    def has_capacity(self, assignment: Assignment) -> bool:
        return True

    def send(self, worker: str, job: Job) -> None:
        self.sent.append((worker, job))

    def receive(self, timeout_s: float) -> Sequence[Message]:
        """The next messages, a millisecond later, or nothing until the timeout."""
        self.now_s += 0.001 if self.batches else timeout_s
        return self.batches.pop(0) if self.batches else []

    def end(self, worker: str) -> None:
        self.ended.append(worker)

    def stop(self) -> None:
        self.started.clear()


class TwoRanks:
    """A trainer of two ranks and a generator, all ready."""

    def __init__(self, **lanes: Any) -> None:
        recipe = fake_recipe(lanes={"ranks": 2, "generators": ["cpu"], **lanes})
        self.workers = place(recipe, Machine(tuple(range(6))), Path("exchange"))
        self.inner = FakeTransport()
        self.transport = RankGroupTransport(self.inner, lambda: self.inner.now_s)
        self.transport.start(self.workers.trainer)
        self.transport.start(self.workers.generators[0])
        first = self.receive(("trainer/1", None, Ready()), ("generator-0", None, Ready()))
        assert first == [Message("generator-0", None, Ready())]
        assert self.receive(("trainer/0", None, Ready())) == [Message("trainer", None, Ready())]

    def receive(self, *arriving: tuple[str, int | None, Report]) -> list[Message]:
        self.inner.batches = [[Message(*each) for each in arriving]]
        return list(self.transport.receive(0.0))

    def receive_all(self, *batches: list[Message]) -> list[Message]:
        """What is reported until long after the last batch."""
        self.inner.batches = list(batches)
        messages: list[Message] = []
        while self.inner.batches:
            messages += self.transport.receive(0.0)
        return [*messages, *self.transport.receive(2 * NOTICE_S)]


def test_each_rank_starts_with_its_share_of_the_cores() -> None:
    two = TwoRanks(threads=2)
    ranks = [two.inner.started[f"trainer/{index}"] for index in range(2)]
    assert [(each.rank, each.epoch) for each in ranks] == [(Rank(0, 2), 1), (Rank(1, 2), 1)]
    assert [each.cores for each in ranks] == [(0, 1), (2, 3)]
    assert two.inner.started["generator-0"].cores == (4, 5) and two.inner.started["generator-0"].rank is None
    two.transport.end("trainer")
    two.transport.start(two.workers.trainer)
    assert two.inner.started["trainer/1"].epoch == 2


def test_ranks_have_consecutive_devices() -> None:
    recipe = fake_recipe(lanes={"ranks": 2, "generators": 1, "rewards": 1})
    workers = place(recipe, Machine((0,), cuda_devices=3), Path("exchange"))
    assert [each.device for each in workers.initial()] == ["cuda:0", "cuda:2", "cuda:2", "cuda:0"]
    inner = FakeTransport()
    RankGroupTransport(inner).start(workers.trainer)
    assert [each.device for each in inner.started.values()] == ["cuda:0", "cuda:1"]


def test_a_job_goes_to_all_ranks_and_its_report_is_that_of_rank_0() -> None:
    two = TwoRanks()
    commit = Commit(7, 0, 3, keeps_state=True, sharded=True)
    two.transport.send("trainer", commit)
    assert [(worker, job.id) for worker, job in two.inner.sent] == [("trainer/0", 7), ("trainer/1", 7)]
    assert [job.writes() for _, job in two.inner.sent] == [("weights-4", "state-4-0"), ("state-4-1",)]
    assert two.receive(("trainer/1", 7, Committed(0, commit))) == []
    (message,) = two.receive(("trainer/0", 7, Committed(0, commit, updates=({"loss": 1.0},))))
    assert isinstance(message.report, Committed) and message.report.updates == ({"loss": 1.0},)
    assert (message.worker, message.job_id) == ("trainer", 7)


def test_a_job_for_one_rank_goes_to_that_rank_only() -> None:
    two = TwoRanks()
    two.transport.send("trainer/1", TO_GENERATE)
    two.transport.send("trainer", TO_TRAIN)
    assert [worker for worker, _ in two.inner.sent] == ["trainer/1", "trainer/0", "trainer/1"]
    assert two.receive(("trainer/0", 2, TRAINING)) == []
    assert two.receive(("trainer/1", 1, GENERATING)) == [Message("trainer/1", 1, GENERATING)]
    assert two.receive(("trainer/1", 2, TRAINING)) == [Message("trainer", 2, TRAINING)]


def test_reports_are_matched_by_job_id_whatever_their_order() -> None:
    two = TwoRanks()
    two.transport.send("trainer", TO_GENERATE)
    two.transport.send("trainer", TO_TRAIN)
    assert two.receive(("trainer/0", 1, GENERATING), ("trainer/0", 2, TRAINING)) == []
    assert two.receive(("trainer/1", 2, TRAINING)) == [Message("trainer", 2, TRAINING)]
    assert two.receive(("trainer/1", 1, GENERATING)) == [Message("trainer", 1, GENERATING)]


def test_if_one_rank_is_gone_the_others_are_ended() -> None:
    two = TwoRanks()
    two.transport.send("trainer", TO_TRAIN)
    (message,) = two.receive(("trainer/1", None, Gone("ended by signal 9")), ("trainer/0", 2, TRAINING))
    assert message == Message("trainer", None, Gone("lost its rank 1, which ended by signal 9"))
    assert two.inner.ended == ["trainer/0", "trainer/1"]


def test_if_the_device_of_one_rank_has_failed_the_worker_is_gone_at_once() -> None:
    two = TwoRanks()
    two.transport.send("trainer", TO_TRAIN)
    (message,) = two.receive(("trainer/1", 2, DeviceFailed("cannot use its device any more")))
    assert message == Message("trainer", None, Gone("lost its rank 1, which cannot use its device any more"))


FAILED = Gone("was ended after one of its ranks failed", fault=False)


def test_a_failure_of_one_rank_is_reported_before_the_others_answer() -> None:
    for job_id, failed in ((2, JobFailed(0, TO_TRAIN, "no memory")), (None, StartFailed("no memory"))):
        two = TwoRanks()
        two.transport.send("trainer", TO_TRAIN)
        if job_id is None:
            two.transport.start(two.workers.trainer)
        reported, *gone = two.receive_all([Message("trainer/1", job_id, failed)])
        assert reported == Message("trainer", job_id, failed)
        assert gone == ([] if job_id is None else [Message("trainer", None, FAILED)])
        assert two.inner.ended == ["trainer/0", "trainer/1"], "they could wait for the failed rank forever"


@pytest.mark.parametrize("at_once", [True, False])
def test_a_rank_that_fails_because_another_was_lost_does_not_end_the_run(at_once: bool) -> None:
    two = TwoRanks()
    two.transport.send("trainer", TO_TRAIN)
    failed = Message("trainer/0", 2, JobFailed(0, TO_TRAIN, "connection reset by peer"))
    gone, other = Message("trainer/1", None, Gone("ended by signal 9")), Message("rewards-0", 7, TRAINING)
    lost = Message("trainer", None, Gone("lost its rank 1, which ended by signal 9"))
    batches = [[failed, other, gone]] if at_once else [[failed], *[[other]] * 20, [gone]]
    assert two.receive_all(*batches) == [other] * (1 if at_once else 20) + [lost]
    assert two.inner.ended == ["trainer/0", "trainer/1"]


@pytest.mark.parametrize("for_all", [True, False])
def test_a_failure_that_may_have_another_cause_delays_no_report_of_other_workers(for_all: bool) -> None:
    two = TwoRanks()
    two.transport.send("trainer" if for_all else "trainer/0", TO_TRAIN)
    failed, other = JobFailed(0, TO_TRAIN, "no memory"), ("rewards-0", 7, TRAINING)
    assert two.receive(("trainer/0", 2, failed)) == []
    assert two.receive(other) == [Message(*other)]
    (reported, *_) = two.receive_all()
    assert reported == Message("trainer" if for_all else "trainer/0", 2, failed)


def test_ranks_that_fail_for_the_same_reason_stay() -> None:
    two = TwoRanks()
    two.transport.send("trainer", TO_GENERATE)
    failed, other = (JobFailed(0, TO_GENERATE, reason) for reason in ("not finite", "no memory"))
    assert two.receive(("trainer/0", 1, failed)) == []
    assert two.receive(("trainer/1", 1, failed)) == [Message("trainer", 1, failed)]
    two.transport.send("trainer", TO_TRAIN)
    assert two.receive(("trainer/0", 2, TRAINING), ("trainer/1", 2, TRAINING)) == [Message("trainer", 2, TRAINING)]
    assert not two.inner.ended
    two.transport.send("trainer", TO_GENERATE)
    different = [Message("trainer/0", 1, failed), Message("trainer/1", 1, other)]
    assert two.receive_all(different) == [Message("trainer", 1, failed), Message("trainer", None, FAILED)]
    assert two.inner.ended == ["trainer/0", "trainer/1"]


def test_a_rank_that_lost_the_others_ends_the_worker_unless_another_has_failed_by_itself() -> None:
    reason = "rank 0 of 2 lost the others while adding gradients: connection reset by peer"
    lost, failed = Message("trainer/0", 2, PeersLost(reason)), JobFailed(0, TO_TRAIN, "no space left")
    for batches, expected in (
        ([[lost]], [Message("trainer", None, Gone(reason))]),
        (
            [[lost], [], [Message("trainer/1", 2, failed)]],
            [Message("trainer", 2, failed), Message("trainer", None, FAILED)],
        ),
    ):
        two = TwoRanks()
        two.transport.send("trainer", TO_TRAIN)
        assert two.receive_all(*batches) == expected
        assert two.inner.ended == ["trainer/0", "trainer/1"]


@pytest.mark.parametrize("both", [True, False])
def test_inputs_lost_on_all_ranks_are_reported_and_on_some_ranks_end_the_worker(both: bool) -> None:
    two = TwoRanks()
    two.transport.send("trainer", TO_TRAIN)
    lost = InputsLost(("slice-3",))
    (message,) = two.receive(("trainer/0", 2, lost if both else TRAINING), ("trainer/1", 2, lost))
    gone = Message("trainer", None, Gone("lost slice-3 on some ranks", fault=False))
    assert message == (Message("trainer", 2, lost) if both else gone)
    assert bool(two.inner.ended) == (not both)
