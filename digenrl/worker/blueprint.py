"""From a recipe to its blueprint, and from a blueprint to a loaded model and a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from safetensors import SafetensorError

from digenrl import demo
from digenrl.algorithms.contract import Algorithm
from digenrl.algorithms.registry import build_algorithm
from digenrl.config.reading import ConfigError, errors_about, one_line
from digenrl.config.recipe import Recipe
from digenrl.config.recipe_paths import DEMO
from digenrl.config.windows import Window
from digenrl.generation.noise import normal_noise
from digenrl.models.compiled import compile_blocks
from digenrl.models.contract import DiffusionModel, SampleSize, Schedule, TextEncoder
from digenrl.models.family import Family
from digenrl.models.lora import add_lora
from digenrl.models.offloaded_text_encoder import OffloadedTextEncoder
from digenrl.models.pipeline_model import PipelineModel
from digenrl.models.random_text_encoder import RandomTextEncoder
from digenrl.models.registry import find_family, naming_families
from digenrl.models.sources import ModelSource, check_class, check_source
from digenrl.models.trajectory import StepNoise
from digenrl.training.open_batch import BatchShape, check_shape
from digenrl.training.ranks.rank_group import RankGroup
from digenrl.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A recipe with its family, algorithm and window resolved. It holds no weights."""

    recipe: Recipe
    family: Family
    algorithm: Algorithm
    window: Window
    noise: StepNoise
    size: SampleSize
    guidance: float

    @property
    def shape(self) -> BatchShape:
        """The number of groups in a batch, and of samples in a group."""
        return BatchShape(self.recipe.batch.prompts, self.recipe.batch.samples_per_prompt)

    def schedule(self, model: DiffusionModel, steps: int) -> Schedule:
        """The model's own noise levels, or those of the recipe's shift."""
        shift = self.recipe.sample.shift
        return model.schedule(steps, self.size) if shift is None else model.shifted_schedule(steps, shift)


def read_blueprint(recipe: Recipe) -> Blueprint:
    """Resolves a recipe; raises ConfigError for what the family, algorithm or window does not support."""
    family = find_family(recipe.model.family)
    if family.kind == "image" and recipe.sample.frames != 1:
        raise ConfigError(f"sample.frames: {family.name} makes images, got {recipe.sample.frames}; set it to 1")
    if recipe.model.negative_prompt is not None and not family.uses_negative_prompts:
        raise ConfigError(
            f"model.negative_prompt: {family.name} has embedded guidance and takes none; leave it out"
        )
    family.check_text_tokens(recipe.model.text_tokens)
    if recipe.model.random:
        family.full_size(recipe.model.random_size)
    else:
        with naming_families(family):
            check_source(family.pipeline_class, source_of(recipe))
    algorithm = build_algorithm(recipe.algorithm.name, recipe.algorithm.options)
    window = recipe.window
    with errors_about("sample.window"):
        window.check(recipe.sample.denoising_steps)
    check_shape(BatchShape(recipe.batch.prompts, recipe.batch.samples_per_prompt), algorithm, recipe.training)
    if recipe.training.lora is None and recipe.model.dtype != "float32":
        raise ConfigError(
            f"model.dtype: {recipe.model.dtype} is too coarse for weights that are trained; use float32 with "
            "training.autocast: bf16, or adapters (training.lora)"
        )
    guidance = family.default_guidance if recipe.model.guidance is None else recipe.model.guidance
    sample = recipe.sample
    return Blueprint(
        recipe=recipe,
        family=family,
        algorithm=algorithm,
        window=window,
        noise=StepNoise(sample.noise.kind, sample.noise.level),
        size=SampleSize(sample.height, sample.width, sample.frames),
        guidance=guidance,
    )


def check_hub_model(blueprint: Blueprint) -> None:
    """Raises ConfigError if a hub id is not accessible or has another pipeline class; fetches a few kB at most."""
    if not blueprint.recipe.model.random:
        with naming_families(blueprint.family):
            check_class(blueprint.family.pipeline_class, blueprint.family.with_base(source_of(blueprint.recipe)))


def load_model(
    blueprint: Blueprint, device: str, for_a_run: bool = True, *, stays_on_host: bool = False
) -> DiffusionModel:
    """The recipe's model without text encoders, with LoRA adapters if it trains those.

    Compiling takes about a minute, which pays off `for_a_run` but not for a few pictures. A model that is going to
    be sharded `stays_on_host`: it need not fit on one card.
    """
    recipe, family, place = blueprint.recipe, blueprint.family, "cpu" if stays_on_host else device
    vae_dtype, text_tokens = vae_dtype_of(recipe), recipe.model.text_tokens
    if recipe.model.random:
        model = family.build_full(
            dtype_of(recipe),
            place,
            recipe.model.random_size,
            seed=recipe.seed,
            vae_dtype=vae_dtype,
            text_tokens=text_tokens,
        )
    else:
        with _loading_errors_in_one_line(recipe):
            model = family.load(
                source_of(recipe),
                dtype_of(recipe),
                place,
                text_encoders=False,
                vae_dtype=vae_dtype,
                text_tokens=text_tokens,
            )
    if recipe.training.lora is not None:
        add_lora(model, recipe.training.lora.rank, recipe.training.lora.alpha, seed=recipe.seed)
    if for_a_run and recipe.model.compiles(device):
        compile_blocks(model)
    return model


def load_whole_model(blueprint: Blueprint, device: str) -> PipelineModel:
    """The recipe's model with its text encoders, without adapters; not for models with random weights."""
    recipe = blueprint.recipe
    with _loading_errors_in_one_line(recipe):
        return blueprint.family.load(
            source_of(recipe),
            dtype_of(recipe),
            device,
            vae_dtype=vae_dtype_of(recipe),
            text_tokens=recipe.model.text_tokens,
        )


def load_text_encoders(blueprint: Blueprint, device: str, shares_device: bool = False) -> TextEncoder:
    """The recipe's text encoders. On a GPU shared with training they are offloaded between calls."""
    recipe, family = blueprint.recipe, blueprint.family
    tokens = recipe.model.text_tokens
    if recipe.model.random:
        return RandomTextEncoder(family, dtype_of(recipe), recipe.model.random_size, tokens)
    offloaded = shares_device and device.startswith("cuda")
    with _loading_errors_in_one_line(recipe):
        model = family.load_text_encoders(
            source_of(recipe), dtype_of(recipe), "cpu" if offloaded else device, text_tokens=tokens
        )
        return OffloadedTextEncoder(model, device) if offloaded else model


@contextmanager
def _loading_errors_in_one_line(recipe: Recipe) -> Iterator[None]:
    """A missing, truncated or wrong file is the user's to fix."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"model.source: {source_of(recipe)} cannot be loaded: {one_line(error)}") from error


def dtype_of(recipe: Recipe) -> torch.dtype:
    """The dtype of the frozen weights."""
    dtype: torch.dtype = getattr(torch, recipe.model.dtype)
    return dtype


def vae_dtype_of(recipe: Recipe) -> torch.dtype:
    """The dtype in which samples are decoded."""
    dtype: torch.dtype = getattr(torch, recipe.model.vae_dtype)
    return dtype


def source_of(recipe: Recipe) -> ModelSource:
    """Where the model is. The demo's ships with the package."""
    model = recipe.model
    return ModelSource(
        location=str(demo.model_folder()) if model.source == DEMO else model.source,
        revision=model.revision,
        variant=model.variant,
        subfolder=model.subfolder,
        token=model.token,
        base=model.base_source,
    )


def make_trainer(
    blueprint: Blueprint, model: DiffusionModel, *, helps: bool, ranks: RankGroup | None = None
) -> Trainer:
    """The recipe's trainer, alone or as one of several `ranks`.

    A trainer that also generates keeps the last version, and may offload its state while it generates.
    """
    settings = blueprint.recipe.training
    if not blueprint.recipe.techniques.tsp:
        settings = settings.model_copy(update={"pack_size": 1})
    return Trainer(
        model,
        blueprint.algorithm,
        settings,
        blueprint.shape,
        draw_noise=partial(normal_noise, blueprint.recipe.seed),
        ranks=ranks,
        helps=helps,
    )
