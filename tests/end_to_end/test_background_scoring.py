"""Runs on a single device whose samples are scored in background threads."""

from __future__ import annotations

import threading

from live_runs import LiveRuns, lines_of, metric, trained


def test_background_scoring_gives_bitwise_equal_weights_and_leaves_no_thread(live: LiveRuns) -> None:
    background, in_turn = live.finished("mode=colocated"), live.finished("mode=colocated", "lanes.rewards=0")
    assert trained(background, 3) == trained(in_turn, 3)
    assert metric(background, "reward_mean") == metric(in_turn, "reward_mean")
    lanes = {span["lane"] for span in lines_of(background.path / "spans.jsonl") if span["work"] == "score"}
    assert lanes == {"reward-0"}
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("reward")]
