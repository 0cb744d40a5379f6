"""Several ranks as one worker: jobs go to all of them, and they report and end together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_crew import fake_recipe

from digenrl.driver.placement import place
from digenrl.transports.contract import Gone, InputsLost, Message
from digenrl.transports.rank_groups import RankGroupTransport
from digenrl.worker.assignment import Assignment, Machine, Ranks
from digenrl.worker.orders import (
    ChangeRole,
    Order,
    OrderFailed,
    Ready,
    Report,
    RoleChanged,
    StepTaken,
    TakeStep,
)


class FakeTransport:
    """Records what it is asked to do, and delivers the messages of a test."""

    def __init__(self) -> None:
        self.started: dict[str, Assignment] = {}
        self.sent: list[tuple[str, int, Order]] = []
        self.ended: list[str] = []
        self.arriving: list[Message] = []

    def start(self, assignment: Assignment) -> None:
        self.started[assignment.name] = assignment

    def has_room(self, assignment: Assignment) -> bool:
        return True

    def send(self, worker: str, job_id: int, order: Order) -> None:
        self.sent.append((worker, job_id, order))

    def receive(self, timeout_s: float) -> Sequence[Message]:
        arriving, self.arriving = self.arriving, []
        return arriving

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
        self.transport = RankGroupTransport(self.inner)
        self.transport.start(self.workers.trainer)
        self.transport.start(self.workers.generators[0])
        first = self.receive(("trainer/1", None, Ready()), ("generator-0", None, Ready()))
        assert first == [Message("generator-0", None, Ready())]
        assert self.receive(("trainer/0", None, Ready())) == [Message("trainer", None, Ready())]

    def receive(self, *arriving: tuple[str, int | None, Report]) -> list[Message]:
        self.inner.arriving = [Message(*each) for each in arriving]
        return list(self.transport.receive(0.0))


def test_each_rank_starts_with_its_share_of_the_cores() -> None:
    two = TwoRanks(threads=2)
    ranks = [two.inner.started[f"trainer/{index}"] for index in range(2)]
    assert [each.ranks for each in ranks] == [Ranks(0, 2, epoch=1), Ranks(1, 2, epoch=1)]
    assert [each.cores for each in ranks] == [(0, 1), (2, 3)]
    assert two.inner.started["generator-0"].cores == (4, 5) and two.inner.started["generator-0"].ranks is None
    two.transport.end("trainer")
    two.transport.start(two.workers.trainer)
    assert two.inner.started["trainer/1"].ranks == Ranks(1, 2, epoch=2)


def test_ranks_have_consecutive_devices() -> None:
    recipe = fake_recipe(lanes={"ranks": 2, "generators": 1, "rewards": 1})
    workers = place(recipe, Machine((0,), cuda_devices=3), Path("exchange"))
    assert [each.device for each in workers.everybody()] == ["cuda:0", "cuda:2", "cuda:2", "cuda:0"]
    inner = FakeTransport()
    RankGroupTransport(inner).start(workers.trainer)
    assert [each.device for each in inner.started.values()] == ["cuda:0", "cuda:1"]


def test_a_job_goes_to_all_ranks_and_its_report_is_that_of_rank_0() -> None:
    two = TwoRanks()
    two.transport.send("trainer", 7, TakeStep(3, keep=True, sharded=True))
    assert two.inner.sent == [
        ("trainer/0", 7, TakeStep(3, True, True, rank=0)),
        ("trainer/1", 7, TakeStep(3, True, True, rank=1)),
    ]
    assert [order.leaves() for *_, order in two.inner.sent] == [("weights-4", "state-4-0"), ("state-4-1",)]
    weights: Any = object()
    assert two.receive(("trainer/1", 7, StepTaken(3, (), weights))) == []
    first = StepTaken(3, ({"loss": 1.0},), weights)
    assert two.receive(("trainer/0", 7, first)) == [Message("trainer", 7, first)]


def test_a_job_for_one_rank_goes_to_that_rank_only() -> None:
    two = TwoRanks()
    two.transport.send("trainer/1", 1, ChangeRole(True))
    two.transport.send("trainer", 2, ChangeRole(False))
    assert [worker for worker, *_ in two.inner.sent] == ["trainer/1", "trainer/0", "trainer/1"]
    assert two.receive(("trainer/0", 2, RoleChanged(False))) == []
    assert two.receive(("trainer/1", 1, RoleChanged(True))) == [Message("trainer/1", 1, RoleChanged(True))]
    assert two.receive(("trainer/1", 2, RoleChanged(False))) == [Message("trainer", 2, RoleChanged(False))]


def test_reports_are_matched_by_job_id_whatever_their_order() -> None:
    two = TwoRanks()
    two.transport.send("trainer", 1, ChangeRole(True))
    two.transport.send("trainer", 2, ChangeRole(False))
    assert two.receive(("trainer/0", 1, RoleChanged(True)), ("trainer/0", 2, RoleChanged(False))) == []
    assert two.receive(("trainer/1", 2, RoleChanged(False))) == [Message("trainer", 2, RoleChanged(False))]
    assert two.receive(("trainer/1", 1, RoleChanged(True))) == [Message("trainer", 1, RoleChanged(True))]


def test_if_one_rank_is_gone_the_others_are_ended() -> None:
    two = TwoRanks()
    two.transport.send("trainer", 2, ChangeRole(False))
    (message,) = two.receive(("trainer/1", None, Gone("ended by signal 9")), ("trainer/0", 2, RoleChanged(False)))
    assert message == Message("trainer", None, Gone("lost its rank 1, which ended by signal 9"))
    assert two.inner.ended == ["trainer/0", "trainer/1"]


def test_a_failure_of_one_rank_is_reported_before_the_others_answer() -> None:
    two = TwoRanks()
    two.transport.send("trainer", 2, ChangeRole(False))
    failed = OrderFailed(ChangeRole(False), "no memory")
    assert two.receive(("trainer/1", 2, failed)) == [Message("trainer", 2, failed)]
    assert two.inner.ended == ["trainer/0", "trainer/1"], "they could wait for the failed rank forever"


@pytest.mark.parametrize("both", [True, False])
def test_inputs_lost_on_all_ranks_are_reported_and_on_some_ranks_end_the_worker(both: bool) -> None:
    two = TwoRanks()
    two.transport.send("trainer", 2, ChangeRole(False))
    lost = InputsLost(("slice-3",))
    (message,) = two.receive(("trainer/0", 2, lost if both else RoleChanged(False)), ("trainer/1", 2, lost))
    gone = Message("trainer", None, Gone("lost slice-3 on some ranks", fault=False))
    assert message == (Message("trainer", 2, lost) if both else gone)
    assert bool(two.inner.ended) == (not both)
