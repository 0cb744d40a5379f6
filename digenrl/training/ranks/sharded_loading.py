"""Loads a sharded model from the files of a pipeline: each rank reads its own rows, straight to its device.

No process ever holds the whole transformer, neither in host memory nor on a card.
"""

from __future__ import annotations

import torch

from digenrl.models.family import Family
from digenrl.models.loading.sources import ModelSource
from digenrl.models.loading.stored_weights import StoredWeights, read_weights
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
        shard = ShardSpec.of(dict(model.transformer.named_parameters()), ranks)
        read_weights(model.transformer, stored, ranks.device, shard.rows)
    return model
