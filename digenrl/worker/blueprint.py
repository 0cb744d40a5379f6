"""From a recipe to its blueprint, and from a blueprint to a loaded model and a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from digenrl import demo
from digenrl.algorithms.registry import build_algorithm
from digenrl.config.import_paths import add_to_python_path
from digenrl.config.reading import ConfigError, errors_about, one_line
from digenrl.config.recipes.attention import CANDIDATES
from digenrl.config.recipes.base_precision import UNQUANTIZED
from digenrl.config.recipes.conflicts import check_shared_gradients
from digenrl.config.recipes.paths import DEMO_MODELS
from digenrl.config.recipes.recipe import Recipe
from digenrl.config.recipes.windows import AllSteps, EulerOnly, Window
from digenrl.generation.noise import normal_noise
from digenrl.models.adapters.lora import Targets, add_lora, check_targets, target_layers
from digenrl.models.adapters.lora_start import fitted, original_layers, read_lora, start_from
from digenrl.models.contract import DiffusionModel, SampleSize, Schedule, TextEncoder
from digenrl.models.experts import Experts
from digenrl.models.family import Component, Family
from digenrl.models.loading.base_weights import files_fingerprint
from digenrl.models.loading.parked import OffloadedTextEncoder, ParkedModel
from digenrl.models.loading.random_text_encoder import RandomTextEncoder
from digenrl.models.loading.single_file import COMPONENT
from digenrl.models.loading.sources import ModelSource, check_class, check_source, weight_files
from digenrl.models.loading.staged_loading import load_stage
from digenrl.models.objective import Objective
from digenrl.models.parallel.context_parallel import check_ranks, divide_tokens
from digenrl.models.parallel.staged_blocks import keep_blocks
from digenrl.models.parallel.token_exchange import TokenExchange
from digenrl.models.passes.compiled import compile_blocks
from digenrl.models.passes.determinism import use_deterministic_kernels
from digenrl.models.pipeline_model import TRAINED_TIMESTEPS, PipelineModel
from digenrl.models.quantized.replacing import BaseWeights, check_has_blocks
from digenrl.models.registry import find_family, naming_families
from digenrl.models.trajectory import StepNoise
from digenrl.records import Kernel
from digenrl.training.open_batch import BatchShape, check_shape
from digenrl.training.ranks.rank_group import RankGroup
from digenrl.training.ranks.sharded_loading import load_sharded
from digenrl.training.ranks.sharding import shard_model
from digenrl.training.trainer import Trainer
from digenrl.training.update_split import stale_groups
from digenrl.worker.stage_bounds import stage_bounds

TRAIN_EXPERT = "model.train_expert"


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A recipe with its family, algorithm and window resolved. It holds no weights."""

    recipe: Recipe
    family: Family
    algorithm: Objective
    window: Window
    noise: StepNoise
    size: SampleSize
    guidance: float
    held_out_size: SampleSize  # of an evaluation's samples
    held_out_guidance: float

    @property
    def shape(self) -> BatchShape:
        """The number of groups in a batch and of samples in a group, and how many groups may be stale."""
        return batch_shape(self.recipe)

    @property
    def text_tokens(self) -> int | None:
        """The length of the text, as `Family.text_tokens_of`."""
        return self.family.text_tokens_of(self.recipe)

    @property
    def same_initial_noise(self) -> bool:
        """Whether all samples of a group start from the same noise: the recipe's choice, or the algorithm's."""
        chosen = self.recipe.sample.same_initial_noise
        return self.algorithm.settings.same_initial_noise if chosen is None else chosen

    def schedule(self, model: DiffusionModel, steps: int | None = None) -> Schedule:
        """The noise levels of training samples, or of this many steps: the model's own, or those of the shift."""
        sample = self.recipe.sample
        return _schedule(model, sample.denoising_steps if steps is None else steps, self.size, sample.shift)

    def held_out_schedule(self, model: DiffusionModel) -> Schedule:
        """The noise levels of an evaluation's samples."""
        evaluation, shift = self.recipe.evaluation, self.recipe.sample.shift
        assert evaluation is not None, "a recipe without evaluation has no held-out samples"
        shift = shift if evaluation.shift is None else evaluation.shift
        return _schedule(model, evaluation.denoising_steps, self.held_out_size, shift)


def _schedule(model: DiffusionModel, steps: int, size: SampleSize, shift: float | None) -> Schedule:
    try:
        return model.schedule(steps, size) if shift is None else model.shifted_schedule(steps, shift)
    except ConfigError:
        raise
    except (TypeError, ValueError, AssertionError) as error:  # as diffusers refuses settings
        raise ConfigError(f"model.source: its scheduler cannot be used: {one_line(error)}") from error


def read_blueprint(recipe: Recipe, trains: bool = True) -> Blueprint:
    """Resolves a recipe; raises ConfigError for what the family, algorithm or window does not support.

    If nothing `trains`, the algorithm is not looked at, since its module may not be on this machine: another one
    takes its place.
    """
    add_to_python_path(recipe.python_path)
    family = find_family(recipe.model.family)
    size, held_out_size = SampleSize(*recipe.sample_size), SampleSize(*recipe.held_out_size)
    for key, frames in (("sample.frames", size.frames), ("evaluation.frames", held_out_size.frames)):
        if family.kind == "image" and frames != 1:
            raise ConfigError(f"{key}: {family.name} makes images, got {frames}; set it to 1")
    if recipe.model.negative_prompt is not None and not family.uses_negative_prompts:
        raise ConfigError(
            f"model.negative_prompt: {family.name} has embedded guidance and takes none; leave it out"
        )
    if recipe.sample.source_size == "area" and "image_edit" not in family.tasks:
        are_frames = "source images of {} are frames of the sample, and have its size"
        why = are_frames if "image_to_video" in family.tasks else "{} takes no source images"
        raise ConfigError(f"sample.source_size: area, but {why.format(family.name)}; set it to crop")
    family.check_text_tokens(recipe.model.text_tokens)
    own_shift = None if recipe.evaluation is None else recipe.evaluation.shift
    for key, shift in (("sample.shift", recipe.sample.shift), ("evaluation.shift", own_shift)):
        if shift is not None and not family.model_class.takes_shift:
            raise ConfigError(f"{key}: {family.name} has fixed noise levels, got {shift:g}; leave it out")
    if recipe.model.random:
        family.full_size(recipe.model.random_size)
    else:
        with naming_families(family):
            check_source(family.pipeline_class, source_of(recipe))
    _check_revision(recipe)
    algorithm, window = _training(recipe, family) if trains else (build_algorithm("flow_grpo"), AllSteps())
    if recipe.training.lora is None and recipe.model.dtype != "float32":
        raise ConfigError(
            f"model.dtype: {recipe.model.dtype} is too coarse for weights that are trained; use float32 with "
            "training.autocast: bf16, or adapters (training.lora)"
        )
    guidance = family.default_guidance if recipe.model.guidance is None else recipe.model.guidance
    own_guidance = None if recipe.evaluation is None else recipe.evaluation.guidance
    sample = recipe.sample
    return Blueprint(
        recipe=recipe,
        family=family,
        algorithm=algorithm,
        window=window,
        noise=StepNoise(sample.noise.kind, sample.noise.level, sample.noise.log_prob),
        size=size,
        guidance=guidance,
        held_out_size=held_out_size,
        held_out_guidance=guidance if own_guidance is None else own_guidance,
    )


def _check_revision(recipe: Recipe) -> None:
    """Raises ConfigError for a revision of a pipeline that is not on the hub."""
    model = recipe.model
    where = model.base_source or source_of(recipe).location
    if model.revision is not None and (model.random or ModelSource(where).kind == "folder"):
        why = f"{model.revision}, but {model.base_source or model.source} is not on the hub, which has revisions"
        raise ConfigError(f"model.revision: {why}; leave it out", "model.revision")


def _training(recipe: Recipe, family: Family) -> tuple[Objective, Window]:
    """The algorithm and the window; raises ConfigError for settings that do not suit them."""
    algorithm = build_algorithm(recipe.algorithm.name, recipe.algorithm.options)
    check_shared_gradients(recipe)
    window = recipe.window
    with errors_about("sample.window"):
        window.check(recipe.sample.denoising_steps)
    algorithm.settings.trained_steps(recipe.sample.denoising_steps, window)  # raises if there are none
    _check_noise(recipe, window, algorithm)
    _check_sampler(recipe, algorithm)
    _check_pairs(recipe, family, algorithm)
    check_shape(batch_shape(recipe), algorithm, recipe.training)
    return algorithm, window


def check_sizes(blueprint: Blueprint, model: DiffusionModel) -> None:
    """Raises ConfigError if the model cannot generate samples of the recipe's sizes."""
    for key, size in (("sample", blueprint.size), ("evaluation", blueprint.held_out_size)):
        with errors_about(key):
            model.noise_shape(size)


def check_sizes_without_weights(blueprint: Blueprint) -> None:
    """`check_sizes` before the model is loaded, if its VAE is known; a UNet is needed as well."""
    recipe, family = blueprint.recipe, blueprint.family
    if recipe.model.random:
        vae: Component | None = family.full_size(recipe.model.random_size).vae or family.vae
    else:
        vae = family.vae_of(source_of(recipe))
    if vae is not None and family.denoiser == COMPONENT:
        check_sizes(blueprint, family.model_of_shapes(vae))


def batch_shape(recipe: Recipe) -> BatchShape:
    """The shape of the recipe's batches. Stale samples are those of a step that are generated first."""
    prompts = recipe.batch.prompts
    return BatchShape(prompts, recipe.batch.samples_per_prompt, stale_groups(recipe.techniques.tcss, prompts))


def _check_noise(recipe: Recipe, window: Window, algorithm: Objective) -> None:
    if recipe.sample.last_step_noise and not window.covers_all_steps:
        raise ConfigError(
            f"sample.last_step_noise: true, but steps outside a window of kind '{window.kind}' have no noise; "
            "set it to false, or sample.window to {kind: all}"
        )
    if recipe.sample.same_initial_noise and isinstance(window, EulerOnly) and not recipe.trains_on_pairs:
        raise ConfigError(
            f"sample.same_initial_noise: true, but {recipe.algorithm.name} adds no noise in any step: all samples "
            "of a group would be equal; leave it out"
        )
    needs_densities = algorithm.settings.needs_densities
    if recipe.sample.noise.log_prob == "squared_error" and needs_densities is not None:
        raise ConfigError(
            f"sample.noise.log_prob: squared_error is no density, which {needs_densities} needs; set it to normal"
        )
    needs_diffusion = algorithm.settings.needs_diffusion
    if recipe.sample.noise.kind in ("cps", "ddim") and needs_diffusion is not None:
        raise ConfigError(
            f"sample.noise.kind: {recipe.sample.noise.kind} is no diffusion over a step, which {needs_diffusion} "
            "needs; set it to flow, dance, linear or truncated_flow"
        )


def _check_sampler(recipe: Recipe, algorithm: Objective) -> None:
    """A ratio between two precisions is not 1 before the first update, and recomputing it hides the difference."""
    if recipe.sample.precision is not None and not algorithm.settings.corrects_precision:
        raise ConfigError(
            f"sample.precision: {recipe.sample.precision}, but with these options {recipe.algorithm.name} takes "
            "samples as if they were generated in the precision of training; weigh them with "
            "algorithm.options={stale: decoupled, weighted: all}, or leave it out"
        )


def _check_pairs(recipe: Recipe, family: Family, algorithm: Objective) -> None:
    where = "prompts.pair_columns"
    if not recipe.trains_on_pairs:
        return
    if algorithm.rows_per_term != 2:
        raise ConfigError(
            f"{where}: {recipe.algorithm.name} compares no two samples; set algorithm={{name: flow_dpo}}, or "
            "leave pair_columns out",
            where,
        )
    if not isinstance(recipe.window, EulerOnly):
        raise ConfigError(
            f"sample.window: {recipe.window.kind}, but images of {where} have no denoising steps; leave it out",
            "sample.window",
        )
    if family.kind != "image":
        raise ConfigError(
            f"{where}: pairs are images, but {family.name} makes videos; use another model.family", where
        )


def check_trained_expert(blueprint: Blueprint, schedule: Schedule, boundary_ratio: float) -> None:
    """Raises ConfigError if a step that is trained belongs to the other of two transformers.

    Algorithms that renoise final latents train at all noise levels.
    """
    expert = blueprint.recipe.model.train_expert
    if expert is None or expert == "both":
        return
    boundary = boundary_ratio * TRAINED_TIMESTEPS
    own = [
        index for index, time in enumerate(schedule.timesteps.tolist()) if (time >= boundary) == (expert == "high")
    ]
    renoised = blueprint.algorithm.settings.replays == "renoised"
    trained = range(schedule.steps) if renoised else blueprint.window.trainable_steps(schedule.steps)
    others = [index for index in trained if index not in own]
    if not others:
        return
    steps = f"{own[0]} to {own[-1]}" if own else "none"
    hint = "" if renoised or not own else f", or sample.window to {{kind: sparse, skip: {own[0]}, fraction: "
    hint += "" if not hint else f"{(own[-1] + 1) / schedule.steps:g}}}"
    raise ConfigError(
        f"{TRAIN_EXPERT}: {expert}, which takes the steps {steps} of {schedule.steps}, but step {others[0]} is "
        f"trained too; set it to both{hint}",
        TRAIN_EXPERT,
    )


def check_hub_model(blueprint: Blueprint) -> dict[str, Any]:
    """The content of the model's `model_index.json`, {} if it has random weights; fetches a few kB at most.

    Raises ConfigError if a hub id is not accessible, has another pipeline class or a tokenizer for shorter texts.
    """
    family, source = blueprint.family, source_of(blueprint.recipe)
    if blueprint.recipe.model.random:
        return {}
    with naming_families(family):
        index = check_class(family.pipeline_class, family.with_base(source))
    family.model_class.check_index(index)
    family.check_tokenizer(blueprint.recipe.model.text_tokens, source)
    return index


def load_model(
    blueprint: Blueprint,
    device: str,
    for_a_run: bool = True,
    *,
    shard_over: RankGroup | None = None,
    base: BaseWeights | None = None,
    exchange: TokenExchange | None = None,
) -> DiffusionModel:
    """The recipe's model without text encoders, with LoRA adapters if it trains those.

    Compiling takes about a minute, which pays off `for_a_run` but not for a few pictures. A model is sharded over
    the ranks that are given, or cut into stages, and need not fit on one card. `base` is the format of the frozen
    weights, by default that of a trainer. With an `exchange`, its ranks compute every forward together, which is
    not compiled.
    """
    recipe = blueprint.recipe
    if for_a_run:
        check_attention(recipe, device)
        if recipe.model.deterministic and device.startswith("cuda"):
            use_deterministic_kernels()
    base = BaseWeights(recipe.model.base) if base is None else base
    if shard_over is not None and recipe.training.stages is not None:
        model = _load_stage(blueprint, shard_over, base)
    else:
        model = (
            _load_whole(blueprint, device, base) if shard_over is None else _load_sharded(blueprint, shard_over)
        )
        _add_adapters(recipe, model)
    check_sizes(blueprint, model)
    if for_a_run and isinstance(model.transformer, Experts):
        ratio = model.transformer.boundary / TRAINED_TIMESTEPS
        check_trained_expert(blueprint, blueprint.schedule(model), ratio)
    if for_a_run and recipe.model.kernels is not None:
        model.use_attention(recipe.model.kernels)
    if exchange is not None:
        divide_tokens(model, exchange)
    elif for_a_run and recipe.model.compiles(device):
        compile_blocks(model)
    return model


def check_attention(recipe: Recipe, device: str) -> None:
    """Raises ConfigError if the device cannot compute an attention kernel that the recipe names."""
    model = recipe.model
    unusable: dict[Kernel, str] = {}
    if not device.startswith("cuda"):
        unusable = dict.fromkeys(("cudnn", "efficient"), f"needs a GPU, got {device}")
    elif model.dtype == "float32" and recipe.training.autocast != "bf16":
        unusable = dict.fromkeys(("cudnn", "flash"), "computes in 16 bits only, and model.dtype is float32")
    elif model.deterministic:
        unusable = {"cudnn": "is not deterministic, and model.deterministic is true"}
    for kernel in sorted(unusable.keys() & (model.kernels or {}).values()):
        known = ", ".join(each for each in CANDIDATES if each not in unusable)
        raise ConfigError(
            f"model.attention: {kernel} {unusable[kernel]}; known here: {known}, native; set one of them, or auto",
            "model.attention",
        )


def _load_whole(blueprint: Blueprint, device: str, base: BaseWeights) -> DiffusionModel:
    recipe, family = blueprint.recipe, blueprint.family
    vae_dtype, text_tokens = vae_dtype_of(recipe), blueprint.text_tokens
    if recipe.model.random:
        return family.build_full(
            dtype_of(recipe),
            device,
            recipe.model.random_size,
            seed=recipe.seed,
            vae_dtype=vae_dtype,
            text_tokens=text_tokens,
            base=base,
        )
    with _loading_errors_in_one_line(recipe):
        return family.load(
            source_of(recipe),
            dtype_of(recipe),
            device,
            text_encoders=False,
            vae_dtype=vae_dtype,
            text_tokens=text_tokens,
            base=base,
        )


def _load_sharded(blueprint: Blueprint, ranks: RankGroup) -> DiffusionModel:
    """A model with a sharded transformer. Random weights and single files are whole in host memory first."""
    recipe, source = blueprint.recipe, source_of(blueprint.recipe)
    if recipe.model.random or source.file is not None:
        model = _load_whole(blueprint, "cpu", BaseWeights())
        shard_model(model, ranks)
        return model
    with _loading_errors_in_one_line(recipe):
        return load_sharded(
            blueprint.family,
            source,
            ranks,
            dtype_of(recipe),
            vae_dtype=vae_dtype_of(recipe),
            text_tokens=blueprint.text_tokens,
        )


def _load_stage(blueprint: Blueprint, ranks: RankGroup, base: BaseWeights) -> DiffusionModel:
    """A rank's stage, with all adapters. What cannot be read in parts is whole in host memory first."""
    recipe, source, own = blueprint.recipe, source_of(blueprint.recipe), ranks.rank.index
    before = blueprint.family.model_class.blocks_before_chain
    if recipe.model.random or source.file is not None or base.quantized:
        whole = _load_whole(blueprint, "cpu", base)
        _add_adapters(recipe, whole)
        bounds = stage_bounds(recipe, whole.transformer, before, ranks)
        keep_blocks(whole, bounds[own], bounds[own + 1])
        whole.transformer.to(ranks.device)
        return whole
    bounds = stage_bounds(recipe, transformer_without_weights(blueprint), before, ranks)
    with _loading_errors_in_one_line(recipe):
        return load_stage(
            blueprint.family,
            source,
            range(bounds[own], bounds[own + 1]),
            dtype_of(recipe),
            ranks.device,
            vae_dtype=vae_dtype_of(recipe),
            text_tokens=blueprint.text_tokens,
            add_adapters=lambda model: _add_adapters(recipe, model, ranks.device),
        )


def load_for_evaluation(
    blueprint: Blueprint, device: str, exchange: TokenExchange | None = None
) -> ParkedModel | None:
    """The model that evaluates, in host memory, if it has other frozen weights than the one that generates."""
    recipe = blueprint.recipe
    if recipe.evaluation is None or recipe.held_out_base == recipe.generating_base:
        return None
    base = BaseWeights(recipe.held_out_base)
    model = load_model(blueprint, "cpu", for_a_run=False, base=base, exchange=exchange)
    assert isinstance(model, PipelineModel)
    return ParkedModel(model, device)


def load_for_merging(blueprint: Blueprint) -> PipelineModel:
    """The recipe's model with its text encoders and adapters, on the CPU; not for models with random weights."""
    model = load_whole_model(blueprint, "cpu")
    _add_adapters(blueprint.recipe, model)
    return model


def _add_adapters(recipe: Recipe, model: DiffusionModel, values_on: torch.device | None = None) -> None:
    lora = recipe.training.lora
    if lora is None:
        return
    expert = recipe.model.train_expert or "both"
    add_lora(model, lora.rank, lora.alpha, recipe.seed, lora.targets, lora.init, values_on, expert)
    if lora.start_from is not None:
        start_from(model, Path(lora.start_from))


def check_base(blueprint: Blueprint) -> None:
    """Raises ConfigError if the recipe's base format does not suit the model; reads no weights."""
    if blueprint.recipe.model.base != UNQUANTIZED:
        with suppress(OSError):  # a hub id that is not in the cache is checked when it is loaded
            check_has_blocks(transformer_without_weights(blueprint), blueprint.recipe.model.base)


def check_adapters(blueprint: Blueprint) -> None:
    """Raises ConfigError if the recipe's LoRA targets, or the LoRA that it starts from, do not fit the model.

    Reads no weights of the model. A hub id that is not in the cache is checked when it is loaded.
    """
    recipe, lora = blueprint.recipe, blueprint.recipe.training.lora
    model_class = blueprint.family.model_class
    declared = ":" in recipe.model.family and "lora_targets" in vars(model_class)  # by the user's own family
    if lora is None or (lora.targets is None and lora.start_from is None and not declared):
        return
    try:
        transformer = transformer_without_weights(blueprint)
    except OSError:
        return
    if lora.targets is not None:
        check_targets(transformer, lora.targets)
    elif declared:
        where = f"{model_class.__module__}.{model_class.__qualname__}.lora_targets"
        check_targets(transformer, model_class.lora_targets, where)
    if lora.start_from is not None:
        layers = target_layers(transformer, lora_targets(recipe, blueprint.family))
        original = original_layers(blueprint.family.model_class, transformer)
        fitted(read_lora(Path(lora.start_from), blueprint.family.pipeline_class, original), set(layers), lora.rank)


def check_cards_per_sample(blueprint: Blueprint) -> None:
    """Raises ConfigError if the model's heads cannot be divided over the cards that compute a sample together.

    Reads no weights. A hub id that is not in the cache is checked when it is loaded.
    """
    lanes, kind = blueprint.recipe.lanes, blueprint.family.model_class
    keys = {"cards_per_replica": lanes.cards_per_replica, "cards_per_generator": lanes.cards_per_generator}
    several = {key: count for key, count in keys.items() if count > 1}
    if not several:
        return
    try:
        transformer = transformer_without_weights(blueprint)
    except OSError:
        return
    for key, count in several.items():
        with errors_about(f"lanes.{key}"):
            check_ranks(kind.family, kind.self_attention, transformer, count)


def transformer_without_weights(blueprint: Blueprint) -> nn.Module:
    """The recipe's transformer on the meta device; raises OSError if its configuration is not on this machine."""
    recipe, family = blueprint.recipe, blueprint.family
    if recipe.model.random:
        return family.build_transformer(dtype_of(recipe), "meta", recipe.model.random_size)
    return family.transformer_without_weights(source_of(recipe))


def lora_targets(recipe: Recipe, family: Family) -> Targets:
    """The layers that the recipe adapts, by default the family's."""
    chosen = None if recipe.training.lora is None else recipe.training.lora.targets
    return family.model_class.lora_targets if chosen is None else chosen


def load_whole_model(blueprint: Blueprint, device: str) -> PipelineModel:
    """The recipe's model with its text encoders, without adapters; not for models with random weights."""
    recipe = blueprint.recipe
    with _loading_errors_in_one_line(recipe):
        return blueprint.family.load(
            source_of(recipe),
            dtype_of(recipe),
            device,
            vae_dtype=vae_dtype_of(recipe),
            text_tokens=blueprint.text_tokens,
        )


def load_text_encoders(blueprint: Blueprint, device: str, shares_device: bool = False) -> TextEncoder:
    """The recipe's text encoders. On a GPU shared with training they are offloaded between calls."""
    recipe, family = blueprint.recipe, blueprint.family
    tokens = blueprint.text_tokens
    if recipe.model.random:
        return RandomTextEncoder(family, dtype_of(recipe), recipe.model.random_size, tokens)
    offloaded = shares_device and device.startswith("cuda")
    with _loading_errors_in_one_line(recipe):
        model = family.load_text_encoders(
            source_of(recipe),
            dtype_of(recipe),
            "cpu" if offloaded else device,
            vae_dtype=vae_dtype_of(recipe),
            text_tokens=tokens,
            precision=recipe.model.encoder_base,
            quantize_on=device,
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
    """Where the model is. Those of the demos ship with the package."""
    model, packaged = recipe.model, DEMO_MODELS.get(recipe.model.source)
    return ModelSource(
        location=model.source if packaged is None else str(demo.model_folder(packaged)),
        revision=model.revision,
        variant=model.variant,
        subfolder=model.subfolder,
        token=model.token,
        base=model.base_source,
    )


def fingerprint_of_base(blueprint: Blueprint) -> str:
    """A hash of the weights that training starts from; "" for random ones, which the recipe determines."""
    if blueprint.recipe.model.random:
        return ""
    source = blueprint.family.with_base(source_of(blueprint.recipe))
    return files_fingerprint(weight_files(blueprint.family.pipeline_class, source))


def make_trainer(
    blueprint: Blueprint,
    model: DiffusionModel,
    *,
    helps: bool,
    ranks: RankGroup | None = None,
    commits: bool = True,
) -> Trainer:
    """The recipe's trainer, alone or as one of several `ranks`, or that of a generator, which never `commits`.

    A trainer that also generates keeps the last version, and may offload its state while it generates. Trainers
    that share gradients compute an update together, and one of them commits.
    """
    settings = blueprint.recipe.training.model_copy(update={"job_samples": blueprint.recipe.job_samples})
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
        shares_gradients=blueprint.recipe.shares_work,
        commits=commits,
    )
