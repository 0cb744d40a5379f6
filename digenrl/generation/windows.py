"""Chooses the stochastic steps of a rollout, and those of them that are kept for training.

A choice is a function of the window, the run's seed and the sample's id alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.windows import (
    AllSteps,
    EulerOnly,
    FastWindow,
    RandomSubset,
    SlidingWindow,
    SparseWindow,
    Window,
)
from digenrl.generation.noise import SHARED, draw_key
from digenrl.models.contract import SampleSize, Schedule
from digenrl.models.trajectory import RolloutPlan, StepNoise
from digenrl.records import SampleId


@dataclass(frozen=True, slots=True)
class StepChoice:
    """Indices into the schedule, ascending; `kept` is a subset of `stochastic`."""

    stochastic: tuple[int, ...]
    kept: tuple[int, ...]


def choose_steps(
    window: Window, steps: int, run_seed: int, sample: SampleId, last_step_noise: bool = False
) -> StepChoice:
    """The steps of one sample in a schedule of `steps`, which the window has to fit (`window.check`).

    With `last_step_noise` the last step is stochastic too, but never kept: the window must cover all steps.
    """
    possible = tuple(range(steps - 1))
    stochastic = (*possible, steps - 1) if last_step_noise else possible
    match window:
        case EulerOnly():
            return StepChoice((), ())
        case AllSteps():
            return StepChoice(stochastic, possible[: window.kept_steps(steps)])
        case RandomSubset():
            return StepChoice(stochastic, _subset(possible, window.kept_steps(steps), run_seed, sample, "subset"))
        case SparseWindow():
            group = sample.group if window.drawn_per == "group" else SHARED
            drawn_for = SampleId(sample.step, group, SHARED)
            drawable = tuple(window.trainable_steps(steps))
            drawn = _subset(drawable, window.count, run_seed, drawn_for, "sparse window")
            return StepChoice(drawn, drawn)
        case SlidingWindow():
            first = (sample.step // window.training_steps_per_shift) % (steps - 2)
        case FastWindow():
            # Drawn once per training step, for all its samples.
            key = draw_key(run_seed, SampleId(sample.step, SHARED, SHARED), "fast window")
            first = key % (steps // 2 - window.width + 1)
    chosen = possible[first : first + window.width]
    return StepChoice(chosen, chosen)


def _subset(steps: tuple[int, ...], count: int, run_seed: int, sample: SampleId, purpose: str) -> tuple[int, ...]:
    """`count` random steps, ascending."""
    shuffled = sorted(steps, key=lambda index: draw_key(run_seed, sample, f"{purpose} {index}"))
    return tuple(sorted(shuffled[:count]))


def plan_rollouts(
    window: Window,
    samples: Iterable[SampleId],
    *,
    schedule: Schedule,
    size: SampleSize,
    noise: StepNoise,
    guidance: float,
    run_seed: int,
    last_step_noise: bool = False,
    training_schedule: Schedule | None = None,
) -> tuple[RolloutPlan, ...]:
    """One plan per sample, in order; samples with the same choice of steps share a plan."""
    window.check(schedule.steps)
    assert window.covers_all_steps or not last_step_noise, f"a window of kind {window.kind} ends before"
    plans: dict[StepChoice, RolloutPlan] = {}

    def plan(sample: SampleId) -> RolloutPlan:
        choice = choose_steps(window, schedule.steps, run_seed, sample, last_step_noise)
        if choice not in plans:
            plans[choice] = RolloutPlan(
                schedule, size, noise, guidance, choice.stochastic, choice.kept, training_schedule
            )
        return plans[choice]

    return tuple(plan(sample) for sample in samples)


def check_plan(plan: RolloutPlan) -> None:
    """Raises ConfigError if steps are outside the schedule, or the last step or one without noise is kept."""
    last = plan.schedule.steps - 1
    outside = [index for index in plan.stochastic_steps if not 0 <= index <= last]
    if outside:
        raise ConfigError(
            f"step {outside[0]} cannot be stochastic in a schedule of {last + 1} steps; use steps 0 to {last}"
        )
    if last in plan.kept_steps:
        raise ConfigError(f"step {last} is the last and is never trained; keep steps before it")
    without_noise = sorted(set(plan.kept_steps) - set(plan.stochastic_steps))
    if without_noise:
        raise ConfigError(
            f"step {without_noise[0]} is kept for training but has no noise; keep stochastic steps only"
        )
    if list(plan.kept_steps) != sorted(set(plan.kept_steps)):
        raise ConfigError(f"kept steps must be strictly ascending, got {plan.kept_steps}")
    if plan.kept_steps and plan.noise.level <= 0:
        raise ConfigError(f"kept steps need noise: its level must be above 0, got {plan.noise.level}")
