"""Builds the SPEC of a layout, with all durations from the cost model, rounded to six digits."""

from __future__ import annotations

from decimal import Decimal

from digenrl.config.spec import HelperCosts, ScheduleRules, Spec, TimedGeneratorPool, TimedRewardPool, TrainerCosts
from digenrl.planning.costs import commit_seconds, lane_slice_seconds, switch_seconds, unit_seconds
from digenrl.planning.facts.cluster import CardPool
from digenrl.planning.facts.workload import Workload
from digenrl.planning.layout import GeneratorLayout, Layout
from digenrl.planning.publication import publication_seconds, remote_publication_seconds
from digenrl.records import StreamRuleName


def build_spec(
    workload: Workload,
    layout: Layout,
    slice_size: int,
    rules: ScheduleRules,
    steps: int,
    pool_slices: tuple[int, ...] = (),
) -> Spec:
    """The SPEC of `steps` steps of the workload on this layout.

    `pool_slices` are the slice sizes of the layout's generator pools, in order; empty if all are `slice_size`.
    """
    own_slices = pool_slices or (slice_size,) * len(layout.generators)
    samples_per_unit = training_unit(workload, rules.stream)
    unit_s = unit_seconds(workload, layout.trainer, samples_per_unit)
    return Spec(
        steps=steps,
        prompts=workload.prompts,
        samples_per_prompt=workload.samples_per_prompt,
        slice=slice_size,
        generators=tuple(
            TimedGeneratorPool(
                name=generator.pool.name,
                count=generator.lanes,
                seconds=slice_table(workload, generator.pool, generator.lane_cards),
                slice=own if own != slice_size else None,
                publish=_own_publication(workload, layout, generator),
            )
            for generator, own in zip(layout.generators, own_slices, strict=True)
        ),
        reward=reward_pool(workload, slice_size),
        trainer=TrainerCosts(
            seconds_per_sample=rounded(unit_s / samples_per_unit),
            commit=rounded(commit_seconds(workload, layout.trainer)),
            helper=_helper(workload, layout),
        ),
        publish=rounded(publication_seconds(workload, layout)),
        policy=rules,
    )


def training_unit(workload: Workload, stream: StreamRuleName) -> int:
    """The number of samples that are sent to the trainer together."""
    return {"group": workload.samples_per_prompt, "batch": workload.samples_per_step, "sample": 1}[stream]


def slice_table(workload: Workload, pool: CardPool, lane_cards: int) -> dict[int, Decimal]:
    """Seconds by slice size, for every size that cuts a group evenly and is covered by measurements, if any."""
    modeled = pool.measured.slice_seconds is None
    return {
        size: rounded(lane_slice_seconds(workload, pool, size, lane_cards))
        for size in workload.slice_sizes()
        if modeled or pool.measured.covers(size)
    }


def reward_pool(workload: Workload, slice_size: int) -> TimedRewardPool:
    """The workload's reward lanes, which score whole slices."""
    return TimedRewardPool(lanes=workload.reward_lanes, seconds=rounded(workload.reward_seconds), batch=slice_size)


def rounded(seconds: float) -> Decimal:
    """Six significant digits, which is more than the cost model can know."""
    return Decimal(f"{Decimal(repr(seconds)):.6g}")


def _own_publication(workload: Workload, layout: Layout, generator: GeneratorLayout) -> Decimal | None:
    seconds = remote_publication_seconds(workload, layout, generator)
    return None if seconds is None else rounded(seconds)


def _helper(workload: Workload, layout: Layout) -> HelperCosts | None:
    if layout.helper_lane_cards is None or layout.helper_lanes == 0:
        return None
    switch_in, switch_out = switch_seconds(workload, layout.trainer, layout.helper_lane_cards)
    return HelperCosts(
        lanes=layout.helper_lanes,
        seconds=slice_table(workload, layout.trainer.pool, layout.helper_lane_cards),
        switch_in=rounded(switch_in),
        switch_out=rounded(switch_out),
    )
