"""Whole runs with rewards that look beyond one sample: a judge beside another reward, and ranks within groups."""

from __future__ import annotations

import json
import math

import pytest
from judge_serving import ChatServer, Said, judging, text_of
from live_runs import LiveRuns, lines_of

from digenrl.config.reading import ConfigError
from digenrl.records import Quarantine
from digenrl.run_folder.journal import read_journal


class Choosy(ChatServer):
    """Refuses to judge cats."""

    def respond(self, request: dict[str, object], token: str | None) -> Said:
        said = super().respond(request, token)
        return Said(b"no cats", status=400) if "a cat" in text_of(request) else said


def test_a_run_learns_from_a_judge_and_replaces_the_prompt_that_it_refuses(live: LiveRuns) -> None:
    with judging(Choosy()) as server:
        judge = {"name": "judge", "url": server.url, "model": "m", "template": "unified_reward", "token_env": None}
        judge |= {"answer": {"field": "score"}, "cache": str(live.root / "answers")}
        rewards = f"rewards={json.dumps([judge, {'name': 'live_rewards:redness', 'weight': 0.5}])}"
        run = live.finished(rewards, "reward_sum=normalized", "mode=colocated", "steps=3")
        (raw,) = lines_of(live.finished(rewards, "mode=colocated", "steps=1").metrics)
    steps = lines_of(run.metrics)
    assert (raw["reward_mean"], raw["reward/judge/cached"]) == (steps[0]["reward_mean"], 1)
    assert abs(raw["gradient_norm"] / steps[0]["gradient_norm"] - 1) > 0.01, "the sums are different"
    assert len(steps) == 3
    for step in steps:
        assert step["reward_mean"] == pytest.approx(step["reward/judge"] + 0.5 * step["reward/redness"])
        assert step["reward/judge/prompt_tokens"] == 100 and step["zero_spread_groups"] == 0
    reasons = [
        action.reason
        for decision in read_journal(run.journal)
        for action in decision.actions
        if isinstance(action, Quarantine)
    ]
    assert reasons and all("400: no cats" in reason for reason in reasons)


def test_a_reward_of_groups_compares_all_samples_of_a_prompt(live: LiveRuns) -> None:
    rank = {"name": "live_rewards:redness_rank", "scores": "groups"}
    run = live.finished(f"rewards={json.dumps(rank)}", "batch.slice=4", "steps=2")
    # Ranks 0, 1/3, 2/3 and 1: their std tells that no call had fewer samples.
    for step in lines_of(run.metrics):
        assert (step["reward_mean"], step["reward_std"]) == pytest.approx((0.5, math.sqrt(5) / 6))


@pytest.mark.parametrize(
    ("change", "noun"),
    [({"template": "absent.txt"}, r"absent\.txt"), ({"token_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE")],
)
def test_a_judge_that_cannot_be_asked_is_an_error_before_the_run_starts(
    live: LiveRuns, change: dict[str, str], noun: str
) -> None:
    judge = {"name": "judge", "url": "http://127.0.0.1:9/v1", "model": "m", "template": "ocr", "token_env": None}
    path = live.new_path()
    with pytest.raises(ConfigError, match=f"'judge': .*{noun}"):
        live.run(f"rewards={json.dumps(judge | change)}", "mode=colocated", out=path)
    assert not path.exists()
