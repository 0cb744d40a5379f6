"""The result of a simulated schedule, and a lower bound of its makespan."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from digenrl.config.spec import Spec
from digenrl.simulation.shared_work import MOST_AT_ONCE
from digenrl.simulation.spec_costs import best_rate

BISECTIONS = 100  # as many as a float has use for


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
    assisted_samples: int  # trained by generator lanes
    help_decisions: tuple[tuple[float, str], ...]


def bound_seconds(spec: Spec) -> float:
    """A lower bound of the makespan: work is divisible without limit, and staleness is unrestricted."""
    if spec.shares_work:
        return _bound_if_lanes_do_both(spec)
    generator_rate = sum(
        (pool.count * best_rate(pool.seconds, _sizes(spec, pool.slice)) for pool in spec.generators),
        start=Fraction(0),
    )
    lanes = sum(pool.count for pool in spec.generators)
    samples = spec.steps * spec.prompts * spec.samples_per_prompt
    training = samples * Fraction(spec.trainer.seconds_per_sample)
    commits = spec.steps * Fraction(spec.trainer.commit)
    helper = spec.trainer.helper
    helper_rate = helper.lanes * best_rate(helper.seconds, _sizes(spec)) if helper else Fraction(0)
    if spec.policy.colocated:
        assert helper is not None, "a colocated SPEC has a helper"
        share = Fraction(helper.lanes, helper.lanes + lanes)
        return float(samples / (generator_rate + helper_rate) + training * share + commits)
    busy = training + commits
    if "none" in (spec.policy.help, spec.policy.assist) or not helper_rate:
        return float(max(busy, samples / generator_rate))
    return float(max(busy, (samples + helper_rate * busy) / (generator_rate + helper_rate)))


@dataclass(frozen=True, slots=True)
class _CardClass:
    """Equal cards: how many, their rates in samples per second, and the seconds that each loses to commits."""

    count: int
    generating: float
    training: float
    lost: float = 0.0


def _bound_if_lanes_do_both(spec: Spec) -> float:
    """The least time in which all samples can be generated and trained, each card for a share of the time."""
    samples = spec.steps * spec.prompts * spec.samples_per_prompt
    # Cards that generate well compared with how they train generate first.
    cards = sorted(_card_classes(spec), key=_generating_over_training, reverse=True)

    def fits(makespan: float) -> bool:
        ungenerated, trained = float(samples), 0.0
        for card in cards:
            seconds = card.count * max(0.0, makespan - card.lost)
            generating = min(seconds, ungenerated / card.generating)
            ungenerated -= generating * card.generating
            trained += (seconds - generating) * card.training
        return ungenerated <= samples * 1e-15 and trained >= samples

    low, high = 0.0, 1.0
    while not fits(high):
        low, high = high, 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _card_classes(spec: Spec) -> list[_CardClass]:
    helper = spec.trainer.helper
    assert helper is not None, "a SPEC whose lanes do both has a helper"
    classes = [
        _CardClass(
            pool.count,
            float(best_rate(pool.seconds, _sizes(spec, pool.slice))),
            float(1 / Fraction(pool.train_seconds)) if pool.train_seconds else 0.0,
        )
        for pool in spec.generators
    ]
    alone = Fraction(spec.trainer.seconds_per_sample) * helper.lanes
    lost = float(spec.steps * (Fraction(spec.trainer.reduce) + Fraction(spec.trainer.commit)))
    generating = float(best_rate(helper.seconds, _sizes(spec)))
    return [*classes, _CardClass(helper.lanes, generating, float(1 / alone), lost)]


def _sizes(spec: Spec, pool_slice: int | None = None) -> tuple[int, ...]:
    """How many samples a lane may generate together, at some slice size of the SPEC.

    A pool with its own slice takes what is left of a group, and with `slice: auto` lanes that do both take any
    number up to a limit. These need not divide a group.
    """
    unit = 1 if spec.slice == "auto" else spec.slice
    at_once = min(MOST_AT_ONCE, spec.samples_per_prompt) if spec.shares_work and spec.slice == "auto" else unit
    return tuple({*spec.slice_sizes(), *range(unit, (pool_slice or at_once) + 1, unit)})


def _generating_over_training(card: _CardClass) -> float:
    return card.generating / card.training if card.training else float("inf")
