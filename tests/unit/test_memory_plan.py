"""Pack size and blocks computed again, chosen on a made-up card whose memory and time follow a known law."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, hypot

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.training.packing.memory_plan import Packing, choose_packing

SHARE = 0.9  # of the capacity that may be planned with


@dataclass(frozen=True)
class Law:
    """What passes take. Blocks are of kinds "a" and "b", the latter behind the former."""

    saved: dict[str, float]  # bytes of a block's activations, for one term
    blocks: dict[str, int]
    fixed: float = 500.0
    per_term: float = 40.0
    passed_on: float = 1.0  # a block's output, for one term: kept whether it is computed again or not
    once: float = 0.0  # bytes that a block keeps of a pack of any size, such as its weights in another type
    host_s: float = 2.0
    term_s: float = 1.0
    again: float = 1 / 3  # more time with all blocks computed again

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, count in self.blocks.items() for _ in range(count)]

    def peak(self, pack_size: int, chosen: Collection[int]) -> float:
        """Of the end of the forward, and of every block that is computed again while those before it keep."""
        own = [self.once + pack_size * self.saved[kind] for kind in self.kinds]
        kept = [0.0 if index in chosen else bytes_ for index, bytes_ in enumerate(own)]
        moments = [sum(kept), *(own[index] + sum(kept[:index]) for index in chosen)]
        return self.fixed + pack_size * (self.per_term + self.passed_on * len(own)) + max(moments)

    def grown(self, pack_size: int, chosen: Collection[int]) -> list[int]:
        """Bytes by block, in the forward."""
        own = [self.once + pack_size * self.saved[kind] for kind in self.kinds]
        stays = [0.0 if index in chosen else bytes_ for index, bytes_ in enumerate(own)]
        return [round(pack_size * self.passed_on + bytes_) for bytes_ in stays]

    def seconds(self, pack_size: int, checkpointed: int) -> float:
        slower = 1 + self.again * checkpointed / len(self.kinds)
        return slower * hypot(self.host_s, pack_size * self.term_s)

    def total_s(self, terms: int, pack_size: int, checkpointed: int) -> float:
        return ceil(terms / pack_size) * self.seconds(pack_size, checkpointed)


@dataclass
class MadeUpCard:
    """A gauge of passes that follow a law; runs are remembered, and one that needs more than there is raises."""

    law: Law
    capacity: float
    chosen: Sequence[int] = ()
    runs: list[tuple[int, int]] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        return self.law.kinds

    def checkpoint(self, chosen: Collection[int]) -> None:
        self.chosen = tuple(chosen)

    def warm_up(self, pack_size: int) -> None:
        self._run(pack_size)

    def measure(self, pack_size: int) -> tuple[int, list[int]]:
        return round(self._run(pack_size)), self.law.grown(pack_size, self.chosen)

    def seconds(self, pack_size: int) -> float:
        self._run(pack_size)
        return self.law.seconds(pack_size, len(self.chosen))

    def _run(self, pack_size: int) -> float:
        self.runs.append((pack_size, len(self.chosen)))
        peak = self.law.peak(pack_size, self.chosen)
        if peak > self.capacity:
            raise torch.OutOfMemoryError(f"{peak} of {self.capacity}")
        return peak


def plan(
    law: Law, budget: float, terms: int = 24, most: int = 64, card: MadeUpCard | None = None, **given: int
) -> Packing:
    gauge = card or MadeUpCard(law, budget / SHARE)
    return choose_packing(gauge, budget=budget, fixed_bytes=law.fixed, terms=terms, most=most, **given)


def true_peak(law: Law, packing: Packing) -> float:
    return law.peak(packing.pack_size, range(packing.checkpointed))


ONE_KIND = Law(saved={"a": 100}, blocks={"a": 10})
TWO_KINDS = Law(saved={"a": 100, "b": 30}, blocks={"a": 6, "b": 8})
each_law = pytest.mark.parametrize("law", [ONE_KIND, TWO_KINDS], ids=["one kind", "two kinds"])


@each_law
def test_nothing_is_computed_again_where_everything_fits(law: Law) -> None:
    packing = plan(law, budget=2 * law.peak(64, ()))
    assert packing.checkpointed == 0
    assert law.total_s(24, packing.pack_size, 0) <= 1.03 * min(law.total_s(24, pack, 0) for pack in range(1, 25))


@each_law
@pytest.mark.parametrize("room", [0.3, 0.5, 0.8])
def test_as_few_blocks_as_needed_are_computed_again_and_the_plan_is_what_it_takes(law: Law, room: float) -> None:
    blocks = range(len(law.kinds))
    least, most = law.peak(1, blocks), law.peak(1, ())
    budget = least + room * (most - least)  # so that one term does not fit without
    packing = plan(law, budget)
    assert packing.checkpointed > 0
    assert law.peak(packing.pack_size, range(packing.checkpointed - 1)) > budget >= true_peak(law, packing)
    assert packing.planned_bytes == pytest.approx(true_peak(law, packing), rel=0.01)


def test_larger_packs_are_taken_where_they_pay_and_only_there() -> None:
    """With the host in the way they do, even for some more blocks computed again; with a busy card they do not."""
    idle_card, busy_card = (Law({"a": 100}, {"a": 10}, host_s=host_s, again=0.2) for host_s in (20.0, 0.1))
    budget = idle_card.peak(1, ())  # one term, with nothing computed again
    packing = plan(idle_card, budget)
    assert packing.pack_size > 2 and packing.checkpointed > 0
    assert plan(busy_card, budget) == Packing(1, 0, round(budget), round(budget))


@each_law
def test_what_is_given_is_kept(law: Law) -> None:
    budget = law.peak(6, range(2))
    assert plan(law, budget, pack_size=6) == Packing(6, 2, round(budget), round(budget))
    for count in (0, 5):
        packing = plan(law, budget, checkpointed=count)
        assert packing.checkpointed == count and true_peak(law, packing) <= budget
    beyond = plan(law, budget, pack_size=60)
    assert (beyond.pack_size, beyond.checkpointed) == (60, len(law.kinds)), "as given, with all that helps"
    assert plan(law, budget, most=3).pack_size <= 3


def test_where_the_first_measurement_does_not_fit_all_blocks_and_one_term_are_left() -> None:
    law = Law({"a": 100, "b": 90}, {"a": 6, "b": 8})  # one of each kind are measured together
    everything = range(len(law.kinds))
    capacity = law.peak(1, everything)
    assert plan(law, SHARE * capacity) == Packing(1, len(everything))
    assert plan(law, SHARE * capacity, pack_size=3) == Packing(3, len(everything)), "if need be, it is halved"
    with pytest.raises(torch.OutOfMemoryError):
        plan(law, SHARE * (capacity - 1))
    with pytest.raises(torch.OutOfMemoryError):
        plan(law, SHARE * capacity, checkpointed=8)


def test_a_pack_that_takes_more_than_was_foreseen_is_given_up_for_a_smaller_one() -> None:
    class Surprising(Law):
        def peak(self, pack_size: int, chosen: Collection[int]) -> float:
            return super().peak(pack_size, chosen) * (4 if pack_size > 5 else 1)

    law = Surprising({"a": 100}, {"a": 10})
    packing = plan(law, budget=super(Surprising, law).peak(16, ()))
    assert 2 <= packing.pack_size <= 5 and packing.checkpointed == 0


def test_what_was_foreseen_is_told_beside_what_was_planned_once_a_pack_had_been_tried() -> None:
    class Surprising(Law):
        def peak(self, pack_size: int, chosen: Collection[int]) -> float:
            return super().peak(pack_size, chosen) * (1.25 if pack_size > 1 else 1)

    law = Surprising({"a": 100}, {"a": 10})
    expected = super(Surprising, law).peak
    packing = plan(law, budget=1.2 * expected(24, ()))
    assert packing.pack_size > 1
    assert packing.foreseen_bytes == pytest.approx(
        expected(packing.pack_size, range(packing.checkpointed)), rel=0.01
    )
    assert packing.planned_bytes == pytest.approx(true_peak(law, packing), rel=0.01)


def test_bytes_that_are_there_already_are_added_to_what_was_measured_only() -> None:
    assert Packing(4, 2, planned_bytes=30, foreseen_bytes=20).beside(100) == Packing(4, 2, 130, 120)
    assert Packing(4, 2).beside(100) == Packing(4, 2)


def test_ranks_agree_on_what_all_of_them_have_room_for() -> None:
    assert Packing.for_all([Packing(4, 2, 30, 20), Packing(3, 1, 10, 40)]) == Packing(3, 2, 30, 40)


@each_law
@pytest.mark.parametrize("room", [0.3, 0.5, 0.7, 0.9])
def test_what_blocks_keep_once_for_a_pack_is_not_taken_for_the_price_of_every_pair(law: Law, room: float) -> None:
    """Of weights that are cast, most of what one pair keeps is not a pair's; a trial of several tells."""
    law = replace(law, once=80, host_s=20.0, again=0.1)
    blocks = range(len(law.kinds))
    least, most = law.peak(2, blocks), law.peak(24, ())
    budget = least + room * (most - least)
    packing = plan(law, budget)
    assert packing.pack_size > 1
    assert true_peak(law, packing) <= budget
    assert packing.planned_bytes == pytest.approx(true_peak(law, packing), rel=0.01)
    assert packing.foreseen_bytes >= packing.planned_bytes


laws = st.builds(
    Law,
    saved=st.fixed_dictionaries({kind: st.integers(500, 50_000) for kind in "ab"}),
    blocks=st.fixed_dictionaries({"a": st.integers(2, 12), "b": st.sampled_from([0, 2, 12])}),
    fixed=st.integers(0, 200_000),
    per_term=st.integers(0, 100_000),
    passed_on=st.integers(50, 500),
    once=st.sampled_from([0, 500, 50_000]),
    host_s=st.floats(0, 20),
    term_s=st.floats(0.1, 10),
    again=st.floats(0.1, 0.6),
)


@given(laws, st.floats(0, 1), st.sampled_from([1, 3, 12, 24, 240]))
@settings(max_examples=150)
def test_the_plan_fits_the_budget_and_no_other_within_it_is_much_quicker(
    law: Law, room: float, terms: int
) -> None:
    blocks, packs = len(law.kinds), range(1, min(32, terms) + 1)
    peaks = {(pack, count): law.peak(pack, range(count)) for pack in packs for count in range(blocks + 1)}
    least, most = peaks[1, blocks], peaks[max(packs), 0]
    budget = least * (most / least) ** room
    card = MadeUpCard(law, budget / SHARE)
    packing = plan(law, budget, terms, most=32, card=card)
    if packing.planned_bytes == 0:  # one block of every kind together did not fit
        assert (packing.pack_size, packing.checkpointed) == (1, blocks)
        return
    chosen = packing.pack_size, packing.checkpointed
    assert peaks[chosen] <= budget + 1
    if law.once:  # a trial of one pair does not tell what is kept once, and the plan is on the safe side
        assert packing.planned_bytes >= 0.99 * peaks[chosen]
        return
    assert packing.planned_bytes == pytest.approx(peaks[chosen], rel=0.01)
    best = min(law.total_s(terms, *each) for each, peak in peaks.items() if peak <= budget)
    assert law.total_s(terms, *chosen) <= 1.04 * best
