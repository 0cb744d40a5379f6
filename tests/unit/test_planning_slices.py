"""Slice sizes per pool: only sizes that fit and pay, and never worse than one size for all lanes."""

from __future__ import annotations

import pytest

from digenrl.config.reading import parse_model
from digenrl.config.spec import ScheduleRules
from digenrl.planning.bounds import least_makespan
from digenrl.planning.candidates import Candidate, PlanOptions, better_slices, candidates, rates_of, splits
from digenrl.planning.facts.cluster import CardPool, Cluster
from digenrl.planning.facts.workload import Workload
from digenrl.planning.layout import Layout, best_trainer, generator_layout
from digenrl.planning.planner import plan
from digenrl.planning.results.plan_tables import slice_words
from digenrl.simulation.makespan import predict_makespan
from digenrl.simulation.simulator import simulate

WORK = Workload(
    model="tiny", height=32, width=32, denoise_steps=4, trained_share=0.75, prompts=6,
    samples_per_prompt=12,
)  # fmt: skip


def pool(name: str, count: int, seconds: dict[int, float], train: float | None = None) -> CardPool:
    measured = {"slice_seconds": seconds, "train_seconds_per_sample": train}
    return parse_model(CardPool, {"name": name, "nodes": count, "per_node": 1, "measured": measured})


# A slice is dominated by launches on the large card and by arithmetic on the small one, which fits 2 samples.
LARGE = pool("large", 2, {1: 1.0, 12: 1.4})
SMALL = pool("small", 4, {1: 1.0, 2: 1.9})
TRAINER = pool("trainer", 1, {1: 50.0, 12: 600.0}, train=0.02)
CLUSTER = Cluster(pools=(LARGE, SMALL, TRAINER))


@pytest.fixture(scope="module")
def result():
    return plan(WORK, CLUSTER, PlanOptions(steps=3, helps=("none",)))


def uniform_candidates() -> list[Candidate]:
    options = PlanOptions(steps=3, helps=("none",))
    return list(candidates(WORK, splits(WORK, CLUSTER, TRAINER, 1, options), options))


def test_a_card_with_more_memory_generates_larger_slices(result):
    both = next(found for found in result.plans if len(found.layout.generators) == 2)
    slices = {g.pool.name: own for g, own in zip(both.layout.generators, both.slices, strict=True)}
    assert slices["small"] <= 2 < slices["large"]
    assert all(own % both.spec.slice == 0 for own in slices.values())
    assert f"large {slices['large']}" in slice_words(both)


def test_slices_per_pool_beat_every_plan_with_one_size(result):
    one_size = {1: [], 2: []}
    for candidate in uniform_candidates():
        one_size[len(candidate.layout.generators)].append(predict_makespan(candidate.spec(WORK, 3)))
    assert len(result.best.layout.generators) == 2
    assert result.best.makespan_s < min(one_size[1]), "the large cards alone"
    assert result.best.makespan_s < 0.6 * min(one_size[2])


def test_no_pool_gets_a_slice_size_that_was_not_measured(result):
    for found in result.plans:
        for generator, own in zip(found.layout.generators, found.slices, strict=True):
            assert generator.pool.measured.covers(own)


def test_slices_that_do_not_pay_stay_one_size():
    # The time is proportional to the size, so a larger slice gains nothing.
    even = Cluster(pools=(pool("a", 2, {1: 1.0, 12: 12.0}), pool("b", 2, {1: 2.0, 12: 24.0}), TRAINER))
    found = plan(WORK, even, PlanOptions(steps=3, helps=("none",)))
    assert set(found.best.slices) == {found.best.spec.slice}


def test_the_search_for_slices_respects_its_budget():
    start = min(uniform_candidates(), key=lambda candidate: candidate.bound_s)
    seen: list[Candidate] = []

    def makespan(candidate: Candidate) -> float:
        seen.append(candidate)
        return predict_makespan(candidate.spec(WORK, 3))

    before_s = predict_makespan(start.spec(WORK, 3))
    found, found_s = better_slices(start, before_s, WORK, makespan, 0.005, tries=3)
    assert len(seen) <= 3
    assert predict_makespan(found.spec(WORK, 3)) == found_s <= before_s
    assert better_slices(start, before_s, WORK, makespan, 0.005, tries=0) == (start, before_s)


def test_a_lane_with_larger_slices_is_bounded_by_its_rate():
    trainer, lanes = best_trainer(WORK, TRAINER, 1, 12), generator_layout(WORK, LARGE, 2)
    assert trainer is not None and lanes is not None
    layout = Layout((lanes,), trainer, None)
    rates = rates_of(WORK, layout, 1, ScheduleRules(), 3, pool_slices=(12,))
    assert rates.samples_per_second == pytest.approx(2 * 12 / 1.4)
    candidate = Candidate(layout, 1, ScheduleRules(), rates, least_makespan(rates), (12,))
    assert candidate.bound_s <= simulate(candidate.spec(WORK, 3)).answer.makespan


def test_a_stale_share_that_gains_nothing_is_not_used():
    # The trainer is the bottleneck, with or without stale samples.
    busy = cluster_training_in(5.0)
    found = plan(WORK, busy, PlanOptions(steps=12))
    assert found.best.spec.policy.stale_fraction == 0
    stale = plan(WORK, busy, PlanOptions(steps=12, stale_shares=(0.5,)))
    assert stale.best.makespan_s > 0.98 * found.best.makespan_s


def cluster_training_in(seconds: float) -> Cluster:
    return Cluster(pools=(LARGE, SMALL, pool("trainer", 1, {1: 50.0, 12: 600.0}, train=seconds)))


def test_the_gap_includes_the_loss_from_less_staleness(result):
    gap = result.proven_gap
    one_size = min(predict_makespan(candidate.spec(WORK, 3)) for candidate in uniform_candidates())
    assert one_size >= result.best.makespan_s * (1 - gap) * (1 - 1e-9)
