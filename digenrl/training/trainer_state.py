"""The state of a trainer as a value: everything that another trainer with the same settings needs to continue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from digenrl.training.ranks.sharding import ShardSpec

MOMENTS_PER_PARAMETER = 2  # of AdamW

Tensors = Mapping[str, Tensor]
"""Tensors by the name of a parameter."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """`scalars` are the hyperparameters of the only parameter group; `moments` are by parameter, then by kind."""

    scalars: Mapping[str, Any]
    moments: Mapping[str, Tensors]


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The state between two batches; all tensors are on the CPU.

    `old_policy` is None if it equals the trained weights or is not needed, `reference` if it is the base model or
    not needed. For a sharded model, the tensors are one rank's shards and `shard` describes them. `links` are the
    codecs between stages that the trainer has chosen, as JSON represents them.
    """

    batch: int
    updates_done: int
    pack_size: int | None
    weights: Tensors
    optimizer: OptimizerState
    old_policy: Tensors | None = None
    reference: Tensors | None = None
    average: Tensors | None = None
    shard: ShardSpec | None = None
    links: Mapping[str, Any] | None = None

    def missing_moment_bytes(self) -> int:
        """By how many bytes the state grows with the first optimizer step."""
        missing = self.weights.keys() - self.optimizer.moments.keys()
        return sum(MOMENTS_PER_PARAMETER * self.weights[name].nbytes for name in missing)

    def for_shard(self, shard: ShardSpec) -> TrainerState:
        """One rank's part of a whole state."""

        def part(tensors: Tensors | None) -> Tensors | None:
            if tensors is None:
                return None
            return {name: shard.shard(name, each) for name, each in tensors.items() if shard.holds(name)}

        moments = {
            name: {kind: shard.shard(name, value) for kind, value in of_parameter.items()}
            for name, of_parameter in self.optimizer.moments.items()
            if shard.holds(name)
        }
        return replace(
            self,
            weights=part(self.weights) or {},
            optimizer=replace(self.optimizer, moments=moments),
            old_policy=part(self.old_policy),
            reference=part(self.reference),
            average=part(self.average),
            shard=shard,
        )
