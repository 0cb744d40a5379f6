"""Prompt, generate, reward, advantage, train: 24 steps raise the mean reward of a tiny SD3 pipeline.

All weights are trained. The reward is the brightness of a picture, compared before and after on samples of noise
that training never saw.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from scored_groups import DRAW_NOISE, RUN_SEED

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.recipes.training import TrainerSettings
from digenrl.generation.rollout import RolloutSettings, decode_slice, generate_slice
from digenrl.generation.windows import plan_rollouts
from digenrl.models.contract import Conditioning, DiffusionModel
from digenrl.models.objective import Objective
from digenrl.models.registry import FAMILIES
from digenrl.models.trajectory import ScoredGroup, StepNoise
from digenrl.records import Slice
from digenrl.testing.tiny_models import make_tiny_pipeline, tiny_size
from digenrl.training.open_batch import BatchShape
from digenrl.training.trainer import Trainer

FAMILY = FAMILIES["sd3"]
STEPS, GROUPS = 24, 2
HELD_OUT_GROUPS = 12
HELD_OUT_STEP = 10_000
PROMPTS = ["a red door", "a lake at dawn", "three green apples", "snow on a roof"]


@dataclass(frozen=True)
class Recipe:
    """What one algorithm is tried with: small, but enough for it to learn."""

    algorithm: Objective
    noise: StepNoise
    denoising_steps: int
    group_size: int
    learning_rate: float


RECIPE = Recipe(
    build_algorithm("flow_grpo", {"clip": 1e-2, "kl_weight": 0.0, "updates_per_batch": 1}),
    StepNoise("flow", 0.7),
    denoising_steps=4,
    group_size=6,
    learning_rate=3e-3,
)


def brightness(pixels_BFCHW: torch.Tensor) -> list[float]:
    """The mean of all pixels, per sample."""
    return pixels_BFCHW.mean(dim=(1, 2, 3, 4)).tolist()


@dataclass(frozen=True)
class Policy:
    """A model, and its prompts, which are encoded once."""

    model: DiffusionModel
    conditionings: Sequence[Conditioning]


def rollout(policy: Policy, recipe: Recipe, step: int, group: int) -> ScoredGroup:
    """One group, generated, decoded and scored."""
    algorithm, model = recipe.algorithm, policy.model
    slice_ = Slice(step, group, 0, recipe.group_size)
    conditioning = policy.conditionings[group % len(PROMPTS)]
    plans = plan_rollouts(
        algorithm.settings.window,
        slice_.samples(),
        schedule=model.schedule(recipe.denoising_steps, tiny_size(FAMILY.name)),
        size=tiny_size(FAMILY.name),
        noise=recipe.noise,
        guidance=1.0,
        run_seed=RUN_SEED,
    )
    generated = generate_slice(
        model,
        conditioning,
        plans,
        slice_,
        RolloutSettings(RUN_SEED, algorithm.needs, algorithm.settings.same_initial_noise),
        version=step,
    )
    return ScoredGroup(conditioning, generated.trajectories, tuple(brightness(decode_slice(model, generated))))


def held_out_rewards(policy: Policy, recipe: Recipe) -> list[float]:
    """Means of groups, which are independent draws; samples of a group that share noise are not."""
    groups = [rollout(policy, recipe, HELD_OUT_STEP, group) for group in range(HELD_OUT_GROUPS)]
    return [statistics.mean(group.rewards) for group in groups]


def test_a_few_steps_raise_the_mean_reward_by_more_than_three_standard_errors(tmp_path: Path) -> None:
    recipe = RECIPE
    make_tiny_pipeline("sd3", tmp_path / "sd3")
    model = FAMILY.load(tmp_path / "sd3")
    policy = Policy(model, [model.encode([prompt]) for prompt in PROMPTS])
    settings = TrainerSettings(learning_rate=recipe.learning_rate, pack_size=16)
    shape = BatchShape(GROUPS, recipe.group_size)
    trainer = Trainer(model, recipe.algorithm, settings, shape, draw_noise=DRAW_NOISE)

    before = held_out_rewards(policy, recipe)
    for step in range(STEPS):
        for group in [rollout(policy, recipe, step, group) for group in range(GROUPS)]:
            trainer.add_group(group)
        trainer.commit()
    after = held_out_rewards(policy, recipe)

    standard_error = math.hypot(*(statistics.stdev(r) / math.sqrt(len(r)) for r in (before, after)))
    assert statistics.mean(after) - statistics.mean(before) > 3 * standard_error
