"""Replays terms in one packed forward and returns a batch of pairs. Rows may be at different steps.

Shape legend as in `digenrl.models.objective`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from digenrl.config.recipes.training import TrainerSettings
from digenrl.models.contract import Conditioning, DiffusionModel, Schedule
from digenrl.models.objective import Objective, PairBatch, RenoisedPairs, StepPairs
from digenrl.models.stochastic_step import StepResult, StepTimes, stochastic_step
from digenrl.models.trajectory import StepNoise, Trajectory
from digenrl.models.transfers import to_device, to_device_like
from digenrl.records import SampleId
from digenrl.training.packing.noise_levels import DrawNoise, noise_level
from digenrl.training.packing.packs import Term
from digenrl.training.policy_weights import PolicyWeights

NO_GUIDANCE = 1.0  # up to this scale a model has one branch, the conditional one


@dataclass(frozen=True, slots=True)
class _Rows:
    trajectories: list[Trajectory]
    noise_samples: list[SampleId]  # whose noise a row gets: the first sample of its term
    advantage_R: Tensor
    times: StepTimes
    steps: list[int]
    conditioning: Conditioning

    @property
    def noise(self) -> StepNoise:
        """The noise of the rollout's stochastic steps."""
        return self.trajectories[0].plan.noise


class Replay:
    """Repeats steps of a rollout under the policies that an objective needs.

    The forward that carries gradient is always the last one: the others swap weights in and out.
    """

    def __init__(
        self,
        model: DiffusionModel,
        objective: Objective,
        policies: PolicyWeights,
        draw_noise: DrawNoise,
        settings: TrainerSettings,
    ) -> None:
        self.model, self.objective, self.policies = model, objective, policies
        self._draw_noise = draw_noise
        self._recompute = settings.old_log_probs == "recomputed"
        self._autocast = settings.autocast == "bf16"

    def pairs(self, terms: Sequence[Term], conditioning: Conditioning, *, before_updates: bool) -> PairBatch:
        """The pairs of these terms of one group; `conditioning` is the group's single row.

        `before_updates` says that the trained weights are still those from before the batch.
        """
        rows = self._rows(terms, conditioning)
        if self.objective.replays == "steps":
            return self._step_pairs(rows, before_updates)
        return self._renoised_pairs(rows)

    def _rows(self, terms: Sequence[Term], conditioning: Conditioning) -> _Rows:
        trajectories = [trajectory for term in terms for trajectory in term.trajectories]
        first = trajectories[0].plan
        for trajectory in trajectories:
            plan = trajectory.plan
            same = (plan.size, plan.noise, plan.guidance) == (first.size, first.noise, first.guidance)
            assert same, "the samples of a group share size, noise and guidance"
        steps = [term.step for term in terms for _ in term.trajectories]
        return _Rows(
            trajectories=trajectories,
            noise_samples=[term.trajectories[0].sample for term in terms for _ in term.trajectories],
            advantage_R=torch.tensor([a for term in terms for a in term.advantages], dtype=torch.float64),
            times=StepTimes.of_rows([row for term in terms for row in self._places(term)]),
            steps=steps,
            conditioning=self.model.compact(conditioning).to(self.model.device).repeated(len(steps)),
        )

    def _places(self, term: Term) -> list[tuple[Schedule, int]]:
        """The schedule of each row of a term, and the row's place in it; rows that are compared share theirs."""
        if self.objective.replays == "steps":
            return [(trajectory.plan.schedule, term.step) for trajectory in term.trajectories]
        place = noise_level(term.trajectories[0], term.step, self.objective, self._draw_noise)
        return [place] * len(term.trajectories)

    def _step_pairs(self, rows: _Rows, before_updates: bool) -> StepPairs:
        kept = [t.plan.kept_steps.index(step) for t, step in zip(rows.trajectories, rows.steps, strict=True)]
        stored = list(zip(rows.trajectories, kept, strict=True))
        latents_RL = self._stacked([t.latents_KL[k] for t, k in stored])
        next_RL = self._stacked([t.next_latents_KL[k] for t, k in stored])
        reference = old = None
        if self.objective.needs.reference:
            with torch.no_grad(), self.policies.reference():
                reference = self._scored(latents_RL, next_RL, rows)[1]
        if self._recompute and not before_updates:
            with torch.no_grad(), self.policies.old():
                old = self._scored(latents_RL, next_RL, rows)[1]
        velocity_RL, scored = self._scored(latents_RL, next_RL, rows)
        if self._recompute and before_updates:
            old = scored  # the same weights: one forward serves as both, and the ratio is exactly 1
        fresh_R = to_device(
            torch.tensor([t.version == t.sample.step for t in rows.trajectories]), self.model.device
        )
        rollout_log_prob_R = to_device_like(torch.stack([t.log_prob_K[k] for t, k in stored]), scored.log_prob_B)
        old_log_prob_R = rollout_log_prob_R
        old_mean_RL = None
        if self.objective.needs.step_means:
            old_mean_RL = self._stacked([_mean(t)[k] for t, k in stored]).to(scored.mean_BL)
        if old is not None:
            old_log_prob_R = torch.where(fresh_R, old.log_prob_B.detach(), old_log_prob_R)
            if old_mean_RL is not None:
                fresh_R1 = fresh_R.view(-1, *[1] * (old_mean_RL.dim() - 1))
                old_mean_RL = torch.where(fresh_R1, old.mean_BL.detach(), old_mean_RL)
        return StepPairs(
            advantage_R=to_device_like(rows.advantage_R, scored.log_prob_B),
            log_prob_R=scored.log_prob_B,
            old_log_prob_R=old_log_prob_R,
            rollout_log_prob_R=rollout_log_prob_R,
            fresh_R=fresh_R,
            std_R=scored.std_B,
            sigma_R=to_device_like(rows.times.sigma_B, scored.std_B),
            step_size_R=to_device_like(rows.times.step_size_B, scored.std_B),
            noise_time_R=to_device_like(rows.times.noise_time_B(rows.noise.kind), scored.std_B),
            mean_RL=scored.mean_BL,
            velocity_RL=velocity_RL,
            proximal_log_prob_R=None if old is None else old.log_prob_B.detach(),
            old_mean_RL=old_mean_RL,
            reference_mean_RL=None if reference is None else reference.mean_BL,
        )

    def _renoised_pairs(self, rows: _Rows) -> RenoisedPairs:
        final_RL = self._stacked([_final(t) for t in rows.trajectories])
        final_RL = final_RL.to(torch.promote_types(final_RL.dtype, torch.float32))
        noise_RL = torch.stack(
            [
                self._draw_noise(sample, f"renoise {step}", final_RL.shape[1:])
                for sample, step in zip(rows.noise_samples, rows.steps, strict=True)
            ]
        )
        noise_RL = to_device_like(noise_RL, final_RL)
        sigma_R = to_device_like(rows.times.sigma_B, final_RL)
        sigma_R1 = sigma_R.view(-1, *[1] * (final_RL.dim() - 1))
        noised_RL = (1 - sigma_R1) * final_RL + sigma_R1 * noise_RL
        reference_RL = old_RL = None
        if self.objective.needs.reference:
            with torch.no_grad(), self.policies.reference():
                reference_RL = self._velocity(noised_RL, rows, guided=False)
        if self.objective.needs.old_policy:
            with torch.no_grad(), self.policies.old():
                old_RL = self._velocity(noised_RL, rows, guided=False)
        velocity_RL = self._velocity(noised_RL, rows, guided=False)
        return RenoisedPairs(
            advantage_R=to_device_like(rows.advantage_R, velocity_RL),
            sigma_R=sigma_R,
            final_RL=final_RL,
            noise_RL=noise_RL,
            noised_RL=noised_RL,
            velocity_RL=velocity_RL,
            old_velocity_RL=old_RL,
            reference_velocity_RL=reference_RL,
        )

    def _scored(self, latents_RL: Tensor, next_RL: Tensor, rows: _Rows) -> tuple[Tensor, StepResult]:
        velocity_RL = self._velocity(latents_RL, rows)
        scored = stochastic_step(latents_RL, velocity_RL, rows.times, rows.noise, next_latents_BL=next_RL)
        return velocity_RL, scored

    def _velocity(self, latents_RL: Tensor, rows: _Rows, guided: bool = True) -> Tensor:
        """The velocity as in the rollout or, for a loss against data, without classifier-free guidance.

        A family with embedded guidance has no other velocity than the guided one.
        """
        plan = rows.trajectories[0].plan
        guidance = plan.guidance if guided or rows.conditioning.negative is None else NO_GUIDANCE
        timesteps_R = to_device(rows.times.timestep_B, self.model.device)
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self._autocast):
            return self.model.velocity(latents_RL, timesteps_R, rows.conditioning, guidance, plan.size)

    def _stacked(self, values: list[Tensor]) -> Tensor:
        return to_device(torch.stack(values), self.model.device)


def _final(trajectory: Trajectory) -> Tensor:
    assert trajectory.final_L is not None, "the rollout must keep final latents for this algorithm"
    return trajectory.final_L


def _mean(trajectory: Trajectory) -> Tensor:
    assert trajectory.mean_KL is not None, "the rollout must keep step means for this algorithm"
    return trajectory.mean_KL
