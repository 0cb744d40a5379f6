"""Whether a recipe suits a model with two transformers, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers

from digenrl.config.reading import ConfigError
from digenrl.models.loading.pipelines import pipeline_without
from digenrl.worker.blueprint import TRAIN_EXPERT, Blueprint, check_trained_expert, source_of


def check_experts(blueprint: Blueprint, index: Mapping[str, Any]) -> None:
    """Raises ConfigError if the recipe cannot train the model, whose `model_index.json` this is; {} if random.

    The schedule of a hub id is that of the published model, and is checked again when it is loaded.
    """
    recipe, family = blueprint.recipe, blueprint.family
    published = family.full_size(recipe.model.random_size).pipeline_settings if recipe.model.random else {}
    boundary = published.get("boundary_ratio", index.get("boundary_ratio"))
    if boundary is None:
        if recipe.model.train_expert is not None:
            raise ConfigError(
                f"{TRAIN_EXPERT}: {recipe.model.train_expert}, but {recipe.model.source} has one transformer; "
                "leave it out",
                TRAIN_EXPERT,
            )
        return
    _check_training(blueprint)
    scheduler = _scheduler(blueprint, index)
    model = family.model_class(pipeline_without(family.pipeline_class, scheduler=scheduler))
    check_trained_expert(blueprint, blueprint.schedule(model), boundary)


def _check_training(blueprint: Blueprint) -> None:
    """Ranks that compute different experts would wait for each other in a sharded forward."""
    recipe, why = blueprint.recipe, "a model with two transformers"
    if recipe.training.lora is None:
        raise ConfigError(f"training.lora: {why} trains adapters only; set training.lora.rank", "training.lora")
    if recipe.training.lora.start_from is not None:
        key = "training.lora.start_from"
        raise ConfigError(f"{key}: {why} cannot start from a LoRA; leave it out", key)
    divided = {
        "lanes.shard_base": recipe.lanes.shard_base,
        "lanes.cards_per_replica": recipe.lanes.cards_per_replica > 1,
        "lanes.cards_per_generator": recipe.lanes.cards_per_generator > 1,
        "training.stages": recipe.training.stages is not None,
    }
    for key, used in divided.items():
        if used:
            raise ConfigError(
                f"{key}: {why} is whole on every card; leave it out, and to save memory set model.base=nf4", key
            )


def _scheduler(blueprint: Blueprint, index: Mapping[str, Any]) -> Any:
    """The scheduler of a local pipeline, or the published one."""
    family, source = blueprint.family, source_of(blueprint.recipe)
    folder = Path(source.location, source.within, "scheduler")
    if "scheduler" in index and folder.is_dir():
        return getattr(diffusers, index["scheduler"][1]).from_pretrained(folder, local_files_only=True)
    return family.scheduler.build()
