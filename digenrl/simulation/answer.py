"""The result of a simulated schedule, and a lower bound of its makespan."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from digenrl.config.spec import Spec
from digenrl.simulation.spec_costs import best_rate


@dataclass(frozen=True, slots=True)
class Answer:
    """Times in seconds; idle shares are relative to the lane-seconds of the whole run."""

    makespan: float
    step_end: tuple[float, ...]
    throughput: float  # samples per second
    bound: float
    efficiency: float
    generator_idle: float
    trainer_idle: float
    stale_samples: int
    helped_samples: int
    help_decisions: tuple[tuple[float, str], ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def bound_seconds(spec: Spec) -> float:
    """A lower bound of the makespan: work is divisible without limit, and staleness is unrestricted."""
    sizes = spec.slice_sizes()
    generator_rate = sum(
        (pool.count * best_rate(pool.seconds, sizes) for pool in spec.generators), start=Fraction(0)
    )
    lanes = sum(pool.count for pool in spec.generators)
    samples = spec.steps * spec.prompts * spec.samples_per_prompt
    training = samples * Fraction(spec.trainer.seconds_per_sample)
    commits = spec.steps * Fraction(spec.trainer.commit)
    helper = spec.trainer.helper
    helper_rate = helper.lanes * best_rate(helper.seconds, sizes) if helper else Fraction(0)
    if spec.policy.colocated:
        assert helper is not None, "a colocated SPEC has a helper"
        share = Fraction(helper.lanes, helper.lanes + lanes)
        return float(samples / (generator_rate + helper_rate) + training * share + commits)
    busy = training + commits
    if spec.policy.help == "none" or not helper_rate:
        return float(max(busy, samples / generator_rate))
    return float(max(busy, (samples + helper_rate * busy) / (generator_rate + helper_rate)))
