"""The head of LAION's aesthetic predictor and of ImageReward: five linear layers without activations."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from digenrl.config.reading import ConfigError
from digenrl.rewards.parts.weights import load_into

WIDTHS = (1024, 128, 64, 16, 1)
LINEAR_AT = (0, 2, 4, 6, 7)  # the published stack has dropout between, without weights or effect in inference


class ScoreHead(nn.Module):
    """(N, width) features -> (N,) scores. Weights are named as published, such as `layers.0.weight`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inputs = (width, *WIDTHS[:-1])
        linears = [nn.Linear(one, other) for one, other in zip(inputs, WIDTHS, strict=True)]
        self.layers = nn.ModuleDict({str(at): linear for at, linear in zip(LINEAR_AT, linears, strict=True)})

    def forward(self, features_ND: Tensor) -> Tensor:
        for linear in self.layers.values():
            features_ND = linear(features_ND)
        return features_ND.squeeze(-1)

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], width: int, source: object) -> ScoreHead:
        """The head with these weights, in fp32, for inference; `width` is that of the backbone's features."""
        first = state.get("layers.0.weight")
        if first is not None and first.shape[1] != width:
            raise ConfigError(f"{source}: the head expects {first.shape[1]} features, its backbone has {width}")
        head = cls(width)
        load_into(head, {name: tensor.to(torch.float32) for name, tensor in state.items()}, source)
        return head.eval().requires_grad_(False)
