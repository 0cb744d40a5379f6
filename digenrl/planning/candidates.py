"""The search space of the planner: splits of the cluster, slice sizes and scheduling rules, each with a bound."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import product
from typing import Literal

from digenrl.config.spec import ScheduleRules, Spec
from digenrl.planning.bounds import EqualLanes, Rates, least_makespan
from digenrl.planning.costs import commit_seconds, lane_slice_seconds, unit_seconds
from digenrl.planning.facts.cluster import CardPool, Cluster
from digenrl.planning.facts.workload import Workload
from digenrl.planning.layout import (
    ALL_CAPABILITIES,
    Capabilities,
    GeneratorLayout,
    Layout,
    best_trainer,
    can_help,
    fitting_slices,
    generator_layout,
    helper_lane_cards,
    lane_sizes,
)
from digenrl.planning.publication import earliest_publication_seconds
from digenrl.planning.spec_builder import build_spec, training_unit
from digenrl.records import DispatchRuleName, HelpRuleName, StreamRuleName

Objective = Literal["throughput", "cost"]

# Training a whole step at once is considered only if it is this much faster per sample than training by group.
STREAM_GAIN = 0.95
# Stale samples change the numerics: a larger share has to gain at least this much.
STALE_MIN_GAIN = 0.01


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The choices of the search. `stale_shares=(0,)` keeps every sample on-policy; `ranks` fixes the number of
    trainer cards. `job_samples` is the size of a Train job if generators may train as well; else it is None, and
    `why_dedicated` says why they may not."""

    steps: int = 4
    ranks: int | None = None
    streams: tuple[StreamRuleName, ...] = ("group", "batch")
    capabilities: Capabilities = ALL_CAPABILITIES
    stale_shares: tuple[float, ...] = (0.0, 0.25, 0.5)
    helps: tuple[HelpRuleName, ...] = ("none", "auto")
    objective: Objective = "throughput"
    keep: int = 5
    tolerance: float = 0.005
    max_evaluations: int = 300
    job_samples: int | None = None
    why_dedicated: str = ""


@dataclass(frozen=True)
class Candidate:
    """A plan that has not been simulated.

    `pool_slices` are the slice sizes of the layout's generator pools, multiples of `slice_size`; empty if all are
    equal to it. `bound_s` is a lower bound of the makespan for equal slices, and an estimate for unequal ones.
    """

    layout: Layout
    slice_size: int
    rules: ScheduleRules
    rates: Rates
    bound_s: float
    pool_slices: tuple[int, ...] = ()

    def spec(self, workload: Workload, steps: int) -> Spec:
        return build_spec(workload, self.layout, self.slice_size, self.rules, steps, self.pool_slices)

    def with_stale_share(self, share: float) -> Candidate:
        """The same plan with another share of stale samples."""
        rules = self.rules.model_copy(update={"stale_fraction": Decimal(repr(share))})
        rates = replace(self.rates, stale_share=share)
        return replace(self, rules=rules, rates=rates, bound_s=least_makespan(rates))

    @property
    def own_slices(self) -> tuple[int, ...]:
        """The slice size of each generator pool."""
        return self.pool_slices or (self.slice_size,) * len(self.layout.generators)


def splits(
    workload: Workload, cluster: Cluster, trainer_pool: CardPool, trainer_cards: int, options: PlanOptions
) -> Iterator[tuple[Layout, StreamRuleName]]:
    """The layouts with `trainer_cards` trainer cards of this pool; all or some of the other cards generate."""
    group_s_per_sample: float | None = None
    for stream in options.streams:
        unit = training_unit(workload, stream)
        trainer = best_trainer(workload, trainer_pool, trainer_cards, unit, options.capabilities)
        if trainer is None:
            continue
        s_per_sample = unit_seconds(workload, trainer, unit) / unit
        if stream == "group":
            group_s_per_sample = s_per_sample
        elif group_s_per_sample is not None and s_per_sample > STREAM_GAIN * group_s_per_sample:
            continue
        helper_cards = helper_lane_cards(workload, trainer, options.capabilities)
        for generators in _generator_choices(workload, cluster, trainer_pool, trainer_cards, options):
            yield Layout(generators, trainer, helper_cards, site_links=cluster.sites), stream


def candidates(
    workload: Workload, layouts: Iterable[tuple[Layout, StreamRuleName]], options: PlanOptions
) -> Iterator[Candidate]:
    """Every slice size, help rule, stale share and dispatch rule on every layout."""
    for layout, stream in layouts:
        dispatches: tuple[DispatchRuleName, ...] = ("eager", "earliest_finish")
        if len(layout.generators) == 1:
            dispatches = ("eager",)  # equal lanes have no faster lane to wait for
        for slice_size in fitting_slices(workload, layout):
            helps = options.helps if can_help(layout, slice_size) else ("none",)
            helped = ScheduleRules(stream=stream, help="auto")
            rates = rates_of(workload, layout, slice_size, helped, options.steps)
            for help_rule, stale, dispatch in product(helps, options.stale_shares, dispatches):
                rules = ScheduleRules(
                    order="generation" if stream == "group" else "batch",
                    stream=stream,
                    help=help_rule,
                    dispatch=dispatch,
                    stale_fraction=Decimal(repr(stale)),
                )
                helpers = None if help_rule == "none" else rates.helpers
                own_rates = replace(rates, helpers=helpers, stale_share=stale)
                yield Candidate(layout, slice_size, rules, own_rates, least_makespan(own_rates))


def rates_of(
    workload: Workload,
    layout: Layout,
    slice_size: int,
    rules: ScheduleRules,
    steps: int,
    pool_slices: tuple[int, ...] = (),
) -> Rates:
    """The unrounded numbers of the plan's SPEC that bound its makespan.

    A lane with larger slices counts as a lane that generates slices of `slice_size` one after another at the same
    rate.
    """
    own_slices = pool_slices or (slice_size,) * len(layout.generators)
    unit = training_unit(workload, rules.stream)
    helpers = None
    if rules.help != "none" and layout.helper_lane_cards is not None and can_help(layout, slice_size):
        helper_s = lane_slice_seconds(workload, layout.trainer.pool, slice_size, layout.helper_lane_cards)
        helpers = EqualLanes(layout.helper_lanes, helper_s)
    return Rates(
        steps=steps,
        samples_per_step=workload.samples_per_step,
        slice_size=slice_size,
        unit_samples=unit,
        generators=tuple(
            EqualLanes(
                g.lanes,
                lane_slice_seconds(workload, g.pool, own, g.lane_cards) * slice_size / own,
            )
            for g, own in zip(layout.generators, own_slices, strict=True)
        ),
        helpers=helpers,
        seconds_per_sample=unit_seconds(workload, layout.trainer, unit) / unit,
        commit_s=commit_seconds(workload, layout.trainer),
        publish_s=earliest_publication_seconds(workload, layout),
        reward_s=workload.reward_seconds if workload.reward_lanes else 0.0,
        reward_lanes=workload.reward_lanes,
        stale_share=float(rules.stale_fraction),
    )


def _generator_choices(
    workload: Workload, cluster: Cluster, trainer_pool: CardPool, trainer_cards: int, options: PlanOptions
) -> list[tuple[GeneratorLayout, ...]]:
    """All remaining cards; all but one pool, since slow lanes can delay a step; for cost, parts of a pool."""
    remaining = [
        generator_layout(
            workload, pool, pool.cards - (trainer_cards if pool == trainer_pool else 0), options.capabilities
        )
        for pool in cluster.pools
    ]
    everything = tuple(layout for layout in remaining if layout is not None)
    choices = [everything]
    if len(everything) > 1:
        choices += [everything[:i] + everything[i + 1 :] for i in range(len(everything))]
    if options.objective == "cost":
        choices += [part for choice in choices for part in _parts(workload, choice)]
    return [choice for choice in dict.fromkeys(choices) if choice]


def _parts(workload: Workload, choice: tuple[GeneratorLayout, ...]) -> Iterator[tuple[GeneratorLayout, ...]]:
    """The same pools with one of them reduced to a half or a quarter."""
    for index, share in product(range(len(choice)), (2, 4)):
        cut = generator_layout(workload, choice[index].pool, choice[index].cards // share)
        if cut is not None:
            yield (*choice[:index], cut, *choice[index + 1 :])


def better_slices(
    candidate: Candidate,
    makespan_s: float,
    workload: Workload,
    makespan: Callable[[Candidate], float],
    least_gain: float,
    tries: int,
) -> tuple[Candidate, float]:
    """The same plan with a slice size per pool, and its makespan.

    It is `candidate` itself, with the given makespan, if no other is shorter than that by at least `least_gain`.
    Changes one pool's slice or the common unit at a time, the most promising change first, as long as that pays.
    Calls `makespan` at most `tries` times.
    """
    best, best_s = candidate, makespan_s
    seen: set[tuple[int, tuple[int, ...]]] = set()
    queue = _slice_changes(best, workload)
    while queue and tries:
        change = queue.pop(0)
        key = (change.slice_size, change.own_slices)
        if key in seen or change.bound_s >= best_s * (1 - least_gain):
            continue
        seen.add(key)
        tries -= 1
        seconds = makespan(change)
        if seconds < best_s * (1 - least_gain):
            best, best_s = change, seconds
            queue = _slice_changes(best, workload)
    return best, best_s


def _slice_changes(candidate: Candidate, workload: Workload) -> list[Candidate]:
    """Plans with another slice for one pool, or with a smaller unit and the same slices, best bound first."""
    unit, own = candidate.slice_size, candidate.own_slices
    sizes = [lane_sizes(workload, generator) for generator in candidate.layout.generators]
    changes = [
        (unit, (*own[:index], size, *own[index + 1 :]))
        for index, fitting in enumerate(sizes)
        for size in fitting
        if size % unit == 0 and size != own[index]
    ]
    changes += [
        (smaller, own)
        for smaller in workload.slice_sizes()
        if smaller < unit and unit % smaller == 0 and all(smaller in fitting for fitting in sizes)
    ]
    changed = [_with_slices(candidate, *change, workload) for change in changes]
    return sorted(changed, key=lambda change: change.bound_s)


def _with_slices(candidate: Candidate, unit: int, own: tuple[int, ...], workload: Workload) -> Candidate:
    rules = candidate.rules
    if rules.help != "none" and not can_help(candidate.layout, unit):
        rules = rules.model_copy(update={"help": "none"})
    rates = rates_of(workload, candidate.layout, unit, rules, candidate.rates.steps, own)
    return replace(
        candidate, slice_size=unit, rules=rules, rates=rates, bound_s=least_makespan(rates), pool_slices=own
    )
