"""The ladder of benchmarks/paper_ladder.py: each assumption about the colocated baseline has its effect."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ladder_simulation import (
    RUNGS,
    ColocatedAssumptions,
    best_colocated,
    both_directions,
    colocated_spec,
    colocated_trainer,
    simulate_rungs,
)

from digenrl.config.reading import ConfigError
from digenrl.planning.costs import slice_seconds, switch_seconds, unit_seconds
from digenrl.planning.facts.cluster import CardPool
from digenrl.planning.facts.workload import workload_for
from digenrl.simulation.makespan import predict_makespan

A = CardPool.model_validate({"card": "RTX A6000", "nodes": 4, "network_gbit_s": 200})
B = CardPool.model_validate({"card": "H100", "nodes": 4, "network_gbit_s": 400})
C = CardPool.model_validate({"card": "RTX PRO 6000 Blackwell", "nodes": 2, "network_gbit_s": 200})
AS_ASSUMED = ColocatedAssumptions(engine_switch_s=1.0)


def clip(model: str, **changes):
    base = {
        "tuning": "full", "prompts": 2, "samples_per_prompt": 16, "denoise_steps": 20, "trained_share": 0.6,
        "guidance": False, "height": 240, "width": 416, "frames": 17,
    }  # fmt: skip
    return workload_for(model, **{**base, **changes})


def speedups_of(workload, pools, assumptions=AS_ASSUMED) -> list[float]:
    return [row.speedup for row in simulate_rungs(workload, pools, 4, assumptions)]


def test_a_colocated_step_is_generation_two_switches_training_and_commit():
    workload = clip("hunyuan")
    spec = colocated_spec(workload, [B], 1, AS_ASSUMED)
    trainer = colocated_trainer(workload, [B], AS_ASSUMED)
    switch_in, switch_out = switch_seconds(workload, trainer, 1)
    expected = (
        slice_seconds(workload, B.card, 1)  # 32 samples on 32 lanes
        + switch_in + switch_out + 2 * AS_ASSUMED.engine_switch_s
        + unit_seconds(workload, trainer, 32)
        + float(spec.trainer.commit)
    )  # fmt: skip
    second_step_s = predict_makespan(spec.with_changes(steps=2)) - predict_makespan(spec)
    assert second_step_s == pytest.approx(expected, rel=1e-4)


def test_the_baseline_trains_unpacked_over_all_cards():
    trainer = colocated_trainer(clip("hunyuan"), [B], AS_ASSUMED)
    assert (trainer.cards, trainer.shard_cards, trainer.pack, trainer.spread_steps) == (32, 32, 1, False)


def test_every_overhead_makes_the_baseline_slower():
    workload = clip("hunyuan")
    cheap = predict_makespan(colocated_spec(workload, [B], 2, ColocatedAssumptions(True, True)))
    for overhead in (
        {"engine_switch_s": 1.0},
        {"scaling": 0.8},
        {"packed": False},
        {"sharded_rollout": True},
    ):
        spec = colocated_spec(workload, [B], 2, replace(ColocatedAssumptions(True, True), **overhead))
        assert predict_makespan(spec) > cheap, overhead


def test_unequal_cards_train_at_the_rate_of_the_slowest():
    workload = clip("hunyuan")
    mixed = colocated_trainer(workload, [B, A], AS_ASSUMED)
    assert mixed.pool.card == A.card
    assert (mixed.cards, mixed.pool.network_gbit_s) == (64, 200)


def test_a_baseline_that_does_not_fit_is_an_error():
    tiny = CardPool.model_validate({"card": "RTX 4090", "per_node": 2})
    with pytest.raises(ConfigError, match="does not fit"):
        colocated_spec(clip("qwen", height=512, width=512, frames=1), [tiny], 1, AS_ASSUMED)


@pytest.mark.parametrize(("model", "papers_last"), [("hunyuan", 3.34), ("wan", 2.85)])
def test_the_ladder_on_testbed_b_reaches_the_papers_last_rung_as_assumed(model, papers_last):
    speedups = speedups_of(clip(model), [B])
    assert len(speedups) == 1 + len(RUNGS)
    assert speedups[-1] >= papers_last
    assert speedups == sorted(speedups)


def test_a_baseline_that_packs_and_shards_inside_nodes_is_almost_as_fast():
    assert speedups_of(clip("hunyuan"), [B], ColocatedAssumptions(True, True))[-1] < 1.15


def test_longer_clips_hide_the_gathers_and_reduce_the_gain():
    short, longer = (speedups_of(clip("hunyuan", frames=frames), [B])[-1] for frames in (17, 33))
    assert longer < 0.75 * short


def test_two_equal_nodes_that_do_both_beat_the_best_colocated_system():
    """The samples divide evenly between them: there is nothing to gain but the time of the commit."""
    workload = clip("hunyuan")
    assert best_colocated(workload, [C], 32) > 1.02 * both_directions(workload, [C], 32, "1").makespan_s
