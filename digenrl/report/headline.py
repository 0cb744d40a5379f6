"""The headline figures of a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isclose
from statistics import fmean, median

from digenrl.config.recipes.recipe import Recipe
from digenrl.config.rewards.base import RewardSettings
from digenrl.config.rewards.judge import COST_PARTS
from digenrl.run_folder.metric_lines import EvaluationRecord, StepRecord
from digenrl.run_folder.reading import RunRecord

# The reward of a single step is noisy: the first and the last are means over 1/20 of the steps.
_ENDS = Fraction(1, 20)
_MOST_HELD_OUT = 3
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Change:
    """A value at the start and at the end of a run; `last` is None if there is only the first."""

    first: float
    last: float | None


@dataclass(frozen=True, slots=True)
class PredictionAccuracy:
    """Predicted and measured step times. Each step is compared with the newest prediction made before it ended."""

    steps: tuple[int, ...]
    predicted_s: tuple[float, ...]
    measured_s: tuple[float, ...]

    @property
    def errors(self) -> tuple[float, ...]:
        """(predicted - measured) / measured for every step."""
        pairs = zip(self.predicted_s, self.measured_s, strict=True)
        return tuple((predicted - measured) / measured for predicted, measured in pairs)

    @property
    def median_error(self) -> float:
        """The median of the absolute errors."""
        return median(abs(error) for error in self.errors)


def sum_of_rewards(rewards: Sequence[RewardSettings]) -> str:
    """The weighted sum of raw scores as a formula; a single reward by its name."""
    if len(rewards) == 1:
        return rewards[0].shown_as
    return " + ".join(f"{reward.weight:g} × {reward.shown_as}" for reward in rewards)


def reward_names(recipe: Recipe) -> dict[str, str]:
    """What the reward in training and in evaluations is, if they differ; both empty if they are the same."""
    if recipe.held_out_rewards == recipe.rewards:
        return {"training": "", "held_out": ""}
    return {"training": sum_of_rewards(recipe.rewards), "held_out": sum_of_rewards(recipe.held_out_rewards)}


def ends_averaged(count: int) -> int:
    """The number of steps over which the first and the last reward are averaged."""
    return max(1, int(count * _ENDS))


def reward_change(steps: tuple[StepRecord, ...]) -> Change | None:
    """The mean training reward of the first and of the last steps; None without rewards."""
    rewards = [step.values["reward_mean"] for step in steps if "reward_mean" in step.values]
    if not rewards:
        return None
    ends = ends_averaged(len(rewards))
    return Change(fmean(rewards[:ends]), fmean(rewards[-ends:]))


def repeats_reward(rows: Sequence[StepRecord | EvaluationRecord], name: str) -> bool:
    """Whether a part equals the reward in all rows, as that of a single reward of weight 1 does."""
    pairs = [(row.values.get(name), row.values.get("reward_mean")) for row in rows]
    return name != "reward_mean" and all(
        part == reward or (part is not None and reward is not None and isclose(part, reward, abs_tol=_ROUNDING))
        for part, reward in pairs
    )


def held_out_changes(run: RunRecord) -> dict[str, Change]:
    """The held-out reward and its sub-parts (`ocr.exact`), in the first and last comparable evaluation."""
    alike = run.comparable_evaluations
    if len(alike) < 2:
        return {}
    first, last = alike[0].values, alike[-1].values
    names = [name for name in last if name in first]
    names = [name for name in names if not repeats_reward((alike[0], alike[-1]), name)]
    chosen = [name for name in names if name == "reward_mean"]
    chosen += [name for name in names if re.fullmatch(r"reward/.+[./].+", name) and not _is_cost(name)]
    return {name: Change(first[name], last[name]) for name in chosen[:_MOST_HELD_OUT]}


def _is_cost(name: str) -> bool:
    """Whether a part of a reward counts tokens or requests."""
    return name.rpartition("/")[2] in COST_PARTS


def samples_per_second(steps: tuple[StepRecord, ...]) -> float | None:
    """Throughput without the first step, which includes warm-up, unless it is the only one."""
    timed = [step.values for step in steps if {"samples", "step_s"} <= step.values.keys()]
    steady = timed[1:] or timed
    seconds = sum(values["step_s"] for values in steady)
    return sum(values["samples"] for values in steady) / seconds if seconds > 0 else None


def share_of_samples(steps: tuple[StepRecord, ...], name: str) -> float | None:
    """The share `name` over all samples of the run; None if no step has it."""
    known = [step.values for step in steps if {"samples", name} <= step.values.keys()]
    samples = sum(values["samples"] for values in known)
    return sum(values[name] * values["samples"] for values in known) / samples if samples > 0 else None


def prediction_accuracy(steps: tuple[StepRecord, ...]) -> PredictionAccuracy | None:
    """Predicted and measured step times from the first prediction on; None without one."""
    known: list[tuple[int, float, float]] = []
    newest_s: float | None = None
    for step in steps:
        newest_s = step.values.get("predicted_step_s", newest_s)
        measured_s = step.values.get("step_s", 0.0)
        if newest_s is not None and measured_s >= 1e-9:  # clocks have nanoseconds
            known.append((step.step, newest_s, measured_s))
    if not known:
        return None
    numbers, predicted_s, measured = zip(*known, strict=True)
    return PredictionAccuracy(numbers, predicted_s, measured)
