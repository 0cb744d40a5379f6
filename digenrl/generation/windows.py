"""Windows choose which steps of a rollout are stochastic, and which of those are kept for training.

The last step of a schedule is never stochastic, so at most N - 1 of N steps are kept. The choice depends only on
the run's seed and the sample's id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from digenrl.config.reading import ConfigError, Frozen, nearest, parse_model
from digenrl.generation.noise import SHARED, draw_key
from digenrl.models.contract import SampleSize, Schedule
from digenrl.models.trajectory import RolloutPlan, StepNoise
from digenrl.records import SampleId


@dataclass(frozen=True, slots=True)
class StepChoice:
    """Indices into the schedule, ascending; `kept` is a subset of `stochastic`."""

    stochastic: tuple[int, ...]
    kept: tuple[int, ...]


class EulerOnly(Frozen):
    """No stochastic steps: for algorithms that train on the final latents."""

    kind: Literal["none"] = "none"

    def check(self, steps: int) -> None:
        pass  # fits every schedule

    def choose(self, steps: int, run_seed: int, sample: SampleId) -> StepChoice:
        return StepChoice((), ())


class AllSteps(Frozen):
    """Flow-GRPO: every step except the last is stochastic, the first int(fraction * N) of them are kept."""

    kind: Literal["all"] = "all"
    fraction: float = Field(default=0.99, gt=0, le=1)

    def check(self, steps: int) -> None:
        _at_least_one(int(self.fraction * steps), f"fraction {self.fraction}", steps)

    def choose(self, steps: int, run_seed: int, sample: SampleId) -> StepChoice:
        return StepChoice(
            _before_last(range(steps), steps), _before_last(range(int(self.fraction * steps)), steps)
        )


class RandomSubset(Frozen):
    """DanceGRPO: every step except the last is stochastic, a random int(fraction * (N - 1)) of them are kept."""

    kind: Literal["random_subset"] = "random_subset"
    fraction: float = Field(default=0.6, gt=0, le=1)

    def check(self, steps: int) -> None:
        _at_least_one(int(self.fraction * (steps - 1)), f"fraction {self.fraction}", steps)

    def choose(self, steps: int, run_seed: int, sample: SampleId) -> StepChoice:
        stochastic = _before_last(range(steps), steps)
        in_random_order = sorted(stochastic, key=lambda index: draw_key(run_seed, sample, f"subset {index}"))
        return StepChoice(stochastic, tuple(sorted(in_random_order[: int(self.fraction * len(stochastic))])))


class SlidingWindow(Frozen):
    """MixGRPO: steps [l, l + width) are stochastic and kept; l moves by 1 every `training_steps_per_shift`.

    l restarts at 0 when it reaches N - 2. Near the end the window is cut before the last step.
    """

    kind: Literal["sliding"] = "sliding"
    width: int = Field(default=4, ge=1)
    training_steps_per_shift: int = Field(default=25, ge=1)

    def check(self, steps: int) -> None:
        _fits(self.width, steps - 1 if steps > 2 else 0, steps)

    def choose(self, steps: int, run_seed: int, sample: SampleId) -> StepChoice:
        first = (sample.step // self.training_steps_per_shift) % (steps - 2)
        window = _before_last(range(first, first + self.width), steps)
        return StepChoice(window, window)


class FastWindow(Frozen):
    """Flow-GRPO-Fast: steps [l, l + width) are stochastic and kept; l is uniform in [0, N // 2 - width].

    l is drawn once per training step, for all its samples.
    """

    kind: Literal["fast"] = "fast"
    width: int = Field(default=2, ge=1)

    def check(self, steps: int) -> None:
        _fits(self.width, min(steps // 2, steps - 1), steps)

    def choose(self, steps: int, run_seed: int, sample: SampleId) -> StepChoice:
        places = steps // 2 - self.width + 1
        first = draw_key(run_seed, SampleId(sample.step, SHARED, SHARED), "fast window") % places
        window = tuple(range(first, first + self.width))
        return StepChoice(window, window)


# `check(steps)` raises ConfigError if a window does not fit a schedule; `choose` gives the steps of one sample.
Window = EulerOnly | AllSteps | RandomSubset | SlidingWindow | FastWindow

WINDOWS: dict[str, type[Window]] = {
    "none": EulerOnly,
    "all": AllSteps,
    "random_subset": RandomSubset,
    "sliding": SlidingWindow,
    "fast": FastWindow,
}


def read_window(settings: Mapping[str, object]) -> Window:
    """Parses the settings of a window, such as {"kind": "fast", "width": 3}."""
    kind = str(settings.get("kind", ""))
    if kind not in WINDOWS:
        raise ConfigError(f"unknown window kind '{kind}'; {nearest(kind, list(WINDOWS))}")
    return parse_model(WINDOWS[kind], dict(settings))


def plan_rollouts(
    window: Window,
    samples: Iterable[SampleId],
    *,
    schedule: Schedule,
    size: SampleSize,
    noise: StepNoise,
    guidance: float,
    run_seed: int,
) -> tuple[RolloutPlan, ...]:
    """One plan per sample, in order; samples with the same choice of steps share a plan."""
    window.check(schedule.steps)
    plans: dict[StepChoice, RolloutPlan] = {}

    def plan(sample: SampleId) -> RolloutPlan:
        choice = window.choose(schedule.steps, run_seed, sample)
        if choice not in plans:
            plans[choice] = RolloutPlan(schedule, size, noise, guidance, choice.stochastic, choice.kept)
        return plans[choice]

    return tuple(plan(sample) for sample in samples)


def check_plan(plan: RolloutPlan) -> None:
    """Raises ConfigError if steps are outside the schedule, include the last step, or are kept without noise."""
    last = plan.schedule.steps - 1
    outside = [index for index in plan.stochastic_steps if not 0 <= index < last]
    if outside:
        raise ConfigError(
            f"step {outside[0]} cannot be stochastic in a schedule of {last + 1} steps; "
            f"use steps 0 to {last - 1}, the last is always deterministic"
        )
    without_noise = sorted(set(plan.kept_steps) - set(plan.stochastic_steps))
    if without_noise:
        raise ConfigError(
            f"step {without_noise[0]} is kept for training but has no noise; keep stochastic steps only"
        )
    if list(plan.kept_steps) != sorted(set(plan.kept_steps)):
        raise ConfigError(f"kept steps must be strictly ascending, got {plan.kept_steps}")
    if plan.kept_steps and plan.noise.level <= 0:
        raise ConfigError(f"kept steps need noise: its level must be above 0, got {plan.noise.level}")


def _before_last(indices: range, steps: int) -> tuple[int, ...]:
    return tuple(index for index in indices if index < steps - 1)


def _at_least_one(kept: int, setting: str, steps: int) -> None:
    if kept < 1 or steps < 2:
        raise ConfigError(f"{setting} keeps no step of a schedule of {steps}; use more steps or a larger fraction")


def _fits(width: int, room: int, steps: int) -> None:
    if width > room:
        raise ConfigError(
            f"a window of {width} steps does not fit a schedule of {steps}, which has room for {room}; "
            "use a narrower window or more steps"
        )
