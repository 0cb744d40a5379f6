"""`digenrl sample`: generates samples from a checkpoint of a run, in this process, as an evaluation would.

Shape legend: B = samples, F = frames, C = 3 colors, H, W = height and width.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from digenrl.commands.support.checkpoints import UNTRAINED, find_checkpoint
from digenrl.commands.support.diffusers_snippet import diffusers_snippet
from digenrl.commands.support.output import out, print_written
from digenrl.commands.support.output_folders import new_folder, written_files
from digenrl.config.devices import check_device
from digenrl.config.reading import ConfigError, errors_about, parse_model
from digenrl.config.recipes.prompts import HeldOutPromptSettings, PromptSettings
from digenrl.config.recipes.recipe import EvaluationSettings, Recipe
from digenrl.generation.encoding import encode_prompts
from digenrl.models.contract import Conditioning, DiffusionModel
from digenrl.models.model_weights import load_weights, weights_state
from digenrl.models.quantized.replacing import BaseWeights
from digenrl.prompts.source_images import check_images, image_bytes
from digenrl.prompts.sources import ImageSource, Prompt, read_prompts
from digenrl.run_folder.folder import RunFolder
from digenrl.run_folder.grids import columns_for, side_by_side
from digenrl.training.checkpoint.checkpoints import read_checkpoint
from digenrl.training.checkpoint.export import weights_to_export
from digenrl.worker.blueprint import Blueprint, load_model, load_text_encoders, read_blueprint
from digenrl.worker.checks.sources import IN_FILES, check_source_counts, sources_of
from digenrl.worker.clips import clip_suffix, write_clip
from digenrl.worker.encoding import encode_prompt, source_images
from digenrl.worker.pictures import as_image
from digenrl.worker.rollouts import held_out_pixels

Weights = Literal["untrained", "trained", "moving average"]
ReportProgress = Callable[[int, int], None]  # samples done, and samples in all


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """What to sample; the run's evaluation settings apply to everything that is not given.

    `prompts` are texts, or a file with texts. All texts have the same source `images`. `count` samples are
    generated in total: if there are fewer prompts, they repeat, with other noise.
    """

    checkpoint: str | None = None
    prompts: Sequence[str] | Path = ()
    images: Sequence[Path] = ()
    count: int | None = None
    denoising_steps: int | None = None
    guidance: float | None = None
    seed: int | None = None
    device: str | None = None


@dataclass(frozen=True, slots=True)
class WrittenSample:
    """One sample: its PNG (the middle frame of a video), and the clip of a video."""

    file: str
    prompt: str
    clip: str | None


@dataclass(frozen=True, slots=True)
class WrittenSamples:
    """The samples, and the weights and settings that generated them.

    `as_evaluated` says whether an evaluation of this checkpoint uses the same weights. `loading` is Python code
    that loads the run's newest export with diffusers.
    """

    folder: Path
    grid: Path
    checkpoint: str
    weights: Weights
    as_evaluated: bool
    denoising_steps: int
    guidance: float
    seed: int
    device: str
    pictures: tuple[WrittenSample, ...]
    loading: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The content as plain JSON values."""
        return {**asdict(self), "folder": str(self.folder), "grid": str(self.grid)}


def sample_run(run: Path, request: SampleRequest, out: Path | None, report: ReportProgress) -> WrittenSamples:
    """Writes samples and their grid into `out`, a new or empty folder, after checking everything.

    Without `out`, into a new numbered folder inside the run's folder. The result is complete or absent.
    """
    folder = RunFolder.open(run)
    checkpoint = find_checkpoint(folder, request.checkpoint)
    name = UNTRAINED if checkpoint is None else checkpoint.name
    wanted = requested_prompts(folder.recipe, request)
    recipe = folder.recipe if checkpoint is None else folder.recipe.from_checkpoint()
    blueprint = read_blueprint(_with_evaluation(recipe, request), trains=False)
    how = "add --image FILE" if request.prompts else IN_FILES
    check_source_counts(blueprint.family, wanted.prompts, how, sources_of(blueprint), fixed_model=True)
    check_images(wanted.prompts)
    device = find_device(request.device)
    with new_folder(out, folder.path / "sampled", name) as target, _out_of_memory_as_error(device):
        rows = _encode(blueprint, wanted.prompts, device)
        base = BaseWeights(blueprint.recipe.held_out_base, trains=False)
        model = load_model(blueprint, device, for_a_run=False, base=base)
        weights, as_evaluated = _load_weights(model, checkpoint, folder.recipe)
        samples = WrittenSamples(
            folder=target,
            grid=target / "grid.png",
            checkpoint=name,
            weights=weights,
            as_evaluated=as_evaluated,
            denoising_steps=_evaluation(blueprint).denoising_steps,
            guidance=blueprint.held_out_guidance,
            seed=_evaluation(blueprint).seed,
            device=device,
            pictures=_sample_entries(wanted.prompts[: wanted.count], videos=blueprint.held_out_size.frames > 1),
            loading=diffusers_snippet(folder, blueprint.family),
        )
        with written_files(target) as partial:
            images = _generate(blueprint, model, rows, samples, partial, report)
            side_by_side(images, columns_for(len(images))).save(partial / samples.grid.name)
            _write_description(partial, samples)
    return samples


def print_samples(samples: WrittenSamples) -> None:
    """Prints where the samples are, and how to load the newest weights with diffusers."""
    count = len(samples.pictures)
    samples_made = "1 sample" if count == 1 else f"{count} samples"
    out.print(f"{samples.checkpoint} ({samples.weights}): {samples_made}", highlight=False)
    if not samples.as_evaluated:
        out.print("These are the exported weights; evaluations use those that generate.", style="dim")
    print_written(samples.grid)
    if samples.loading:
        out.print("To load the newest weights with diffusers:")
        for line in samples.loading:
            out.print(f"  {line}", highlight=False, soft_wrap=True)


# --- The request ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SampledPrompts:
    """The prompts of samples; the first `count` samples are kept, the others complete the last batch.

    The last bits of a sample depend on its batch, so batches must be those of an evaluation.
    """

    prompts: tuple[Prompt, ...]
    count: int


def requested_prompts(recipe: Recipe, request: SampleRequest) -> SampledPrompts:
    """The prompts to sample. A file has the columns that the recipe names."""
    evaluation = _evaluation_of(recipe)
    if isinstance(request.prompts, Path):
        prompts = read_prompts(_prompt_settings(request.prompts, evaluation.prompts))
        return _repeated(prompts, request.count or min(len(prompts), evaluation.shown))
    if request.prompts:
        if not all(text.strip() for text in request.prompts):
            raise ConfigError("--prompt: an empty text; describe the sample")
        images = tuple(request.images)
        given = [Prompt(at, text, images=images, where="--image") for at, text in enumerate(request.prompts)]
        return _repeated(given, request.count or len(given))
    prompts = read_prompts(evaluation.prompts)[: evaluation.count]
    count = request.count or min(len(prompts), evaluation.shown)
    if count > len(prompts):
        return _repeated(prompts, count)
    whole_batches = -(-count // evaluation.batch) * evaluation.batch
    return SampledPrompts(prompts[:whole_batches], count)


def _repeated(prompts: Sequence[Prompt], count: int) -> SampledPrompts:
    return SampledPrompts(tuple(islice(cycle(prompts), count)), count)


def _prompt_settings(path: Path, own: PromptSettings) -> PromptSettings:
    columns = {"column": own.column, "image_column": own.image_column}
    try:
        return parse_model(PromptSettings, {"path": path, **columns})
    except ConfigError as error:
        raise ConfigError(f"--prompts: {str(error).removeprefix('path: ')}") from None


def _evaluation_of(recipe: Recipe) -> EvaluationSettings:
    """The recipe's evaluation; for a run without one, the default settings on its training prompts."""
    return recipe.evaluation or EvaluationSettings(prompts=HeldOutPromptSettings(**recipe.prompts.model_dump()))


def _with_evaluation(recipe: Recipe, request: SampleRequest) -> Recipe:
    given = {
        "denoising_steps": request.denoising_steps,
        "guidance": request.guidance,
        "seed": request.seed,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    return recipe.model_copy(update={"evaluation": _evaluation_of(recipe).model_copy(update=changes)})


def find_device(name: str | None) -> str:
    """The device of this name; by default cuda if available. Raises ConfigError if there is no such device."""
    if name is None or name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    with errors_about("--device"):
        check_device(name)
    if name != "cpu" and int(name.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"--device: {name}, but this machine has {torch.cuda.device_count()} CUDA devices; use cpu"
        )
    return name


# --- Generation ------------------------------------------------------------------------------------------------


def _encode(blueprint: Blueprint, prompts: Sequence[Prompt], device: str) -> list[Conditioning]:
    """One row per sample. The text encoders are freed before the model is loaded."""
    encoders = load_text_encoders(blueprint, device)
    by_key = {(prompt.text, prompt.images): prompt for prompt in prompts}

    def encode(key: tuple[str, tuple[ImageSource, ...]]) -> Conditioning:
        prompt = by_key[key]
        images = source_images(blueprint, image_bytes(prompt), prompt.where, held_out=True)
        return encode_prompt(blueprint, encoders, prompt.text, images, held_out=True)

    rows = encode_prompts(encoders, by_key, encode)
    return [rows[prompt.text, prompt.images] for prompt in prompts]


def _load_weights(model: DiffusionModel, checkpoint: Path | None, recipe: Recipe) -> tuple[Weights, bool]:
    """Loads the weights that an export of the checkpoint would have; returns whether evaluations use the same.

    Evaluations use the moving average or, by the recipe, the weights that generate, which are not trained weights
    that the generating policy follows with a lag. Both may be rounded for generators, which an export is not.
    """
    if checkpoint is None:
        return "untrained", True
    state = read_checkpoint(checkpoint).trainer_state
    try:
        load_weights(model, weights_state(model, "cpu", instead=weights_to_export(state)))
    except ValueError as error:
        raise ConfigError(f"{checkpoint}: {error}; was config.yaml changed?") from None
    exact = recipe.publish.dtype != "bfloat16"
    if state.average is not None:
        return "moving average", exact and (recipe.evaluation is None or recipe.evaluates_average)
    return "trained", exact and state.old_policy is None


def _generate(
    blueprint: Blueprint,
    model: DiffusionModel,
    rows: Sequence[Conditioning],
    samples: WrittenSamples,
    folder: Path,
    report: ReportProgress,
) -> list[Image.Image]:
    """Writes the samples, which are the first of the rows; returns the images for the grid."""
    batch, count = _evaluation(blueprint).batch, len(samples.pictures)
    images: list[Image.Image] = []
    report(0, count)
    for first in range(0, len(rows), batch):
        pixels_BFCHW = held_out_pixels(blueprint, model, rows[first : first + batch], first)
        for pixels_FCHW in pixels_BFCHW[: count - first]:
            _check_finite(blueprint, pixels_FCHW, samples, len(images))
            images.append(_write_sample(pixels_FCHW, folder, len(images)))
        report(len(images), count)
    return images


def _check_finite(blueprint: Blueprint, pixels_FCHW: Tensor, samples: WrittenSamples, index: int) -> None:
    """Raises ConfigError if a sample has values that a file would show as black."""
    if not pixels_FCHW.isfinite().all():
        raise ConfigError(
            f"sample {index} ({samples.pictures[index].prompt!r}) has values that are not finite; the weights of "
            f"{samples.checkpoint} have diverged or are damaged, or {blueprint.recipe.model.dtype} is too coarse "
            "for them (model.dtype); use an earlier --checkpoint, or start a run with another dtype"
        )


def _write_sample(pixels_FCHW: Tensor, folder: Path, index: int) -> Image.Image:
    image = as_image(pixels_FCHW)
    image.save(folder / _image_name(index))
    if len(pixels_FCHW) > 1:
        write_clip(pixels_FCHW, folder / _clip_name(index))
    return image


def _sample_entries(prompts: Sequence[Prompt], videos: bool) -> tuple[WrittenSample, ...]:
    return tuple(
        WrittenSample(_image_name(index), prompt.text, _clip_name(index) if videos else None)
        for index, prompt in enumerate(prompts)
    )


def _write_description(folder: Path, samples: WrittenSamples) -> None:
    """Writes prompts, weights and settings beside the samples."""
    content = samples.as_dict()
    for name in ("folder", "grid", "loading"):
        del content[name]
    text = json.dumps(content, indent=1, ensure_ascii=False)
    (folder / "samples.json").write_text(text + "\n", encoding="utf-8")


def _image_name(index: int) -> str:
    return f"{index:04d}.png"


def _clip_name(index: int) -> str:
    return f"{index:04d}{clip_suffix()}"


def _evaluation(blueprint: Blueprint) -> EvaluationSettings:
    assert blueprint.recipe.evaluation is not None, "`_with_evaluation` has set it"
    return blueprint.recipe.evaluation


@contextmanager
def _out_of_memory_as_error(device: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise ConfigError(f"{device}: out of memory; stop other programs on it, or use another --device") from None
