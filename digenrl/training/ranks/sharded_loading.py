"""Loads a sharded model from the files of a pipeline: each rank reads its own rows, straight to its device.

No process ever holds the whole transformer, neither in host memory nor on a card.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from digenrl.models.family import Family
from digenrl.models.loading.sources import ModelSource
from digenrl.models.loading.stored_weights import StoredWeights
from digenrl.models.parallel.shards import with_local_rows
from digenrl.models.pipeline_model import PipelineModel
from digenrl.training.ranks.rank_group import RankGroup
from digenrl.training.ranks.sharding import ShardSpec, shard_model


def load_sharded(
    family: Family,
    source: ModelSource,
    ranks: RankGroup,
    dtype: torch.dtype,
    *,
    vae_dtype: torch.dtype = torch.float32,
    text_tokens: int | None = None,
) -> PipelineModel:
    """The model of a pipeline without text encoders, with a transformer that is sharded over the ranks.

    The VAE stays on the CPU: ranks of a sharded model do not generate. Ranks may call this at different times.
    Raises ValueError if the files are not those of the transformer. Not for a single file.
    """
    model, files = family.load_without_weights(source, dtype, vae_dtype=vae_dtype, text_tokens=text_tokens)
    shard_model(model, ranks)
    with StoredWeights(files) as stored:
        read_shards(model.transformer, stored, ranks)
    return model


def read_shards(transformer: nn.Module, stored: StoredWeights, ranks: RankGroup) -> None:
    """Gives a sharded transformer without values this rank's rows of the stored weights."""
    values: dict[str, Tensor] = {}
    shard = ShardSpec.of(dict(transformer.named_parameters()), ranks)
    for name, value in transformer.state_dict().items():
        sharded = isinstance(value, DTensor)
        if not sharded and name not in stored.shapes:
            continue  # a table that is computed, not trained
        _check_shape(name, value, stored)
        rows = shard.rows(name) if sharded else slice(None)
        read = stored.read(name, rows, value.dtype, ranks.device)
        values[name] = with_local_rows(value, read) if isinstance(value, DTensor) else read
    transformer.load_state_dict(values, assign=True, strict=False)


def _check_shape(name: str, value: Tensor, stored: StoredWeights) -> None:
    found = stored.shapes.get(name)
    if found is None:
        raise ValueError(f"the transformer's weight {name} is not in its files")
    if found != tuple(value.shape):
        raise ValueError(f"the transformer's weight {name} is {found} in its files, expected {tuple(value.shape)}")
