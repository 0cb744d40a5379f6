"""Online Flow-DPO: of every group the best sample is preferred to the worst, at the same noise and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field, field_validator
from torch.nn import functional

from digenrl.algorithms.advantages import AdvantageSettings, checked_rewards, has_spread
from digenrl.algorithms.contract import AlgorithmSettings, GroupRelative, leading_steps
from digenrl.algorithms.policy_loss import squared_distance_R
from digenrl.models.objective import Advantages, LossTerms, Needs, PairBatch, RenoisedPairs
from digenrl.models.trajectory import RolloutPlan


class FlowDpoSettings(AlgorithmSettings):
    """Only the order of rewards counts, so that there is nothing to normalise over the batch."""

    beta: float = Field(default=100.0, gt=0)
    trained_fraction: float = Field(default=0.99, gt=0, le=1)

    @field_validator("advantage")
    @classmethod
    def _only_the_order_counts(cls, advantage: AdvantageSettings) -> AdvantageSettings:
        if advantage != AdvantageSettings():
            raise ValueError("flow_dpo compares the best sample with the worst; it takes no advantage settings")
        return advantage


class FlowDpo(GroupRelative):
    """A term has two rows: the best sample of a group, then the worst."""

    name = "flow_dpo"
    settings: FlowDpoSettings
    replays: Literal["renoised"] = "renoised"
    rollout_window: ClassVar[Mapping[str, object]] = {"kind": "none"}
    rows_per_term: Literal[2] = 2

    @property
    def needs(self) -> Needs:
        return Needs(final_latents=True, reference=True)

    def group_advantages(self, rewards: Sequence[float]) -> Advantages:
        checked_rewards(rewards)
        indices = range(len(rewards))
        best = max(indices, key=lambda index: rewards[index])
        worst = min(indices, key=lambda index: rewards[index])
        if not has_spread(rewards):
            return Advantages(tuple(0.0 for _ in indices), chosen=())
        advantages = tuple(1.0 if index == best else -1.0 if index == worst else 0.0 for index in indices)
        return Advantages(advantages, chosen=(best, worst))

    def samples_per_group(self, group_size: int) -> int:
        return 1  # one couple

    def trained_steps(self, plan: RolloutPlan) -> tuple[int, ...]:
        return leading_steps(self.settings.trained_fraction, plan.schedule.steps)

    def loss(self, pairs: PairBatch) -> LossTerms:
        assert isinstance(pairs, RenoisedPairs) and pairs.reference_velocity_RL is not None
        target_RL = pairs.noise_RL - pairs.final_RL
        excess_R = squared_distance_R(pairs.velocity_RL, target_RL) - squared_distance_R(
            pairs.reference_velocity_RL, target_RL
        )
        margin_M = -self.settings.beta / 2 * (excess_R[0::2] - excess_R[1::2])
        measures = {"preferred": (margin_M.detach() > 0).to(margin_M.dtype)}
        return LossTerms(scaled_M=None, fixed_M=-functional.logsigmoid(margin_M), measures=measures)
