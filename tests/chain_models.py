"""ResNet-101 and GPT-2 with random weights, whole and as chains of modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetForImageClassification

from digenrl.stages.chain import ChainStage
from digenrl.stages.links import connect_stages
from digenrl.training.ranks.rank_group import RankGroup

TOKENS, CLASSES = 50, 10


def make_resnet() -> nn.Module:
    """All 101 layers, with an eighth of the width."""
    torch.manual_seed(0)
    config = ResNetConfig(
        depths=[3, 4, 23, 3], embedding_size=8, hidden_sizes=[32, 64, 128, 256], num_labels=CLASSES
    )
    return ResNetForImageClassification(config).train()


def make_gpt2() -> nn.Module:
    """Without dropout; the embedding of tokens is also the output layer."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=TOKENS,
        n_positions=16,
        n_embd=32,
        n_layer=5,
        n_head=2,
        embd_pdrop=0,
        attn_pdrop=0,
        resid_pdrop=0,
    )
    return GPT2LMHeadModel(config).train()


class Embedding(nn.Module):
    """The first module of GPT-2's chain."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.wte, self.wpe = model.transformer.wte, model.transformer.wpe

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.wte(tokens_BT) + self.wpe(torch.arange(tokens_BT.shape[1])[None])


def chain_of(model: Any) -> list[nn.Module]:
    if isinstance(model, GPT2LMHeadModel):
        return [Embedding(model), *model.transformer.h, nn.Sequential(model.transformer.ln_f, model.lm_head)]
    blocks = [layer for stage in model.resnet.encoder.stages for layer in stage.layers]
    return [model.resnet.embedder, *blocks, nn.Sequential(model.resnet.pooler, model.classifier)]


def batches(name: str, count: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    if name == "resnet":
        images = torch.randn(count, 2, 3, 32, 32, generator=generator).unbind()
        return [*images], [*torch.randint(CLASSES, (count, 2), generator=generator).unbind()]
    texts = torch.randint(TOKENS, (count, 2, 9), generator=generator)
    return [*texts[:, :, :-1]], [*texts[:, :, 1:]]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


MODELS = {"resnet": make_resnet, "gpt2": make_gpt2}


def named_gradients(model: nn.Module, among: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The gradients of some modules' parameters, by their names in the whole model."""
    own = {id(p) for module in among for p in module.parameters()}
    return {name: p.grad for name, p in model.named_parameters() if id(p) in own and p.grad is not None}


def train_stages(ranks: RankGroup, cuts: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Any]]:
    """Losses and gradients of this stage of each model."""
    found = {}
    with connect_stages() as links:
        for name, bounds in cuts.items():
            model = MODELS[name]()
            modules = chain_of(model)[bounds[links.index] : bounds[links.index + 1]]
            tied = {}
            if name == "gpt2" and (links.is_first or links.is_last):
                tied["wte"] = model.transformer.wte.weight
            stage = ChainStage(modules, links, loss_of, tied=tied)
            losses = stage.step(*batches(name, 4))
            found[name] = {"losses": losses, "gradients": named_gradients(model, modules)}
    return found
