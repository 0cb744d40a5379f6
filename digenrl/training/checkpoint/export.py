"""Trained weights as diffusers loads them: a LoRA folder or, after full fine-tuning, a transformer folder."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from digenrl.models.adapters.lora import has_lora, published_name
from digenrl.models.adapters.lora_files import save_lora
from digenrl.models.contract import DiffusionModel
from digenrl.models.experts import of_part, parts_of
from digenrl.models.loading.pipelines import without_progress_bars
from digenrl.models.loading.weight_files import copy_components
from digenrl.models.model_weights import merged_weights, weights_replaced, weights_state
from digenrl.models.parallel.shards import is_sharded
from digenrl.models.pipeline_model import PipelineModel
from digenrl.training.checkpoint.atomic_folders import tidy, written_atomically
from digenrl.training.checkpoint.format import CheckpointError, reason_of
from digenrl.training.ranks.sharding import unsharded_class
from digenrl.training.trainer_state import TrainerState


def export_weights(model: DiffusionModel, parent: Path, values: Mapping[str, Tensor] | None = None) -> Path:
    """Writes parent/lora for a model with adapters, else parent/transformer; returns the folder."""
    folder = parent / ("lora" if has_lora(model) else "transformer")
    (export_lora if has_lora(model) else export_transformer)(model, folder, values)
    return folder


def export_lora(model: DiffusionModel, folder: Path, values: Mapping[str, Tensor] | None = None) -> None:
    """Writes the adapters so that `pipe.load_lora_weights(folder)` reads them; replaces older ones.

    `values`, named as by `weights_to_export`, replace the model's own.
    """
    try:
        with _with_values(model, values):
            save_lora(model, folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be written: {reason_of(error)}") from error


def export_transformer(model: DiffusionModel, folder: Path, values: Mapping[str, Tensor] | None = None) -> None:
    """Writes the transformer so that its class's `from_pretrained(folder)` reads it; replaces an older one.

    `values` replace some of the model's own weights. For a sharded model they must be all weights, gathered.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        tidy(folder.parent)
        with written_atomically(folder) as partial:
            write_transformer(model, partial, values)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be written: {reason_of(error)}") from error


def write_transformer(model: DiffusionModel, folder: Path, values: Mapping[str, Tensor] | None = None) -> None:
    """As `export_transformer`, into a new folder; if that fails, it is incomplete."""
    whole = values if is_sharded(model.transformer) else weights_state(model, "cpu", instead=values or {})
    _transformer_with(model.transformer, whole or {}).save_pretrained(folder)


def write_merged(model: PipelineModel, folder: Path) -> None:
    """Writes the whole pipeline so that its class's `from_pretrained(folder)` reads it, with merged adapters.

    The model's pipeline has the merged transformer from then on. Components that are not loaded here are copied.
    """
    weights = merged_weights(model)
    merged = {
        part or model.denoiser: _transformer_with(transformer, of_part(part, weights))
        for part, transformer in parts_of(model.transformer).items()
    }
    model.pipeline.register_modules(**merged)
    with without_progress_bars():
        model.pipeline.save_pretrained(folder)
    source, optional = Path(model.pipeline.config._name_or_path), model.pipeline_class._optional_components
    copy_components(source, folder, (*model.unused_components, *model.processors), optional)


def weights_to_export(state: TrainerState) -> dict[str, Tensor]:
    """The moving average if there is one, else the trained weights, under their published names."""
    return {published_name(name): value for name, value in (state.average or state.weights).items()}


def _with_values(model: DiffusionModel, values: Mapping[str, Tensor] | None) -> AbstractContextManager[None]:
    if values is None:
        return nullcontext()
    return weights_replaced(model, weights_state(model, "cpu", instead=values))


def _transformer_with(own: nn.Module, weights: Mapping[str, Tensor]) -> Any:
    """A transformer of the same configuration with these weights; the model's own is not changed."""
    parameters = dict(own.named_parameters())
    buffers = {name: value.cpu() for name, value in own.state_dict().items() if name not in parameters}
    configuration: Any = own.config
    with torch.device("meta"):
        transformer = unsharded_class(own).from_config(configuration)
    weights = {name: _with_own_storage(value) for name, value in weights.items()}
    transformer.load_state_dict(buffers | weights, assign=True)
    return transformer


def _with_own_storage(value: Tensor) -> Tensor:
    """The same memory as a separate storage: diffusers puts tensors that share one into a single file."""
    content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(content).view(value.dtype).view(value.shape)
