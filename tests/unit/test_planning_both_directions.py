"""Plans in which every card generates and trains: when they are possible, what they cost, and how they compare."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
import yaml
from rich.console import Console

from digenrl.commands.plan import PlanFiles, search_plans, show_plans
from digenrl.config.plan_files import PlanFile, overrides_of
from digenrl.config.reading import parse_model
from digenrl.config.recipes.files import read_recipe
from digenrl.config.spec import Spec
from digenrl.planning.both_directions import MOST_CARDS, SLICE_SIZES, SharedResult, best_shared_plan
from digenrl.planning.candidates import PlanOptions
from digenrl.planning.colocated import colocated_plan
from digenrl.planning.costs import commit_seconds, reduce_seconds, switch_seconds, unit_seconds
from digenrl.planning.facts.cluster import CardPool, Cluster
from digenrl.planning.facts.recipe_workload import options_for
from digenrl.planning.facts.workload import Workload, workload_for
from digenrl.planning.memory import GIB, generator_memory, shared_card_memory, trainer_memory
from digenrl.planning.planner import plan
from digenrl.planning.results.plan_kinds import compared
from digenrl.planning.results.plan_overlay import overlay, overlay_text
from digenrl.planning.results.plan_tables import result_as_dict, spec_as_dict
from digenrl.planning.results.plans import PlanResult
from digenrl.planning.shared_layout import shared_layouts, shared_slices
from digenrl.planning.shared_spec import build_shared_spec
from digenrl.simulation.simulator import simulate

TINY = Workload(
    model="tiny", height=32, width=32, denoise_steps=4, trained_share=0.75, prompts=8,
    samples_per_prompt=8,
)  # fmt: skip
COSTS = {
    "slice_seconds": {1: 1.0, 4: 3.8},
    "train_seconds_per_sample": 0.8,
    "commit_seconds": 0.1,
    "publish_seconds": 0.1,
}
SHARED = PlanOptions(job_samples=1, steps=3, stale_shares=(0.0,), keep=2)


def pool(name: str = "lab", nodes: int = 5, **measured: Any) -> CardPool:
    content = {"name": name, "nodes": nodes, "per_node": 1, "measured": {**COSTS, **measured}}
    return parse_model(CardPool, content)


def cards(*pools: dict[str, Any]) -> Cluster:
    return parse_model(Cluster, {"pools": list(pools)})


H100S = cards({"card": "H100", "per_node": 8})


@pytest.fixture(scope="module")
def equal_cards() -> PlanResult:
    return plan(TINY, Cluster(pools=(pool(),)), SHARED)


def test_on_equal_cards_that_no_split_keeps_busy_both_directions_wins(equal_cards: PlanResult):
    best, split, *_ = equal_cards.plans
    assert (best.kind, best.layout.split) == ("both directions", "5 lab generate and train")
    ahead = best.samples_per_second / split.samples_per_second - 1
    assert equal_cards.comparison.startswith(f"Both directions wins: {ahead:.1%} faster than the best split")
    assert split.layout.split in equal_cards.comparison and "busy" in equal_cards.comparison


def test_a_split_that_keeps_all_cards_busy_is_not_said_to_leave_them_idle(equal_cards: PlanResult):
    best, split, *_ = equal_cards.plans
    best = replace(best, efficiency=0.999)
    split = replace(split, makespan_s=1.002 * best.makespan_s, samples_per_second=best.samples_per_second / 1.002)
    words = compared(split, SharedResult(best, "", {}, 1, 1), None, "throughput")
    assert words.startswith("Both directions wins") and "no split" not in words


def test_the_prediction_is_that_of_the_simulated_spec(equal_cards: PlanResult):
    best = equal_cards.best
    answer = simulate(best.spec).answer
    assert best.makespan_s == answer.makespan
    assert answer.assisted_samples > 0
    assert best.spec.shares_work and best.spec.trainer.job == 1
    assert parse_model(Spec, json.loads(json.dumps(spec_as_dict(best)))) == best.spec


def test_the_result_names_the_kind_of_every_plan_and_compares_them(equal_cards: PlanResult):
    content = json.loads(json.dumps(result_as_dict(equal_cards)))
    assert [found["kind"] for found in content["plans"]] == [found.kind for found in equal_cards.plans]
    assert content["colocated"]["kind"] == "colocated"
    assert content["comparison"] == equal_cards.comparison
    console = Console(file=io.StringIO(), width=200)
    show_plans(console, equal_cards, [], PlanFiles(None, None))
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    for kind in ("both directions: 5 lab", "trainer helps: ", "colocated: 5 lab generate, then train"):
        assert kind in printed
    assert equal_cards.comparison in " ".join(printed.split())


def test_colocated_cards_are_a_comparison_and_never_a_plan(equal_cards: PlanResult):
    assert equal_cards.colocated is not None
    assert all(found.kind != "colocated" for found in equal_cards.plans)
    assert "Colocated cards" in equal_cards.comparison


def test_a_colocated_step_is_generation_two_switches_training_and_a_commit():
    workload = workload_for("wan", prompts=4, samples_per_prompt=4)
    found = colocated_plan(workload, H100S, PlanOptions(steps=2))
    assert found is not None
    trainer = found.layout.trainer
    assert trainer.cards == 8
    size = found.spec.slice
    rounds = 16 / size / 8
    expected = (
        max(1, rounds) * float(found.spec.generators[0].seconds[size])
        + sum(switch_seconds(workload, trainer, 1))
        + unit_seconds(workload, trainer, 16)
        + commit_seconds(workload, trainer)
    )
    assert found.step_s == pytest.approx(expected, rel=1e-4)


def test_cards_without_a_measured_training_time_only_generate():
    slow = parse_model(
        CardPool, {"name": "slow", "nodes": 3, "per_node": 1, "measured": {"slice_seconds": {1: 2.0, 4: 7.0}}}
    )
    found = best_shared_plan(TINY, Cluster(pools=(slow, pool())), SHARED).plan
    assert found is not None
    trains = {each.name: each.train_seconds for each in found.spec.generators}
    assert trains["lab"] is not None and trains.get("slow") is None
    assert found.layout.trainer.pool.name == "lab"


def test_cards_with_room_for_larger_slices_generate_larger_ones():
    few = pool("small", 3, slice_seconds={1: 1.0, 2: 1.9})
    large = pool("large", 3, slice_seconds={1: 1.0, 8: 2.0})
    workload = TINY.model_copy(update={"prompts": 24})
    found = best_shared_plan(workload, Cluster(pools=(few, large)), SHARED).plan
    assert found is not None
    slices = {g.pool.name: own for g, own in zip(found.layout.generators, found.slices, strict=True)}
    assert slices["small"] <= 2 < slices["large"]


def test_training_alone_costs_what_one_card_needs_for_a_job():
    workload = workload_for("sd3.5")
    (layout,) = shared_layouts(workload, H100S, 3, PlanOptions())
    spec = build_shared_spec(workload, layout, (1,), 3, steps=1)
    alone_s = unit_seconds(workload, layout.trainer, 3) / 3
    assert float(spec.generators[0].train_seconds) == pytest.approx(alone_s, rel=1e-5)
    assert float(spec.trainer.seconds_per_sample) == pytest.approx(alone_s, rel=1e-5)
    assert spec.generators[0].count == 7 and spec.generators[0].switch == 0


def test_gradient_sums_of_all_other_cards_cross_the_trainers_link():
    workload = workload_for("sd3.5")
    once = reduce_seconds(workload, 7, 50e9)
    assert once == pytest.approx(7 * 8 * workload.trained_parameters / 50e9 + 0.005)
    twice = reduce_seconds(workload.model_copy(update={"updates_per_batch": 2}), 7, 50e9)
    assert twice > 2 * once
    assert reduce_seconds(TINY, 7, 50e9) == 0


def test_a_card_that_does_both_holds_frozen_weights_once_and_gradient_sums():
    workload, card = workload_for("flux"), H100S.pools[0].card
    generating, training = generator_memory(workload, card, 2), trainer_memory(workload, card, 1, 2, True)
    both = shared_card_memory(workload, card, 2, 2, True)
    sums = 8 * workload.trained_parameters / GIB
    assert both.optimizer_gib == pytest.approx(training.optimizer_gib + sums)
    assert both.weights_gib == pytest.approx(generating.weights_gib)
    assert both.activations_gib == max(generating.activations_gib, training.activations_gib)


def test_larger_slices_than_fit_beside_the_training_state_are_excluded():
    workload = workload_for("hunyuan", height=720, width=1280, frames=129, samples_per_prompt=8)
    (layout,) = shared_layouts(workload, cards({"card": "H200", "per_node": 2}), 1, PlanOptions())
    sizes, _ = shared_slices(workload, layout)
    assert sizes and sizes[-1] < 8
    trainer = layout.trainer
    for size in workload.slice_sizes():
        memory = shared_card_memory(workload, trainer.pool.card, size, trainer.pack, trainer.checkpointing)
        assert memory.fits == (size in sizes)


def test_full_fine_tuning_that_does_not_fit_beside_generation_keeps_dedicated_lanes():
    recipe = read_recipe("flux_mix_grpo", ["algorithm.options.updates_per_batch=1"], without_prompts=True)
    workload = workload_for("flux", tuning="full", prompts=4, samples_per_prompt=4)
    options = options_for(recipe, PlanOptions(steps=2, keep=1, stale_shares=(0.0,)))
    assert options.job_samples is not None
    result = plan(workload, H100S, options)
    needed = shared_card_memory(workload, H100S.pools[0].card, 1, 1, True)
    assert [found.kind for found in result.plans] == ["disaggregated"]
    lacks = f"H100 lacks {needed.total_gib - needed.available_gib:.1f} GiB"
    assert lacks in result.comparison


def test_a_measured_training_time_does_not_make_room_beside_generation():
    measured = {"card": "H100", "per_node": 4, "measured": {"train_seconds_per_sample": 1.0}}
    shared = best_shared_plan(workload_for("flux", tuning="full"), cards(measured), SHARED)
    assert shared.plan is None and "H100 lacks" in shared.why_not


def test_cards_that_are_too_small_to_train_generate_for_those_that_do_both():
    mixed = cards({"card": "H100", "per_node": 4}, {"card": "RTX 4090", "per_node": 4})
    workload = workload_for("sd3.5", tuning="full", height=256, width=256, prompts=8, samples_per_prompt=8)
    shared = best_shared_plan(workload, mixed, SHARED)
    assert shared.plan is not None and set(shared.missing_gib) == {"RTX 4090"}
    trains = {each.name: each.train_seconds for each in shared.plan.spec.generators}
    assert trains["H100"] is not None and trains.get("RTX 4090") is None
    comparison = plan(workload, mixed, SHARED).comparison
    assert f"RTX 4090 (lacks {shared.missing_gib['RTX 4090']:.1f} GiB)" in comparison


@pytest.mark.parametrize(
    ("recipe", "overrides", "ranks", "why"),
    [
        ("sd3_flow_dpo", ("techniques.assist=none",), None, "techniques.assist"),
        ("sd3_flow_dpo", ("techniques.tag=none",), None, "techniques.tag"),
        ("sd3_flow_dpo", ("techniques.gap=false",), None, "techniques.gap"),
        ("sd3_flow_dpo", (), 4, "--ranks is 4"),
    ],
)
def test_a_recipe_that_cannot_share_training_says_why(recipe, overrides, ranks, why):
    options = options_for(read_recipe(recipe, [*overrides], without_prompts=True), PlanOptions(ranks=ranks))
    assert options.job_samples is None
    shared = best_shared_plan(TINY, Cluster(pools=(pool(),)), options)
    assert shared.plan is None and why in shared.why_not


def test_a_recipe_without_help_is_planned_without_help():
    options = options_for(read_recipe("demo", ["techniques.assist=none"]), PlanOptions())
    assert options.helps == ("none",)


def test_few_plans_of_cards_that_do_both_are_tried():
    three = Cluster(pools=(pool("a"), pool("b"), pool("c")))
    shares = (0.0, 0.25, 0.5)
    shared = best_shared_plan(TINY, three, PlanOptions(job_samples=1, steps=2, stale_shares=shares))
    assert shared.evaluated <= 4 * (SLICE_SIZES + 1) + len(shares) + 1
    many = best_shared_plan(TINY, Cluster(pools=(pool(nodes=MOST_CARDS + 1),)), SHARED)
    assert many.plan is None and many.evaluated == 0 and str(MOST_CARDS) in many.why_not


def test_a_stale_share_has_to_gain_something():
    cluster = Cluster(pools=(pool(publish_seconds=0.0),))
    even = best_shared_plan(TINY, cluster, PlanOptions(job_samples=1, steps=3)).plan
    late = Cluster(pools=(pool(publish_seconds=6.0),))
    stale = best_shared_plan(TINY, late, PlanOptions(job_samples=1, steps=3)).plan
    assert even is not None and stale is not None
    assert even.spec.policy.stale_fraction < stale.spec.policy.stale_fraction


def test_a_plan_for_both_directions_is_a_recipe_whose_cards_do_both():
    overrides = ["algorithm.options.updates_per_batch=1"]
    recipe = read_recipe("demo", overrides)
    lab = parse_model(
        Cluster,
        {
            "pools": [
                {
                    **pool().model_dump(include={"name", "nodes", "per_node"}),
                    "labels": {"class": "lab"},
                    "measured": {**COSTS, "slice_seconds": {1: 1.0, 12: 11.8}},
                }
            ]
        },
    )
    result = search_plans(recipe, lab, PlanOptions(keep=1, steps=2, stale_shares=(0.0,)))
    best = result.best
    assert best.kind == "both directions"
    text = overlay_text(overlay(best, recipe, "demo"), best)
    over = read_recipe("demo", overrides_of(parse_model(PlanFile, yaml.safe_load(text)), overrides))
    assert over.shares_work and over.lanes.ranks == 1 and over.lanes.rewards == recipe.lanes.rewards
    assert [each.count for each in over.cluster.generators] == [4]
    assert over.batch.slice == best.spec.slice
    assert over.job_samples == best.spec.trainer.job


def test_a_model_of_the_catalog_is_compared_as_well():
    workload = workload_for("wan", prompts=4, samples_per_prompt=4)
    result = search_plans(workload, H100S, PlanOptions(keep=1, steps=2, stale_shares=(0.0,)))
    assert {found.kind for found in result.plans} >= {"both directions"}
    fixed = search_plans(workload, H100S, PlanOptions(keep=1, steps=2, stale_shares=(0.0,), ranks=2))
    assert all(found.kind != "both directions" for found in fixed.plans)
