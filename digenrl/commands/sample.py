"""Pictures from a checkpoint of a run, made in this process by the stages that evaluate while training goes on.

Shape legend: B = samples, F = frames, C = 3 colours, H, W = height and width.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from digenrl.commands.diffusers_snippet import diffusers_snippet
from digenrl.config.prompts import PromptSettings
from digenrl.config.reading import ConfigError, nearest, parse_model
from digenrl.config.recipe import EvaluationSettings, Recipe
from digenrl.generation.encoding import encode_prompts
from digenrl.models.contract import Conditioning, DiffusionModel
from digenrl.models.model_weights import load_weights, weights_state
from digenrl.prompts.sources import read_prompts
from digenrl.run_folder.folder import RunFolder, numbered_path
from digenrl.run_folder.grids import columns_for, side_by_side
from digenrl.training.checkpoint.atomic_folders import written_atomically
from digenrl.training.checkpoint.checkpoints import read_checkpoint
from digenrl.training.checkpoint.export import weights_to_export
from digenrl.training.checkpoint.format import checkpoints_in
from digenrl.worker.blueprint import Blueprint, load_model, load_text_encoders, read_blueprint
from digenrl.worker.pictures import as_image
from digenrl.worker.rollouts import held_out_pixels

UNTRAINED = "before"  # in place of a checkpoint's name
FRAME_MS = 60  # of an animation: about 16 frames a second; a GIF counts in hundredths
DEVICE = re.compile(r"cpu|cuda(:\d+)?")

Weights = Literal["untrained", "trained", "moving average"]
Report = Callable[[int, int], None]  # images done, and images in all


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """What to sample; where nothing is said, the run's own evaluation decides.

    `prompts` are texts, or a file of them. `count` images are made in all: prompts come in turn and, where they
    are fewer, once more with other noise.
    """

    checkpoint: str | None = None
    prompts: Sequence[str] | Path = ()
    count: int | None = None
    denoising_steps: int | None = None
    guidance: float | None = None
    seed: int | None = None
    device: str | None = None


@dataclass(frozen=True, slots=True)
class SampledPicture:
    """One sample: its PNG (of a video the frame in the middle), and the animation of a video."""

    file: str
    prompt: str
    animation: str | None


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was made, from which weights and how; `loading` is how diffusers loads the run's newest export.

    `as_evaluated` says whether the run's evaluations show the same weights of this checkpoint.
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
    pictures: tuple[SampledPicture, ...]
    loading: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "folder": str(self.folder), "grid": str(self.grid)}


def sample_run(run: Path, request: SampleRequest, out: Path | None, report: Report) -> Sampled:
    """Writes pictures and their grid into `out`, which is new or empty; everything is checked first.

    Without `out`, a new numbered folder in the run's own. The folder is complete or absent.
    """
    folder = RunFolder.open(run)
    checkpoint = find_checkpoint(folder, request.checkpoint)
    name = UNTRAINED if checkpoint is None else checkpoint.name
    wanted = _wanted(folder.recipe, request)
    blueprint = read_blueprint(_with_evaluation(folder.recipe, request))
    device = _device(request.device)
    with _new_folder(out, folder.path / "sampled", name) as target, _memory_told(device):
        rows = _encoded(blueprint, wanted.texts, device)
        model = load_model(blueprint, device, for_a_run=False)
        weights, as_evaluated = _load_weights(model, checkpoint)
        sampled = Sampled(
            folder=target,
            grid=target / "grid.png",
            checkpoint=name,
            weights=weights,
            as_evaluated=as_evaluated,
            denoising_steps=_evaluation(blueprint).denoising_steps,
            guidance=_guidance(blueprint),
            seed=_evaluation(blueprint).seed,
            device=device,
            pictures=_pictures(wanted.texts[: wanted.count], animated=blueprint.size.frames > 1),
            loading=diffusers_snippet(folder, blueprint.family),
        )
        with written_atomically(target) as partial:
            images = _make_pictures(blueprint, model, rows, wanted.count, partial, report)
            side_by_side(images, columns_for(len(images))).save(partial / sampled.grid.name)
            _write_words(partial, sampled)
    return sampled


def find_checkpoint(folder: RunFolder, name: str | None) -> Path | None:
    """The checkpoint of this name, the newest without one; None for the untrained model."""
    if name == UNTRAINED:
        return None
    found = {path.name: path for path in checkpoints_in(folder.checkpoints)}
    if name is None:
        if not found:
            raise ConfigError(
                f"{folder.path}: has no checkpoint yet; for the untrained model, add --checkpoint {UNTRAINED}"
            )
        return list(found.values())[-1]
    if name not in found:
        raise ConfigError(f"--checkpoint: unknown '{name}'; {nearest(name, [UNTRAINED, *found])}")
    return found[name]


# --- What is asked for ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The prompts of images, `count` of which are kept: the others complete the last batch.

    An evaluation has them in its batches, and a sample's last bits depend on its batch.
    """

    texts: tuple[str, ...]
    count: int


def _wanted(recipe: Recipe, request: SampleRequest) -> _Wanted:
    evaluation = _own_evaluation(recipe)
    if isinstance(request.prompts, Path):
        texts = [prompt.text for prompt in read_prompts(_prompt_settings(request.prompts))]
        return _in_turn(texts, request.count or min(len(texts), evaluation.shown))
    if request.prompts:
        if not all(text.strip() for text in request.prompts):
            raise ConfigError("--prompt: an empty text; say what the picture shall show")
        return _in_turn(request.prompts, request.count or len(request.prompts))
    texts = [prompt.text for prompt in read_prompts(evaluation.prompts)[: evaluation.count]]
    count = request.count or min(len(texts), evaluation.shown)
    if count > len(texts):
        return _in_turn(texts, count)
    whole_batches = -(-count // evaluation.batch) * evaluation.batch
    return _Wanted(tuple(texts[:whole_batches]), count)


def _in_turn(texts: Sequence[str], count: int) -> _Wanted:
    return _Wanted(tuple(islice(cycle(texts), count)), count)


def _prompt_settings(path: Path) -> PromptSettings:
    try:
        return parse_model(PromptSettings, {"path": path})
    except ConfigError as error:
        raise ConfigError(f"--prompts: {str(error).removeprefix('path: ')}") from None


def _own_evaluation(recipe: Recipe) -> EvaluationSettings:
    """A run without evaluation is sampled on its training prompts, as if it had the settings that are usual."""
    return recipe.evaluation or EvaluationSettings(prompts=recipe.prompts)


def _with_evaluation(recipe: Recipe, request: SampleRequest) -> Recipe:
    wishes = {
        "denoising_steps": request.denoising_steps,
        "guidance": request.guidance,
        "seed": request.seed,
    }
    changes = {name: wish for name, wish in wishes.items() if wish is not None}
    return recipe.model_copy(update={"evaluation": _own_evaluation(recipe).model_copy(update=changes)})


def _device(asked: str | None) -> str:
    if asked is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if DEVICE.fullmatch(asked) is None:
        raise ConfigError(f"--device: unknown '{asked}'; known: cpu, cuda, or one of several as cuda:1")
    if asked != "cpu" and int(asked.partition(":")[2] or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"--device: {asked}, but there are {torch.cuda.device_count()} CUDA devices here; use cpu, or another"
        )
    return asked


# --- Making it ------------------------------------------------------------------------------------------------


def _encoded(blueprint: Blueprint, texts: Sequence[str], device: str) -> list[Conditioning]:
    """A row per image. The text encoders are gone before the model comes."""
    encoders = load_text_encoders(blueprint, device)
    rows = encode_prompts(encoders, texts, blueprint.recipe.model.negative_prompt)
    return [rows[text] for text in texts]


def _load_weights(model: DiffusionModel, checkpoint: Path | None) -> tuple[Weights, bool]:
    """Gives the model what an export of the checkpoint would have.

    Evaluations show the weights that generate: neither an average of the trained ones, nor those that a policy
    which lags behind is following.
    """
    if checkpoint is None:
        return "untrained", True
    state = read_checkpoint(checkpoint).trainer_state
    try:
        load_weights(model, weights_state(model, "cpu", instead=weights_to_export(state)))
    except ValueError as error:
        raise ConfigError(f"{checkpoint}: {error}; was config.yaml changed?") from None
    averaged = state.average is not None
    return "moving average" if averaged else "trained", not averaged and state.old_policy is None


def _make_pictures(
    blueprint: Blueprint,
    model: DiffusionModel,
    rows: Sequence[Conditioning],
    count: int,
    folder: Path,
    report: Report,
) -> list[Image.Image]:
    """Writes the first `count` samples; returns the pictures for the grid."""
    batch = _evaluation(blueprint).batch
    images: list[Image.Image] = []
    report(0, count)
    for first in range(0, len(rows), batch):
        some = Conditioning.joined(rows[first : first + batch])
        pixels_BFCHW = held_out_pixels(blueprint, model, some, first)
        for pixels_FCHW in pixels_BFCHW[: count - first]:
            images.append(_write_picture(pixels_FCHW, folder, len(images)))
        report(len(images), count)
    return images


def _write_picture(pixels_FCHW: Tensor, folder: Path, place: int) -> Image.Image:
    image = as_image(pixels_FCHW)
    image.save(folder / _picture_name(place))
    if len(pixels_FCHW) > 1:
        frames = [as_image(pixels_FCHW[index : index + 1]) for index in range(len(pixels_FCHW))]
        path = folder / _animation_name(place)
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=FRAME_MS, loop=0)
    return image


def _pictures(texts: Sequence[str], animated: bool) -> tuple[SampledPicture, ...]:
    return tuple(
        SampledPicture(_picture_name(place), text, _animation_name(place) if animated else None)
        for place, text in enumerate(texts)
    )


def _write_words(folder: Path, sampled: Sampled) -> None:
    """What the pictures are of, beside them."""
    content = sampled.as_dict()
    for name in ("folder", "grid", "loading"):
        del content[name]
    text = json.dumps(content, indent=1, ensure_ascii=False)
    (folder / "samples.json").write_text(text + "\n", encoding="utf-8")


def _picture_name(place: int) -> str:
    return f"{place:04d}.png"


def _animation_name(place: int) -> str:
    return f"{place:04d}.gif"


def _evaluation(blueprint: Blueprint) -> EvaluationSettings:
    assert blueprint.recipe.evaluation is not None, "a recipe to sample from always has one"
    return blueprint.recipe.evaluation


def _guidance(blueprint: Blueprint) -> float:
    own = _evaluation(blueprint).guidance
    return blueprint.guidance if own is None else own


@contextmanager
def _new_folder(given: Path | None, parent: Path, name: str) -> Iterator[Path]:
    """An empty folder to write; one that stays empty goes again."""
    try:
        if given is not None:
            given.mkdir(parents=True, exist_ok=True)
        folder = given or numbered_path(parent, name)
        inside = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"--out: {given}: cannot be written: {error.strerror or error}") from None
    if inside:
        raise ConfigError(f"--out: {folder} is not empty, it has {inside[0].name}; name a new folder")
    try:
        yield folder
    finally:
        with suppress(OSError):  # it is not empty
            folder.rmdir()


@contextmanager
def _memory_told(device: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise ConfigError(f"{device}: out of memory; end what else is on it, or use another --device") from None
