"""Pools that get new versions at different times: each lane starts as soon as its own pool has the version."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from random_specs import publish_to_all_at_once, spec_contents

from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.spec import Spec
from digenrl.simulation.makespan import predict_makespan
from digenrl.simulation.simulator import simulate
from digenrl.telemetry.trace import Work

FAR, NEAR = 10, 1
TWO_SITES: dict[str, Any] = {
    "steps": 2,
    "prompts": 1,
    "samples_per_prompt": 2,
    "slice": 1,
    "generators": [
        {"name": "far", "seconds": {1: 2}, "publish": FAR},
        {"name": "near", "seconds": {1: 2}},
    ],
    "trainer": {"seconds_per_sample": 1},
    "publish": NEAR,
}


def answer(content: dict[str, Any], **policy: Any) -> dict[str, Any]:
    return asdict(simulate(parse_model(Spec, {**content, "policy": policy})).answer)


def test_a_slow_pool_delays_no_other() -> None:
    """The near lane has version 1 at 5 s and generates both samples; with one time for all it would be 18 s."""
    assert answer(TWO_SITES)["step_end"] == (4, 11)
    pools = [{"name": pool["name"], "seconds": pool["seconds"]} for pool in TWO_SITES["generators"]]
    assert answer({**TWO_SITES, "generators": pools, "publish": FAR})["step_end"] == (4, 18)


def test_among_equally_fast_lanes_the_one_with_newer_weights_goes_first() -> None:
    """One sample may be stale: the near lane takes it at 2 s, and the other one with version 1, at 5 s."""
    run = simulate(parse_model(Spec, {**TWO_SITES, "policy": {"stale_fraction": 0.5}}))
    generated = [span for span in run.trace.spans if span.work is Work.GENERATE and span.step == 1]
    assert [(span.lane, span.start_ns / 1e9, span.version) for span in generated] == [
        ("near-0", 2, 0),
        ("near-0", 5, 1),
    ]
    assert run.answer.step_end == (4, 9)


def test_a_pool_that_is_always_late_still_generates_stale_samples() -> None:
    """Version k arrives at the far pool after step k is committed; it works one version behind, never more."""
    run = simulate(
        parse_model(
            Spec,
            {**TWO_SITES, "steps": 6, "prompts": 4, "publish": 0.5, "policy": {"stale_fraction": 0.5}},
        )
    )
    spans = [span for span in run.trace.spans if span.work is Work.GENERATE]
    staleness = {span.step - span.version for span in spans if span.lane == "far-0"}
    assert staleness <= {0, 1}
    assert any(span.lane == "far-0" and span.step - span.version == 1 for span in spans)


@settings(max_examples=30)
@given(spec_contents(helps=("none", "greedy", "search", "auto"), dispatches=("eager", "earliest_finish")))
def test_the_same_time_for_every_pool_is_one_time_for_all(content: dict[str, Any]) -> None:
    publish_to_all_at_once(content, content["publish"])
    together = simulate(parse_model(Spec, content)).answer
    for pool in content["generators"]:
        pool["publish"] = content["publish"]
    content["publish"] = 123
    assert simulate(parse_model(Spec, content)).answer == together


@settings(max_examples=30)
@given(spec_contents(helps=("none", "greedy"), dispatches=("eager", "earliest_finish"), colocated=False))
def test_the_quick_prediction_equals_the_simulation(content: dict[str, Any]) -> None:
    content["generators"][0]["publish"] = 2.5
    spec = parse_model(Spec, content)
    assert predict_makespan(spec) == pytest.approx(simulate(spec).answer.makespan, abs=1e-9)


def test_a_negative_time_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_model(Spec, {**TWO_SITES, "generators": [{"seconds": {1: 2}, "publish": -1}]})
    assert refused.value.where == "generators[0].publish"
