"""To which noise levels the final latents of a sample are noised for training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from digenrl.config.algorithms import Levels
from digenrl.models.contract import Schedule
from digenrl.models.trajectory import Trajectory
from digenrl.records import SampleId

DrawNoise = Callable[[SampleId, str, Sequence[int]], Tensor]
"""Standard normal noise that depends only on a sample, a purpose and a shape."""


def noise_level(
    trajectory: Trajectory, number: int, levels: Levels, draw_noise: DrawNoise
) -> tuple[Schedule, int]:
    """A schedule and a place in it: the level with this number of the sample's trained levels.

    `first` counts the levels of the rollout's schedule, `random` those of a permutation per sample. `logit_normal`
    draws u = 1 / (1 + exp(-z)) with z ~ N(0, 1), the share of the training schedule that lies before the level.
    """
    plan, sample = trajectory.plan, trajectory.sample
    if levels == "first":
        return plan.schedule, number
    if levels == "random":
        order = draw_noise(sample, "order of levels", [plan.schedule.steps]).argsort()
        return plan.schedule, int(order[number])
    assert plan.training_schedule is not None, "logit-normal levels need a training schedule"
    share = float(torch.sigmoid(draw_noise(sample, f"level {number}", [1]).double()))
    steps = plan.training_schedule.steps
    return plan.training_schedule, min(int(share * steps), steps - 1)
