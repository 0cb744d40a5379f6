"""The workload and planner options of a recipe, and the check of profiles against a recipe."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from digenrl.config.plan_files import work_of
from digenrl.config.profiles import Profile, ProfiledWork, shown_value
from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.recipes.conflicts import LANES_OF_ONE_MACHINE
from digenrl.config.recipes.paths import RANDOM
from digenrl.config.recipes.recipe import TERMS_PER_JOB, Recipe
from digenrl.planning.candidates import PlanOptions
from digenrl.planning.facts.cluster import Cluster
from digenrl.planning.facts.model_facts import CatalogModel, ModelFacts, known_models
from digenrl.planning.facts.workload import Workload
from digenrl.planning.layout import Capabilities

NO_GUIDANCE = 1.0  # up to this scale there is no unconditional forward
BATCH_KEYS = {"recipe", "prompts", "samples_per_prompt", "slice"}  # of a profile; do not affect its costs


def workload_of(recipe: Recipe, cluster: Cluster, facts: ModelFacts | None) -> Workload:
    """The recipe's workload. The scoring time is that of the slowest pool, or 0 if it was not measured.

    `facts` are None if the cost model does not know the model; raises ConfigError if nothing was measured either.
    """
    if facts is None:
        if not any(pool.measured.slice_seconds for pool in cluster.pools):
            raise ConfigError(unknown_model(recipe))
        model: dict[str, Any] = {"model": model_name(recipe)}
    else:
        if not all(pool.measured.complete for pool in cluster.pools):
            _check_precision(recipe)
        model = {
            "model": facts.name,
            "model_facts": facts,
            "compiled": recipe.model.compiles("cuda"),
            "text_tokens": facts.sequence_text_tokens(recipe.model.text_tokens),
        }
    sample, batch, rewards = recipe.sample, recipe.batch, recipe.lanes.rewards
    settings = {
        "height": sample.height,
        "width": sample.width,
        "frames": sample.frames,
        "held_out_size": None if recipe.held_out_size == recipe.sample_size else recipe.held_out_size,
        "denoise_steps": sample.denoising_steps,
        "prompts": batch.prompts,
        "samples_per_prompt": batch.samples_per_prompt,
        "guidance": _guided(recipe.model.guidance),
        "pairs": recipe.trains_on_pairs,
        "reward_lanes": rewards if isinstance(rewards, int) else len(rewards),
        "held_out_weights": recipe.held_out_base != recipe.generating_base,
        "whole_groups": any(reward.needs_whole_groups for reward in recipe.rewards),
        "reward_seconds": max((pool.measured.score_seconds or 0.0 for pool in cluster.pools), default=0.0),
    }
    return parse_model(Workload, {**settings, **_training(recipe), **model})


def options_for(recipe: Recipe, base: PlanOptions) -> PlanOptions:
    """`base`, restricted to plans that the runtime can run with this recipe.

    A lane is one card, and a replica of the trainer has as many as the recipe says. Adapters are trained with a
    full copy of the weights per rank if that fits. If not, and in full fine-tuning, weights are sharded over all
    ranks, which then cannot help. Techniques that the recipe switches off stay off; pack size and checkpointing
    are the recipe's.
    """
    techniques, training, together = recipe.techniques, recipe.training, recipe.lanes.cards_per_replica
    _check_cards_per_sample(recipe, base.ranks)
    if training.stages is not None:
        raise ConfigError(
            "training.stages: plans have no trainer in stages; leave it out to plan. With sites in the cluster "
            "file, plan compares stages with other places of the trainer"
        )
    if training.lora is None and training.offload is True:
        raise ConfigError("training.offload: true, but plans shard all weights over ranks; set it to auto to plan")
    alike = recipe.sample.precision is None  # the trainer has no weights in another precision
    helps = techniques.tag != "none" and techniques.assist != "none" and together == 1 and alike
    job_samples, why_dedicated = _shared_training(recipe, base.ranks)
    checkpointing = training.gradient_checkpointing
    packs = training.pack_size if isinstance(training.pack_size, int) else training.largest_pack
    return PlanOptions(
        steps=base.steps,
        ranks=base.ranks,
        streams=("group", "batch") if techniques.gap else ("batch",),
        capabilities=Capabilities(
            tensor_parallel=False,
            shards="as_trained",
            sharded_help=False,
            packed=techniques.tsp,
            largest_pack=packs,
            checkpointing=(False, True) if checkpointing == "auto" else (bool(checkpointing),),
            replica_cards=together,
        ),
        stale_shares=base.stale_shares,
        helps=("none", techniques.tag) if helps else ("none",),
        objective=base.objective,
        keep=base.keep,
        job_samples=job_samples,
        why_dedicated=why_dedicated,
    )


def with_shared_training(workload: Workload, options: PlanOptions) -> PlanOptions:
    """The options for a workload without a recipe, whose generators may train jobs as small as a recipe's."""
    if options.ranks is not None and options.ranks > 1:
        return replace(options, why_dedicated=_several_ranks(options.ranks))
    enough = (size for size in workload.slice_sizes() if size * workload.pairs_per_sample >= TERMS_PER_JOB)
    return replace(options, job_samples=next(enough, workload.samples_per_prompt))


def _check_cards_per_sample(recipe: Recipe, ranks: int | None) -> None:
    """Raises ConfigError if plans cannot have the recipe's cards per sample."""
    lanes = recipe.lanes
    if lanes.cards_per_generator > 1:
        raise ConfigError(
            f"lanes.cards_per_generator: {lanes.cards_per_generator}, but plans are for mode ray, where a lane is "
            "one card; set it to 1 to plan"
        )
    if ranks is not None and ranks % lanes.cards_per_replica:
        raise ConfigError(
            f"--ranks: {ranks} is not a multiple of lanes.cards_per_replica, {lanes.cards_per_replica}; change one"
        )


def _several_ranks(ranks: int) -> str:
    return f"--ranks is {ranks}, and every card would train alone"


def _shared_training(recipe: Recipe, ranks: int | None) -> tuple[int | None, str]:
    """The size of a Train job if the recipe's generators can train as well, else None and the reason."""
    techniques = recipe.techniques
    for key, value, off in (
        ("gap", techniques.gap, False),
        ("tag", techniques.tag, "none"),
        ("assist", techniques.assist, "none"),
    ):
        if value == off:
            return None, f"the recipe sets techniques.{key} to {str(off).lower()}"
    if recipe.lanes.cards_per_replica > 1:
        return None, f"lanes.cards_per_replica is {recipe.lanes.cards_per_replica}, and no card trains alone"
    if ranks is not None and ranks > 1:
        return None, _several_ranks(ranks)
    content = recipe.model_dump()
    lanes = {key: value for key, value in content["lanes"].items() if key not in LANES_OF_ONE_MACHINE}
    content |= {"mode": "ray", "lanes": {**lanes, "ranks": 1}}
    content["techniques"] = {**content["techniques"], "assist": "both"}
    try:
        return parse_model(Recipe, content).job_samples, ""
    except ConfigError as error:
        why = str(error).removeprefix("techniques.assist: ").removeprefix("both, but ")
        return None, why.removesuffix(", or set it to trainer")


def catalog_model(recipe: Recipe) -> CatalogModel | None:
    """The catalog entry of the recipe's model, by the layers of a local pipeline or by the pipeline's name."""
    of_family = [entry for entry in known_models() if entry.family == recipe.model.family]
    config = recipe.model.pipeline_folder / "transformer" / "config.json"
    if config.is_file():
        return next((entry for entry in of_family if _has_size(config, entry)), None)
    name = model_name(recipe).lower()
    return next((entry for entry in of_family if any(word in name for word in entry.sources)), None)


def model_name(recipe: Recipe) -> str:
    """The last part of a hub id or of a path; for a single file with a base pipeline, of the base's."""
    return Path(recipe.model.base_source or recipe.model.source).name


def unknown_model(recipe: Recipe) -> str:
    """The error message for a model that is not in the catalog and was not measured."""
    known = ", ".join(entry.name for entry in known_models())
    return (
        f"model.source: '{recipe.model.source}' ({recipe.model.family}) is not in the catalog ({known}); "
        "give the cluster's pools measured costs, as measured: {slice_seconds: {1: 0.2, 4: 0.6}, "
        "train_seconds_per_sample: 0.1}"
    )


def profiled_work(recipe: Recipe) -> ProfiledWork:
    """The settings of the recipe that affect the times of a device."""
    algorithm, group = recipe.algorithm.settings(), recipe.batch.samples_per_prompt
    return ProfiledWork(
        **work_of(recipe).model_dump(),
        recipe=recipe.name,
        dtype=recipe.model.dtype,
        base=recipe.model.base,
        generating_base=recipe.sample.precision,
        vae_dtype=recipe.model.vae_dtype,
        text_tokens=recipe.model.text_tokens,
        guidance=recipe.model.guidance,
        slice=recipe.batch.slice,
        trained_steps=algorithm.trained_steps(recipe.sample.denoising_steps, recipe.window),
        trained_share=algorithm.trained_samples(group) / group,
        updates_per_batch=algorithm.updates_per_batch,
        reference_forward=algorithm.needs.reference,
        old_log_probs=recipe.training.old_log_probs,
        autocast=recipe.training.autocast,
        packed=recipe.techniques.tsp,
    )


def check_profiles(cluster: Cluster, recipe: Recipe | None) -> None:
    """Raises ConfigError if a pool's profile measured other work than the recipe's; the batch may differ."""
    for pool in cluster.pools:
        if pool.profile is None:
            continue
        if recipe is None:
            raise ConfigError(
                f"{pool.name}: its profile is of the recipe {pool.profile.work.recipe}; plan a recipe, not --model"
            )
        _check_profile(recipe, pool.profile, f"{pool.name}: its profile")


def _check_profile(recipe: Recipe, profile: Profile, where: str) -> None:
    measured, wanted = profile.work.model_dump(), profiled_work(recipe).model_dump()
    for key, value in wanted.items():
        if key not in BATCH_KEYS and not same_costs(key, measured[key], value):
            raise ConfigError(
                f"{where} was measured for {key} = {shown_value(measured[key])} ({profile.work.recipe}), the "
                f"recipe has {shown_value(value)}; measure it with: digenrl profile RECIPE"
            )


def same_costs(key: str, measured: Any, wanted: Any) -> bool:
    """Whether two values of a profile's key have the same costs."""
    if key == "guidance":  # only the number of forwards matters
        return _guided(measured) == _guided(wanted)
    if key == "model":
        return measured == wanted or _is_random_copy(measured, wanted) or _is_random_copy(wanted, measured)
    return bool(measured == wanted)


def _guided(scale: float | None) -> bool:
    """Whether guidance needs an unconditional forward; None is the family's default scale, which does."""
    return scale is None or scale > NO_GUIDANCE


def _is_random_copy(random: str, other: str) -> bool:
    """Whether `random` has random weights in the size of `other`: any size, or one like 2.1-14b in its name."""
    source, _, size = random.partition(":")
    return source == RANDOM and size.rpartition("-")[2] in other.lower()


def _has_size(config: Path, entry: CatalogModel) -> bool:
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.source: {config} cannot be read: {error}") from None
    hidden = content.get("num_attention_heads", 0) * content.get("attention_head_dim", 0)
    blocks = content.get("num_layers", 0) + content.get("num_single_layers", 0)
    return (hidden, blocks) == (entry.hidden, entry.blocks)


def _training(recipe: Recipe) -> dict[str, Any]:
    """The share of a sample that is trained, and the forwards that training needs in addition to its own."""
    steps, training = recipe.sample.denoising_steps, recipe.training
    algorithm = recipe.algorithm.settings()
    updates, old_policy = algorithm.updates_per_batch, 1.0 if algorithm.needs.old_policy else 0.0
    if training.old_log_probs == "recomputed" and algorithm.replays == "steps":
        old_policy = (updates - 1) / updates  # in the first update, the old policy is the policy itself
    return {
        "tuning": "full" if training.lora is None else "lora",
        "lora_rank": 1 if training.lora is None else training.lora.rank,
        "trained_share": algorithm.trained_steps(steps, recipe.window) / steps,
        "trained_per_prompt": algorithm.trained_samples(recipe.batch.samples_per_prompt),
        "updates_per_batch": updates,
        "parts_per_group": updates if algorithm.updates_of == "samples" else 1,
        "renoised": algorithm.replays == "renoised",
        "reference_forward": algorithm.needs.reference,
        "old_policy_forward": old_policy,
        "weight_copies": _weight_copies(recipe),
        "float32_weights": recipe.model.dtype == "float32",
        "base": recipe.model.base,
        "generating_base": recipe.generating_base,
        "float32_vae": recipe.model.vae_dtype == "float32",
        "published_in_bf16": _publishes_in_bf16(recipe),
    }


def _weight_copies(recipe: Recipe) -> int:
    """What a trainer keeps per trained weight besides weight, moments and the gradient of earlier groups.

    A moving average, and the policy before the update. In full fine-tuning, also a reference, and the gradient of
    the packs before in a group; adapters can be switched off, and their gradients are small.
    """
    training, algorithm = recipe.training, recipe.algorithm.settings()
    recomputes = training.old_log_probs == "recomputed" or recipe.trainer_helps
    keeps_old = algorithm.needs.old_policy or (algorithm.updates_per_batch > 1 and recomputes)
    copies = (training.ema is not None) + keeps_old
    return copies if training.lora is not None else copies + algorithm.needs.reference + 1


def _publishes_in_bf16(recipe: Recipe) -> bool:
    """Whether (nearly) all published weights are rounded to bfloat16."""
    if recipe.publish.dtype == "auto":
        return recipe.training.autocast == "bf16" or recipe.model.dtype == "bfloat16"
    return recipe.publish.dtype == "bfloat16"


def _check_precision(recipe: Recipe) -> None:
    if recipe.model.dtype == "float32" and recipe.training.autocast == "off":
        raise ConfigError(
            "training.autocast: off with float32 weights, but the cost model covers bf16 arithmetic only; set "
            "training.autocast=bf16, or give measured costs for every pool of the cluster"
        )
