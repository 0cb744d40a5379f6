"""Turns a layout into a SPEC: every number of it comes from the cost model, to six digits."""

from __future__ import annotations

from decimal import Decimal

from digenrl.config.spec import (
    HelperCosts,
    ScheduleRules,
    Spec,
    StreamRuleName,
    TimedGeneratorPool,
    TimedRewardPool,
    TrainerCosts,
)
from digenrl.planning.cluster import CardPool
from digenrl.planning.constants import CONSTANTS, Constants
from digenrl.planning.costs import (
    GB,
    commit_seconds,
    lane_slice_seconds,
    network_bytes_s,
    publish_seconds,
    switch_seconds,
    unit_seconds,
)
from digenrl.planning.layout import Layout
from digenrl.planning.workload import Workload


def build_spec(
    workload: Workload,
    layout: Layout,
    slice_size: int,
    policy: ScheduleRules,
    steps: int,
    constants: Constants = CONSTANTS,
    pool_slices: tuple[int, ...] = (),
) -> Spec:
    """The SPEC of `steps` steps of the workload on that layout under that policy.

    `pool_slices` are the slices of the layout's generators, in its order, where they are not all `slice_size`.
    """
    own_slices = pool_slices or (slice_size,) * len(layout.generators)
    samples_per_unit = unit_of(workload, policy.stream)
    unit_s = unit_seconds(workload, layout.trainer, samples_per_unit, constants)
    return Spec(
        steps=steps,
        prompts=workload.prompts,
        samples_per_prompt=workload.samples_per_prompt,
        slice=slice_size,
        generators=tuple(
            TimedGeneratorPool(
                name=generator.pool.name,
                count=generator.lanes,
                seconds=slice_table(workload, generator.pool, generator.lane_cards, constants),
                slice=own if own != slice_size else None,
            )
            for generator, own in zip(layout.generators, own_slices, strict=True)
        ),
        reward=TimedRewardPool(
            lanes=workload.reward_lanes, seconds=rounded(workload.reward_seconds), batch=slice_size
        ),
        trainer=TrainerCosts(
            seconds_per_sample=rounded(unit_s / samples_per_unit),
            commit=rounded(commit_seconds(workload, layout.trainer, constants)),
            helper=_helper(workload, layout, constants),
        ),
        publish=rounded(publication_seconds(workload, layout, constants)),
        policy=policy,
    )


def unit_of(workload: Workload, stream: StreamRuleName) -> int:
    """Samples that the trainer gets at once."""
    return {"group": workload.samples_per_prompt, "batch": workload.samples_per_step, "sample": 1}[stream]


def slice_table(
    workload: Workload, pool: CardPool, lane_cards: int, constants: Constants = CONSTANTS
) -> dict[int, Decimal]:
    """Slice size to seconds, for every size that cuts a group evenly and that measurements, if any, cover."""
    modelled = pool.measured.slice_seconds is None
    return {
        size: rounded(lane_slice_seconds(workload, pool, size, lane_cards, constants))
        for size in workload.slice_sizes()
        if modelled or pool.measured.covers(size)
    }


def publication_seconds(workload: Workload, layout: Layout, constants: Constants = CONSTANTS) -> float:
    """Until the last generator has a new version: the slowest pool's measured time, or the modelled one."""
    measured = [generator.pool.measured.publish_seconds for generator in layout.generators]
    known = [seconds for seconds in measured if seconds is not None]
    if len(known) == len(measured) or not workload.catalogued:
        return max(known, default=0.0)
    return max([*known, publish_seconds(workload, publish_link(layout, constants), constants)])


def publish_link(layout: Layout, constants: Constants = CONSTANTS) -> float:
    """Bytes a second to the generators: the network's slowest part, or the node's own links within one node."""
    pools = {layout.trainer.pool, *(generator.pool for generator in layout.generators)}
    trainer_pool = layout.trainer.pool
    if len(pools) == 1 and trainer_pool.nodes == 1:
        return trainer_pool.card.card_link_gb_s * GB * constants.collective_share
    return min(network_bytes_s(pool, constants) for pool in pools)


def rounded(seconds: float) -> Decimal:
    """Six significant digits, which is finer than any of this is known."""
    return Decimal(f"{Decimal(repr(seconds)):.6g}")


def _helper(workload: Workload, layout: Layout, constants: Constants) -> HelperCosts | None:
    if layout.helper_lane_cards is None or layout.helper_lanes == 0:
        return None
    switch_in, switch_out = switch_seconds(workload, layout.trainer, layout.helper_lane_cards, constants)
    return HelperCosts(
        lanes=layout.helper_lanes,
        seconds=slice_table(workload, layout.trainer.pool, layout.helper_lane_cards, constants),
        switch_in=rounded(switch_in),
        switch_out=rounded(switch_out),
    )
