"""Predicts a run on the single device of a profile, with generation and training in turns (`mode: colocated`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from digenrl.config.profiles import Profile
from digenrl.config.reading import ConfigError
from digenrl.config.spec import ScheduleRules
from digenrl.records import LaneOffer
from digenrl.scheduling import Costs, Terms
from digenrl.simulation.prediction import predict
from digenrl.simulation.spec_costs import slice_seconds, to_ns, with_rules
from digenrl.telemetry.trace import Trace
from digenrl.units import NS_PER_SECOND

PREDICTED_STEPS = 3
LANE = "device-0"  # the lane's name in such a run


@dataclass(frozen=True, slots=True)
class SingleDevicePrediction:
    """The predicted step of the profile's batch; `parts` are its seconds by kind of work."""

    slice: int
    samples: int
    step_seconds: float
    parts: Mapping[str, float]
    trace: Trace

    def as_dict(self) -> dict[str, Any]:
        return {
            "step_seconds": self.step_seconds,
            "samples_per_second": self.samples / self.step_seconds,
            "samples_per_step": self.samples,
            "slice": self.slice,
            "parts": dict(self.parts),
        }


def predict_single_device(profile: Profile, name: str) -> SingleDevicePrediction:
    """Simulates a few steps on one lane with the production scheduler.

    A colocated run scores on the same device, publishes nothing, and switches roles twice per step. Costs that the
    profile lacks count as 0, except slices and training, which are required. `name` is the profile's, for errors.
    """
    work, training = profile.work, profile.training
    if training is None or not profile.slices:
        raise ConfigError(f"{name}: has no {'slices' if training else 'training'}; a step cannot be predicted")
    size = _slice_of(profile, name)
    generation = slice_seconds({at: _exact(s) for at, s in profile.slice_seconds.items()}, size)
    scoring = size * Fraction(_exact(profile.score_seconds or 0.0))
    terms = with_rules(
        Terms(PREDICTED_STEPS, work.prompts, work.samples_per_prompt, size), ScheduleRules(colocated=True)
    )
    costs = Costs(
        train_sample_ns=Fraction(_exact(training.seconds_per_sample)) * NS_PER_SECOND,
        commit_ns=to_ns(_exact(profile.commit_seconds or 0.0)),
        switch_in_ns=to_ns(_exact(profile.switch_in_seconds or 0.0)),
        switch_out_ns=to_ns(_exact(profile.switch_out_seconds or 0.0)),
    )
    lane = LaneOffer(LANE, to_ns(generation + scoring))
    run = predict(terms, costs, [lane], steps=PREDICTED_STEPS)
    slices, samples = terms.slices_per_step, terms.samples_per_step
    return SingleDevicePrediction(
        slice=size,
        samples=samples,
        step_seconds=(run.commit_ends_ns[-1] - run.commit_ends_ns[-2]) / NS_PER_SECOND,
        parts={
            "generation": float(slices * generation),
            "scoring": float(slices * scoring),
            "training": samples * training.seconds_per_sample,
            "commit": profile.commit_seconds or 0.0,
            "role switches": (profile.switch_in_seconds or 0.0) + (profile.switch_out_seconds or 0.0),
        },
        trace=run.trace,
    )


def _slice_of(profile: Profile, name: str) -> int:
    """The recipe's slice size or, if that is auto, the measured size with the least time per sample."""
    work = profile.work
    if isinstance(work.slice, int) and profile.covers(work.slice):
        return work.slice
    fitting = [size for size in profile.slices if work.samples_per_prompt % size == 0]
    if not fitting:
        raise ConfigError(
            f"{name}: none of its slice sizes divides samples_per_prompt = {work.samples_per_prompt}"
        )
    return min(sorted(fitting, reverse=True), key=lambda size: profile.slices[size].seconds / size)


def _exact(seconds: float) -> Decimal:
    return Decimal(repr(seconds))
