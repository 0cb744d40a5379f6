"""Translates a SPEC into the scheduler's terms, costs and lanes, with exact arithmetic in nanoseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

from digenrl.config.reading import ConfigError
from digenrl.config.spec import ScheduleRules, Spec
from digenrl.records import LaneOffer
from digenrl.scheduling import Costs, SchedulerState, SharedWorkRule, Terms, initial_state
from digenrl.units import NS_PER_SECOND

GENERATE_FIRST = SharedWorkRule()


def to_ns(seconds: Decimal | Fraction) -> int:
    """Whole nanoseconds, rounded half to even."""
    return round(Fraction(seconds) * NS_PER_SECOND)


def slice_seconds(table: Mapping[int, Decimal], size: int) -> Fraction:
    """The time of a slice of `size` samples, interpolated linearly, and extrapolated with the last slope.

    The table implicitly starts with 0 seconds for 0 samples.

    >>> slice_seconds({1: Decimal(1), 2: Decimal("1.7")}, 4)
    Fraction(31, 10)
    """
    points = [(0, Fraction(0))] + [(at, Fraction(table[at])) for at in sorted(table)]
    right = next((index for index, (at, _) in enumerate(points) if at >= size), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * Fraction(size - x0, x1 - x0)


def slice_ns(table: Mapping[int, Decimal], size: int, where: str) -> int:
    """`slice_seconds` in nanoseconds; raises ConfigError if the extrapolated time is not positive."""
    duration = to_ns(slice_seconds(table, size))
    if duration <= 0:
        raise ConfigError(
            f"{where}: the extrapolated time of a slice of {size} is {duration} ns, it must be above 0; "
            f"correct the table or add an entry for {size}"
        )
    return duration


def best_rate(table: Mapping[int, Decimal], sizes: tuple[int, ...]) -> Fraction:
    """The highest throughput of a lane over these slice sizes, in samples per second.

    Sizes that a falling table extrapolates to no time at all do not count.

    >>> best_rate({1: Decimal(2), 2: Decimal(1)}, (1, 3))
    Fraction(1, 2)
    """
    return max(size / takes for size in sizes if (takes := slice_seconds(table, size)) > 0)


def initial_scheduler_state(
    spec: Spec, search_budget: int, shared_work: SharedWorkRule = GENERATE_FIRST
) -> SchedulerState:
    """The scheduler's state at the start of a SPEC with a fixed slice size."""
    assert isinstance(spec.slice, int), "slice: auto is resolved before a run"
    terms = replace(_terms(spec, search_budget), shared_work=shared_work)
    at_once = shared_work.slices_at_once if terms.shares_work else 1
    next_number: Counter[str] = Counter()
    generators: list[LaneOffer] = []
    for which, pool in enumerate(spec.generators):
        own = range(spec.slice, (pool.slice or at_once * spec.slice) + 1, spec.slice)
        take_ns = tuple(slice_ns(pool.seconds, size, f"generators[{which}].seconds") for size in own)
        lanes = _lanes(pool.name, pool.count, take_ns, next_number)
        if pool.publish is not None:
            lanes = [replace(lane, publish_ns=to_ns(pool.publish)) for lane in lanes]
        if terms.shares_work and pool.train_seconds is not None:
            lanes = _able_to_train(lanes, pool.train_seconds, pool.switch, pool.switch)
        generators += lanes
    helper, helpers = spec.trainer.helper, []
    if helper is not None and (_helps(spec) or spec.policy.colocated):
        sizes = range(spec.slice, at_once * spec.slice + 1, spec.slice)
        take_ns = tuple(slice_ns(helper.seconds, size, "trainer.helper.seconds") for size in sizes)
        helpers = _lanes("helper", helper.lanes, take_ns, next_number)
        if terms.shares_work:
            alone = Fraction(spec.trainer.seconds_per_sample) * helper.lanes
            helpers = _able_to_train(helpers, alone, helper.switch_in, helper.switch_out)
    costs = _costs(spec, len(generators))
    return initial_state(terms, costs, generators, helpers, evaluations=() if spec.evaluation is None else (0,))


def _helps(spec: Spec) -> bool:
    return spec.policy.help != "none" and spec.policy.assist != "none"


def _lanes(pool: str, count: int, take_ns: tuple[int, ...], next_number: Counter[str]) -> list[LaneOffer]:
    """Equal lanes, named after their pool, with a counter that is shared by pools of the same name.

    `take_ns` are the times of 1, 2, ... slices together, up to the number that a lane takes per job.
    """
    first = next_number[pool]
    next_number[pool] += count
    at_once, smaller = len(take_ns), take_ns if len(take_ns) > 1 else ()
    return [LaneOffer(f"{pool}-{first + index}", take_ns[-1], at_once, smaller) for index in range(count)]


def _able_to_train(
    lanes: list[LaneOffer], seconds: Decimal | Fraction, switch_in: Decimal, switch_out: Decimal
) -> list[LaneOffer]:
    sample_ns = Fraction(seconds) * NS_PER_SECOND
    return [
        replace(lane, train_sample_ns=sample_ns, switch_in_ns=to_ns(switch_in), switch_out_ns=to_ns(switch_out))
        for lane in lanes
    ]


def _terms(spec: Spec, search_budget: int) -> Terms:
    assert isinstance(spec.slice, int)
    work = Terms(
        steps=spec.steps,
        prompts=spec.prompts,
        samples_per_prompt=spec.samples_per_prompt,
        slice_size=spec.slice,
        scorers=spec.reward.lanes if to_ns(spec.reward.seconds) else 0,
        score_batch=spec.reward.batch,
        search_budget=search_budget,
        evaluate_every=spec.evaluation.every if spec.evaluation else 0,
        evaluation_chunks=spec.evaluation.chunks if spec.evaluation else 0,
        save_every=spec.checkpoint.every if spec.checkpoint else 0,
        job_samples=spec.trainer.job if spec.shares_work else 0,
    )
    return with_rules(work, spec.policy, has_helper=spec.trainer.helper is not None)


def with_rules(terms: Terms, rules: ScheduleRules, has_helper: bool = True) -> Terms:
    """The same work under these scheduling rules. Colocated runs use none of the techniques."""
    if rules.colocated:
        return replace(terms, order="batch", stream="batch", dispatch=rules.dispatch, colocated=True)
    return replace(
        terms,
        order=rules.order,
        stream=rules.stream,
        help=rules.help if has_helper and rules.assist != "none" else "none",
        assist="both" if rules.assist == "both" and rules.help != "none" else "trainer",
        dispatch=rules.dispatch,
        stale_budget=int(Fraction(rules.stale_fraction) * terms.samples_per_step),
    )


def _costs(spec: Spec, generator_lanes: int) -> Costs:
    """The SPEC's costs. If colocated, the generators' cards train as well, and all role switches cost the same."""
    trainer, helper = spec.trainer, spec.trainer.helper
    train_sample_ns = Fraction(trainer.seconds_per_sample) * NS_PER_SECOND
    switch_in, switch_out = (helper.switch_in, helper.switch_out) if helper else (Decimal(0), Decimal(0))
    if spec.policy.colocated:
        assert helper is not None, "a colocated SPEC has a helper"
        train_sample_ns *= Fraction(helper.lanes, helper.lanes + generator_lanes)
        switch_in = switch_out = spec.colocate.switch
    return Costs(
        train_sample_ns=train_sample_ns,
        commit_ns=to_ns(trainer.commit),
        publish_ns=to_ns(spec.publish),
        switch_in_ns=to_ns(switch_in),
        switch_out_ns=to_ns(switch_out),
        score_ns=to_ns(spec.reward.seconds),
        evaluate_ns=to_ns(spec.evaluation.chunk) if spec.evaluation else 0,
        score_chunk_ns=to_ns(spec.evaluation.score) if spec.evaluation else 0,
        save_ns=to_ns(spec.checkpoint.seconds) if spec.checkpoint else 0,
        reduce_ns=to_ns(trainer.reduce) if spec.shares_work else 0,
    )
