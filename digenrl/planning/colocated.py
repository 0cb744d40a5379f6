"""The colocated baseline: every card generates, then every card trains. What that pays is spelled out here.

A SPEC's colocated rule trains on all cards with perfect scaling; real systems do not. So the SPEC is given numbers
from which that rule returns the modelled time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import ceil

from digenrl.config.reading import ConfigError
from digenrl.config.spec import (
    ColocatedCosts,
    HelperCosts,
    ScheduleRules,
    Spec,
    TimedGeneratorPool,
    TimedRewardPool,
    TrainerCosts,
)
from digenrl.planning.cluster import CardPool
from digenrl.planning.constants import CONSTANTS, Constants
from digenrl.planning.costs import (
    TrainerLayout,
    all_gather_seconds,
    commit_seconds,
    slice_seconds,
    switch_seconds,
    training_pass_seconds,
    unit_seconds,
)
from digenrl.planning.layout import GeneratorLayout, generator_layout, memory_of_trainer
from digenrl.planning.spec_builder import rounded
from digenrl.planning.workload import Workload


@dataclass(frozen=True, slots=True)
class ColocatedAssumptions:
    """What a colocated system pays beyond its arithmetic.

    `node_shards`: weights sharded inside each node instead of over all cards. `packed`: time-steps packed and
    spread as a disaggregated trainer does. `sharded_rollout`: generates with the sharded weights, gathering them
    at every denoising step, instead of with a whole copy. `scaling`: share of perfect scaling that training over
    all cards keeps. `engine_switch_s`: restarting the inference engine, beside the weights that move.
    """

    node_shards: bool = False
    packed: bool = False
    sharded_rollout: bool = False
    scaling: float = 1.0
    engine_switch_s: float = 0.0


def colocated_spec(
    workload: Workload,
    pools: Sequence[CardPool],
    steps: int,
    assumptions: ColocatedAssumptions,
    constants: Constants = CONSTANTS,
) -> Spec:
    """The SPEC of the colocated run on all cards of `pools`; unequal cards train at the slowest one's pace.

    Raises ConfigError where the model does not fit.
    """
    lanes = [_lanes(workload, pool, constants) for pool in pools]
    trainer = colocated_trainer(workload, pools, assumptions, constants)
    step_s = unit_seconds(workload, trainer, workload.samples_per_step, constants) / assumptions.scaling
    lane_count = sum(layout.lanes for layout in lanes)
    switch_in, switch_out = switch_seconds(workload, trainer, lanes[-1].lane_cards, constants)
    tables = [_rollout_table(workload, layout, trainer, assumptions, constants) for layout in lanes]
    counts = [layout.lanes for layout in lanes]
    counts[-1] -= 1  # the SPEC wants at least one of the lanes named as the trainer's
    return Spec(
        steps=steps,
        prompts=workload.prompts,
        samples_per_prompt=workload.samples_per_prompt,
        slice=_rollout_slice(workload, lane_count),
        generators=tuple(
            TimedGeneratorPool(name=layout.pool.name, count=count, seconds=table)
            for layout, count, table in zip(lanes, counts, tables, strict=True)
            if count
        ),
        reward=TimedRewardPool(lanes=workload.reward_lanes, seconds=rounded(workload.reward_seconds)),
        trainer=TrainerCosts(
            seconds_per_sample=rounded(step_s / workload.samples_per_step * lane_count),
            commit=rounded(commit_seconds(workload, trainer, constants)),
            helper=HelperCosts(lanes=1, seconds=tables[-1]),
        ),
        policy=ScheduleRules(colocated=True),
        colocate=ColocatedCosts(switch=rounded((switch_in + switch_out) / 2 + assumptions.engine_switch_s)),
    )


def colocated_trainer(
    workload: Workload,
    pools: Sequence[CardPool],
    assumptions: ColocatedAssumptions,
    constants: Constants = CONSTANTS,
) -> TrainerLayout:
    """All cards as one trainer, at the pace of the slowest; packs and checkpointing as they train soonest."""
    slowest = max(pools, key=lambda pool: training_pass_seconds(workload, pool.card, 1, True, constants))
    pace = slowest.model_copy(
        update={
            "nodes": sum(pool.nodes for pool in pools),
            "network_gbit_s": min(pool.network_gbit_s for pool in pools),
        }
    )
    cards = sum(pool.cards for pool in pools)
    shard_cards = pace.per_node if assumptions.node_shards and cards % pace.per_node == 0 else cards
    pairs = ceil(workload.samples_per_step * workload.pairs_per_sample / cards) if assumptions.packed else 1
    layouts = [
        TrainerLayout(pace, cards, shard_cards, pack, checkpointing, assumptions.packed)
        for pack in range(1, pairs + 1)
        for checkpointing in (False, True)
    ]
    headroom = constants.memory_headroom
    fitting = [layout for layout in layouts if memory_of_trainer(workload, layout, headroom).fits]
    if not fitting:
        needed = memory_of_trainer(workload, layouts[1], headroom)
        raise ConfigError(
            f"{workload.model} does not train on {cards} colocated {pace.name}: one pair needs "
            f"{needed.total_gib:.0f} GiB a card and {needed.available_gib:.0f} are free; add cards, or use LoRA"
        )
    return min(fitting, key=lambda layout: unit_seconds(workload, layout, workload.samples_per_step, constants))


def _lanes(workload: Workload, pool: CardPool, constants: Constants) -> GeneratorLayout:
    layout = generator_layout(workload, pool, pool.cards, constants)
    if layout is None:
        raise ConfigError(f"{workload.model} does not fit on a node of {pool.per_node} {pool.name}")
    return layout


def _rollout_slice(workload: Workload, lanes: int) -> int:
    """The step's samples spread over all lanes, rounded down to a size that cuts groups evenly."""
    share = ceil(workload.samples_per_step / lanes)
    return max(size for size in workload.slice_sizes() if size <= share)


def _rollout_table(
    workload: Workload,
    layout: GeneratorLayout,
    trainer: TrainerLayout,
    assumptions: ColocatedAssumptions,
    constants: Constants,
) -> dict[int, Decimal]:
    """Slice seconds; a rollout through sharded weights also gathers them at every denoising step."""
    gather_s = workload.denoise_steps * all_gather_seconds(workload.family.weight_bytes, trainer, constants)
    table = {}
    for size in workload.slice_sizes():
        seconds = slice_seconds(workload, layout.pool.card, size, layout.lane_cards, constants)
        if assumptions.sharded_rollout:
            seconds = max(seconds, gather_s) + (1 - constants.gather_overlap) * min(seconds, gather_s)
        table[size] = rounded(seconds)
    return table
