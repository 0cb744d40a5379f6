"""Tiny models with enough heads for four ranks: one forward and backward, and a batch of training."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from rank_cases import STEADY, train
from scored_groups import Rollout, lively, nudge, scored_groups, trainer_of
from torch import Tensor

from digenrl.models.adapters.lora import add_lora
from digenrl.models.blocks import checkpoint_blocks, repeated_blocks
from digenrl.models.contract import Conditioning, DiffusionModel, SampleSize
from digenrl.models.parallel.context_parallel import divide_tokens
from digenrl.models.quantized.replacing import BaseWeights, quantize_transformer
from digenrl.models.registry import FAMILIES
from digenrl.testing.tiny_models import TINY_MODELS, seeded_weights
from digenrl.training.ranks.rank_group import RankGroup
from digenrl.training.ranks.sharding import shard_model

HEADS = 4
DIVISIBLE = [  # families that edit images have the transformers of others
    name for name, family in FAMILIES.items() if family.model_class.self_attention and not family.sources.most
]
PROMPTS = ["a red cat", "a sign that says hello to everybody"]


class Pass(NamedTuple):
    """The velocity, and the gradient of a weighted sum of it."""

    velocity: Tensor
    gradients: dict[str, Tensor]


def lively_model(family: str) -> DiffusionModel:
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
    weights = torch.randn(velocity.shape, generator=generator)
    model.transformer.zero_grad()
    (velocity * weights).mean().backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in model.transformer.named_parameters() if p.grad is not None}
    return Pass(velocity.detach(), gradients)


def _encoded(model: Any, prompts: list[str]) -> Conditioning:
    """Encoded one by one, as in a run."""
    return Conditioning.joined([model.encode([prompt]) for prompt in prompts])


def passes(family: str, ranks: RankGroup | None = None) -> list[Pass]:
    """One pass over both prompts, and one over the first that is checkpointed; gradients are summed over ranks.

    Where texts have different lengths, the first has a mask, and the second branches of different lengths.
    """
    model = lively_model(family)
    if ranks is not None:
        divide_tokens(model, ranks.context(ranks.rank.count))
        model.use_attention({"replay": "math"})
    done = [one_pass(model, family, PROMPTS, False), one_pass(model, family, PROMPTS[:1], True)]
    if ranks is not None:
        for each in done:
            ranks.sum_tensors(each.gradients)
    return done


def passes_on_ranks(ranks: RankGroup) -> dict[str, list[Pass]]:
    """The passes of all families on ranks that divide the tokens."""
    return {family: passes(family, ranks) for family in DIVISIBLE}


def trained(
    ranks: RankGroup | None, together: int, base: str | None
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The weights and metrics after a batch, if `together` ranks train each sample.

    The base of adapters is sharded or in int8; without a base, all weights are trained and sharded.
    """
    model, algorithm = lively_model("sd3"), lively("flow_grpo")
    if base == "int8":
        quantize_transformer(model.transformer, BaseWeights("int8"), "cpu")
    if base is not None:
        add_lora(model, rank=2, alpha=4, seed=3)
        nudge(model, 0.1, seed=4)
    else:
        model.transformer.requires_grad_()
    rollout = Rollout(groups=2, group_size=3, steps=3, guidance=2.0, size=odd_size("sd3"))
    groups = scored_groups(model, algorithm, rollout, [(0.0, 1.0, 3.0), (5.0, 2.0, 2.5)])
    if ranks is not None and base != "int8":
        shard_model(model, ranks)
    if ranks is not None:
        divide_tokens(model, ranks.context(together))
    settings = STEADY.model_copy(update={"pack_size": "auto", "largest_pack": 2, "gradient_checkpointing": 1})
    trainer = trainer_of(model, algorithm, groups, settings, ranks=ranks)
    metrics = train(trainer, groups)
    return trainer.published(), metrics
