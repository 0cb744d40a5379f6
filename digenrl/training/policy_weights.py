"""The policies of a trainer: the one it trains, the one before the batch, the reference, and a moving average.

They share one model. A snapshot holds a copy of the trained weights and replaces them inside a `with` block; no
autograd graph built on the model's own weights may be alive then. For a sharded model, each rank holds its shards,
and for a model in stages the weights of its stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from digenrl.models.adapters.lora import adapters_disabled, has_lora, published_name
from digenrl.models.contract import DiffusionModel
from digenrl.models.model_weights import check_fits, gathered_weights, load_weights, weights_state
from digenrl.models.parallel.shards import any_sharded, local_shard
from digenrl.models.parallel.staged_blocks import outside_blocks
from digenrl.training.offload.host_copies import CopyTensor, copy_all, cpu_copy
from digenrl.training.ranks.rank_group import RankGroup
from digenrl.training.trainer_state import Tensors, TrainerState


def trained_parameters(model: DiffusionModel) -> dict[str, nn.Parameter]:
    """By name, in the transformer's order: the LoRA adapters, or all parameters in full fine-tuning."""
    named = {name: p for name, p in model.transformer.named_parameters() if p.requires_grad}
    if not named:
        raise ValueError("the model has nothing to train; add adapters, or let parameters require gradients")
    for name, parameter in named.items():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"trained parameter {name} is {parameter.dtype}, which is too coarse for small updates; "
                "keep trained weights in float32 and set autocast: bf16"
            )
    return named


class Snapshot:
    """A copy of the trained weights. `in_place` if FSDP2 shares the parameters' memory."""

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
        """values <- decay * values + (1 - decay) * the model's weights; an exact copy if the decay is 0."""
        for name, parameter in self._parameters.items():
            if decay == 0:
                self.values[name].copy_(parameter)
            else:
                self.values[name].lerp_(parameter, 1 - decay)

    def load(self, values: Tensors) -> None:
        for name, value in self.values.items():
            value.copy_(values[name])


class PolicyWeights:
    """Provides the weights that a forward is computed with.

    A version is what is published after a batch. Inside a batch with several updates, the trained weights are not
    a version; the last version's weights are then available only as the old policy, if that is kept.

    `model_parameters` receive gradients, `parameters` are what the optimizer changes: the same or, if they are
    `sharded`, this rank's shards of them. Adapters are whole on every rank, even if their base is sharded. If all
    weights are `staged`, each of the ranks has those of its own blocks, and the `shared` ones outside of blocks.
    """

    def __init__(
        self, model: DiffusionModel, *, keep_old: bool, keep_reference: bool, ranks: RankGroup | None = None
    ) -> None:
        self.model_parameters = trained_parameters(model)
        self.staged = model.own_blocks is not None and not has_lora(model)
        self.shared = outside_blocks(model) if self.staged else frozenset[str]()
        self._ranks = ranks
        self.sharded = any_sharded(self.model_parameters.values())  # not if only a frozen base is
        self.parameters = self.model_parameters
        if self.sharded:
            shards = {name: local_shard(value.detach()) for name, value in self.model_parameters.items()}
            self.parameters = {name: nn.Parameter(shard) for name, shard in shards.items()}
        self._model = model
        self._inside_batch = False
        self.old_snapshot = self.snapshot() if keep_old else None
        self._old_lags = False  # between batches, the old policy differs from the trained weights
        frozen_copy = keep_reference and not has_lora(model)
        self._reference_snapshot = self.snapshot() if frozen_copy else None

    def snapshot(self) -> Snapshot:
        return Snapshot(self.parameters, in_place=self.sharded)

    def generating(self) -> AbstractContextManager[None]:
        """Inside, the model has the last version's weights."""
        if self.old_snapshot is not None:
            return self.old_snapshot.applied()
        if self._inside_batch:
            raise RuntimeError(
                "the last version's weights are not kept inside a batch; make the trainer with helps=True, "
                "or generate between batches"
            )
        return nullcontext()

    def published(self, kept: Tensors | None = None) -> dict[str, Tensor]:
        """The last version's weights under their published names, as copies or, if given, from `kept` weights.

        For a model that is sharded or staged this is a collective: rank 0 gets all weights, whole and on its CPU,
        and the others get none.
        """
        if self.sharded:
            if kept is None and self.old_snapshot is not None:
                kept = self.old_snapshot.values
            return gathered_weights(self._model, kept or {})
        if kept is not None:
            instead = {published_name(name): value for name, value in kept.items()}
            return self._of_all_stages(weights_state(self._model, instead=instead))
        with self.generating():
            return self._of_all_stages(weights_state(self._model))

    def trained(self) -> dict[str, Tensor]:
        """Copies of the weights as they are now, in the middle of a batch too, under their published names.

        For a model that is sharded or staged this is a collective, as `published` is.
        """
        return self._of_all_stages(weights_state(self._model))

    def _of_all_stages(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Without stages, the weights as they are."""
        if not self.staged:
            return weights
        assert self._ranks is not None, "stages are ranks"
        if not self._ranks.rank.is_first:
            weights = {name: value for name, value in weights.items() if name not in self.shared}
        return self._ranks.collect(weights)

    def old(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights from before the batch, or the ones that follow slowly."""
        assert self.old_snapshot is not None, "the old policy was not requested"
        return self.old_snapshot.applied()

    def reference(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights from before all training: without adapters, or a frozen copy."""
        if self._reference_snapshot is not None:
            return self._reference_snapshot.applied()
        return adapters_disabled(self._model)

    @property
    def reference_values(self) -> Mapping[str, Tensor]:
        """The frozen weights; empty if the base model is the reference, or none is needed."""
        return {} if self._reference_snapshot is None else self._reference_snapshot.values

    def reference_state(self) -> Tensors | None:
        """A copy of the frozen weights, which never change."""
        return copy_all(self.reference_values, cpu_copy) or None

    def old_state(self, copy: CopyTensor) -> Tensors | None:
        """A copy of the old policy; None if it equals the trained weights between batches, or is not kept."""
        if self.old_snapshot is None or not self._old_lags:
            return None
        return copy_all(self.old_snapshot.values, copy)

    def check_state(self, state: TrainerState) -> None:
        """Raises ValueError unless `load_state` can load it."""
        check_fits("state of the trained weights", state.weights, self.parameters)
        if self.old_snapshot is not None and state.old_policy is not None:
            check_fits("state of the old policy", state.old_policy, self.parameters)
        if self._reference_snapshot is not None:
            check_fits("state of the reference", state.reference or {}, self.parameters)

    @torch.no_grad()
    def load_state(self, state: TrainerState) -> None:
        """Overwrites the weights and snapshots with a state that `check_state` accepts."""
        for name, parameter in self.parameters.items():
            parameter.copy_(state.weights[name])
        if self.old_snapshot is not None:
            self.old_snapshot.load(state.old_policy or state.weights)
            self._old_lags = state.old_policy is not None
        if self._reference_snapshot is not None and state.reference is not None:
            self._reference_snapshot.load(state.reference)
        self._inside_batch = False

    def load_trained(self, weights: Tensors) -> None:
        """Overwrites the trained weights inside a batch, by their published names; the last version stays kept.

        Raises ValueError, and changes nothing, if they do not fit.
        """
        load_weights(self._model, weights)
        self.begin_updates()

    @torch.no_grad()
    def restore_version(self) -> None:
        """Makes the trained weights those of the last version again."""
        if self.old_snapshot is not None:
            for name, parameter in self.parameters.items():
                parameter.copy_(self.old_snapshot.values[name])
        self._inside_batch = False

    def begin_updates(self) -> None:
        """To be called before the batch's first optimizer step: the weights leave the last version."""
        self._inside_batch = True

    def finish_batch(self, decay: float) -> None:
        """To be called after the batch's last step: old <- decay * old + (1 - decay) * new."""
        if self.old_snapshot is not None:
            self.old_snapshot.follow(decay)
            self._old_lags = decay != 0
        self._inside_batch = False
