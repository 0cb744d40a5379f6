"""What a run would take on the one device of a profile: in turns, as `mode: colocated` trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from digenrl.config.profiles import Profile
from digenrl.config.reading import ConfigError
from digenrl.records import LaneOffer
from digenrl.scheduling import Costs, Terms
from digenrl.simulation.prediction import predict
from digenrl.simulation.spec_costs import NS_PER_SECOND, slice_seconds, to_ns
from digenrl.telemetry.trace import Trace

FORETOLD_STEPS = 3
LANE = "device-0"  # as such a run calls it


@dataclass(frozen=True, slots=True)
class SingleDevicePrediction:
    """A step of the profile's own batch, and where its time goes: seconds by kind of work."""

    slice: int
    samples: int
    step_seconds: float
    parts: Mapping[str, float]
    trace: Trace

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "step_seconds": self.step_seconds,
            "samples_per_second": self.samples / self.step_seconds,
            "samples_per_step": self.samples,
            "slice": self.slice,
            "parts": dict(self.parts),
        }


def predict_single_device(profile: Profile, name: str) -> SingleDevicePrediction:
    """A few steps on one lane, by the production scheduler with the terms of a colocated run.

    Such a run scores its own samples, needs no publication, and pays a change of role each way. What a profile has
    not measured counts as nothing, but for slices and training: without them it cannot be foretold.
    """
    work, training = profile.work, profile.training
    if training is None or not profile.slices:
        raise ConfigError(f"{name}: has no {'slices' if training else 'training'}; a step cannot be foretold")
    size = _slice_of(profile, name)
    generation = slice_seconds({at: _exact(s) for at, s in profile.slice_seconds.items()}, size)
    scoring = size * Fraction(_exact(profile.score_seconds or 0.0))
    terms = Terms(
        steps=FORETOLD_STEPS,
        prompts=work.prompts,
        samples_per_prompt=work.samples_per_prompt,
        slice_size=size,
        order="batch",
        stream="batch",
        colocated=True,
    )
    costs = Costs(
        train_sample_ns=Fraction(_exact(training.seconds_per_sample)) * NS_PER_SECOND,
        commit_ns=to_ns(_exact(profile.commit_seconds or 0.0)),
        switch_in_ns=to_ns(_exact(profile.switch_in_seconds or 0.0)),
        switch_out_ns=to_ns(_exact(profile.switch_out_seconds or 0.0)),
    )
    lane = LaneOffer(LANE, to_ns(generation + scoring))
    foreseen = predict(terms, costs, [lane], steps=FORETOLD_STEPS)
    slices, samples = terms.slices_per_step, terms.samples_per_step
    return SingleDevicePrediction(
        slice=size,
        samples=samples,
        step_seconds=(foreseen.commit_ends_ns[-1] - foreseen.commit_ends_ns[-2]) / NS_PER_SECOND,
        parts={
            "generation": float(slices * generation),
            "scoring": float(slices * scoring),
            "training": samples * training.seconds_per_sample,
            "commit": profile.commit_seconds or 0.0,
            "changes of role": (profile.switch_in_seconds or 0.0) + (profile.switch_out_seconds or 0.0),
        },
        trace=foreseen.trace,
    )


def _slice_of(profile: Profile, name: str) -> int:
    """The recipe's own slice; where that is left to the run, the measured one with which a sample takes least."""
    work = profile.work
    if isinstance(work.slice, int) and profile.covers(work.slice):
        return work.slice
    fitting = [size for size in profile.slices if work.samples_per_prompt % size == 0]
    if not fitting:
        raise ConfigError(f"{name}: no slice of it divides samples_per_prompt = {work.samples_per_prompt}")
    return min(sorted(fitting, reverse=True), key=lambda size: profile.slices[size].seconds / size)


def _exact(seconds: float) -> Decimal:
    return Decimal(repr(seconds))
