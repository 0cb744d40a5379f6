"""All that training changes, as one tree: weights, snapshots and moving average, and the optimizer's moments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from digenrl.models.model_weights import check_fits
from digenrl.training.offload.host_copies import Copied, cpu_copy
from digenrl.training.optimizer import MOMENTS_PER_PARAMETER, check_moments, load_optimizer_state, optimizer_state
from digenrl.training.policy_weights import PolicyWeights, Snapshot
from digenrl.training.ranks.sharding import ShardSpec, as_held_by


class TrainedState:
    """Read off a trainer's parts, or written into them. Of a sharded model it is this rank's, and says which."""

    def __init__(
        self,
        policies: PolicyWeights,
        ema: Snapshot | None,
        optimizer: torch.optim.Optimizer,
        cut: ShardSpec | None,
    ) -> None:
        self._policies, self._ema, self._optimizer, self._cut = policies, ema, optimizer, cut

    def copy(self, with_reference: bool = True, copied: Copied = cpu_copy) -> dict[str, Any]:
        """A copy on the CPU, when a batch begins."""
        return {
            "policies": self._policies.state(with_reference, copied),
            "ema": None if self._ema is None else self._ema.state(copied),
            "optimizer": optimizer_state(self._optimizer, self._policies.parameters, copied),
            "shard": None if self._cut is None else self._cut.facts(),
        }

    def fitting(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """The state as it is held here; raises ValueError if it is of something else."""
        held, parameters = as_held_by(self._cut, self._policies.model_parameters, state), self._policies.parameters
        self._policies.check_state(held["policies"])
        check_moments(held["optimizer"], parameters)
        if self._ema is not None:
            check_fits("state of the moving average", held["ema"] or {}, parameters)
        return held

    def load(self, fitting: Mapping[str, Any]) -> None:
        """Takes over a copy of a state that fits."""
        if self._ema is not None:
            self._ema.load_state(fitting["ema"])
        self._policies.load_state(fitting["policies"])
        load_optimizer_state(self._optimizer, self._policies.parameters, fitting["optimizer"])

    def moments_to_come(self) -> int:
        """Bytes of the optimizer's moments before the first step; none after it."""
        without = [p for p in self._policies.parameters.values() if not self._optimizer.state.get(p)]
        return sum(MOMENTS_PER_PARAMETER * parameter.nbytes for parameter in without)
