"""From a recipe to the workload that is planned, and to what the search may choose for it. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.recipe import Recipe
from digenrl.planning.candidates import PlanOptions
from digenrl.planning.cluster import CardPool, Cluster
from digenrl.planning.layout import Abilities
from digenrl.planning.model_catalogue import ModelFamily, known_models
from digenrl.planning.workload import Workload

NO_GUIDANCE = 1.0  # up to this scale a family runs no unconditional branch


def workload_of(recipe: Recipe, cluster: Cluster) -> Workload:
    """What the recipe costs. Scoring costs what the slowest pool measured, and nothing where none did.

    Raises ConfigError where the catalogue does not know the model and nothing was measured.
    """
    model = catalogue_model(recipe)
    content = {
        **_sample_and_batch(recipe),
        **_training(recipe),
        "reward_lanes": _reward_lanes(recipe),
        "reward_seconds": max((pool.measured.score_seconds or 0.0 for pool in cluster.pools), default=0.0),
    }
    if model is not None:
        if not all(_fully_measured(pool) for pool in cluster.pools):
            _check_precision(recipe)
        return parse_model(Workload, {**content, "model": model.name, "compiled": recipe.model.compiles("cuda")})
    if not any(pool.measured.slice_seconds for pool in cluster.pools):
        raise ConfigError(_unknown_model(recipe))
    return parse_model(Workload, {**content, "model": model_name(recipe), "catalogued": False})


def options_for(recipe: Recipe, base: PlanOptions) -> PlanOptions:
    """The options with which a plan of the recipe can be run.

    A lane is a card; adapters are trained beside a whole copy of the weights, all weights in shards over all
    ranks, which then cannot help. Help and streaming that the recipe switches off stay off; packs and
    checkpointing are the recipe's.
    """
    techniques, training = recipe.techniques, recipe.training
    checkpointing = training.gradient_checkpointing
    packs = training.pack_size if isinstance(training.pack_size, int) else training.largest_pack
    return PlanOptions(
        steps=base.steps,
        ranks=base.ranks,
        streams=("group", "batch") if techniques.gap else ("batch",),
        abilities=Abilities(
            tensor_parallel=False,
            shards="as_trained",
            sharded_help=False,
            packed=techniques.tsp,
            largest_pack=packs,
            checkpointing=(False, True) if checkpointing == "auto" else (bool(checkpointing),),
        ),
        stale_shares=base.stale_shares,
        helps=("none",) if techniques.tag == "none" else ("none", techniques.tag),
        objective=base.objective,
        keep=base.keep,
    )


def catalogue_model(recipe: Recipe) -> ModelFamily | None:
    """The catalogue's entry of the recipe's size: by the layers of a pipeline that is here, else by its name."""
    of_family = [entry for entry in known_models() if entry.family == recipe.model.family]
    config = Path(recipe.model.source) / "transformer" / "config.json"
    if config.is_file():
        return next((entry for entry in of_family if _has_size(config, entry)), None)
    name = model_name(recipe).lower()
    return next((entry for entry in of_family if any(word in name for word in entry.sources)), None)


def model_name(recipe: Recipe) -> str:
    """The last part of a hub id or of a folder's path."""
    return Path(recipe.model.source).name


def _has_size(config: Path, entry: ModelFamily) -> bool:
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.source: {config} cannot be read: {error}") from None
    hidden = content.get("num_attention_heads", 0) * content.get("attention_head_dim", 0)
    return (hidden, content.get("num_layers", 0) + content.get("num_single_layers", 0)) == (
        entry.hidden,
        entry.blocks,
    )


def _sample_and_batch(recipe: Recipe) -> dict[str, Any]:
    sample, batch = recipe.sample, recipe.batch
    return {
        "height": sample.height,
        "width": sample.width,
        "frames": sample.frames,
        "denoise_steps": sample.denoising_steps,
        "prompts": batch.prompts,
        "samples_per_prompt": batch.samples_per_prompt,
        "guidance": recipe.model.guidance is None or recipe.model.guidance > NO_GUIDANCE,
    }


def _training(recipe: Recipe) -> dict[str, Any]:
    """What of a sample is trained, and what that takes beside its own forward and backward."""
    steps, training = recipe.sample.denoising_steps, recipe.training
    algorithm = recipe.algorithm.settings()
    updates, old_policy = algorithm.updates_per_batch, 1.0 if algorithm.needs.old_policy else 0.0
    if training.old_log_probs == "recomputed" and algorithm.replays == "steps":
        old_policy = (updates - 1) / updates  # before the first update, the policy's own forward is the old one's
    return {
        "tuning": "full" if training.lora is None else "lora",
        "lora_rank": 1 if training.lora is None else training.lora.rank,
        "trained_share": algorithm.trained_steps(steps, recipe.window) / steps,
        "trained_per_prompt": algorithm.trained_samples(recipe.batch.samples_per_prompt),
        "updates_per_batch": updates,
        "reference_forward": algorithm.needs.reference,
        "old_policy_forward": old_policy,
        "float32_weights": recipe.model.dtype == "float32",
    }


def _reward_lanes(recipe: Recipe) -> int:
    rewards = recipe.lanes.rewards
    return rewards if isinstance(rewards, int) else len(rewards)


def _fully_measured(pool: CardPool) -> bool:
    measured = pool.measured
    return measured.slice_seconds is not None and measured.train_seconds_per_sample is not None


def _check_precision(recipe: Recipe) -> None:
    if recipe.model.dtype == "float32" and recipe.training.autocast == "off":
        raise ConfigError(
            "training.autocast: off with float32 weights, and the cost model knows bf16 arithmetic only; set "
            "training.autocast=bf16, or give measured costs for every pool of the cluster"
        )


def _unknown_model(recipe: Recipe) -> str:
    known = ", ".join(entry.name for entry in known_models())
    return (
        f"model.source: '{recipe.model.source}' ({recipe.model.family}) is no model that the catalogue knows "
        f"({known}); give the cluster's pools measured costs, as measured: {{slice_seconds: {{1: 0.2, 4: 0.6}}, "
        "train_seconds_per_sample: 0.1}"
    )
