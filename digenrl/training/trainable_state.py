"""Everything that training changes: weights and snapshots, moving average, and optimizer moments."""

from __future__ import annotations

import logging
import math

from torch import Tensor

from digenrl.config.recipes.training import TrainerSettings
from digenrl.models.contract import DiffusionModel
from digenrl.models.model_weights import check_fits
from digenrl.models.objective import Objective
from digenrl.models.parallel.shards import is_sharded
from digenrl.training.gradients.sums import Gradients, total_norm
from digenrl.training.offload.host_copies import CopyTensor, copy_all, cpu_copy
from digenrl.training.optimizer import (
    check_moments,
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
    set_learning_rate,
    take_step,
)
from digenrl.training.policy_weights import PolicyWeights
from digenrl.training.ranks.rank_group import RankGroup
from digenrl.training.ranks.sharding import ShardSpec
from digenrl.training.trainer_state import MOMENTS_PER_PARAMETER, TrainerState

logger = logging.getLogger(__name__)


class TrainableState:
    """The live tensors behind a `TrainerState`: of a sharded model this rank's shards, or those of its stage.

    A trainer that never `commits` has no moving average, and its optimizer no moments. It keeps a snapshot of the
    version if a batch has several updates.
    """

    def __init__(
        self,
        model: DiffusionModel,
        objective: Objective,
        settings: TrainerSettings,
        ranks: RankGroup | None,
        helps: bool,
        commits: bool = True,
    ) -> None:
        several = objective.updates_per_batch > 1
        recomputes = settings.old_log_probs == "recomputed"
        keep_old = objective.needs.old_policy or (several and (recomputes or helps or not commits))
        self.policies = PolicyWeights(
            model, keep_old=keep_old, keep_reference=objective.needs.reference, ranks=ranks
        )
        sharded = is_sharded(model.transformer)
        if sharded and ranks is None:
            raise ValueError("a sharded model needs ranks: pass the RankGroup that it is sharded over")
        if sharded and helps:
            raise ValueError("a sharded trainer cannot generate: no rank holds all weights; use helps=False")
        if model.own_blocks is not None and (helps or ranks is None):
            raise ValueError("a model in stages cannot generate, and its stages are ranks; use helps=False, ranks")
        self.shard: ShardSpec | None = None
        if (self.policies.sharded or self.policies.staged) and ranks is not None:
            self.shard = ShardSpec.of(self.policies.model_parameters, ranks, whole=self.policies.staged)
        self.average = self.policies.snapshot() if settings.ema is not None and commits else None
        self.optimizer = make_optimizer(self.policies.parameters, settings)
        self.updates_done = 0
        self.commits = commits
        self._settings = settings
        self._weight_count = sum(value.numel() for value in self.policies.model_parameters.values())
        self._warned_of_epsilon = False

    def step(self, gradient: Gradients, norm: float) -> None:
        """Takes an optimizer step and lets the moving average follow; the gradient is used up."""
        set_learning_rate(self.optimizer, self._settings.learning_rate_after(self.updates_done))
        take_step(self.policies.parameters, self.optimizer, gradient, norm, self._settings.gradient_norm)
        self._check_epsilon(min(norm, self._settings.gradient_norm))
        self.updates_done += 1
        ema = self._settings.ema
        if ema is not None and self.average is not None and self.updates_done % ema.every_updates == 0:
            self.average.follow(ema.decay_after(self.updates_done))

    def _check_epsilon(self, norm: float) -> None:
        """Warns once if AdamW's epsilon is larger than the typical gradient of a weight: it then hardly learns."""
        typical, epsilon = norm / math.sqrt(self._weight_count), self._settings.adam_eps
        if 0 < typical < epsilon and not self._warned_of_epsilon:
            self._warned_of_epsilon = True
            logger.warning(
                "the gradient of a weight is %.0e (root mean square), less than training.adam_eps=%.0e, so that "
                "AdamW hardly changes the weights; set training.adam_eps=1e-15",
                *(typical, epsilon),
            )

    def norm_of(self, gradient: Gradients) -> float:
        """The norm of this rank's part of a gradient: what all stages have is counted on the first."""
        is_counted = self.shard is None or self.shard.rank.is_first
        shared = frozenset[str]() if is_counted else self.policies.shared
        return total_norm({name: value for name, value in gradient.items() if name not in shared})

    def copy(
        self, batch: int, pack_size: int | None, *, with_reference: bool = True, copy: CopyTensor = cpu_copy
    ) -> TrainerState:
        """A copy of the state between two batches."""
        return TrainerState(
            batch=batch,
            updates_done=self.updates_done,
            pack_size=pack_size,
            weights=copy_all(self.policies.parameters, copy),
            old_policy=self.policies.old_state(copy),
            reference=self.policies.reference_state() if with_reference else None,
            average=None if self.average is None else copy_all(self.average.values, copy),
            optimizer=optimizer_state(self.optimizer, self.policies.parameters, copy),
            shard=self.shard,
        )

    def fitted(self, state: TrainerState) -> TrainerState:
        """The state as this rank holds it; raises ValueError if it belongs to something else."""
        state = self._for_this_rank(state)
        self.policies.check_state(state)
        check_moments(state.optimizer, self.policies.parameters)
        if self.average is not None:
            check_fits("state of the moving average", state.average or {}, self.policies.parameters)
        return state

    def load(self, state: TrainerState) -> None:
        """Loads a copy of a state that `fitted` has returned."""
        if self.average is not None and state.average is not None:
            self.average.load(state.average)
        self.policies.load_state(state)
        load_optimizer_state(self.optimizer, self.policies.parameters, state.optimizer)
        self.updates_done = state.updates_done

    def missing_moment_bytes(self) -> int:
        """By how many bytes the first optimizer step will increase this state; 0 after it."""
        if not self.commits:
            return 0
        without = [p for p in self.policies.parameters.values() if not self.optimizer.state.get(p)]
        return sum(MOMENTS_PER_PARAMETER * parameter.nbytes for parameter in without)

    def moments(self) -> dict[str, Tensor]:
        """The optimizer's tensors that are as large as their parameter: all except step counters."""
        return {
            f"{kind}/{name}": value
            for name, parameter in self.policies.parameters.items()
            for kind, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape
        }

    def _for_this_rank(self, state: TrainerState) -> TrainerState:
        if state.shard == self.shard:
            return state
        if state.shard is None and self.shard is not None:
            if not self.shard.whole:
                check_fits("state of the trained weights", state.weights, self.policies.model_parameters)
            return state.for_shard(self.shard)
        own = "holds whole weights" if self.shard is None else f"is {self.shard.rank}"
        raise ValueError(
            f"state does not fit: it holds the shards of {state.shard and state.shard.rank}, and this trainer "
            f"{own}; save a checkpoint with those ranks, and read it with these"
        )
