"""The serial reference against gradients computed independently."""

from __future__ import annotations

import pytest
import torch
from scored_groups import Rollout, relative_difference, scored_groups, serial_gradient, serial_of, toy
from serial_reference import batch_advantages

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.recipes.training import TrainerSettings
from digenrl.models.stochastic_step import StepTimes, stochastic_step


def test_on_policy_the_gradient_is_the_score_function_weighted_by_advantages():
    """-(1 / Z) sum A grad ln p, with the density of torch's normal distribution."""
    algorithm = build_algorithm("dance_grpo")
    model = toy()
    groups = scored_groups(model, algorithm, Rollout(groups=1))
    group = groups[0]
    found = serial_gradient(serial_of(model, algorithm), groups)

    rewards = torch.tensor(group.rewards, dtype=torch.float64)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
    parameters = {name: p for name, p in model.transformer.named_parameters() if p.requires_grad}
    terms = []
    for advantage, trajectory in zip(advantages, group.trajectories, strict=True):
        for place, step in enumerate(trajectory.plan.kept_steps):
            latents, then = trajectory.latents_KL[place][None], trajectory.next_latents_KL[place][None]
            plan = trajectory.plan
            times = StepTimes.at(plan.schedule, [step])
            velocity = model.velocity(latents, times.timestep_B, group.conditioning, plan.guidance, plan.size)
            taken = stochastic_step(latents, velocity, times, plan.noise, next_latents_BL=then)
            density = torch.distributions.Normal(taken.mean_BL, taken.std_B.view(-1, 1, 1, 1))
            terms.append(-advantage * density.log_prob(then).mean())
    assert len(terms) == 4 * 2
    torch.stack(terms).mean().backward()
    expected = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    assert relative_difference(found, expected) < 1e-10


def test_two_updates_step_over_different_groups():
    algorithm = build_algorithm("flow_grpo", {"updates_per_batch": 2})
    model = toy()
    groups = scored_groups(model, algorithm, Rollout(groups=4, steps=4))
    serial = serial_of(model, algorithm)
    advantages = batch_advantages(algorithm, [group.rewards for group in groups])
    first_half = serial.gradient(groups[:2], advantages[:2])
    second_half_too_early = serial.gradient(groups[2:], advantages[2:])
    gradients = serial.train_batch(groups)
    assert len(gradients) == 2
    assert relative_difference(gradients[0], first_half) == 0
    assert relative_difference(gradients[1], second_half_too_early) > 1e-6, "the first step changed the weights"


def test_a_step_is_limited_by_the_clipped_gradient():
    algorithm = build_algorithm("flow_dpo")
    model = toy()
    groups = scored_groups(model, algorithm)
    settings = TrainerSettings(learning_rate=1.0, gradient_norm=1e-3, weight_decay=0, adam_eps=1.0)
    before = [p.detach().clone() for p in model.transformer.parameters() if p.requires_grad]
    (gradient,) = serial_of(model, algorithm, settings).train_batch(groups)
    after = [p.detach() for p in model.transformer.parameters() if p.requires_grad]
    moved = torch.cat([(b - a).flatten() for a, b in zip(after, before, strict=True)]).norm()
    assert torch.cat([g.flatten() for g in gradient.values()]).norm() > 0.01, "otherwise nothing is clipped"
    assert float(moved) == pytest.approx(1e-3, rel=0.01)
