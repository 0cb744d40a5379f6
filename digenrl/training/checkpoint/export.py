"""Trained weights as diffusers loads them: a LoRA folder, or a transformer folder after full fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from digenrl.models.contract import DiffusionModel
from digenrl.models.lora import has_lora, published_name, save_lora
from digenrl.models.model_weights import weights_replaced, weights_state
from digenrl.models.shards import is_sharded
from digenrl.training.checkpoint.atomic_folders import tidy, written_atomically
from digenrl.training.checkpoint.checkpoints import CheckpointError, reason_of
from digenrl.training.ranks.sharding import plain_class


def export_weights(model: DiffusionModel, parent: Path, values: Mapping[str, Tensor] | None = None) -> Path:
    """Writes parent/lora of a model with adapters, else parent/transformer; returns the folder."""
    folder = parent / ("lora" if has_lora(model) else "transformer")
    (export_lora if has_lora(model) else export_transformer)(model, folder, values)
    return folder


def export_lora(model: DiffusionModel, folder: Path, values: Mapping[str, Tensor] | None = None) -> None:
    """Writes the adapters so that `pipe.load_lora_weights(folder)` reads them, in place of older ones.

    `values` stand in for the model's own, by the names of `weights_to_export`.
    """
    try:
        with _with_values(model, values):
            save_lora(model, folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be written: {reason_of(error)}") from error


def export_transformer(model: DiffusionModel, folder: Path, values: Mapping[str, Tensor] | None = None) -> None:
    """Writes the transformer so that its class's `from_pretrained(folder)` reads it, in place of an older one.

    `values` as in `export_lora`; a weight that they do not name is the model's own. Of a sharded model they are
    whole and name all weights, as `gathered_weights` gives them.
    """
    whole = values if is_sharded(model.transformer) else weights_state(model, "cpu", instead=values or {})
    transformer = _transformer_with(model, whole or {})
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        tidy(folder.parent)
        with written_atomically(folder) as partial:
            transformer.save_pretrained(partial)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}: cannot be written: {reason_of(error)}") from error


def weights_to_export(trainer_state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Of a trainer's state: the moving average where there is one, else the trained weights."""
    values = trainer_state["ema"] or trainer_state["policies"]["current"]
    return {published_name(name): value for name, value in values.items()}


def _with_values(model: DiffusionModel, values: Mapping[str, Tensor] | None) -> AbstractContextManager[None]:
    if values is None:
        return nullcontext()
    return weights_replaced(model, weights_state(model, "cpu", instead=values))


def _transformer_with(model: DiffusionModel, weights: Mapping[str, Tensor]) -> Any:
    """A transformer of the same configuration around these weights; the model's own is left alone."""
    parameters = dict(model.transformer.named_parameters())
    saved = model.transformer.state_dict()
    buffers = {name: value.cpu() for name, value in saved.items() if name not in parameters}
    configuration: Any = model.transformer.config
    with torch.device("meta"):
        transformer = plain_class(model.transformer).from_config(configuration)
    transformer.load_state_dict(buffers | {name: _apart(value) for name, value in weights.items()}, assign=True)
    return transformer


def _apart(value: Tensor) -> Tensor:
    """The same values as a tensor by itself: those that share memory are written into one file, however large."""
    content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(content).view(value.dtype).view(value.shape)
