"""Finds the best plan in which every card that can both generates and trains.

Predicting such a plan costs far more than predicting a split, because the best rule for sharing the work is itself
searched. So slice sizes are compared by a short search for on-policy steps, stale shares only where they can gain,
and only the result is simulated.
"""

from __future__ import annotations

from dataclasses import dataclass

from digenrl.config.spec import ScheduleRules, Spec
from digenrl.planning.candidates import STALE_MIN_GAIN, PlanOptions, rates_of
from digenrl.planning.facts.cluster import Cluster
from digenrl.planning.facts.workload import Workload
from digenrl.planning.layout import Layout
from digenrl.planning.results.plans import Plan
from digenrl.planning.results.simulated_plan import simulated_plan
from digenrl.planning.shared_layout import missing_memory, shared_layouts, shared_slices
from digenrl.planning.shared_spec import build_shared_spec
from digenrl.scheduling import SharedWorkRule
from digenrl.simulation.answer import bound_seconds
from digenrl.simulation.both_directions import initial_shared_state
from digenrl.simulation.shared_work import best_rules, makespan_ns
from digenrl.simulation.step_forecast import StepForecast
from digenrl.units import NS_PER_SECOND

MOST_CARDS = 64  # beyond, one prediction takes longer than the whole search for splits
SLICE_SIZES = 4  # the largest that still give every card a few slices
SLICES_PER_CARD = 2
FORECASTS = 12  # of steps, for each slice size
STALE_STEPS = 3  # simulated to compare stale shares


@dataclass(frozen=True)
class SharedResult:
    """The best plan in which generators train as well, if any, and why some or all of them do not.

    `missing_gib` is the memory that the cards of some pools lack to train beside generating.
    """

    plan: Plan | None
    why_not: str
    missing_gib: dict[str, float]
    considered: int
    evaluated: int


@dataclass(frozen=True)
class _Choice:
    layout: Layout
    slices: tuple[int, ...]  # the common unit, and the sizes of the generator pools if they differ from it
    spec: Spec
    price: float  # of a second, in units of the objective
    bound: float  # likewise, of the whole run


@dataclass(frozen=True)
class _Forecast:
    """Good rules for a SPEC's on-policy steps, and the time of all steps with the first of them."""

    rules: list[SharedWorkRule]
    seconds: float


def best_shared_plan(workload: Workload, cluster: Cluster, options: PlanOptions) -> SharedResult:
    """The best plan of cards that do both, or the reason why there is none."""
    job_samples = options.job_samples
    if job_samples is None:
        return SharedResult(None, options.why_dedicated, {}, 0, 0)
    if cluster.cards > MOST_CARDS:
        why = f"the cluster has {cluster.cards} cards, and sharing all work is compared up to {MOST_CARDS}"
        return SharedResult(None, why, {}, 0, 0)
    missing = missing_memory(workload, cluster, options)
    choices = _choices(workload, cluster, job_samples, options)
    if not choices:
        return SharedResult(None, _why_none_fits(missing), missing, 0, 0)
    best, forecast, evaluated = _best_on_policy(choices)
    spec, compared = _with_stale_share(best.spec, forecast, options.stale_shares)
    unit, *by_pool = best.slices
    slices = tuple(by_pool) or (unit,) * len(best.layout.generators)
    rates = rates_of(workload, best.layout, unit, ScheduleRules(), options.steps, slices)
    plan = simulated_plan(workload, best.layout, rates, spec, slices)
    return SharedResult(plan, "", missing, len(choices) * len(options.stale_shares), evaluated + compared + 1)


def _choices(workload: Workload, cluster: Cluster, job_samples: int, options: PlanOptions) -> list[_Choice]:
    """Layouts and slice sizes on-policy, best bound first."""
    found = []
    for layout in shared_layouts(workload, cluster, job_samples, options):
        price = layout.usd_per_hour if options.objective == "cost" else 1.0
        for slices in _few_slices(workload, layout):
            spec = build_shared_spec(workload, layout, slices, job_samples, options.steps)
            found.append(_Choice(layout, slices, spec, price, price * bound_seconds(spec)))
    return sorted(found, key=lambda choice: choice.bound)


def _few_slices(workload: Workload, layout: Layout) -> list[tuple[int, ...]]:
    """The largest common sizes that leave every card several slices, or the smallest if none does.

    If some pools have room for larger slices, the largest common size is also tried with these.
    """
    common, by_pool = shared_slices(workload, layout)
    most = workload.samples_per_step // (SLICES_PER_CARD * layout.cards)
    few = [size for size in common if size <= most][-SLICE_SIZES:] or list(common[:1])
    slices: list[tuple[int, ...]] = [(size,) for size in few]
    if few:
        unit = few[-1]
        own = [max(size for size in sizes if size % unit == 0 and size <= max(most, unit)) for sizes in by_pool]
        if any(size != unit for size in own):
            slices.append((unit, *own))
    return slices


def _best_on_policy(choices: list[_Choice]) -> tuple[_Choice, _Forecast, int]:
    """The choice with the best forecast, that forecast, and the number of forecasts."""
    best, best_forecast, evaluated = choices[0], _forecast(choices[0].spec), 1
    for choice in choices[1:]:
        best_score = best_forecast.seconds * best.price
        if choice.bound >= best_score:
            break
        evaluated += 1
        forecast = _forecast(choice.spec)
        if forecast.seconds * choice.price < best_score:
            best, best_forecast = choice, forecast
    return best, best_forecast, evaluated


def _forecast(spec: Spec) -> _Forecast:
    rules = best_rules(lambda rule: initial_shared_state(spec, rule), most_at_once=1, budget=FORECASTS, changes=0)
    forecast = StepForecast(initial_shared_state(spec, rules[0]))
    step_ns = forecast.step_ns(rules[0])
    return _Forecast(rules, spec.steps * step_ns / NS_PER_SECOND)


def _with_stale_share(spec: Spec, forecast: _Forecast, shares: tuple[float, ...]) -> tuple[Spec, int]:
    """The SPEC with the least stale share that is almost as fast as the best, and the simulations for it."""
    specs = [spec.with_rules(stale_fraction=share) for share in sorted(shares)]
    cannot_gain = forecast.seconds <= bound_seconds(spec) * (1 + STALE_MIN_GAIN)
    if len(specs) == 1 or (cannot_gain and not specs[0].policy.stale_fraction):
        return specs[0], 0
    seconds = []
    for stale in specs:
        few = stale.with_changes(steps=min(stale.steps, STALE_STEPS))
        seconds.append(min(makespan_ns(initial_shared_state(few, rule)) for rule in forecast.rules))
    limit = min(seconds) * (1 + STALE_MIN_GAIN)
    chosen = next(stale for stale, taken in zip(specs, seconds, strict=True) if taken <= limit)
    return chosen, len(specs)


def _why_none_fits(missing: dict[str, float]) -> str:
    if not missing:
        return "fewer than two cards can both generate and train"
    lacking = ", ".join(f"{name} lacks {gib:.1f} GiB" for name, gib in missing.items())
    return f"a trainer's state does not fit on a card beside generation ({lacking})"
