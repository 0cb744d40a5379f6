"""Trains any chain of modules in stages: each process holds consecutive modules of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from digenrl.stages.links import StageLinks
from digenrl.stages.messages import States
from digenrl.stages.pipeline import Pipeline
from digenrl.stages.shared_weights import SharedWeights

Loss = Callable[[Any, Any], Tensor]


class ChainStage:
    """One stage of a chain, in which every module takes what the one before returns: a tensor, or a tuple of them.

    `modules` are those of this stage. `loss(output, target)` is computed by the last one. `tied` are parameters
    that several stages hold, each its own copy with the same values, by a name that they agree on. Making it is a
    collective.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        links: StageLinks,
        loss: Loss,
        *,
        tied: Mapping[str, nn.Parameter] | None = None,
        in_flight: int | None = None,
    ) -> None:
        self._modules, self._loss = modules, loss
        self._pipeline = Pipeline(links, in_flight)
        self._tied = dict(tied or {})
        self._shared = SharedWeights(list(self._tied))

    def step(self, inputs: Sequence[Any], targets: Sequence[Any]) -> list[Tensor]:
        """Adds the gradients of all micro-batches; returns their losses on the last stage.

        All stages pass as many inputs and targets; only the first stage reads the inputs, and only the last one
        the targets. Parameters must have no gradient before.
        """
        losses = self._pipeline.train(
            len(inputs), lambda index, states: self._forward(inputs, targets, index, states)
        )
        for parameter in self._tied.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._shared.sum({name: _grad_of(parameter) for name, parameter in self._tied.items()})
        return losses

    def _forward(self, inputs: Sequence[Any], targets: Sequence[Any], index: int, states: States) -> States:
        links = self._pipeline.links
        value = _as_states(inputs[index]) if links.is_first else states
        for module in self._modules:
            value = _as_states(module(*value))
        if not links.is_last:
            return value
        return (self._loss(value[0] if len(value) == 1 else value, targets[index]),)


def _as_states(value: Any) -> States:
    return value if isinstance(value, tuple) else (value,)


def _grad_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
