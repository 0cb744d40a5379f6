"""Pack size and checkpointing, chosen for a simulated GPU whose memory and time follow known formulas."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, hypot

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.training.packing.memory_plan import PackPlan, choose_plan

SHARE = 0.9  # of the capacity, for the plan


@dataclass(frozen=True)
class CostFormula:
    """Memory and time of passes. Blocks of kind "b" follow those of kind "a"."""

    saved: dict[str, float]  # bytes of a block's activations, for one term
    blocks: dict[str, int]
    fixed: float = 500.0
    per_term: float = 40.0
    passed_on: float = 1.0  # a block's output, for one term: kept even if the block is checkpointed
    once: float = 0.0  # bytes of a block in a pack of any size, such as weights in another dtype
    host_s: float = 2.0
    term_s: float = 1.0
    again: float = 1 / 3  # additional time if all blocks are checkpointed

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, count in self.blocks.items() for _ in range(count)]

    def peak(self, pack_size: int, chosen: Collection[int]) -> float:
        """The largest of: the end of the forward, and the recomputation of each checkpointed block."""
        own = [self.once + pack_size * self.saved[kind] for kind in self.kinds]
        kept = [0.0 if index in chosen else bytes_ for index, bytes_ in enumerate(own)]
        moments = [sum(kept), *(own[index] + sum(kept[:index]) for index in chosen)]
        return self.fixed + pack_size * (self.per_term + self.passed_on * len(own)) + max(moments)

    def grown(self, pack_size: int, chosen: Collection[int]) -> list[int]:
        """Growth of memory by block, in the forward."""
        own = [self.once + pack_size * self.saved[kind] for kind in self.kinds]
        stays = [0.0 if index in chosen else bytes_ for index, bytes_ in enumerate(own)]
        return [round(pack_size * self.passed_on + bytes_) for bytes_ in stays]

    def seconds(self, pack_size: int, checkpointed: int) -> float:
        slower = 1 + self.again * checkpointed / len(self.kinds)
        return slower * hypot(self.host_s, pack_size * self.term_s)

    def total_s(self, terms: int, pack_size: int, checkpointed: int) -> float:
        return ceil(terms / pack_size) * self.seconds(pack_size, checkpointed)


@dataclass
class SimulatedProfiler:
    """Profiles passes that follow a formula; records them, and raises if they exceed the capacity."""

    formula: CostFormula
    capacity: float
    chosen: Sequence[int] = ()
    runs: list[tuple[int, int]] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        return self.formula.kinds

    def checkpoint(self, chosen: Collection[int]) -> None:
        self.chosen = tuple(chosen)

    def warm_up(self, pack_size: int) -> None:
        self._run(pack_size)

    def measure(self, pack_size: int) -> tuple[int, list[int]]:
        return round(self._run(pack_size)), self.formula.grown(pack_size, self.chosen)

    def seconds(self, pack_size: int) -> float:
        self._run(pack_size)
        return self.formula.seconds(pack_size, len(self.chosen))

    def _run(self, pack_size: int) -> float:
        self.runs.append((pack_size, len(self.chosen)))
        peak = self.formula.peak(pack_size, self.chosen)
        if peak > self.capacity:
            raise torch.OutOfMemoryError(f"{peak} of {self.capacity}")
        return peak


def plan(
    formula: CostFormula,
    budget: float,
    terms: int = 24,
    most: int = 64,
    profiler: SimulatedProfiler | None = None,
    **given: int,
) -> PackPlan:
    profiler = profiler or SimulatedProfiler(formula, budget / SHARE)
    return choose_plan(profiler, budget=budget, fixed_bytes=formula.fixed, terms=terms, largest_pack=most, **given)


def true_peak(formula: CostFormula, packing: PackPlan) -> float:
    return formula.peak(packing.pack_size, range(packing.checkpointed))


ONE_KIND = CostFormula(saved={"a": 100}, blocks={"a": 10})
TWO_KINDS = CostFormula(saved={"a": 100, "b": 30}, blocks={"a": 6, "b": 8})
each_formula = pytest.mark.parametrize("formula", [ONE_KIND, TWO_KINDS], ids=["one kind", "two kinds"])


@each_formula
def test_nothing_is_checkpointed_if_everything_fits(formula: CostFormula) -> None:
    packing = plan(formula, budget=2 * formula.peak(64, ()))
    assert packing.checkpointed == 0
    assert formula.total_s(24, packing.pack_size, 0) <= 1.03 * min(
        formula.total_s(24, pack, 0) for pack in range(1, 25)
    )


@each_formula
@pytest.mark.parametrize("room", [0.3, 0.5, 0.8])
def test_as_few_blocks_as_needed_are_checkpointed_and_the_planned_memory_is_right(
    formula: CostFormula, room: float
) -> None:
    blocks = range(len(formula.kinds))
    least, most = formula.peak(1, blocks), formula.peak(1, ())
    budget = least + room * (most - least)  # so that one term does not fit without checkpointing
    packing = plan(formula, budget)
    assert packing.checkpointed > 0
    assert formula.peak(packing.pack_size, range(packing.checkpointed - 1)) > budget >= true_peak(formula, packing)
    assert packing.planned_bytes == pytest.approx(true_peak(formula, packing), rel=0.01)


def test_larger_packs_are_chosen_only_if_they_are_faster() -> None:
    """They are if the host limits the speed, even with more checkpointed blocks, but not if the GPU does."""
    host_bound, gpu_bound = (
        CostFormula({"a": 100}, {"a": 10}, host_s=host_s, again=0.2) for host_s in (20.0, 0.1)
    )
    budget = host_bound.peak(1, ())  # one term, without checkpointing
    packing = plan(host_bound, budget)
    assert packing.pack_size > 2 and packing.checkpointed > 0
    assert plan(gpu_bound, budget) == PackPlan(1, 0, round(budget), round(budget))


@each_formula
def test_given_values_are_kept(formula: CostFormula) -> None:
    budget = formula.peak(6, range(2))
    assert plan(formula, budget, pack_size=6) == PackPlan(6, 2, round(budget), round(budget))
    for count in (0, 5):
        packing = plan(formula, budget, checkpointed=count)
        assert packing.checkpointed == count and true_peak(formula, packing) <= budget
    beyond = plan(formula, budget, pack_size=60)
    assert (beyond.pack_size, beyond.checkpointed) == (60, len(formula.kinds)), (
        "as given, with all blocks checkpointed"
    )
    assert plan(formula, budget, most=3).pack_size <= 3


def test_if_the_first_measurement_does_not_fit_one_term_with_all_blocks_checkpointed_remains() -> None:
    formula = CostFormula({"a": 100, "b": 90}, {"a": 6, "b": 8})  # one block of each kind is measured
    everything = range(len(formula.kinds))
    capacity = formula.peak(1, everything)
    assert plan(formula, SHARE * capacity) == PackPlan(1, len(everything))
    assert plan(formula, SHARE * capacity, pack_size=3) == PackPlan(3, len(everything)), (
        "it is halved later if necessary"
    )
    with pytest.raises(torch.OutOfMemoryError):
        plan(formula, SHARE * (capacity - 1))
    with pytest.raises(torch.OutOfMemoryError):
        plan(formula, SHARE * capacity, checkpointed=8)


def test_a_pack_that_needs_more_memory_than_estimated_is_replaced_by_a_smaller_one() -> None:
    class Surprising(CostFormula):
        def peak(self, pack_size: int, chosen: Collection[int]) -> float:
            return super().peak(pack_size, chosen) * (4 if pack_size > 5 else 1)

    formula = Surprising({"a": 100}, {"a": 10})
    packing = plan(formula, budget=super(Surprising, formula).peak(16, ()))
    assert 2 <= packing.pack_size <= 5 and packing.checkpointed == 0


def test_the_first_estimate_is_reported_along_with_the_corrected_plan() -> None:
    class Surprising(CostFormula):
        def peak(self, pack_size: int, chosen: Collection[int]) -> float:
            return super().peak(pack_size, chosen) * (1.25 if pack_size > 1 else 1)

    formula = Surprising({"a": 100}, {"a": 10})
    expected = super(Surprising, formula).peak
    packing = plan(formula, budget=1.2 * expected(24, ()))
    assert packing.pack_size > 1
    assert packing.first_estimate_bytes == pytest.approx(
        expected(packing.pack_size, range(packing.checkpointed)), rel=0.01
    )
    assert packing.planned_bytes == pytest.approx(true_peak(formula, packing), rel=0.01)


@pytest.mark.parametrize("factor", [1.15, 1.6, 5.0])
def test_a_plan_that_was_not_tried_is_run_before_it_is_used(factor: float) -> None:
    """Checkpointed packs need more memory than the trial, without checkpointing, lets expect."""

    class Surprising(CostFormula):
        def peak(self, pack_size: int, chosen: Collection[int]) -> float:
            return super().peak(pack_size, chosen) * (factor if pack_size > 4 else 1)

    formula = Surprising({"a": 100}, {"a": 10}, host_s=20.0, again=0.2)
    budget = super(Surprising, formula).peak(3, ())
    profiler = SimulatedProfiler(formula, budget / SHARE)
    packing = plan(formula, budget, profiler=profiler)
    assert packing.pack_size > 2, "larger packs are faster here"
    assert (packing.pack_size, packing.checkpointed) in profiler.runs
    assert true_peak(formula, packing) <= budget
    assert packing.planned_bytes == pytest.approx(true_peak(formula, packing), rel=0.01)


def test_allocated_bytes_are_added_only_to_measured_plans() -> None:
    assert PackPlan(4, 2, planned_bytes=30, first_estimate_bytes=20).plus(100) == PackPlan(4, 2, 130, 120)
    assert PackPlan(4, 2).plus(100) == PackPlan(4, 2)


def test_the_plan_for_all_ranks_fits_on_every_one() -> None:
    assert PackPlan.for_all([PackPlan(4, 2, 30, 20), PackPlan(3, 1, 10, 40)]) == PackPlan(3, 2, 30, 40)


@each_formula
@pytest.mark.parametrize("room", [0.3, 0.5, 0.7, 0.9])
def test_memory_needed_once_per_pack_is_not_counted_per_term(formula: CostFormula, room: float) -> None:
    """With weights cast to another dtype, most memory of one term is needed only once; a trial pack shows it."""
    formula = replace(formula, once=80, host_s=20.0, again=0.1)
    blocks = range(len(formula.kinds))
    least, most = formula.peak(2, blocks), formula.peak(24, ())
    budget = least + room * (most - least)
    packing = plan(formula, budget)
    assert packing.pack_size > 1
    assert true_peak(formula, packing) <= budget
    assert packing.planned_bytes == pytest.approx(true_peak(formula, packing), rel=0.01)
    assert packing.first_estimate_bytes >= packing.planned_bytes


formulas = st.builds(
    CostFormula,
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


@given(formulas, st.floats(0, 1), st.sampled_from([1, 3, 12, 24, 240]))
@settings(max_examples=80)
def test_the_plan_fits_the_budget_and_no_other_plan_is_much_faster(
    formula: CostFormula, room: float, terms: int
) -> None:
    blocks, packs = len(formula.kinds), range(1, min(32, terms) + 1)
    peaks = {(pack, count): formula.peak(pack, range(count)) for pack in packs for count in range(blocks + 1)}
    least, most = peaks[1, blocks], peaks[max(packs), 0]
    budget = least * (most / least) ** room
    profiler = SimulatedProfiler(formula, budget / SHARE)
    packing = plan(formula, budget, terms, most=32, profiler=profiler)
    if packing.planned_bytes == 0:  # the first measurement did not fit
        assert (packing.pack_size, packing.checkpointed) == (1, blocks)
        return
    chosen = packing.pack_size, packing.checkpointed
    assert peaks[chosen] <= budget + 1
    if formula.once:  # a trial of one term cannot tell it apart: the plan overestimates
        assert packing.planned_bytes >= 0.99 * peaks[chosen]
        return
    assert packing.planned_bytes == pytest.approx(peaks[chosen], rel=0.01)
    best = min(formula.total_s(terms, *each) for each, peak in peaks.items() if peak <= budget)
    assert formula.total_s(terms, *chosen) <= 1.04 * best
