"""Tiny models with enough heads for four ranks, and what one forward and backward of them gives."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from digenrl.models.blocks import checkpoint_blocks, repeated_blocks
from digenrl.models.context_parallel import divide_tokens
from digenrl.models.contract import Conditioning, DiffusionModel, SampleSize
from digenrl.models.registry import FAMILIES
from digenrl.testing.tiny_models import TINY_MODELS, seeded_weights
from digenrl.training.ranks.rank_group import RankGroup

HEADS = 4
PROMPTS = ["a red cat", "a sign that says hello to everybody"]


class Pass(NamedTuple):
    """The velocity, and the gradient of a weighted sum of it."""

    velocity: Tensor
    gradients: dict[str, Tensor]


def lively_model(family: str, dtype: torch.dtype = torch.float32) -> DiffusionModel:
    """The family's tiny model with four heads and weights of which none is zero."""
    with seeded_weights(0):
        pipeline = TINY_MODELS[family].build()
        config = {**pipeline.transformer.config, "num_attention_heads": HEADS}
        if "caption_projection_dim" in config:
            config["caption_projection_dim"] = HEADS * config["attention_head_dim"]
        pipeline.transformer = type(pipeline.transformer).from_config(config)
        with torch.no_grad():
            for parameter in pipeline.transformer.parameters():
                parameter.normal_(std=0.1)
    pipeline.transformer.to(dtype)
    model: DiffusionModel = FAMILIES[family].model_class(pipeline)
    return model


def odd_size(family: str) -> SampleSize:
    """A size whose tokens do not divide by four: 6 for images, 12 + 3 for videos."""
    size = TINY_MODELS[family].size
    return SampleSize(size.height, size.width + 16, 1 if size.frames == 1 else size.frames + 4)


def one_pass(model: DiffusionModel, family: str, prompts: list[str], checkpointed: bool) -> Pass:
    """With guidance, so that there are two branches where the family has them."""
    size = odd_size(family)
    checkpoint_blocks(model, len(repeated_blocks(model.transformer)) if checkpointed else 0)
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(len(prompts), *model.noise_shape(size), generator=generator)
    latents = model.initial_latents(noise, size)
    timesteps = model.schedule(4, size).timesteps[torch.arange(len(prompts))]
    velocity = model.velocity(latents, timesteps, _encoded(model, prompts), 2.0, size)
    weights = torch.randn(velocity.shape, generator=generator).to(velocity)
    model.transformer.zero_grad()
    (velocity * weights).mean().backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in model.transformer.named_parameters() if p.grad is not None}
    return Pass(velocity.detach(), gradients)


def _encoded(model: Any, prompts: list[str]) -> Conditioning:
    """Encoded one by one, as in a run."""
    return Conditioning.joined([model.encode([prompt]) for prompt in prompts])


def passes_on_ranks(
    ranks: RankGroup, cases: list[tuple[str, list[str], bool]], dtype: torch.dtype = torch.float32
) -> list[Pass]:
    """The same passes on ranks that divide the tokens; gradients are summed over ranks."""
    passes, exchange = [], ranks.context(ranks.rank.count)
    for family, prompts, checkpointed in cases:
        model = lively_model(family, dtype)
        divide_tokens(model, exchange)
        done = one_pass(model, family, prompts, checkpointed)
        ranks.sum_tensors(done.gradients)
        passes.append(done)
    return passes
