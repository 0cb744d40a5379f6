"""From layouts to SPECs: lanes, helpers, units and bounds."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.config.spec import ScheduleRules
from digenrl.planning.bounds import EqualLanes, finish_s
from digenrl.planning.candidates import Candidate, PlanOptions, candidates, splits
from digenrl.planning.costs import slice_seconds, unit_seconds
from digenrl.planning.facts.cluster import CardPool, Cluster
from digenrl.planning.facts.workload import workload_for
from digenrl.planning.layout import Layout, best_trainer, fitting_slices, generator_layout
from digenrl.planning.memory import trainer_memory
from digenrl.planning.spec_builder import build_spec, rounded
from digenrl.simulation.makespan import predict_makespan


def pool(card: str, nodes: int = 1, **more) -> CardPool:
    return CardPool.model_validate({"card": card, "nodes": nodes, "network_gbit_s": 200, **more})


H100S, A6000S, L40SS = pool("H100"), pool("RTX A6000", 2), pool("L40S")
CLIP = workload_for("wan", prompts=2, samples_per_prompt=4)


def layout_of(workload, trainer_pool, cards, *generators) -> Layout:
    trainer = best_trainer(workload, trainer_pool, cards, workload.samples_per_prompt)
    assert trainer is not None
    lanes = tuple(generator_layout(workload, *share) for share in generators)
    assert all(lanes)
    helper = generator_layout(workload, trainer_pool, cards)
    return Layout(lanes, trainer, helper.lane_cards if helper else None)


def test_a_lane_has_the_fewest_cards_that_the_model_fits_on():
    qwen = workload_for("qwen")
    assert generator_layout(qwen, H100S, 8).lane_cards == 1
    assert generator_layout(qwen, pool("RTX 4090"), 7).lane_cards == 2
    assert generator_layout(qwen, pool("RTX 4090"), 7).lanes == 3
    assert generator_layout(qwen, pool("RTX 4090"), 1) is None


def test_the_durations_of_a_spec_are_those_of_the_cost_model():
    layout = layout_of(CLIP, H100S, 4, (H100S, 4), (A6000S, 16))
    spec = build_spec(CLIP, layout, 2, ScheduleRules(help="auto"), steps=3)
    assert [pool.count for pool in spec.generators] == [4, 16]
    assert spec.trainer.helper.lanes == 4
    seconds = slice_seconds(CLIP, A6000S.card, 2)
    assert float(spec.generators[1].seconds[2]) == pytest.approx(seconds, rel=1e-5)
    trained = unit_seconds(CLIP, layout.trainer, 4) / 4
    assert float(spec.trainer.seconds_per_sample) == pytest.approx(trained, rel=1e-5)
    assert spec.publish > 0


def test_rounding_keeps_six_significant_digits():
    assert rounded(12.3456789) == Decimal("12.3457")
    assert rounded(0.000123456789) == Decimal("0.000123457")
    assert rounded(0.0) == 0


def test_trainer_cards_that_cannot_generate_are_no_helper():
    qwen = workload_for("qwen")
    small = pool("RTX 4090", per_node=1, nodes=8)
    trainer = best_trainer(qwen, small, 8, qwen.samples_per_prompt)
    layout = Layout((generator_layout(qwen, H100S, 8),), trainer, None)
    assert build_spec(qwen, layout, 1, ScheduleRules(), steps=1).trainer.helper is None


def test_a_trainer_that_gathers_weights_packs_pairs_that_fit_in_memory():
    full = workload_for("hunyuan", tuning="full", height=240, width=416, frames=17)
    trainer = best_trainer(full, pool("RTX PRO 6000 Blackwell", 2), 16, 32)
    assert trainer.pack > 1
    report = trainer_memory(full, trainer.pool.card, trainer.shard_cards, trainer.pack, trainer.checkpointing)
    assert report.fits


def test_a_trainer_whose_state_does_not_fit_is_none():
    assert best_trainer(workload_for("wan", tuning="full"), H100S, 1, 4) is None
    assert best_trainer(workload_for("wan", tuning="full"), H100S, 8, 4) is not None


def test_slices_that_do_not_fit_a_lane_are_excluded():
    long_clip = workload_for("hunyuan", height=720, width=1280, frames=129, samples_per_prompt=8)
    layout = layout_of(long_clip, pool("H200"), 8, (pool("B200"), 8))
    offered = fitting_slices(long_clip, layout)
    assert offered[0] == 1
    assert 8 not in offered


def test_equal_slices_finish_after_whole_rounds():
    assert finish_s((EqualLanes(4, 2.0),), 9) == 6.0
    assert finish_s((EqualLanes(4, 2.0),), 0) == 0.0
    assert finish_s((EqualLanes(1, 1.0), EqualLanes(1, 3.0)), 4) == pytest.approx(3.0, rel=1e-3)


@given(
    counts=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    seconds=st.tuples(st.floats(0.1, 5), st.floats(0.1, 5)),
    slices=st.integers(1, 30),
)
def test_no_lanes_finish_before_the_bound(counts, seconds, slices):
    lanes = [pace for count, pace in zip(counts, seconds, strict=True) for _ in range(count)]
    free_at = [0.0] * len(lanes)
    for _ in range(slices):  # earliest finish first is optimal for equal slices
        lane = min(range(len(lanes)), key=lambda index: free_at[index] + lanes[index])
        free_at[lane] += lanes[lane]
    pools = tuple(EqualLanes(count, pace) for count, pace in zip(counts, seconds, strict=True))
    assert finish_s(pools, slices) <= max(free_at) + 1e-9


def some_candidates() -> list[Candidate]:
    """Candidates with mixed cards, all rules, both tunings, with and without slow rewards."""
    cluster = Cluster(pools=(H100S, A6000S, L40SS))
    found = []
    for changes in ({}, {"tuning": "full"}, {"reward_lanes": 1, "reward_seconds": 2.0}):
        workload = CLIP.model_copy(update=changes)
        for trainer_pool, cards in ((H100S, 8), (H100S, 3), (A6000S, 16), (L40SS, 8)):
            options = PlanOptions(steps=3)
            layouts = splits(workload, cluster, trainer_pool, cards, options)
            found += [(workload, candidate) for candidate in candidates(workload, layouts, options)]
    return found


SOME = some_candidates()


@settings(max_examples=80, deadline=None)
@given(index=st.integers(0, len(SOME) - 1))
def test_no_schedule_beats_its_bound(index):
    workload, candidate = SOME[index]
    assert candidate.bound_s <= predict_makespan(candidate.spec(workload, 3))


def test_bounds_are_tight():
    ratios = []
    for workload, candidate in SOME[::97]:
        ratios.append(candidate.bound_s / predict_makespan(candidate.spec(workload, 3)))
    assert len(ratios) > 10
    assert sum(ratios) / len(ratios) > 0.85
