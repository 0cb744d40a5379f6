"""The serial reference: the updates of a batch, computed one (sample, step) pair at a time.

It has no packing, no slicing and no streaming. Read it first; every faster path is tested against it. It follows a
batch from its rewards to the new weights:

    advantages of all samples -> for every update: the gradient, pair by pair -> clip -> AdamW

The trained model is the *current* policy. The *old* policy is the one before the batch, the *reference* is the
model before any training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from digenrl.models.contract import DiffusionModel
from digenrl.models.objective import Objective, PairBatch, RenoisedPairs, StepPairs
from digenrl.models.stochastic_step import StepResult, StepTimes, stochastic_step
from digenrl.models.trajectory import ScoredGroup, Trajectory
from digenrl.training.packing.noise_levels import DrawNoise, noise_level
from digenrl.training.policy_weights import PolicyWeights

Gradients = dict[str, Tensor]


def batch_advantages(objective: Objective, rewards_by_group: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    """The final advantages of all samples of a batch: scaled and clamped."""
    scale, clamp = objective.scale(rewards_by_group), objective.clamp
    groups = [objective.group_advantages(rewards) for rewards in rewards_by_group]
    return [tuple(max(-clamp, min(clamp, value * scale)) for value in group.values) for group in groups]


class SerialReference:
    """Computes the updates of one batch after the other."""

    def __init__(
        self,
        model: DiffusionModel,
        objective: Objective,
        policies: PolicyWeights,
        optimizer: torch.optim.Optimizer,
        draw_noise: DrawNoise,
        gradient_norm: float,
    ) -> None:
        self.model, self.objective, self.policies = model, objective, policies
        self.optimizer, self.draw_noise, self.gradient_norm = optimizer, draw_noise, gradient_norm
        self.batches_done = 0

    def train_batch(self, groups: Sequence[ScoredGroup]) -> list[Gradients]:
        """Takes all optimizer steps of a batch; returns their gradients before clipping."""
        advantages = batch_advantages(self.objective, [group.rewards for group in groups])
        gradients = []
        for update in range(self.objective.updates_per_batch):
            units = [self.units(place, update, len(groups), group) for place, group in enumerate(groups)]
            gradient = self.gradient(groups, advantages, units)
            gradients.append(gradient)
            self._step(gradient)
        self.policies.finish_batch(self.objective.old_policy_decay(self.batches_done))
        self.batches_done += 1
        return gradients

    def units(self, place: int, update: int, groups: int, group: ScoredGroup) -> list[int]:
        """The numbers of the samples, or compared pairs, of the group at a place that an update trains."""
        count, updates = self.objective.units_per_group(len(group.rewards)), self.objective.updates_per_batch
        if self.objective.updates_of == "samples":
            return [unit for unit in range(count) if (place + unit) % updates == update]
        return list(range(count)) if place * updates // groups == update else []

    def gradient(
        self,
        groups: Sequence[ScoredGroup],
        advantages: Sequence[Sequence[float]],
        units_by_group: Sequence[Sequence[int]] | None = None,
    ) -> Gradients:
        """The gradient of L = (1 / Z) sum of l over pairs, for some units of each group, by default all.

        Z also counts groups with equal rewards, unless they are left out.
        """
        objective, parameters = self.objective, self.policies.parameters
        every_unit = [range(objective.units_per_group(len(group.rewards))) for group in groups]
        denominator = 0
        for group, units in zip(groups, units_by_group or every_unit, strict=True):
            if len(set(group.rewards)) > 1 or objective.zero_spread_groups != "left_out":
                denominator += len(units) * len(objective.trained_steps(group.trajectories[0].plan))
        for parameter in parameters.values():
            parameter.grad = None
        for group, advantage, units in zip(groups, advantages, units_by_group or every_unit, strict=True):
            chosen = objective.group_advantages(group.rewards).chosen
            for first in [unit * objective.rows_per_term for unit in units]:
                samples = chosen[first : first + objective.rows_per_term]  # one sample, or two that are compared
                if not samples:
                    continue
                for step in objective.trained_steps(group.trajectories[samples[0]].plan):
                    pairs = self.replay(group, samples, [advantage[index] for index in samples], step)
                    (loss,) = objective.loss(pairs).total_M()
                    (loss / denominator).backward()
        gradient = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        for parameter in parameters.values():
            parameter.grad = None
        return gradient

    def replay(
        self, group: ScoredGroup, samples: Sequence[int], advantages: Sequence[float], step: int
    ) -> PairBatch:
        """The loss's inputs for one sample, or for two that are compared, at one step."""
        trajectories = [group.trajectories[index] for index in samples]
        if self.objective.replays == "steps":
            (trajectory,), (advantage,) = trajectories, advantages
            return self._replay_step(group, trajectory, advantage, step)
        return self._replay_renoised(group, trajectories, advantages, step)

    def _replay_step(self, group: ScoredGroup, trajectory: Trajectory, advantage: float, step: int) -> StepPairs:
        """The rollout's step from one latent to the next, scored by the current policy."""
        needs = self.objective.needs
        kept = trajectory.plan.kept_steps.index(step)

        def score() -> tuple[Tensor, StepResult]:
            latents_1L, next_1L = trajectory.latents_KL[kept][None], trajectory.next_latents_KL[kept][None]
            velocity_1L = self._velocity(group, trajectory, latents_1L, step)
            times = StepTimes.at(trajectory.plan.schedule, [step])
            scored = stochastic_step(
                latents_1L, velocity_1L, times, trajectory.plan.noise, next_latents_BL=next_1L
            )
            return velocity_1L, scored

        reference_mean_1L = None
        if needs.reference:
            with torch.no_grad(), self.policies.reference():
                reference_mean_1L = score()[1].mean_BL
        velocity_1L, scored = score()
        sigmas = trajectory.plan.schedule.sigmas
        log_prob_1 = trajectory.log_prob_K[kept][None].to(scored.log_prob_B)
        return StepPairs(
            advantage_R=torch.tensor([advantage], dtype=torch.float64).to(scored.log_prob_B),
            log_prob_R=scored.log_prob_B,
            old_log_prob_R=log_prob_1,
            rollout_log_prob_R=log_prob_1,
            fresh_R=torch.tensor([trajectory.version == trajectory.sample.step]),
            std_R=scored.std_B,
            sigma_R=sigmas[step][None].to(scored.std_B),
            step_size_R=(sigmas[step] - sigmas[step + 1])[None].to(scored.std_B),
            noise_time_R=StepTimes.at(trajectory.plan.schedule, [step])
            .noise_time_B(trajectory.plan.noise.kind)
            .to(scored.std_B),
            mean_RL=scored.mean_BL,
            velocity_RL=velocity_1L,
            old_mean_RL=None if trajectory.mean_KL is None else trajectory.mean_KL[kept][None],
            reference_mean_RL=reference_mean_1L,
        )

    def _replay_renoised(
        self, group: ScoredGroup, trajectories: Sequence[Trajectory], advantages: Sequence[float], step: int
    ) -> RenoisedPairs:
        """Final latents noised to one level with the same noise, and the conditional velocities there."""
        schedule, place = noise_level(trajectories[0], step, self.objective, self.draw_noise)
        final_RL = torch.stack([t.final_L for t in trajectories if t.final_L is not None])
        noise_L = self.draw_noise(trajectories[0].sample, f"renoise {step}", final_RL.shape[1:])
        noise_RL = torch.stack([noise_L for _ in trajectories]).to(final_RL)
        sigma = schedule.sigmas[place].to(final_RL)
        noised_RL = (1 - sigma) * final_RL + sigma * noise_RL

        def velocities() -> Tensor:
            plan, timestep_1 = trajectories[0].plan, schedule.timesteps[place][None].to(self.model.device)
            guidance = plan.guidance if group.conditioning.negative is None else 1.0
            one_by_one = [
                self.model.velocity(noised_L[None], timestep_1, group.conditioning, guidance, plan.size)
                for noised_L in noised_RL
            ]
            return torch.cat(one_by_one)

        reference_RL = old_RL = None
        if self.objective.needs.reference:
            with torch.no_grad(), self.policies.reference():
                reference_RL = velocities()
        if self.objective.needs.old_policy:
            with torch.no_grad(), self.policies.old():
                old_RL = velocities()
        return RenoisedPairs(
            advantage_R=torch.tensor(advantages, dtype=torch.float64).to(final_RL),
            sigma_R=sigma.expand(len(trajectories)),
            final_RL=final_RL,
            noise_RL=noise_RL,
            noised_RL=noised_RL,
            velocity_RL=velocities(),
            old_velocity_RL=old_RL,
            reference_velocity_RL=reference_RL,
        )

    def _velocity(self, group: ScoredGroup, trajectory: Trajectory, latents_1L: Tensor, step: int) -> Tensor:
        """The velocity of one row, with the conditioning and guidance of the rollout."""
        plan = trajectory.plan
        timestep_1 = plan.schedule.timesteps[step][None].to(self.model.device)
        return self.model.velocity(latents_1L, timestep_1, group.conditioning, plan.guidance, plan.size)

    def _step(self, gradient: Gradients) -> None:
        """Clips the norm of the whole gradient, then takes an AdamW step."""
        for name, parameter in self.policies.parameters.items():
            parameter.grad = gradient[name].clone() if name in gradient else None
        torch.nn.utils.clip_grad_norm_(self.policies.parameters.values(), self.gradient_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
