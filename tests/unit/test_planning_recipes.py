"""From a recipe to a workload, to a plan, and back to recipe keys; also for models without a catalog entry."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from digenrl.commands.plan import PlanFiles, facts_for, search_plans, show_plans
from digenrl.config.plan_files import PlanFile, check_planned_for, overrides_of, read_plan, replaced_by
from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.recipes.files import read_recipe
from digenrl.config.recipes.recipe import AlgorithmChoice, Recipe
from digenrl.models.families.sd3 import SD3, SD3Model
from digenrl.models.registry import FAMILIES
from digenrl.planning.candidates import PlanOptions
from digenrl.planning.facts.cluster import CardPool, Cluster, read_cluster
from digenrl.planning.facts.recipe_workload import catalog_model, options_for, workload_of
from digenrl.planning.facts.workload import Workload, workload_for
from digenrl.planning.layout import Capabilities, best_trainer, possible_shards
from digenrl.planning.memory import generator_memory
from digenrl.planning.results.plan_overlay import overlay, overlay_text
from digenrl.planning.results.plan_tables import result_as_dict, trainer_words
from digenrl.planning.results.plans import Plan

EXAMPLES = Path(__file__).parents[2] / "examples"
MIXED = read_cluster(EXAMPLES / "cluster_mixed.yaml")
MEASURED = read_cluster(EXAMPLES / "cluster_measured.yaml")
H100S = parse_model(Cluster, {"pools": [{"card": "H100"}]})


def recipe_of(name: str, *overrides: str) -> Recipe:
    return read_recipe(name, overrides, without_prompts=True)


def known_workload(recipe: Recipe, cluster: Cluster) -> Workload:
    """The workload of a recipe as planned without torch."""
    return workload_of(recipe, cluster, catalog_model(recipe))


def best(recipe: Recipe, cluster: Cluster, **options: Any) -> Plan:
    options = {"keep": 1, "steps": 2, **options}
    return search_plans(recipe, cluster, PlanOptions(**options)).best


def plan_file(found: Plan, recipe: Recipe, name: str) -> PlanFile:
    return parse_model(PlanFile, yaml.safe_load(overlay_text(overlay(found, recipe, name), found)))


@pytest.fixture(scope="module")
def demo_plan() -> Plan:
    return best(recipe_of("demo"), MEASURED)


def test_a_generator_has_room_for_a_sample_of_the_evaluation():
    def needed_gib(*overrides: str) -> float:
        workload = known_workload(recipe_of("sd3_flow_grpo", *overrides), MIXED)
        return generator_memory(workload, MIXED.pools[0].card, size=1).total_gib

    same = needed_gib()
    assert needed_gib("evaluation=off") == needed_gib("evaluation.height=256") == same
    assert needed_gib("evaluation.height=2048", "evaluation.width=2048") > 1.2 * same
    quantized = needed_gib("model.base=nf4")
    assert needed_gib("model.base=nf4", "evaluation.base=unquantized") > quantized + 4, (
        "both copies of the weights"
    )
    with pytest.raises(ConfigError, match="multiples of 16"):
        needed_gib("evaluation.height=500")


def test_a_workload_has_the_settings_of_the_recipe():
    workload = known_workload(recipe_of("sd3_flow_grpo", "lanes.rewards=3"), MIXED)
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
        ("sd3_flow_grpo", ("algorithm.options.updates_of=samples",), "parts_per_group", 2),
        ("sd3_flow_grpo", ("algorithm.options.updates_of=groups",), "parts_per_group", 1),
        ("flux_mix_grpo", (), "tuning", "full"),
        ("flux_mix_grpo", (), "float32_weights", True),
        ("flux_mix_grpo", (), "weight_copies", 2),  # the old policy, and the gradient of the packs before
        ("flux_mix_grpo", ("training.ema={decay: 0.9}",), "weight_copies", 3),
        ("sd3_flow_grpo", (), "weight_copies", 2),
        ("flux_dance_grpo", (), "pairs_per_sample", 6),
        ("flux_mix_grpo", ("model.vae_dtype=bfloat16",), "float32_vae", False),
        ("flux_mix_grpo", ("model.vae_dtype=float32",), "float32_vae", True),
        ("sd3_flow_grpo", ("model.text_tokens=128",), "text_tokens", 77 + 128),
        ("flux_flow_grpo", ("model.text_tokens=128",), "text_tokens", 128),
        ("qwen_image_flow_grpo", ("model.text_tokens=1024",), "text_tokens", 128),  # padding is cut
        ("hunyuan_video_dance_grpo", (), "trained_per_prompt", 8),
        ("wan_flow_grpo", (), "model", "Wan2.1-1.3B"),
        ("wan_flow_grpo", ("model.source=Wan-AI/Wan2.1-T2V-14B-Diffusers",), "model", "Wan2.1-14B"),
    ],
)
def test_settings_that_affect_costs_are_read_from_the_recipe(name, overrides, key, value):
    assert getattr(known_workload(recipe_of(name, *overrides), MIXED), key) == value


@pytest.mark.parametrize(
    ("name", "targets", "millions", "more_activations"),
    [
        ("flux_flow_grpo", "[to_q, to_k, to_v, to_out.0]", 149.4 / 2, 0.0),
        ("wan_flow_grpo", "[to_q, to_k, to_v, to_out.0, ffn.net.0.proj, ffn.net.2]", 43.7, 1 + 8960 / 1536),
    ],
)
def test_adapters_are_counted_from_the_recipes_own_targets(name, targets, millions, more_activations):
    recipe = recipe_of(name, f"training.lora.targets={targets}")
    facts, usual = facts_for(recipe, MIXED), catalog_model(recipe)
    assert facts.lora_parameters(recipe.training.lora.rank) / 1e6 == pytest.approx(millions, abs=0.05)
    for kind in ("eager", "compiled"):
        added = getattr(facts, kind).activations - getattr(usual, kind).activations
        assert added == pytest.approx(more_activations)
    with pytest.raises(ConfigError, match="matches no layer"):
        facts_for(recipe_of(name, "training.lora.targets=[to_qq]"), MIXED)


def test_an_algorithm_that_needs_the_old_policy_has_its_forward_for_every_pair():
    nft = recipe_of("sd3_flow_grpo").model_copy(update={"algorithm": AlgorithmChoice(name="diffusion_nft")})
    workload = known_workload(nft, MIXED)
    assert (workload.old_policy_forward, workload.reference_forward, workload.pairs_per_sample) == (1.0, True, 9)


def test_training_on_final_latents_needs_no_guidance_and_may_use_every_level():
    options = {"levels": "random", "trained_fraction": 1.0}
    nft = AlgorithmChoice(name="diffusion_nft", options=options)
    workload = known_workload(recipe_of("sd3_flow_grpo").model_copy(update={"algorithm": nft}), MIXED)
    assert (workload.branches, workload.trained_branches, workload.pairs_per_sample) == (2, 1, 10)
    assert known_workload(recipe_of("sd3_flow_grpo"), MIXED).trained_branches == 2


def test_a_local_pipeline_is_identified_by_its_layers(tmp_path: Path):
    (tmp_path / "mine" / "transformer").mkdir(parents=True)
    config = tmp_path / "mine" / "transformer" / "config.json"
    recipe = recipe_of("wan_flow_grpo", f"model.source={tmp_path / 'mine'}")
    config.write_text(json.dumps({"num_attention_heads": 40, "attention_head_dim": 128, "num_layers": 40}))
    assert known_workload(recipe, MIXED).model == "Wan2.1-14B"
    config.write_text(json.dumps({"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}))
    with pytest.raises(ConfigError, match=r"not in the catalog .* measured costs"):
        known_workload(recipe, MIXED)


def test_the_scoring_time_is_that_of_the_slowest_pool():
    assert known_workload(recipe_of("demo"), MEASURED).reward_seconds == 0.01


@pytest.mark.parametrize(
    ("name", "overrides", "complaint"),
    [
        ("demo", (), "model.source: 'demo'"),
        ("flux_mix_grpo", ("training.autocast=off",), "training.autocast: .*bf16"),
        ("sd3_flow_grpo", ("algorithm.name=flow_grp",), "'flow_grp'.*'flow_grpo'"),
        ("sd3_flow_grpo", ("sample.window={kind: al}",), "unknown window kind 'al'"),
        ("sd3_flow_grpo", ("algorithm.options.kl_weight=-1",), "algorithm.options.kl_weight.*got -1"),
        ("sd3_flow_grpo", ("sample.height=500",), "multiples of 16"),
    ],
)
def test_a_recipe_that_cannot_be_planned_is_an_error_of_one_line(name, overrides, complaint):
    with pytest.raises(ConfigError, match=complaint) as error:
        known_workload(recipe_of(name, *overrides), MIXED)
    assert "\n" not in str(error.value)


def test_adapters_use_full_copies_and_full_fine_tuning_shards_over_all_ranks_without_help():
    lora = best(recipe_of("flux_dance_grpo"), H100S, stale_shares=(0.0,))
    assert lora.layout.trainer.shard_cards == 1
    assert all(generator.lane_cards == 1 for generator in lora.layout.generators)
    full = best(recipe_of("flux_mix_grpo"), H100S, stale_shares=(0.0,))
    assert full.layout.trainer.shard_cards == full.layout.trainer.cards > 1
    assert full.spec.policy.help == "none" and full.layout.helper_lanes == 0


def test_a_trainer_shards_as_the_runtime_does_even_if_another_way_would_fit():
    run, cards = options_for(recipe_of("sd3_flow_grpo"), PlanOptions()).capabilities, MIXED.pools[1]
    full, lora = workload_for("sd3.5", tuning="full"), workload_for("flux")
    whole, sharded = best_trainer(full, cards, 8, 24), best_trainer(full, cards, 8, 24, capabilities=run)
    assert whole is not None and sharded is not None
    assert (whole.shard_cards, sharded.shard_cards) == (1, 8)
    small = parse_model(CardPool, {"card": "RTX 4090"})
    assert best_trainer(lora, small, 8, 24) is not None
    spread = best_trainer(lora, small, 8, 24, capabilities=run)
    assert spread is not None and spread.shard_cards == 8, "a copy does not fit"
    assert best_trainer(lora, small, 1, 24, capabilities=run) is None
    assert best_trainer(lora, cards, 8, 24, capabilities=run).shard_cards == 1, "a copy fits"


def test_techniques_that_the_recipe_switches_off_stay_off():
    base = PlanOptions()
    off = options_for(recipe_of("sd3_flow_grpo", "techniques={tag: none, gap: false, tsp: false}"), base)
    assert (off.helps, off.streams, off.capabilities.packed) == (("none",), ("batch",), False)
    fixed = options_for(recipe_of("demo", "training.gradient_checkpointing=true"), base)
    assert (fixed.capabilities.largest_pack, fixed.capabilities.checkpointing) == (36, (True,))


def test_the_error_for_a_recipe_that_fits_no_card_states_the_memory_of_its_layout():
    tiny = parse_model(Cluster, {"pools": [{"card": "RTX 4090", "nodes": 4}]})
    with pytest.raises(ConfigError, match=r"generating over 1 needs .*GiB") as error:
        best(recipe_of("flux_dance_grpo"), tiny)
    assert "training over 31 needs" in str(error.value), "all of them hold the frozen weights together"


def test_a_plan_shards_the_frozen_weights_over_cards_that_cannot_hold_a_copy():
    pools = [
        {"card": "RTX 4090", "per_node": 4, "accelerator": "small"},
        {"card": "RTX A6000", "per_node": 2, "accelerator": "big"},
    ]
    recipe = recipe_of("flux_dance_grpo")
    found = best(recipe, parse_model(Cluster, {"pools": pools}), ranks=4)
    trainer = found.layout.trainer
    assert (trainer.pool.card.name, trainer.shard_cards, found.layout.helper_lanes) == ("RTX 4090", 4, 0)
    over = read_recipe("flux_dance_grpo", overrides_of(plan_file(found, recipe, "flux_dance_grpo"), []))
    assert (over.lanes.ranks, over.lanes.shard_base, over.trainer_helps) == (4, True, False)


def test_the_requested_ranks_are_planned_and_too_many_are_an_error():
    assert best(recipe_of("sd3_flow_grpo"), MIXED, ranks=5).layout.trainer.cards == 5
    with pytest.raises(ConfigError, match=r"--ranks: 17 .*RTX A6000"):
        best(recipe_of("sd3_flow_grpo"), MIXED, ranks=17)


def test_replicas_of_several_cards_are_planned_whole_and_do_not_help():
    pairs = recipe_of("sd3_flow_grpo", "lanes.ranks=2", "lanes.cards_per_replica=2")
    found = best(pairs, MIXED)
    assert found.layout.trainer.cards % 2 == 0 and found.layout.trainer.replica_cards == 2
    assert found.spec.policy.help == "none" and found.layout.helper_lanes == 0
    assert "2 cards per sample" in trainer_words(found)
    with pytest.raises(ConfigError, match=r"--ranks: 3"):
        best(pairs, MIXED, ranks=3)
    with pytest.raises(ConfigError, match=r"lanes\.cards_per_generator: 2"):
        best(recipe_of("sd3_flow_grpo", "lanes.cards_per_generator=2"), MIXED)


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


def test_overrides_take_precedence_over_a_plan(demo_plan: Plan):
    plan = plan_file(demo_plan, recipe_of("demo"), "demo")
    given = ["techniques.tcss=0.125", "lanes.ranks=2", "cluster.address=local", "batch={slice: 3}"]
    over = read_recipe("demo", overrides_of(plan, given))
    assert (over.techniques.tcss, over.lanes.ranks, over.batch.slice) == (0.125, 2, 3)
    assert over.cluster.address == "local" and over.cluster.generators


def test_the_printed_command_leaves_out_what_the_plan_decides(demo_plan: Plan):
    plan = plan_file(demo_plan, recipe_of("demo"), "demo")
    words = ["seed=3", "techniques.tcss=0.125", "mode=colocated", "batch.slice=3"]
    assert replaced_by(plan, words) == words[1:]


def test_the_prediction_is_in_the_plan_file_but_not_in_the_recipe(demo_plan: Plan):
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
def test_a_plan_for_another_recipe_is_an_error(demo_plan: Plan, override: str, complaint: str):
    plan = plan_file(demo_plan, recipe_of("demo"), "demo")
    with pytest.raises(ConfigError, match=complaint):
        check_planned_for(recipe_of("demo", override), plan, Path("plan.yaml"))


def test_a_file_that_is_not_a_plan_is_an_error(tmp_path: Path):
    path = tmp_path / "spec.yaml"
    path.write_text("steps: 1")
    with pytest.raises(ConfigError, match="is not a plan"):
        read_plan(path)
    path.write_text("plan: {recipe: x}\nlane: {}")
    with pytest.raises(ConfigError, match=r"lane: .*'lanes'"):
        read_plan(path)


def test_pools_whose_machines_are_not_specified_are_an_error(demo_plan: Plan):
    pools = [pool.model_copy(update={"labels": {}}) for pool in MEASURED.pools]
    recipe = recipe_of("demo")
    found = best(recipe, Cluster(pools=tuple(pools)), ranks=2)
    with pytest.raises(ConfigError, match="machines"):
        overlay(found, recipe, "demo")
    alike = Cluster(pools=tuple(pool.model_copy(update={"labels": {"in": "rack 1"}}) for pool in pools))
    with pytest.raises(ConfigError, match=r"the same keys select the machines of both pools"):
        overlay(best(recipe, alike, ranks=2), recipe, "demo")


@pytest.mark.parametrize(
    ("overrides", "objective", "complaint"),
    [
        (("training.stages=auto", "lanes.ranks=2"), "throughput", r"^training.stages: .*leave it out to plan"),
        (("training.lora=null", "training.offload=true"), "throughput", r"^training.offload: .*set it to auto"),
        ((), "cost", r"^--objective cost: .* has no price; give it usd_per_hour"),
    ],
)
def test_what_plans_do_not_cover_is_an_error(overrides: tuple[str, ...], objective: Any, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        search_plans(recipe_of("demo", *overrides), MEASURED, PlanOptions(objective=objective))


def test_plans_keep_to_limits_of_the_recipe():
    recipe = recipe_of("qwen_image_24gb", "lanes.memory_gib=18")
    found = best(recipe, read_cluster(EXAMPLES / "cluster_small.yaml"))
    assert found.trainer_memory is not None and found.trainer_memory.available_gib == pytest.approx(18)
    pools = parse_model(Cluster, {"pools": [{"card": "RTX 4090", "nodes": 1, "per_node": 8}]})
    quantized = known_workload(recipe_of("qwen_image_24gb"), pools)
    assert possible_shards(quantized, pools.pools[0], 8, Capabilities()) == (1,), "the runtime cannot shard them"
    groups = "rewards={name: function, target: 'own:score', scores: groups}"
    whole = known_workload(recipe_of("sd3_flow_grpo", groups, "batch.slice=24", "evaluation=null"), pools)
    assert whole.slice_sizes() == (whole.samples_per_prompt,)


def test_a_single_machine_can_be_planned():
    recipe = recipe_of("wan_flow_grpo")
    found = best(recipe, read_cluster(EXAMPLES / "cluster_small.yaml"))
    over = read_recipe(
        "wan_flow_grpo", overrides_of(plan_file(found, recipe, "wan_flow_grpo"), ["prompts.path=p.txt"])
    )
    assert over.mode == "ray"
    assert over.lanes.ranks + sum(pool.count for pool in over.cluster.generators) <= 8


class OwnModel(SD3Model):
    """A family that the catalog does not know."""

    family = "own"


OWN = replace(SD3, model_class=OwnModel)


def test_a_family_without_a_catalog_entry_is_planned_with_derived_facts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(FAMILIES, "own", OWN)
    recipe = recipe_of("sd3_flow_grpo", "model.family=own", "model.source=random")
    result = search_plans(recipe, H100S, PlanOptions(keep=1, steps=2, stale_shares=(0.0,)))
    facts = result.workload.facts
    assert facts.parameters == pytest.approx(2.24e9, rel=0.01) and not facts.fitted
    assert result.best.trainer_memory is not None and result.best.trainer_memory.fits
    assert result_as_dict(result)["costs"] == "derived"
    console = Console(file=io.StringIO(), width=200)
    show_plans(console, result, ["mine.yaml"], PlanFiles(Path("plan.yaml"), None))
    assert isinstance(console.file, io.StringIO)
    assert "derived" in console.file.getvalue()


def test_facts_are_derived_for_the_size_that_the_recipe_names():
    large = facts_for(recipe_of("sd3_flow_grpo", "model.source=owner/stable-diffusion-3.5-large"), H100S)
    assert large is not None and large.parameters == pytest.approx(8.06e9, rel=0.01)
    assert large.sequence_text_tokens(128) == large.clip_text_tokens + 128 == 205
    demo = facts_for(recipe_of("demo"), H100S)  # a local pipeline of another size, by its own layers
    assert demo is not None and demo.parameters < 1e7 and not demo.fitted


def test_measured_pools_need_no_derived_facts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "digenrl.commands.support.derived_facts", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert facts_for(recipe_of("demo"), MEASURED) is None
    with pytest.raises(ConfigError, match=r"'demo'.*'torch'.*digenrl\[train\]"):
        facts_for(recipe_of("demo"), H100S)
