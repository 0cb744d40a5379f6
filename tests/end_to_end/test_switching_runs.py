"""Colocated full fine-tuning: offloading training state while generating gives bitwise equal weights."""

from __future__ import annotations

from live_runs import LiveRuns, lines_of, trained

FULL = ("mode=colocated", "steps=2", "training.lora=null", "training.ema={every_updates: 1}")
WITH_REFERENCE = "algorithm.options.kl_weight=0.1"


def test_a_run_that_offloads_trains_the_same_weights_and_knows_what_it_costs(live: LiveRuns) -> None:
    still = live.finished(*FULL, WITH_REFERENCE, "training.offload=false")
    moving = live.finished(*FULL, WITH_REFERENCE, "training.offload=true")
    assert trained(moving, 2) == trained(still, 2)
    free, calibrated = (folder.info.initial_state["costs"] for folder in (still, moving))
    assert (free["switch_in_ns"], free["switch_out_ns"]) == (0, 0)
    assert calibrated["switch_in_ns"] > 0 and calibrated["switch_out_ns"] > 0
    events = [line["event"] for line in lines_of(moving.journal)]
    measured = next(event for event in events if event["type"] == "CostsMeasured")
    assert measured["switch_out_ns"] not in (0, calibrated["switch_out_ns"]), "the run measures its own switches"


def test_a_trainer_of_all_weights_that_helps_and_makes_room_trains_the_same_weights(live: LiveRuns) -> None:
    full = ("steps=2", "training.lora=null", "batch.prompts=4", "algorithm.options.updates_per_batch=2")
    alone = live.finished(*full, "mode=colocated")
    helping = live.finished(*full, "techniques.tag=greedy", "training.offload=true")
    assert any(line["helped_share"] > 0 for line in lines_of(helping.metrics))
    assert any(span["work"] == "switch" for span in lines_of(helping.spans))
    assert trained(helping, 2) == trained(alone, 2)
