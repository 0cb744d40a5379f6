"""Several ranks as one worker: orders to all of them, one report, and one end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
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
from fake_crew import fake_recipe

from digenrl.driver.placement import place
from digenrl.transports.contract import Gone, InputsLost, Message
from digenrl.transports.rank_groups import RankGroupTransport
from digenrl.worker.assignment import Assignment, Machine, Ranks


class Recorded:
    """A transport that remembers what it is told and reports what a test puts in."""

    def __init__(self) -> None:
        self.started: dict[str, Assignment] = {}
        self.sent: list[tuple[str, int, Order]] = []
        self.ended: list[str] = []
        self.coming: list[Message] = []

    def start(self, assignment: Assignment) -> None:
        self.started[assignment.name] = assignment

    def has_room(self, assignment: Assignment) -> bool:
        return True

    def send(self, worker: str, job_id: int, order: Order) -> None:
        self.sent.append((worker, job_id, order))

    def receive(self, timeout_s: float) -> Sequence[Message]:
        coming, self.coming = self.coming, []
        return coming

    def end(self, worker: str) -> None:
        self.ended.append(worker)

    def stop(self) -> None:
        self.started.clear()


class Two:
    """A trainer of two ranks and a generator, all ready."""

    def __init__(self, **lanes: Any) -> None:
        recipe = fake_recipe(lanes={"ranks": 2, "generators": ["cpu"], **lanes})
        self.crew = place(recipe, Machine(tuple(range(6))), Path("exchange"))
        self.inner = Recorded()
        self.transport = RankGroupTransport(self.inner)
        self.transport.start(self.crew.trainer)
        self.transport.start(self.crew.generators[0])
        first = self.reports(("trainer/1", None, Ready()), ("generator-0", None, Ready()))
        assert first == [Message("generator-0", None, Ready())]
        assert self.reports(("trainer/0", None, Ready())) == [Message("trainer", None, Ready())]

    def reports(self, *coming: tuple[str, int | None, Report]) -> list[Message]:
        self.inner.coming = [Message(*each) for each in coming]
        return list(self.transport.receive(0.0))


def test_ranks_start_with_places_of_their_own() -> None:
    two = Two(threads=2)
    ranks = [two.inner.started[f"trainer/{index}"] for index in range(2)]
    assert [each.ranks for each in ranks] == [Ranks(0, 2, epoch=1), Ranks(1, 2, epoch=1)]
    assert [each.cores for each in ranks] == [(0, 1), (2, 3)]
    assert two.inner.started["generator-0"].cores == (4, 5) and two.inner.started["generator-0"].ranks is None
    two.transport.end("trainer")
    two.transport.start(two.crew.trainer)
    assert two.inner.started["trainer/1"].ranks == Ranks(1, 2, epoch=2)


def test_ranks_have_devices_one_after_the_other() -> None:
    recipe = fake_recipe(lanes={"ranks": 2, "generators": 1, "rewards": 1})
    crew = place(recipe, Machine((0,), cuda_devices=3), Path("exchange"))
    assert [each.device for each in crew.initial()] == ["cuda:0", "cuda:2", "cuda:2", "cuda:0"]
    inner = Recorded()
    RankGroupTransport(inner).start(crew.trainer)
    assert [each.device for each in inner.started.values()] == ["cuda:0", "cuda:1"]


def test_an_order_goes_to_all_ranks_and_its_report_is_the_first_ranks() -> None:
    two = Two()
    two.transport.send("trainer", 7, TakeStep(3, keep=True, sharded=True))
    assert two.inner.sent == [
        ("trainer/0", 7, TakeStep(3, True, True, rank=0)),
        ("trainer/1", 7, TakeStep(3, True, True, rank=1)),
    ]
    assert [order.leaves() for *_, order in two.inner.sent] == [("weights-4", "state-4-0"), ("state-4-1",)]
    weights: Any = object()
    assert two.reports(("trainer/1", 7, StepTaken(3, (), weights))) == []
    first = StepTaken(3, ({"loss": 1.0},), weights)
    assert two.reports(("trainer/0", 7, first)) == [Message("trainer", 7, first)]


def test_an_order_to_one_rank_is_that_ranks_alone_and_keeps_its_place() -> None:
    two = Two()
    two.transport.send("trainer/1", 1, ChangeRole(True))
    two.transport.send("trainer", 2, ChangeRole(False))
    assert [worker for worker, *_ in two.inner.sent] == ["trainer/1", "trainer/0", "trainer/1"]
    assert two.reports(("trainer/0", 2, RoleChanged(False))) == []
    assert two.reports(("trainer/1", 1, RoleChanged(True))) == [Message("trainer/1", 1, RoleChanged(True))]
    assert two.reports(("trainer/1", 2, RoleChanged(False))) == [Message("trainer", 2, RoleChanged(False))]


def test_jobs_of_a_group_complete_by_id_whatever_the_order_of_their_reports() -> None:
    two = Two()
    two.transport.send("trainer", 1, ChangeRole(True))
    two.transport.send("trainer", 2, ChangeRole(False))
    assert two.reports(("trainer/0", 1, RoleChanged(True)), ("trainer/0", 2, RoleChanged(False))) == []
    assert two.reports(("trainer/1", 2, RoleChanged(False))) == [Message("trainer", 2, RoleChanged(False))]
    assert two.reports(("trainer/1", 1, RoleChanged(True))) == [Message("trainer", 1, RoleChanged(True))]


def test_one_rank_that_is_gone_ends_the_others() -> None:
    two = Two()
    two.transport.send("trainer", 2, ChangeRole(False))
    gone = two.reports(("trainer/1", None, Gone("ended by signal 9")), ("trainer/0", 2, RoleChanged(False)))
    assert gone == [Message("trainer", None, Gone("lost its rank 1, which ended by signal 9"))]
    assert two.inner.ended == ["trainer/0", "trainer/1"]


def test_a_failure_of_one_rank_is_told_before_the_others_answer() -> None:
    two = Two()
    two.transport.send("trainer", 2, ChangeRole(False))
    failed = OrderFailed(ChangeRole(False), "no memory")
    assert two.reports(("trainer/1", 2, failed)) == [Message("trainer", 2, failed)]
    assert two.inner.ended == ["trainer/0", "trainer/1"], "they may wait for it in vain"


@pytest.mark.parametrize("both", [True, False])
def test_what_all_ranks_lack_is_lost_and_what_some_lack_ends_them(both: bool) -> None:
    two = Two()
    two.transport.send("trainer", 2, ChangeRole(False))
    lost = InputsLost(("slice-3",))
    (message,) = two.reports(("trainer/0", 2, lost if both else RoleChanged(False)), ("trainer/1", 2, lost))
    gone = Message("trainer", None, Gone("lost slice-3 on some ranks", fault=False))
    assert message == (Message("trainer", 2, lost) if both else gone)
    assert bool(two.inner.ended) == (not both)
