"""To which noise levels the final latents of a sample are noised for training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from digenrl.models.contract import Schedule
from digenrl.models.objective import Objective
from digenrl.models.trajectory import Trajectory
from digenrl.records import SampleId

DrawNoise = Callable[[SampleId, str, Sequence[int]], Tensor]
"""Standard normal noise that depends only on a sample, a purpose and a shape."""


def noise_level(
    trajectory: Trajectory, number: int, objective: Objective, draw_noise: DrawNoise
) -> tuple[Schedule, int]:
    """A schedule and a place in it: the level with this number of the sample's trained levels.

    `first` counts the levels of the rollout's schedule, `random` those of a permutation per sample. `stratified`
    draws from the part of the schedule with this number. `logit_normal` draws u = 1 / (1 + exp(-z)) with
    z ~ N(0, 1), the share of the training schedule that lies before the level.
    """
    plan, sample = trajectory.plan, trajectory.sample
    drawn_from = objective.drawn_levels(plan.schedule.steps)
    if objective.levels == "first":
        return plan.schedule, number
    if objective.levels == "random":
        order = draw_noise(sample, "order of levels", [drawn_from]).argsort()
        return plan.schedule, int(order[number])
    if objective.levels == "stratified":
        parts = len(objective.trained_steps(plan))
        first, end = (part * drawn_from // parts for part in (number, number + 1))
        share = float(torch.special.ndtr(draw_noise(sample, f"level {number}", [1]).double()))
        return plan.schedule, min(first + int(share * (end - first)), end - 1)
    assert plan.training_schedule is not None, "logit-normal levels need a training schedule"
    share = float(torch.sigmoid(draw_noise(sample, f"level {number}", [1]).double()))
    steps = plan.training_schedule.steps
    return plan.training_schedule, min(int(share * steps), steps - 1)
