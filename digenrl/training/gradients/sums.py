"""Sums of gradients, kept apart from the parameters so that a failed pack or group leaves nothing behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from digenrl.models.parallel.shards import local_shard

Gradients = dict[str, Tensor]
"""Gradients by parameter; a parameter without a gradient is absent."""


@dataclass(slots=True)
class GradientSums:
    """The gradient in two parts: `unscaled` still has to be multiplied by the batch's scale, `final` has not."""

    unscaled: Gradients = field(default_factory=dict)
    final: Gradients = field(default_factory=dict)

    def add(self, other: GradientSums) -> None:
        """Adds the other's sums, which must not be used afterwards."""
        add_into(self.unscaled, other.unscaled)
        add_into(self.final, other.final)

    def total(self, scale: float) -> Gradients:
        """scale * unscaled + final, in new tensors."""
        total = scaled(self.unscaled, scale)
        add_into(total, {name: value if name in total else value.clone() for name, value in self.final.items()})
        return total


def add_into(sums: Gradients, more: Gradients) -> None:
    """sums += more; tensors of parameters that are new to the sums are moved, not copied."""
    both = [name for name in more if name in sums]
    if both and all(sums[name].is_cpu and sums[name].dtype == torch.int64 for name in both):
        for name in both:
            total = sums[name].numpy()
            np.add(total, more[name].numpy(), out=total)  # several times as fast as torch
    elif both:
        torch._foreach_add_([sums[name] for name in both], [more[name] for name in both])
    sums |= {name: value for name, value in more.items() if name not in sums}


def scaled(gradients: Gradients, factor: float) -> Gradients:
    """factor * gradients, in new tensors."""
    if not gradients:
        return {}
    return dict(zip(gradients, torch._foreach_mul(list(gradients.values()), factor), strict=True))


def take_gradients(parameters: Mapping[str, nn.Parameter]) -> Gradients:
    """Removes the gradients of the last backward from the parameters and returns them, or this rank's shards."""
    taken = {name: local_shard(p.grad) for name, p in parameters.items() if p.grad is not None}
    drop_gradients(parameters)
    return taken


def drop_gradients(parameters: Mapping[str, nn.Parameter]) -> None:
    for parameter in parameters.values():
        parameter.grad = None


def total_norm(gradients: Gradients) -> float:
    """The Euclidean norm of all gradients together."""
    if not gradients:
        return 0.0
    norms = torch._foreach_norm([value.detach() for value in gradients.values()], 2, dtype=torch.float64)
    return float(torch.stack(norms).cpu().norm())
