"""Whole colocated runs of all weights: what training holds leaves the card while it generates, bit for bit."""

from __future__ import annotations

from live_runs import LiveRuns, lines_of, trained

FULL = ("mode=colocated", "steps=2", "training.lora=null", "training.ema={every_updates: 1}")
WITH_REFERENCE = "algorithm.options.kl_weight=0.1"


def test_a_run_that_offloads_trains_the_same_weights_and_knows_what_it_costs(live: LiveRuns) -> None:
    still = live.finished(*FULL, WITH_REFERENCE, "training.offload=false")
    moving = live.finished(*FULL, WITH_REFERENCE, "training.offload=true")
    assert trained(moving, 2) == trained(still, 2)
    free, rehearsed = (folder.info.opening["costs"] for folder in (still, moving))
    assert (free["switch_in_ns"], free["switch_out_ns"]) == (0, 0)
    assert rehearsed["switch_in_ns"] > 0 and rehearsed["switch_out_ns"] > 0
    events = [line["event"] for line in lines_of(moving.journal)]
    measured = next(event for event in events if event["type"] == "CostsMeasured")
    assert measured["switch_out_ns"] not in (0, rehearsed["switch_out_ns"]), "the run measures its own switches"
