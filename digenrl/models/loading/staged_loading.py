"""Loads one stage of a model from the files of a pipeline: the blocks of other stages are never read."""

from __future__ import annotations

from collections.abc import Callable

import torch

from digenrl.models.family import Family
from digenrl.models.loading.sources import ModelSource
from digenrl.models.loading.stored_weights import StoredWeights, read_weights
from digenrl.models.parallel.staged_blocks import keep_blocks
from digenrl.models.pipeline_model import PipelineModel


def load_stage(
    family: Family,
    source: ModelSource,
    blocks: range,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    vae_dtype: torch.dtype = torch.float32,
    text_tokens: int | None = None,
    add_adapters: Callable[[PipelineModel], None] | None = None,
) -> PipelineModel:
    """The model of a pipeline without text encoders, with these blocks of its transformer's chain.

    The transformer is on the device, the VAE on the CPU. `add_adapters` is called for the model without weights.
    Raises ValueError if the files are not those of the transformer. Not for a single file.
    """
    model, files = family.load_without_weights(source, dtype, vae_dtype=vae_dtype, text_tokens=text_tokens)
    if add_adapters is not None:
        add_adapters(model)
    keep_blocks(model, blocks.start, blocks.stop)
    with StoredWeights(files) as stored:
        read_weights(model.transformer, stored, device)
    model.transformer.to(device)
    return model
