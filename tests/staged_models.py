"""Tiny models with several blocks, whole and in stages."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from scored_groups import nudge
from tiny_pipelines import with_own_transformer
from torch import Tensor

from digenrl.models.adapters.lora import add_lora
from digenrl.models.blocks import checkpoint_blocks, repeated_blocks
from digenrl.models.contract import Conditioning, DiffusionModel
from digenrl.models.parallel.staged_blocks import keep_blocks
from digenrl.models.registry import FAMILIES
from digenrl.testing.tiny_models import TINY_MODELS, seeded_weights

LAYERS = {"num_layers": 3, "num_single_layers": 2, "n_layers": 4}
PROMPTS = ["a red cat", "a sign that says hello to everybody"]
CHAINS = [  # families that edit images have the transformers of others
    name for name, family in FAMILIES.items() if family.denoiser == "transformer" and not family.sources.most
]


def deep_model(family: str) -> DiffusionModel:
    """The family's tiny model with at least three blocks, and weights of which none is zero. All are trained."""
    with seeded_weights(0):
        pipeline = TINY_MODELS[family].build()
        config = dict(pipeline.transformer.config)
        config |= {name: count for name, count in LAYERS.items() if name in config}
        pipeline.transformer = type(pipeline.transformer).from_config(config)
        with torch.no_grad():
            for parameter in pipeline.transformer.parameters():
                parameter.normal_(std=0.1)
    model: DiffusionModel = FAMILIES[family].model_class(pipeline)
    model.transformer.requires_grad_()
    return model


def train_adapters(model: DiffusionModel) -> None:
    """Adds adapters that are not zero; nothing else is trained."""
    add_lora(model, rank=2, alpha=4, seed=3)
    nudge(model, 0.1, seed=4)


@dataclass
class Inputs:
    """The arguments of a velocity, with guidance, and the weights of a loss of it."""

    latents: Tensor
    timesteps: Tensor
    conditioning: Conditioning
    weights: Tensor


def make_inputs(model: DiffusionModel, family: str, seed: int = 7) -> Inputs:
    size = TINY_MODELS[family].size
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(PROMPTS), *model.noise_shape(size), generator=generator)
    latents = model.initial_latents(noise, size)
    return Inputs(
        latents,
        model.schedule(4, size).timesteps[torch.arange(len(PROMPTS))],
        Conditioning.joined([model.encode([prompt]) for prompt in PROMPTS]),
        torch.randn(latents.shape, generator=generator),
    )


def velocity(model: DiffusionModel, family: str, inputs: Inputs) -> Tensor:
    return model.velocity(inputs.latents, inputs.timesteps, inputs.conditioning, 2.0, TINY_MODELS[family].size)


def loss_of(value: Tensor, inputs: Inputs) -> Tensor:
    return (value * inputs.weights).mean()


def gradients_of(model: DiffusionModel) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.transformer.named_parameters() if p.grad is not None}


def whole_pass(model: DiffusionModel, family: str, inputs: Inputs, checkpointed: bool) -> Tensor:
    """The velocity of the whole model, whose parameters get gradients."""
    set_checkpointing(model, checkpointed)
    model.transformer.zero_grad()
    value = velocity(model, family, inputs)
    loss_of(value, inputs).backward()
    return value.detach()


def set_checkpointing(model: DiffusionModel, checkpointed: bool) -> None:
    checkpoint_blocks(model, len(repeated_blocks(model.transformer)) if checkpointed else 0)


def staged_pass(
    model: DiffusionModel, family: str, inputs: Inputs, bounds: tuple[int, ...], checkpointed: bool
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """The velocity of copies of a model that are stages, one after the other, and the gradients of each."""
    stages = []
    received: tuple[Tensor, ...] = ()
    for first, end in pairwise(bounds):
        own = with_own_transformer(model)
        keep_blocks(own, first, end)
        set_checkpointing(own, checkpointed)
        own.transformer.zero_grad()
        value, handed = own.own_blocks.run(received, lambda own=own: velocity(own, family, inputs))
        stages.append((own, received, handed))
        received = tuple(each.detach().clone().requires_grad_(each.requires_grad) for each in handed)
    loss_of(value, inputs).backward()
    for (_, _, handed), (_, entered, _) in reversed(list(pairwise(stages))):
        pairs = [(out, into.grad) for out, into in zip(handed, entered, strict=True) if into.grad is not None]
        torch.autograd.backward([out for out, _ in pairs], [gradient for _, gradient in pairs])
    return value.detach(), [gradients_of(own) for own, _, _ in stages]
