"""Measured costs override the cost model, and suffice to plan a model that it does not know."""

from __future__ import annotations

from typing import Any

import pytest

from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.spec import ScheduleRules
from digenrl.planning.candidates import PlanOptions
from digenrl.planning.costs import commit_seconds, lane_slice_seconds, slice_seconds, unit_seconds
from digenrl.planning.facts.cluster import CardPool, Cluster, Measured
from digenrl.planning.facts.workload import Workload, workload_for
from digenrl.planning.layout import Layout, best_trainer, fitting_slices, generator_layout
from digenrl.planning.planner import plan
from digenrl.planning.results.plans import PlanResult
from digenrl.planning.spec_builder import build_spec

FLUX = workload_for("flux", prompts=4, samples_per_prompt=8)
TINY = Workload(
    model="tiny", height=32, width=32, denoise_steps=4, trained_share=0.75, prompts=4,
    samples_per_prompt=8,
)  # fmt: skip
COSTS = {
    "slice_seconds": {1: 1.0, 4: 2.5},
    "train_seconds_per_sample": 0.6,
    "commit_seconds": 0.3,
    "publish_seconds": 0.2,
}


def pool(name: str = "lab", nodes: int = 2, **changes: Any) -> CardPool:
    content = {"name": name, "nodes": nodes, "per_node": 1, "measured": COSTS, **changes}
    return parse_model(CardPool, content)


def planned(workload: Workload, *pools: CardPool, **options: Any) -> PlanResult:
    cluster = Cluster(pools=pools)
    return plan(workload, cluster, PlanOptions(**options))


def test_sizes_between_two_measured_ones_are_interpolated():
    measured = Measured(slice_seconds={1: 1.0, 4: 2.5, 8: 6.5})
    assert [measured.slice_s(size) for size in (1, 2, 4, 6, 8)] == [1.0, 1.5, 2.5, 4.5, 6.5]
    assert not measured.covers(12)
    assert not Measured(slice_seconds={4: 2.5}).covers(1)


def test_a_measured_slice_overrides_the_modeled_one_and_other_sizes_are_not_used():
    measured = pool(card="H100")
    layout = generator_layout(FLUX, measured, 2)
    assert layout is not None and layout.lanes == 2
    assert lane_slice_seconds(FLUX, measured, 2) == 1.5
    assert lane_slice_seconds(FLUX, pool(card="H100", measured={}), 2) == slice_seconds(FLUX, measured.card, 2)
    trainer = best_trainer(FLUX, measured, 1, 8)
    assert trainer is not None
    assert fitting_slices(FLUX, Layout((layout,), trainer, 1)) == (1, 2, 4)


def test_ranks_share_the_pairs_of_a_group_and_the_busiest_rank_sets_the_time():
    workload = TINY.model_copy(update={"samples_per_prompt": 3, "prompts": 1})  # 9 pairs in a group
    seconds = {}
    for ranks in (1, 2, 9):
        trainer = best_trainer(workload, pool(nodes=9), ranks, 3)
        assert trainer is not None
        seconds[ranks] = unit_seconds(workload, trainer, 3)
        assert commit_seconds(workload, trainer) == 0.3
    assert seconds == pytest.approx({1: 1.8, 2: 1.8 * 5 / 9, 9: 0.2})


def test_the_spec_contains_the_measured_times():
    lab = pool()
    trainer, lanes = best_trainer(TINY, lab, 1, 8), generator_layout(TINY, lab, 1)
    assert trainer is not None and lanes is not None
    spec = build_spec(TINY, Layout((lanes,), trainer, 1), 2, ScheduleRules(), steps=1)
    (generators,) = spec.generators
    assert {size: float(seconds) for size, seconds in generators.seconds.items()} == {1: 1.0, 2: 1.5, 4: 2.5}
    assert float(spec.trainer.seconds_per_sample) == 0.6
    assert (float(spec.trainer.commit), float(spec.publish)) == (0.3, 0.2)


def test_the_slowest_pool_sets_the_time_of_publishing():
    far = pool("far", measured={**COSTS, "publish_seconds": 5.0})
    spec = planned(TINY, pool(), far, keep=1, stale_shares=(0.0,)).best.spec
    names = {generators.name for generators in spec.generators}
    assert float(spec.publish) == (5.0 if "far" in names else 0.2)


def test_a_lane_that_scores_its_samples_takes_longer():
    scoring = TINY.model_copy(update={"reward_seconds": 0.25})
    assert lane_slice_seconds(scoring, pool(), 4) == 2.5 + 4 * 0.25
    apart = scoring.model_copy(update={"reward_lanes": 1})
    assert lane_slice_seconds(apart, pool(), 4) == 2.5


def test_a_model_without_facts_is_planned_with_measured_costs():
    slow = pool("slow", measured={"slice_seconds": {1: 3.0, 8: 20.0}})
    result = planned(TINY, pool("fast", 4), slow)
    assert result.best.trainer_memory is None
    assert {found.layout.trainer.pool.name for found in result.plans} == {"fast"}, "slow has no training time"


def test_machines_without_a_card_are_used_only_for_measured_work():
    untrained = pool(measured={"slice_seconds": {1: 1.0, 8: 2.0}})
    assert best_trainer(FLUX, untrained, 1, 8) is None
    cards = parse_model(CardPool, {"card": "H100", "per_node": 2})
    result = planned(FLUX, untrained, cards)
    assert {found.layout.trainer.pool.name for found in result.plans} == {"H100"}


@pytest.mark.parametrize(
    ("workload", "pools", "complaint"),
    [
        (TINY, [{"slice_seconds": {1: 1.0}}], "measured.slice_seconds .* measured.train_seconds_per_sample"),
        (TINY, [{"train_seconds_per_sample": 1.0}], "tiny .*catalog"),
        (
            TINY,
            [{"slice_seconds": {3: 1.0}, "train_seconds_per_sample": 1.0}],
            "samples_per_prompt = 8; .* 1, 2, 4, 8",
        ),
        (FLUX, [{"slice_seconds": {1: 1.0}}], "no pool has a card"),
    ],
)
def test_missing_measurements_are_an_error_of_one_line(workload, pools, complaint):
    with pytest.raises(ConfigError, match=complaint) as error:
        planned(workload, *(pool(measured=measured) for measured in pools))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"nodes": 2}, "no card"),
        ({"name": "lab"}, "no card"),
        ({"name": "lab", "measured": {"slice_second": {1: 1}}}, "'slice_seconds'"),
        ({"name": "lab", "measured": {"slice_seconds": {1: 0}}}, r"slice_seconds\[1\]: .*greater than 0, got 0"),
        ({"name": "lab", "measured": {"slice_seconds": {}}}, "slice_seconds"),
        ({"card": "H100", "measured": {"commit_seconds": -1}}, "commit_seconds: .*got -1"),
        (
            {"card": "H100", "measured": {"train_seconds_per_sample": 5e9}},
            "train_seconds_per_sample: .*got 5000000000",
        ),
    ],
)
def test_an_invalid_pool_is_an_error_of_one_line(content, complaint):
    with pytest.raises(ConfigError, match=complaint) as error:
        parse_model(Cluster, {"pools": [content]})
    assert "\n" not in str(error.value)


def test_two_pools_of_one_card_have_different_names():
    pools = [{"card": "H100", "name": "east"}, {"card": "H100", "name": "west"}]
    cluster = parse_model(Cluster, {"pools": pools})
    assert [each.name for each in cluster.pools] == ["east", "west"]


def test_the_machines_of_a_pool_are_selected_by_its_keys_or_by_its_card():
    assert parse_model(CardPool, {"card": "rtx-pro-6000"}).place == {"accelerator": "RTX-PRO-6000"}
    labeled = parse_model(CardPool, {"card": "H100", "labels": {"zone": "east"}})
    assert labeled.place == {"labels": {"zone": "east"}}
    assert pool(resources={"lab": 1}).place == {"resources": {"lab": 1.0}}
    assert pool().place == {}
