"""`digenrl export`: writes the weights of a checkpoint for other programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor

from digenrl.commands.support.checkpoints import UNTRAINED, find_saved
from digenrl.commands.support.diffusers_snippet import lora_loading
from digenrl.commands.support.output import out, print_written
from digenrl.commands.support.output_folders import new_folder, written_files
from digenrl.config.reading import ConfigError, nearest, one_line
from digenrl.models.adapters.lora_files import (
    Adapters,
    adapted_component,
    write_comfyui,
    write_diffusers,
    write_peft,
)
from digenrl.models.contract import DiffusionModel
from digenrl.models.experts import HIGH_NOISE, LOW_NOISE, parts_of
from digenrl.models.model_weights import load_weights, weights_state
from digenrl.models.quantized.replacing import BaseWeights
from digenrl.run_folder.folder import RunFolder
from digenrl.training.checkpoint.checkpoints import read_checkpoint
from digenrl.training.checkpoint.export import weights_to_export, write_merged, write_transformer
from digenrl.training.trainer_state import TrainerState
from digenrl.worker.blueprint import (
    Blueprint,
    load_for_merging,
    load_model,
    lora_targets,
    read_blueprint,
    source_of,
    transformer_without_weights,
)

ExportFormat = Literal["diffusers", "comfyui", "peft", "merged"]
COMFYUI_ENDINGS = {"": "", HIGH_NOISE: "_high_noise", LOW_NOISE: "_low_noise"}  # of files, by transformer
COMFYUI_MODELS = {"": "it", HIGH_NOISE: "it on the high-noise model", LOW_NOISE: "it on the low-noise model"}


@dataclass(frozen=True, slots=True)
class WrittenExport:
    """What was written. `weights` says which ones; `loading` is how to use them, as Python code or in words."""

    format: ExportFormat
    folder: str
    files: tuple[str, ...]
    checkpoint: str
    weights: Literal["trained", "moving average"]
    loading: tuple[str, ...]
    remark: str = ""


@dataclass(frozen=True, slots=True)
class _Request:
    """A checkpoint's weights by published name, and what they belong to."""

    folder: RunFolder
    blueprint: Blueprint
    values: dict[str, Tensor]

    @property
    def name(self) -> str:
        """The run's name, for files that leave its folder."""
        return self.folder.path.resolve().name

    def adapters(self) -> Adapters:
        recipe = self.blueprint.recipe
        lora = recipe.training.lora
        assert lora is not None, "checked by `_check`"
        return Adapters.of(self.values, lora.rank, lora.alpha, lora_targets(recipe, self.blueprint.family))

    def load_into(self, model: DiffusionModel) -> None:
        """Overwrites a model's weights."""
        try:
            load_weights(model, weights_state(model, "cpu", instead=self.values))
        except ValueError as error:
            raise ConfigError(f"{self.folder.path}: {error}; was config.yaml changed?") from None


def export_run(run: Path, to: str, checkpoint: str | None, given: Path | None) -> WrittenExport:
    """Writes a checkpoint's weights, by default the newest's, into a new or empty folder; complete or absent."""
    form = _known_format(to)
    write, loading = _FORMATS[form]
    folder = RunFolder.open(run)
    if checkpoint == UNTRAINED:
        raise ConfigError(f"--checkpoint: {checkpoint} is the untrained model, which has nothing to export")
    path = find_saved(folder, checkpoint)
    _check(folder, form)
    state = read_checkpoint(path).trainer_state
    blueprint = read_blueprint(folder.recipe.from_checkpoint(), trains=False)
    request = _Request(folder, blueprint, weights_to_export(state))
    with new_folder(given, folder.path / "exported", form) as target:
        with written_files(target) as partial:
            write(request, partial)
        files = sorted(str(file.relative_to(target)) for file in target.rglob("*") if file.is_file())
    return WrittenExport(
        format=form,
        folder=str(target),
        files=tuple(files),
        checkpoint=path.name,
        weights="trained" if state.average is None else "moving average",
        loading=loading(request, target),
        remark=_remark(folder, state),
    )


def _remark(folder: RunFolder, state: TrainerState) -> str:
    """What the user should know about the exported weights."""
    ema = folder.recipe.training.ema
    if state.average is None or ema is None or state.updates_done >= ema.every_updates:
        return ""
    return (
        f"the moving average follows every {ema.every_updates} updates (training.ema.every_updates), and only "
        f"{state.updates_done} are done: these are the initial weights"
    )


def print_export(exported: WrittenExport) -> None:
    """Prints where the files are, and how to use them."""
    out.print(f"{exported.checkpoint} ({exported.weights}) for {exported.format}", highlight=False)
    print_written(Path(exported.folder))
    if exported.remark:
        out.print(exported.remark, highlight=False, soft_wrap=True)
    for line in exported.loading:
        out.print(f"  {line}", highlight=False, soft_wrap=True)


def _known_format(to: str) -> ExportFormat:
    known = list(get_args(ExportFormat))
    if to not in known:
        raise ConfigError(f"--to: unknown '{to}'; {nearest(to, known)}")
    form: ExportFormat = to  # type: ignore[assignment]
    return form


def _check(folder: RunFolder, form: ExportFormat) -> None:
    """Raises ConfigError if the run's weights cannot be written in this format."""
    recipe = folder.recipe
    if recipe.training.lora is None and form in ("comfyui", "peft"):
        raise ConfigError(
            f"--to: {form} is for adapters, but this run trained all weights; use diffusers, for the transformer, "
            "or merged, for a whole pipeline"
        )
    if recipe.model.random and form == "merged":
        raise ConfigError(
            f"--to: merged needs a whole pipeline, but model.source is {recipe.model.source}, which has no text "
            "encoders; use another format"
        )


# --- Formats ---------------------------------------------------------------------------------------------------


def _diffusers(request: _Request, folder: Path) -> None:
    if request.blueprint.recipe.training.lora is None:
        # Adapters do not depend on the format of the frozen weights.
        model = load_model(request.blueprint, "cpu", for_a_run=False, base=BaseWeights())
        request.load_into(model)
        write_transformer(model, folder / request.blueprint.family.denoiser)
    else:
        write_diffusers(request.adapters(), folder, request.blueprint.family.pipeline_class)


def _comfyui(request: _Request, folder: Path) -> None:
    family = request.blueprint.family
    layers = family.model_class.comfyui_layers
    if layers is None:
        raise ConfigError(f"--to: ComfyUI's names for {family.name} are not known; use merged, or declare them")
    try:
        transformer = transformer_without_weights(request.blueprint)
    except OSError as error:
        raise ConfigError(f"model.source: its configuration cannot be read: {one_line(error)}") from None
    unet = adapted_component(family.pipeline_class) == "unet"
    for part, adapters in request.adapters().by_part().items():
        file = folder / f"{request.name}{COMFYUI_ENDINGS[part]}.safetensors"
        write_comfyui(adapters, file, layers, parts_of(transformer).get(part, transformer), unet=unet)


def _peft(request: _Request, folder: Path) -> None:
    write_peft(request.adapters(), folder, str(source_of(request.blueprint.recipe)))


def _merged(request: _Request, folder: Path) -> None:
    model = load_for_merging(request.blueprint)
    request.load_into(model)
    write_merged(model, folder)


def _loading_diffusers(request: _Request, folder: Path) -> tuple[str, ...]:
    family = request.blueprint.family
    if request.blueprint.recipe.training.lora is None:
        kind, part = family.full_size().transformer.cls.__name__, family.denoiser
        return (f'{part} = {kind}.from_pretrained("{folder / part}")',)
    return lora_loading(folder, request.adapters().by_part(), family)


def _loading_comfyui(request: _Request, folder: Path) -> tuple[str, ...]:
    parts = [*request.adapters().by_part()]
    files = [f"{request.name}{COMFYUI_ENDINGS[part]}.safetensors" for part in parts]
    each = COMFYUI_MODELS[parts[0]] if len(parts) == 1 else "each on its model"
    return (f"copy {' and '.join(files)} into ComfyUI's models/loras, and load {each} with strength 1",)


def _loading_peft(request: _Request, folder: Path) -> tuple[str, ...]:
    named = {part or request.blueprint.family.denoiser: folder / part for part in request.adapters().by_part()}
    return tuple(
        f'{part} = peft.PeftModel.from_pretrained(pipe.{part}, "{where}")' for part, where in named.items()
    )


def _loading_merged(request: _Request, folder: Path) -> tuple[str, ...]:
    return (f'pipe = {request.blueprint.family.pipeline_class.__name__}.from_pretrained("{folder}")',)


# By format: what writes the weights, and what says how to use them.
_FORMATS: dict[
    ExportFormat, tuple[Callable[[_Request, Path], None], Callable[[_Request, Path], tuple[str, ...]]]
] = {
    "diffusers": (_diffusers, _loading_diffusers),
    "comfyui": (_comfyui, _loading_comfyui),
    "peft": (_peft, _loading_peft),
    "merged": (_merged, _loading_merged),
}
