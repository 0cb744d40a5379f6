"""From a recipe to a workload, to a plan, and back to keys of the recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from digenrl.commands.plan import search_plans
from digenrl.config.plan_files import PlanFile, check_planned_for, overrides_of, read_plan
from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.recipe import AlgorithmChoice, Recipe
from digenrl.config.recipe_files import read_recipe
from digenrl.planning.candidates import PlanOptions
from digenrl.planning.cluster import CardPool, Cluster, read_cluster
from digenrl.planning.layout import best_trainer
from digenrl.planning.plan_overlay import overlay, overlay_text
from digenrl.planning.plans import Plan
from digenrl.planning.recipe_workload import options_for, workload_of
from digenrl.planning.workload import workload_for

EXAMPLES = Path(__file__).parents[2] / "examples"
MIXED = read_cluster(EXAMPLES / "cluster_mixed.yaml")
MEASURED = read_cluster(EXAMPLES / "cluster_measured.yaml")


def recipe_of(name: str, *overrides: str) -> Recipe:
    return read_recipe(name, overrides, without_prompts=True)


def best(recipe: Recipe, cluster: Cluster, **options: Any) -> Plan:
    options = {"keep": 1, "steps": 2, **options}
    return search_plans(recipe, cluster, PlanOptions(**options)).best


def plan_file(found: Plan, recipe: Recipe, name: str) -> PlanFile:
    return parse_model(PlanFile, yaml.safe_load(overlay_text(overlay(found, recipe, name), found)))


@pytest.fixture(scope="module")
def demo_plan() -> Plan:
    return best(recipe_of("demo"), MEASURED)


def test_a_workload_is_what_the_recipe_says():
    workload = workload_of(recipe_of("sd3_flow_grpo", "lanes.rewards=3"), MIXED)
    assert (workload.model, workload.tuning, workload.lora_rank) == ("SD3.5-M", "lora", 32)
    assert (workload.prompts, workload.samples_per_prompt, workload.reward_lanes) == (48, 24, 3)
    assert workload.pairs_per_sample == 9
    assert workload.reference_forward and workload.branches == 2
    assert (workload.updates_per_batch, workload.old_policy_forward) == (2, 0.5)


@pytest.mark.parametrize(
    ("name", "overrides", "key", "value"),
    [
        ("sd3_flow_grpo_fast", (), "branches", 1),  # guidance 1
        ("sd3_flow_grpo_fast", (), "pairs_per_sample", 3),
        ("sd3_flow_grpo", ("algorithm.options.kl_weight=0",), "reference_forward", False),
        ("sd3_flow_grpo", ("sample.window={kind: fast, width: 4}",), "pairs_per_sample", 4),
        ("sd3_flow_grpo", ("training.old_log_probs=rollout",), "old_policy_forward", 0.0),
        ("flux_mix_grpo", (), "tuning", "full"),
        ("flux_mix_grpo", (), "float32_weights", True),
        ("flux_dance_grpo", (), "pairs_per_sample", 9),
        ("hunyuan_video_dance_grpo", (), "trained_per_prompt", 8),
        ("wan_flow_grpo", (), "model", "Wan2.1-1.3B"),
        ("wan_flow_grpo", ("model.source=Wan-AI/Wan2.1-T2V-14B-Diffusers",), "model", "Wan2.1-14B"),
    ],
)
def test_what_bears_on_costs_is_read_from_the_recipe(name, overrides, key, value):
    assert getattr(workload_of(recipe_of(name, *overrides), MIXED), key) == value


def test_an_algorithm_that_compares_with_the_old_policy_has_its_forward_for_every_pair():
    nft = recipe_of("sd3_flow_grpo").model_copy(update={"algorithm": AlgorithmChoice(name="diffusion_nft")})
    workload = workload_of(nft, MIXED)
    assert (workload.old_policy_forward, workload.reference_forward, workload.pairs_per_sample) == (1.0, True, 9)


def test_a_pipeline_on_disk_is_known_by_its_layers(tmp_path: Path):
    (tmp_path / "mine" / "transformer").mkdir(parents=True)
    config = tmp_path / "mine" / "transformer" / "config.json"
    recipe = recipe_of("wan_flow_grpo", f"model.source={tmp_path / 'mine'}")
    config.write_text(json.dumps({"num_attention_heads": 40, "attention_head_dim": 128, "num_layers": 40}))
    assert workload_of(recipe, MIXED).model == "Wan2.1-14B"
    config.write_text(json.dumps({"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}))
    with pytest.raises(ConfigError, match=r"is no model that the catalogue knows .* measured costs"):
        workload_of(recipe, MIXED)


def test_scoring_costs_what_the_slowest_pool_measured():
    assert workload_of(recipe_of("demo"), MEASURED).reward_seconds == 0.01


@pytest.mark.parametrize(
    ("name", "overrides", "complaint"),
    [
        ("demo", (), "model.source: 'demo' .sd3. is no model that the catalogue knows"),
        ("flux_mix_grpo", ("training.autocast=off",), "knows bf16 arithmetic only; set training.autocast=bf16"),
        ("sd3_flow_grpo", ("algorithm.name=flow_grp",), "unknown algorithm 'flow_grp'; did you mean 'flow_grpo'"),
        ("sd3_flow_grpo", ("sample.window={kind: al}",), "unknown window kind 'al'"),
        ("sd3_flow_grpo", ("algorithm.options.kl_weight=-1",), "algorithm.options.kl_weight.*got -1"),
        ("sd3_flow_grpo", ("sample.height=500",), "multiples of 16"),
    ],
)
def test_a_recipe_that_cannot_be_planned_is_told_in_one_line(name, overrides, complaint):
    with pytest.raises(ConfigError, match=complaint) as told:
        workload_of(recipe_of(name, *overrides), MIXED)
    assert "\n" not in str(told.value)


def test_adapters_are_planned_beside_whole_copies_and_full_weights_over_all_ranks_without_help():
    lora = best(recipe_of("flux_dance_grpo"), MIXED)
    assert lora.layout.trainer.shard_cards == 1
    assert all(generator.lane_cards == 1 for generator in lora.layout.generators)
    full = best(recipe_of("flux_mix_grpo"), MIXED)
    assert full.layout.trainer.shard_cards == full.layout.trainer.cards > 1
    assert full.spec.policy.help == "none" and full.layout.helper_lanes == 0


def test_a_trainer_shards_as_the_runtime_does_even_where_another_way_would_do():
    run, cards = options_for(recipe_of("sd3_flow_grpo"), PlanOptions()).capabilities, MIXED.pools[1]
    full, lora = workload_for("sd3.5", tuning="full"), workload_for("flux")
    whole, sharded = best_trainer(full, cards, 8, 24), best_trainer(full, cards, 8, 24, capabilities=run)
    assert whole is not None and sharded is not None
    assert (whole.shard_cards, sharded.shard_cards) == (1, 8)
    small = parse_model(CardPool, {"card": "RTX 4090"})
    assert best_trainer(lora, small, 8, 24) is not None
    assert best_trainer(lora, small, 8, 24, capabilities=run) is None, "a whole copy has no room"


def test_what_the_recipe_switches_off_stays_off():
    base = PlanOptions()
    off = options_for(recipe_of("sd3_flow_grpo", "techniques={tag: none, gap: false, tsp: false}"), base)
    assert (off.helps, off.streams, off.capabilities.packed) == (("none",), ("batch",), False)
    fixed = options_for(recipe_of("demo", "training.gradient_checkpointing=true"), base)
    assert (fixed.capabilities.largest_pack, fixed.capabilities.checkpointing) == (36, (True,))


def test_a_recipe_that_fits_no_card_says_what_it_lacks_as_it_would_run():
    tiny = parse_model(Cluster, {"pools": [{"card": "RTX 4090", "nodes": 4}]})
    with pytest.raises(ConfigError, match=r"generating over 1 needs .*on cards of their own; add cards") as told:
        best(recipe_of("flux_dance_grpo"), tiny)
    assert "training over 1 needs" in str(told.value)


def test_the_ranks_that_were_asked_for_are_planned_and_too_many_are_refused():
    assert best(recipe_of("sd3_flow_grpo"), MIXED, ranks=5).layout.trainer.cards == 5
    with pytest.raises(ConfigError, match="--ranks: 17 ranks are more than one class of cards has: RTX A6000"):
        best(recipe_of("sd3_flow_grpo"), MIXED, ranks=17)


def test_a_plan_over_its_recipe_is_a_recipe_for_ray(demo_plan: Plan):
    recipe = recipe_of("demo")
    plan = plan_file(demo_plan, recipe, "demo")
    check_planned_for(recipe, plan, Path("plan.yaml"))
    over = read_recipe("demo", overrides_of(plan, []))
    assert over.mode == "ray"
    assert over.lanes.ranks == demo_plan.layout.trainer.cards
    assert over.lanes.rewards == 1
    assert over.batch.slice == demo_plan.spec.slice
    assert dict(zip((g.pool.name for g in demo_plan.layout.generators), demo_plan.slices, strict=True)) == {
        "fast": 12,
        "slow": 3,
    }
    lanes = {pool.name: pool for pool in over.cluster.generators}
    for generator, own in zip(demo_plan.layout.generators, demo_plan.slices, strict=True):
        pool = lanes.pop(generator.pool.name)
        assert pool.count == generator.lanes
        assert (pool.slice or over.batch.slice) == own
        assert pool.labels == generator.pool.labels
    assert not lanes
    assert over.cluster.trainer.labels == demo_plan.layout.trainer.pool.labels
    assert over.techniques.tcss == float(demo_plan.spec.policy.stale_fraction)
    assert over.model_dump(include={"model", "sample", "training"}) == recipe.model_dump(
        include={"model", "sample", "training"}
    )


def test_overrides_have_the_last_word_over_a_plan(demo_plan: Plan):
    plan = plan_file(demo_plan, recipe_of("demo"), "demo")
    given = ["techniques.tcss=0.125", "lanes.ranks=2", "cluster.address=local", "batch={slice: 3}"]
    over = read_recipe("demo", overrides_of(plan, given))
    assert (over.techniques.tcss, over.lanes.ranks, over.batch.slice) == (0.125, 2, 3)
    assert over.cluster.address == "local" and over.cluster.generators


def test_the_prediction_is_written_and_does_not_reach_the_recipe(demo_plan: Plan):
    plan = plan_file(demo_plan, recipe_of("demo"), "demo")
    assert plan.plan.predicted.samples_per_second == pytest.approx(demo_plan.samples_per_second, rel=1e-3)
    assert plan.plan.predicted.step_seconds == pytest.approx(demo_plan.step_s, rel=1e-3)
    assert not any(text.startswith("plan") for text in overrides_of(plan, []))


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("batch.prompts=4", "was made for prompts = 8 .demo., the recipe has 4"),
        ("sample.height=64", "was made for height = 32"),
        ("training.lora={rank: 8}", "was made for lora_rank = none .demo., the recipe has 8"),
        ("model.source=elsewhere", "was made for model = demo"),
        ("algorithm.name=flow_grpo", "was made for algorithm = flow_grpo_fast"),
    ],
)
def test_a_plan_for_another_recipe_is_refused(demo_plan: Plan, override: str, complaint: str):
    plan = plan_file(demo_plan, recipe_of("demo"), "demo")
    with pytest.raises(ConfigError, match=complaint):
        check_planned_for(recipe_of("demo", override), plan, Path("plan.yaml"))


def test_a_file_that_is_no_plan_is_told_so(tmp_path: Path):
    path = tmp_path / "spec.yaml"
    path.write_text("steps: 1")
    with pytest.raises(ConfigError, match="is no plan of a recipe; make one with"):
        read_plan(path)
    path.write_text("plan: {recipe: x}\nlane: {}")
    with pytest.raises(ConfigError, match="lane: unknown key; did you mean 'lanes'"):
        read_plan(path)


def test_pools_that_ray_cannot_tell_apart_are_refused(demo_plan: Plan):
    pools = [pool.model_copy(update={"labels": {}}) for pool in MEASURED.pools]
    recipe = recipe_of("demo")
    found = best(recipe, Cluster(pools=tuple(pools)), ranks=2)
    with pytest.raises(ConfigError, match="nothing says which machines of a Ray cluster are this pool's"):
        overlay(found, recipe, "demo")


def test_one_machine_alone_is_a_plan_too():
    recipe = recipe_of("wan_flow_grpo")
    found = best(recipe, read_cluster(EXAMPLES / "cluster_small.yaml"))
    over = read_recipe(
        "wan_flow_grpo", overrides_of(plan_file(found, recipe, "wan_flow_grpo"), ["prompts.path=p.txt"])
    )
    assert over.mode == "ray"
    assert over.lanes.ranks + sum(pool.count for pool in over.cluster.generators) <= 8
