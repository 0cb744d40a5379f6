"""Model facts for `digenrl plan`, counted from a model's layers. Needs torch, but no weights and no GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.recipes.recipe import Recipe
from digenrl.models.adapters.lora import Targets, check_targets
from digenrl.models.contract import SampleSize
from digenrl.models.family import Family
from digenrl.models.loading.pipelines import building_on, keep_fp32_modules, pipeline_without
from digenrl.models.loading.sources import ModelSource
from digenrl.models.loading.weight_files import INDEX_NAME
from digenrl.models.pipeline_model import PipelineModel
from digenrl.models.registry import find_family
from digenrl.models.work_count import TextShapes, added_activations, count_work, lora_linears
from digenrl.planning.facts.model_facts import Execution, ModelFacts, typical_costs
from digenrl.planning.facts.recipe_workload import model_name
from digenrl.worker.blueprint import source_of


def derive_facts(recipe: Recipe, folder: Path | None = None) -> ModelFacts:
    """Facts of the recipe's model: of the local pipeline's layers, else of the family's published size.

    `folder` has the configurations of a pipeline that is not local. Without it, a hub id is matched with the
    family's sizes by name; the family's first size is the default.
    """
    family, sample = find_family(recipe.model.family), recipe.sample
    text_tokens = family.text_tokens_of(recipe)
    size = SampleSize(sample.height, sample.width, sample.frames)
    name, folder = model_name(recipe), folder or _pipeline_folder(source_of(recipe))
    targets = None if recipe.training.lora is None else recipe.training.lora.targets
    if (folder / family.denoiser / "config.json").is_file():
        return facts_of(family, name, *local_model(family, folder, text_tokens), size, targets)
    published = recipe.model.random_size if recipe.model.random else _size_in(name, family)
    if published is None:
        published = next(iter(family.sizes))
        name = f"{name} (as {family.name} {published})"
    model = family.build_full(torch.bfloat16, "meta", published, text_tokens=text_tokens)
    return facts_of(family, name, model, family.text_shapes(published, text_tokens), size, targets)


def with_targets(facts: ModelFacts, recipe: Recipe) -> ModelFacts:
    """Facts that were fitted with the family's LoRA targets, adjusted for a recipe that has others."""
    if recipe.training.lora is None or recipe.training.lora.targets is None:
        return facts
    family, targets = find_family(recipe.model.family), recipe.training.lora.targets
    transformer = _published_transformer(recipe, family)
    check_targets(transformer, targets)
    usual = family.model_class.lora_targets
    more = added_activations(transformer, targets, usual, facts.hidden)
    changes: dict[str, Any] = {"lora_linears": lora_linears(transformer, targets, facts.hidden)}
    for name in ("eager", "compiled"):
        execution: Execution = getattr(facts, name)
        changes[name] = execution.model_copy(update={"activations": execution.activations + more})
    return facts.model_copy(update=changes)


def facts_of(
    family: Family,
    name: str,
    model: PipelineModel,
    text_shapes: TextShapes,
    size: SampleSize,
    targets: Targets | None = None,
) -> ModelFacts:
    """Facts of a model on the meta device, counted with a sample of this size."""
    pipeline = model.pipeline
    sources = family.sources_by(getattr(pipeline, family.denoiser).config, pipeline.config).least
    count = asdict(count_work(model, text_shapes, size, targets, sources))
    costs = typical_costs(count.pop("activations"), family.kind)
    facts = {
        "name": name,
        "family": family.name,
        "guidance": "batched" if family.uses_negative_prompts else "embedded",
        "block_tokens": "joint" if count["joint_attention_blocks"] else "image",
    }
    return parse_model(ModelFacts, {**facts, **count, **costs})


def _pipeline_folder(source: ModelSource) -> Path:
    return Path(source.base or source.location, source.within)


def _size_in(name: str, family: Family) -> str | None:
    """The size with this name on the hub, or with a name that is part of it, such as 3.5-large."""
    for size, full in family.sizes.items():
        if full.hub_id is not None and full.hub_id.lower().endswith(f"/{name.lower()}"):
            return size
    fitting = [size for size in family.sizes if size in name.lower()]
    return max(fitting, key=len, default=None)


def local_model(family: Family, source: Path, text_tokens: int | None) -> tuple[PipelineModel, TextShapes]:
    """The model of a local pipeline on the meta device, and its text shapes."""
    full, settings = family.full_size(), _pipeline_settings(source)
    with building_on(torch.bfloat16, "meta"):
        kind, config = full.transformer.cls, _config(source / family.denoiser)
        transformers = [kind.from_config(config) for _ in range(1 + (settings.get("boundary_ratio") is not None))]
        vae = family.vae.cls.from_config(_config(source / "vae"))
        published = full.transformer.build()
    parts = {"vae": vae, "scheduler": family.scheduler.build()}
    for name, transformer in zip(family.model_class.denoisers(), transformers, strict=False):
        keep_fp32_modules(transformer)
        parts[name] = transformer
    pipeline = pipeline_without(family.pipeline_class, **parts, **settings)
    shapes = {
        name: (*shape[:-1], _width(shape[-1], published.config, transformers[0].config))
        for name, shape in family.text_shapes(None, text_tokens).items()
    }
    model = family.model_class(pipeline)
    model.set_text_tokens(text_tokens)
    return model, shapes


def _published_transformer(recipe: Recipe, family: Family) -> Any:
    """The transformer of a local pipeline or of the family's published size, on the meta device."""
    folder = _pipeline_folder(source_of(recipe))
    if (folder / family.denoiser / "config.json").is_file():
        return family.transformer_without_weights(folder)
    published = recipe.model.random_size if recipe.model.random else _size_in(model_name(recipe), family)
    return family.build_transformer(torch.bfloat16, "meta", published)


def _width(published_width: int, published: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """The width of a text argument: the key that holds the published width also holds the width of this model."""
    keys = [key for key, value in published.items() if value == published_width]
    return next((config[key] for key in keys if isinstance(config.get(key), int)), published_width)


def _pipeline_settings(source: Path) -> dict[str, Any]:
    """Settings of a pipeline besides its components that change what its transformers compute."""
    path = source / INDEX_NAME
    index = _read(path) if path.is_file() else {}
    return {name: index[name] for name in ("boundary_ratio", "expand_timesteps") if name in index}


def _config(folder: Path) -> dict[str, Any]:
    return _read(folder / "config.json")


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.source: {path} cannot be read: {error}") from None
    return content
