"""Every plan worth a look: splits of the cluster, and for each its slices and policies, with a bound."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import product
from typing import Literal

from digenrl.config.spec import DispatchRuleName, HelpRuleName, ScheduleRules, Spec, StreamRuleName
from digenrl.planning.bounds import Lanes, Pace, least_makespan
from digenrl.planning.cluster import CardPool, Cluster
from digenrl.planning.constants import CONSTANTS, Constants
from digenrl.planning.costs import (
    commit_seconds,
    lane_slice_seconds,
    unit_seconds,
)
from digenrl.planning.layout import (
    EVERYTHING,
    Abilities,
    GeneratorLayout,
    Layout,
    best_trainer,
    can_help,
    fitting_slices,
    generator_layout,
    helper_lane_cards,
)
from digenrl.planning.spec_builder import build_spec, publication_seconds, unit_of
from digenrl.planning.workload import Workload

Objective = Literal["throughput", "cost"]

# A whole step at once is only worth a look where a group leaves ranks of the trainer without work.
STREAM_GAIN = 0.95


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the search may choose from. `stale_shares=(0,)` keeps every sample on-policy; `ranks` is how many cards
    train, where that is settled."""

    steps: int = 4
    ranks: int | None = None
    streams: tuple[StreamRuleName, ...] = ("group", "batch")
    abilities: Abilities = EVERYTHING
    stale_shares: tuple[float, ...] = (0.0, 0.25, 0.5)
    helps: tuple[HelpRuleName, ...] = ("none", "auto")
    objective: Objective = "throughput"
    keep: int = 5
    tolerance: float = 0.005
    max_evaluations: int = 300


@dataclass(frozen=True)
class Candidate:
    """One plan before it is simulated.

    `pool_slices` are the layout's generators' own slices, multiples of `slice_size`; empty where all make that.
    `bound_s` is never above the makespan where they do; with slices of several sizes it is an estimate.
    """

    layout: Layout
    slice_size: int
    policy: ScheduleRules
    pace: Pace
    bound_s: float
    pool_slices: tuple[int, ...] = ()

    def spec(self, workload: Workload, steps: int, constants: Constants = CONSTANTS) -> Spec:
        return build_spec(workload, self.layout, self.slice_size, self.policy, steps, constants, self.pool_slices)

    def with_stale_share(self, share: float) -> Candidate:
        """The same plan with another share of stale starts."""
        policy = self.policy.model_copy(update={"stale_fraction": Decimal(repr(share))})
        pace = replace(self.pace, stale_share=share)
        return replace(self, policy=policy, pace=pace, bound_s=least_makespan(pace))

    @property
    def own_slices(self) -> tuple[int, ...]:
        """What each pool of the layout's generators makes at once."""
        return self.pool_slices or (self.slice_size,) * len(self.layout.generators)


def splits(
    workload: Workload,
    cluster: Cluster,
    trainer_pool: CardPool,
    trainer_cards: int,
    options: PlanOptions,
    constants: Constants = CONSTANTS,
) -> Iterator[tuple[Layout, StreamRuleName]]:
    """The layouts in which `trainer_cards` of that pool train; what is left generates, some of it perhaps not."""
    trainers = [
        (best_trainer(workload, trainer_pool, trainer_cards, unit, constants, options.abilities), stream, unit)
        for stream, unit in _units(workload, options)
    ]
    group_s_per_sample: float | None = None
    for trainer, stream, unit in trainers:
        if trainer is None:
            continue
        s_per_sample = unit_seconds(workload, trainer, unit, constants) / unit
        if stream == "group":
            group_s_per_sample = s_per_sample
        elif group_s_per_sample is not None and s_per_sample > STREAM_GAIN * group_s_per_sample:
            continue
        for generators in _generator_choices(workload, cluster, trainer_pool, trainer_cards, options, constants):
            yield (
                Layout(generators, trainer, helper_lane_cards(workload, trainer, constants, options.abilities)),
                stream,
            )


def candidates(
    workload: Workload,
    layouts: Iterable[tuple[Layout, StreamRuleName]],
    options: PlanOptions,
    constants: Constants = CONSTANTS,
) -> Iterator[Candidate]:
    """Every slice, help, stale share and dispatch on every layout."""
    for layout, stream in layouts:
        dispatches: tuple[DispatchRuleName, ...] = ("eager", "earliest_finish")
        if len(layout.generators) == 1:
            dispatches = ("eager",)  # equal lanes have no faster one to wait for
        for slice_size in fitting_slices(workload, layout, constants):
            helps = options.helps if can_help(layout, slice_size) else ("none",)
            pace = pace_of(
                workload, layout, slice_size, ScheduleRules(stream=stream, help="auto"), options.steps, constants
            )
            for help_policy, stale, dispatch in product(helps, options.stale_shares, dispatches):
                policy = ScheduleRules(
                    order="generation" if stream == "group" else "batch",
                    stream=stream,
                    help=help_policy,
                    dispatch=dispatch,
                    stale_fraction=Decimal(repr(stale)),
                )
                helpers = None if help_policy == "none" else pace.helpers
                own_pace = replace(pace, helpers=helpers, stale_share=stale)
                yield Candidate(layout, slice_size, policy, own_pace, least_makespan(own_pace))


def pace_of(
    workload: Workload,
    layout: Layout,
    slice_size: int,
    policy: ScheduleRules,
    steps: int,
    constants: Constants = CONSTANTS,
    pool_slices: tuple[int, ...] = (),
) -> Pace:
    """What bounds the makespan on that layout under that policy: the SPEC's numbers, unrounded.

    A lane of larger slices counts as one that makes slices of `slice_size`, one after the other, at the same rate.
    """
    own_slices = pool_slices or (slice_size,) * len(layout.generators)
    unit = unit_of(workload, policy.stream)
    helpers = None
    if policy.help != "none" and layout.helper_lane_cards is not None and can_help(layout, slice_size):
        helper_s = lane_slice_seconds(
            workload, layout.trainer.pool, slice_size, layout.helper_lane_cards, constants
        )
        helpers = Lanes(layout.helper_lanes, helper_s)
    return Pace(
        steps=steps,
        samples_per_step=workload.samples_per_step,
        slice_size=slice_size,
        unit_samples=unit,
        generators=tuple(
            Lanes(
                g.lanes,
                lane_slice_seconds(workload, g.pool, own, g.lane_cards, constants) * slice_size / own,
            )
            for g, own in zip(layout.generators, own_slices, strict=True)
        ),
        helpers=helpers,
        seconds_per_sample=unit_seconds(workload, layout.trainer, unit, constants) / unit,
        commit_s=commit_seconds(workload, layout.trainer, constants),
        publish_s=publication_seconds(workload, layout, constants),
        reward_s=workload.reward_seconds if workload.reward_lanes else 0.0,
        reward_lanes=workload.reward_lanes,
        stale_share=float(policy.stale_fraction),
    )


def _units(workload: Workload, options: PlanOptions) -> list[tuple[StreamRuleName, int]]:
    return [(stream, unit_of(workload, stream)) for stream in options.streams]


def _generator_choices(
    workload: Workload,
    cluster: Cluster,
    trainer_pool: CardPool,
    trainer_cards: int,
    options: PlanOptions,
    constants: Constants,
) -> list[tuple[GeneratorLayout, ...]]:
    """All that is left; all but one class, since slow lanes can hold a step up; for cost, parts of a class."""
    left = [
        generator_layout(
            workload,
            pool,
            pool.cards - (trainer_cards if pool == trainer_pool else 0),
            constants,
            options.abilities,
        )
        for pool in cluster.pools
    ]
    everything = tuple(layout for layout in left if layout is not None)
    choices = [everything]
    if len(everything) > 1:
        choices += [everything[:i] + everything[i + 1 :] for i in range(len(everything))]
    if options.objective == "cost":
        choices += [part for choice in choices for part in _parts(workload, choice, constants)]
    return [choice for choice in dict.fromkeys(choices) if choice]


def _parts(
    workload: Workload, choice: tuple[GeneratorLayout, ...], constants: Constants
) -> Iterator[tuple[GeneratorLayout, ...]]:
    """The same classes with one of them cut to a half or a quarter."""
    for index, share in product(range(len(choice)), (2, 4)):
        cut = generator_layout(workload, choice[index].pool, choice[index].cards // share, constants)
        if cut is not None:
            yield (*choice[:index], cut, *choice[index + 1 :])
