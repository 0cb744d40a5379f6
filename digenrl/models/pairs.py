"""What training replays and what a loss sees: scored groups, batches of pairs, and the terms of a loss.

A pair is one (sample, trained step). Shape legend: R = rows of a pack, each row a pair; M = terms of the loss (R,
or R / 2 where a term compares two samples); L = one sample's latents; G = samples of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from digenrl.config.algorithms import Needs
from digenrl.models.contract import Conditioning
from digenrl.models.trajectory import RolloutPlan, Trajectory


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """All samples of one prompt with their rewards: what a trainer is handed.

    `conditioning` has one row, the prompt's. `trajectories` and `rewards` are in the order of sample indices.
    """

    conditioning: Conditioning
    trajectories: tuple[Trajectory, ...]
    rewards: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.conditioning) == 1, f"one conditioning row per prompt, got {len(self.conditioning)}"
        assert len(self.trajectories) == len(self.rewards), "one reward per trajectory"
        assert [t.sample.index for t in self.trajectories] == list(range(len(self.trajectories))), "in index order"
        assert len({(t.sample.step, t.sample.group) for t in self.trajectories}) == 1, "samples of one group"

    @property
    def index(self) -> int:
        """Which group of its step this is."""
        return self.trajectories[0].sample.group


@dataclass(frozen=True, slots=True)
class StepPairs:
    """Stochastic steps scored again by the current policy.

    Gradient flows through `log_prob_R`, `mean_RL` and `velocity_RL`.
    `rollout_log_prob_R` is what the rollout recorded. `old_log_prob_R`, of the policy that generated, is the same
    or, for samples of this batch's own policy (`fresh_R`), recomputed. `proximal_log_prob_R` is of the policy
    before the batch's first update, where the trainer recomputes it. `step_size_R` is h = sigma - sigma'. What
    nobody asked for is None.
    """

    advantage_R: Tensor
    log_prob_R: Tensor
    old_log_prob_R: Tensor
    rollout_log_prob_R: Tensor
    fresh_R: Tensor
    std_R: Tensor
    sigma_R: Tensor
    step_size_R: Tensor
    mean_RL: Tensor
    velocity_RL: Tensor
    proximal_log_prob_R: Tensor | None = None
    old_mean_RL: Tensor | None = None
    reference_mean_RL: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RenoisedPairs:
    """Final latents noised again to sigma, and the velocities predicted there: `velocity_RL` carries gradient.

    `noised_RL` = (1 - sigma) final + sigma noise. What nobody asked for is None.
    """

    advantage_R: Tensor
    sigma_R: Tensor
    final_RL: Tensor
    noise_RL: Tensor
    noised_RL: Tensor
    velocity_RL: Tensor
    old_velocity_RL: Tensor | None = None
    reference_velocity_RL: Tensor | None = None


PairBatch = StepPairs | RenoisedPairs


@dataclass(frozen=True, slots=True)
class LossTerms:
    """A loss, one value per term, in the two parts that streaming keeps apart.

    `scaled_M` is positively homogeneous in the advantages: advantages c > 0 times as large give terms c times as
    large. `fixed_M` does not depend on the advantages' size. The loss is their sum. `measures` are for metrics
    alone: detached values per term, by name.
    """

    scaled_M: Tensor | None
    fixed_M: Tensor | None
    measures: Mapping[str, Tensor] = field(default_factory=dict)

    def total_M(self) -> Tensor:
        """Both parts together."""
        parts = [part for part in (self.scaled_M, self.fixed_M) if part is not None]
        assert parts, "a loss has at least one part"
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a group's samples stand before the batch is known: advantages that only lack the batch's scale.

    `chosen` are the indices of the samples that are trained; a group without spread has none, and still counts in
    the denominator.
    """

    advantages: tuple[float, ...]
    chosen: tuple[int, ...]


class Objective(Protocol):
    """What a trainer is handed. It needs no other knowledge of the algorithm.

    The final advantage of a sample is its standing times `scale` of the batch's rewards, held to +-`clamp`.
    """

    @property
    def needs(self) -> Needs: ...

    @property
    def replays(self) -> Literal["steps", "renoised"]: ...

    @property
    def rows_per_term(self) -> Literal[1, 2]:
        """2 where a term compares two samples; then `Standing.chosen` lists couples: first, second, first, ..."""

    @property
    def scale_over(self) -> Literal["group", "batch"]:
        """Whether standings are final (scale 1) or wait for the rewards of the whole batch."""

    @property
    def clamp(self) -> float: ...

    @property
    def updates_per_batch(self) -> int: ...

    def standing(self, rewards: Sequence[float]) -> Standing:
        """Of one group's samples; a reward that is not finite raises."""

    def scale(self, rewards_by_group: Sequence[Sequence[float]]) -> float:
        """What turns standings into advantages, from all rewards of the batch in the groups' order."""

    def advantages(self, rewards_by_group: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
        """The final advantages of all samples of a batch: standings times scale, clamped."""

    def terms_per_group(self, group_size: int, plan: RolloutPlan) -> int:
        """How many terms every group contributes to the denominator, known before any forward."""

    def trained_steps(self, plan: RolloutPlan) -> tuple[int, ...]:
        """The steps of the schedule that a sample of this plan is trained on."""

    def old_policy_decay(self, batch: int) -> float:
        """d of old <- d old + (1 - d) new, after this batch's last update; 0 where the newest policy generates."""

    def loss(self, pairs: PairBatch) -> LossTerms:
        """One value per term, rows never mixed but for the two of one term."""
