"""The policies of a trainer: the one it trains, the one before the batch, the reference, and a moving average.

They share one model. A snapshot holds the trained weights alone and stands in for them inside a `with`; a graph
that was built on the model's own weights must not be open then. Of a sharded model every rank holds its parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from digenrl.models.contract import DiffusionModel
from digenrl.models.lora import adapters_disabled, has_lora, published_name
from digenrl.models.model_weights import check_fits, gathered_weights, weights_state
from digenrl.models.shards import is_sharded, local_shard
from digenrl.training.offload.host_copies import Copied, copies_of, cpu_copy


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
    """A copy of the trained weights. `in_place` where others hold the parameters' very memory, as FSDP2 does."""

    def __init__(self, parameters: dict[str, nn.Parameter], in_place: bool = False) -> None:
        self._parameters = parameters
        self._in_place = in_place
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
            if self._in_place:
                other = self.values[name].clone()
                self.values[name].copy_(parameter.data)
                parameter.data.copy_(other)
            else:
                parameter.data, self.values[name] = self.values[name], parameter.data

    @torch.no_grad()
    def follow(self, decay: float) -> None:
        """values <- decay * values + (1 - decay) * the model's weights; exactly the weights with a decay of 0."""
        for name, parameter in self._parameters.items():
            if decay == 0:
                self.values[name].copy_(parameter)
            else:
                self.values[name].lerp_(parameter, 1 - decay)

    def state(self, copied: Copied = cpu_copy) -> dict[str, Tensor]:
        """A copy of the values, on the CPU."""
        return copies_of(self.values, copied)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Takes over values of the same parameters."""
        for name, value in self.values.items():
            value.copy_(state[name])


class PolicyWeights:
    """Which weights a forward is made with. Old policy and reference are held only where they are needed.

    A version of the weights is what is published when a batch is committed. Inside a batch of several updates the
    trained weights are of no version; those of the last one are then at hand only as the old policy.

    `model_parameters` are those that get gradients, `parameters` what the optimizer changes: the same or, of a
    sharded model, this rank's parts of them.
    """

    def __init__(self, model: DiffusionModel, *, keep_old: bool, keep_reference: bool) -> None:
        self.model_parameters = trained_parameters(model)
        self.sharded = is_sharded(model.transformer)
        self.parameters = self.model_parameters
        if self.sharded:
            parts = {name: local_shard(value.detach()) for name, value in self.model_parameters.items()}
            self.parameters = {name: nn.Parameter(part) for name, part in parts.items()}
        self._model = model
        self._left_version = False
        self.old_snapshot = self.snapshot() if keep_old else None
        self._old_lags = False  # behind the trained weights, when a batch begins
        frozen_copy = keep_reference and not has_lora(model)
        self._reference_snapshot = self.snapshot() if frozen_copy else None

    def snapshot(self) -> Snapshot:
        """A copy of the trained weights of now."""
        return Snapshot(self.parameters, in_place=self.sharded)

    def generating(self) -> AbstractContextManager[None]:
        """The last version's weights, to generate with: the trained ones, or a policy that follows them."""
        if self.old_snapshot is not None:
            return self.old_snapshot.applied()
        if self._left_version:
            raise RuntimeError(
                "inside a batch the weights of the last version are not kept; make the trainer with helps=True, "
                "or generate between batches"
            )
        return nullcontext()

    def published(self, kept: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The last version's weights, which `load_weights` takes over; where they are at hand.

        They are copies, or those that are `kept` of it already. Of a sharded model all ranks ask; the first gets
        whole weights, on its CPU, and the others none.
        """
        if self.sharded:
            return self._published_by_all(kept)
        if kept is not None:
            instead = {published_name(name): value for name, value in kept.items()}
            return weights_state(self._model, instead=instead)
        with self.generating():
            return weights_state(self._model)

    def _published_by_all(self, kept: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        if kept is None and self.old_snapshot is not None:
            kept = self.old_snapshot.values
        if kept is None:
            self.generating()  # raises where the last version is not at hand
        return gathered_weights(self._model, kept or {})

    def old(self) -> AbstractContextManager[None]:
        """The weights before the batch's first update or, where an algorithm lets them follow slowly, behind."""
        assert self.old_snapshot is not None, "the old policy was not asked for"
        return self.old_snapshot.applied()

    def reference(self) -> AbstractContextManager[None]:
        """The weights before any training: without adapters, or a frozen copy."""
        if self._reference_snapshot is not None:
            return self._reference_snapshot.applied()
        return adapters_disabled(self._model)

    def state(self, with_reference: bool = True, copied: Copied = cpu_copy) -> dict[str, dict[str, Tensor] | None]:
        """A copy, on the CPU, of the trained weights and of the snapshots held, when a batch begins.

        An old policy that is the trained one is left out: None, as where there is none.
        """
        return {
            "current": copies_of(self.parameters, copied),
            "old": self.old_snapshot.state(copied) if self.old_snapshot is not None and self._old_lags else None,
            "reference": self.reference_state() if with_reference else None,
        }

    @property
    def reference_values(self) -> Mapping[str, Tensor]:
        """The frozen weights, by name; none where the base model is the reference, or nobody needs one."""
        return {} if self._reference_snapshot is None else self._reference_snapshot.values

    def reference_state(self) -> dict[str, Tensor] | None:
        """A copy of the frozen weights, which never change; None where the base model is the reference."""
        return None if self._reference_snapshot is None else self._reference_snapshot.state()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError unless `load_state` can take it over."""
        check_fits("state of the trained weights", state["current"], self.parameters)
        if self.old_snapshot is not None and state["old"] is not None:
            check_fits("state of the old policy", state["old"], self.parameters)
        if self._reference_snapshot is not None:
            check_fits("state of the reference", state["reference"] or {}, self.parameters)

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes over the weights and snapshots of policies of the same kind."""
        for name, parameter in self.parameters.items():
            parameter.copy_(state["current"][name])
        if self.old_snapshot is not None:
            self.old_snapshot.load_state(state["old"] or state["current"])
            self._old_lags = state["old"] is not None
        if self._reference_snapshot is not None:
            self._reference_snapshot.load_state(state["reference"])
        self._left_version = False

    def leave_version(self) -> None:
        """The trained weights are about to move on from the last version."""
        self._left_version = True

    def finish_batch(self, decay: float) -> None:
        """old <- decay * old + (1 - decay) * new: a version to publish."""
        if self.old_snapshot is not None:
            self.old_snapshot.follow(decay)
            self._old_lags = decay != 0
        self._left_version = False
