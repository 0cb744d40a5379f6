"""A whole run with a judge on a real server, beside another reward, each normalised within its group."""

from __future__ import annotations

import json

import pytest
from judge_serving import ChatServer, Said, judging, text_of
from live_runs import LiveRuns, lines_of

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
        judge |= {"answer": {"field": "score"}, "cache": "answers"}
        rewards = f"rewards={json.dumps([judge, {'name': 'live_rewards:redness', 'weight': 0.5}])}"
        run = live.finished(rewards, "reward_sum=normalised", "mode=colocated", "steps=3")
    steps = lines_of(run.metrics)
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
