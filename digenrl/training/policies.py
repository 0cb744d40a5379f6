"""The policies of a trainer: the one it trains, the one before the batch, the reference, and a moving average.

They share one model. A snapshot holds the trained weights alone and stands in for them inside a `with`; a graph
that was built on the model's own weights must not be open then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from digenrl.models.contract import DiffusionModel
from digenrl.models.lora import adapters_disabled, has_lora


def trained_parameters(model: DiffusionModel) -> dict[str, nn.Parameter]:
    """By name, in the transformer's order: the adapters of LoRA, or everything in full fine-tuning."""
    named = {name: p for name, p in model.transformer.named_parameters() if p.requires_grad}
    if not named:
        raise ValueError("the model has nothing to train; add adapters, or let its parameters require gradients")
    for name, parameter in named.items():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"trained parameter {name} is {parameter.dtype}, too coarse for small updates; "
                "keep trained weights in float32 and set autocast: bf16"
            )
    return named


class Snapshot:
    """A copy of the trained weights."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self.values: dict[str, Tensor] = {name: p.detach().clone() for name, p in parameters.items()}

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model computes with these weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data, self.values[name] = self.values[name], parameter.data

    @torch.no_grad()
    def follow(self, decay: float) -> None:
        """values <- decay * values + (1 - decay) * the model's weights; exactly the weights with a decay of 0."""
        for name, parameter in self._parameters.items():
            if decay == 0:
                self.values[name].copy_(parameter)
            else:
                self.values[name].lerp_(parameter, 1 - decay)

    def state(self) -> dict[str, Tensor]:
        """A copy of the values."""
        return {name: value.clone() for name, value in self.values.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes over values of the same parameters."""
        for name, value in self.values.items():
            value.copy_(state[name])


class Policies:
    """Which weights a forward is made with. Old policy and reference are held only where they are needed."""

    def __init__(self, model: DiffusionModel, *, keep_old: bool, keep_reference: bool) -> None:
        self.parameters = trained_parameters(model)
        self._model = model
        self.old_snapshot = Snapshot(self.parameters) if keep_old else None
        frozen_copy = keep_reference and not has_lora(model)
        self._reference_snapshot = Snapshot(self.parameters) if frozen_copy else None

    def generating(self) -> AbstractContextManager[None]:
        """The weights to generate the next batch with: the trained ones, or a policy that follows them."""
        return nullcontext() if self.old_snapshot is None else self.old_snapshot.applied()

    def old(self) -> AbstractContextManager[None]:
        """The weights before the batch's first update or, where an algorithm lets them follow slowly, behind."""
        assert self.old_snapshot is not None, "the old policy was not asked for"
        return self.old_snapshot.applied()

    def reference(self) -> AbstractContextManager[None]:
        """The weights before any training: without adapters, or a frozen copy."""
        if self._reference_snapshot is not None:
            return self._reference_snapshot.applied()
        return adapters_disabled(self._model)

    def state(self) -> dict[str, dict[str, Tensor] | None]:
        """A copy of the trained weights and of the snapshots held."""
        return {
            "current": {name: parameter.detach().clone() for name, parameter in self.parameters.items()},
            "old": None if self.old_snapshot is None else self.old_snapshot.state(),
            "reference": None if self._reference_snapshot is None else self._reference_snapshot.state(),
        }

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes over the weights and snapshots of policies of the same kind."""
        for name, parameter in self.parameters.items():
            parameter.copy_(state["current"][name])
        for snapshot, values in (
            (self.old_snapshot, state["old"]),
            (self._reference_snapshot, state["reference"]),
        ):
            if snapshot is not None:
                snapshot.load_state(values)

    def finish_batch(self, decay: float) -> None:
        """old <- decay * old + (1 - decay) * new."""
        if self.old_snapshot is not None:
            self.old_snapshot.follow(decay)


def use_gradient_checkpointing(model: DiffusionModel, on: bool) -> None:
    """Whether activations are computed again in the backward instead of kept; the gradient is the same."""
    switch = getattr(model.transformer, f"{'enable' if on else 'disable'}_gradient_checkpointing", None)
    if switch is not None:
        switch()
    elif on:
        raise ValueError(f"{model.family} cannot checkpoint its gradient; set gradient_checkpointing: false")
