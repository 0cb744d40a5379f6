"""The planner finds the optimum of its search space, respects memory, and explains its choice."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.spec import Spec
from digenrl.planning.candidates import PlanOptions, candidates, splits
from digenrl.planning.facts.cluster import CardPool, Cluster, read_cluster
from digenrl.planning.facts.workload import workload_for
from digenrl.planning.planner import plan
from digenrl.planning.results.plan_tables import (
    plan_reasons,
    plans_table,
    rate_words,
    result_as_dict,
    spec_as_dict,
)
from digenrl.simulation.makespan import predict_makespan
from digenrl.simulation.simulator import simulate

EXAMPLES = Path(__file__).parents[2] / "examples"
CLIP = workload_for("wan", prompts=2, samples_per_prompt=4)


def cluster_of(*pools: tuple[str, int]) -> Cluster:
    return Cluster(
        pools=tuple(
            CardPool.model_validate({"card": card, "nodes": nodes, "network_gbit_s": 200}) for card, nodes in pools
        )
    )


def planned(workload, cluster, **options):
    return plan(workload, cluster, PlanOptions(**options))


SMALL = cluster_of(("H100", 1))
MIXED = read_cluster(EXAMPLES / "cluster_mixed.yaml")


@pytest.fixture(scope="module")
def small_result():
    return planned(CLIP, SMALL)


@pytest.fixture(scope="module")
def mixed_result():
    return planned(CLIP, MIXED)


def test_pruning_finds_the_best_of_all_candidates():
    options = PlanOptions(steps=2, tolerance=0.0)
    everything = [
        predict_makespan(candidate.spec(CLIP, 2))
        for cards in range(1, 8)
        for candidate in candidates(CLIP, splits(CLIP, SMALL, SMALL.pools[0], cards, options), options)
    ]
    found = plan(CLIP, SMALL, options)
    assert found.considered == len(everything)
    assert found.evaluated < len(everything)
    assert predict_makespan(found.best.spec) == pytest.approx(min(everything), rel=1e-9)


def test_plans_are_sorted_one_per_split_and_use_every_card_at_most_once(mixed_result):
    rates = [plan.samples_per_second for plan in mixed_result.plans]
    assert rates == sorted(rates, reverse=True)
    assert len({plan.layout.split for plan in mixed_result.plans}) == len(rates) == 5
    for found in mixed_result.plans:
        assert found.layout.cards <= MIXED.cards
        train = found.layout.trainer
        same_pool = [g.cards for g in found.layout.generators if g.pool == train.pool]
        assert train.cards + sum(same_pool) <= train.pool.cards


def test_every_plan_fits_in_memory(mixed_result, small_result):
    for found in (*mixed_result.plans, *small_result.plans):
        assert found.trainer_memory.fits
        assert all(memory.fits for memory in found.generator_memory)


def test_the_prediction_is_that_of_the_simulator(small_result):
    answer = simulate(small_result.best.spec).answer
    assert small_result.best.makespan_s == answer.makespan
    assert small_result.best.generator_busy == 1 - answer.generator_idle


def test_the_best_plan_beats_an_even_split_on_policy_without_help(small_result):
    naive = planned(CLIP, SMALL, stale_shares=(0.0,), helps=("none",))
    assert small_result.best.samples_per_second > naive.best.samples_per_second


def test_on_policy_means_no_stale_share_anywhere():
    result = planned(CLIP, SMALL, stale_shares=(0.0,))
    assert {found.spec.policy.stale_fraction for found in result.plans} == {0}


def test_cost_is_cards_times_price_over_throughput(small_result):
    best = small_result.best
    expected = best.layout.cards * 2.5 / 3600 * 1000 / best.samples_per_second
    assert best.usd_per_1000_samples == pytest.approx(expected)


def test_asking_for_cost_finds_cheaper_samples(mixed_result):
    cheap = planned(CLIP, MIXED, objective="cost")
    assert cheap.best.usd_per_1000_samples < mixed_result.best.usd_per_1000_samples
    assert "more expensive" in cheap.plans[-1].why


def test_runners_up_explain_their_distance_to_the_best_plan(mixed_result):
    best, *others = mixed_result.plans
    assert "sets the pace" in best.why
    for other in others:
        behind = best.samples_per_second / other.samples_per_second - 1
        assert other.why.startswith((f"{behind:.1%} slower: ", "as fast"))


def test_a_written_spec_parses_as_the_planned_spec(small_result):
    content = json.loads(json.dumps(spec_as_dict(small_result.best)))
    again = parse_model(Spec, content)
    assert again == small_result.best.spec


def test_the_result_can_be_written_as_json(mixed_result):
    content = json.loads(json.dumps(result_as_dict(mixed_result)))
    assert content["plans"][0]["trainer"]["memory"]["total_gib"] > 0
    assert content["considered"] == mixed_result.considered


def test_the_table_shows_every_plan_and_the_reasons_are_numbered_like_it(mixed_result):
    console = Console(width=240, record=True, file=io.StringIO())
    console.print(plans_table(mixed_result.plans))
    text = console.export_text()
    for found in mixed_result.plans:
        assert rate_words(found.samples_per_second) in text
        assert f"{found.usd_per_1000_samples:.2f}" in text
    assert [line[:2] for line in plan_reasons(mixed_result.plans)] == ["1.", "2.", "3.", "4.", "5."]


def test_progress_increases_to_its_total():
    seen = []
    plan(CLIP, SMALL, PlanOptions(steps=2), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_small_budget_shows_in_the_gap(mixed_result):
    hurried = planned(CLIP, MIXED, max_evaluations=1, keep=1)
    assert hurried.evaluated <= 1 + 4 + 2 + 6  # polishing, then less staleness and slices per pool
    assert hurried.best.samples_per_second <= mixed_result.best.samples_per_second * 1.0001
    assert mixed_result.proven_gap <= PlanOptions().tolerance


@pytest.mark.parametrize(
    ("workload", "cluster", "complaint"),
    [
        (CLIP, {"card": "H100", "per_node": 1}, "one card"),
        (
            workload_for("qwen"),
            {"card": "RTX 4090", "per_node": 2},
            r"Qwen-Image \(lora\) does not fit .*RTX 4090.* 21.7 GiB",
        ),
        (workload_for("wan", tuning="full"), {"card": "H100", "per_node": 2}, "or use LoRA"),
        (  # quantized weights cannot be sharded
            workload_for("qwen", base="int8", lora_rank=128),
            {"card": "RTX 4090", "per_node": 8},
            r"training over 1 needs 2\d.* GiB.*nf4",
        ),
    ],
)
def test_a_cluster_that_is_too_small_is_an_error_of_one_line(workload, cluster, complaint):
    with pytest.raises(ConfigError, match=complaint) as error:
        planned(workload, parse_model(Cluster, {"pools": [cluster]}))
    assert "\n" not in str(error.value)


def test_few_of_the_plans_for_32_mixed_cards_are_simulated():
    result = planned(workload_for("flux"), MIXED, steps=2, keep=1)
    assert result.every_size
    assert result.evaluated < 0.05 * result.considered


def test_1024_mixed_cards_are_searched_on_a_refined_grid():
    huge = cluster_of(("RTX A6000", 64), ("H100", 32), ("RTX PRO 6000 Blackwell", 32))
    result = planned(workload_for("hunyuan", prompts=16), huge, steps=2, keep=2)
    assert not result.every_size
    assert result.evaluated <= PlanOptions().max_evaluations
    assert result.best.layout.trainer.cards % 8 == 0 or result.best.layout.trainer.cards < 8
