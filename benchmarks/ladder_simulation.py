"""The paper's ladder on our cost model: colocated, then disaggregated with one technique after another.

A SPEC's colocated rule trains on all cards with perfect scaling, which real systems do not reach. So the SPEC of
the baseline gets numbers from which that rule returns the modeled time. Every other rung gets the split, slice
and packing that are best for it, found with the planner's search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import ceil, inf

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
from digenrl.planning import costs
from digenrl.planning.bounds import least_makespan
from digenrl.planning.candidates import Candidate, rates_of
from digenrl.planning.costs import (
    TrainerLayout,
    all_gather_seconds,
    commit_seconds,
    network_bytes_s,
    publish_seconds,
    slice_seconds,
    switch_seconds,
    training_pass_seconds,
    unit_seconds,
)
from digenrl.planning.facts.cluster import CardPool
from digenrl.planning.facts.workload import Workload
from digenrl.planning.layout import (
    Capabilities,
    GeneratorLayout,
    Layout,
    best_trainer,
    fitting_slices,
    generator_layout,
    memory_of_trainer,
)
from digenrl.planning.spec_builder import rounded, training_unit
from digenrl.simulation.makespan import predict_makespan, schedule_if_lanes_do_both, with_best_slice


@dataclass(frozen=True, slots=True)
class ColocatedAssumptions:
    """Overheads of a colocated system.

    `node_shards`: weights are sharded inside each node instead of over all cards. `packed`: time-steps are packed
    and spread as in a disaggregated trainer. `sharded_rollout`: generates with sharded weights, gathered at every
    denoising step, instead of with a full copy. `scaling`: share of perfect scaling that training over all cards
    reaches. `engine_switch_s`: the restart of the inference engine, in addition to the transfer of weights.
    """

    node_shards: bool = False
    packed: bool = False
    sharded_rollout: bool = False
    scaling: float = 1.0
    engine_switch_s: float = 0.0


def colocated_spec(
    workload: Workload, pools: Sequence[CardPool], steps: int, assumptions: ColocatedAssumptions
) -> Spec:
    """The SPEC of the colocated run on all cards of `pools`; unequal cards train at the rate of the slowest.

    Raises ConfigError if the model does not fit.
    """
    lanes = [_lanes(workload, pool) for pool in pools]
    trainer = colocated_trainer(workload, pools, assumptions)
    step_s = unit_seconds(workload, trainer, workload.samples_per_step) / assumptions.scaling
    lane_count = sum(layout.lanes for layout in lanes)
    switch_in, switch_out = switch_seconds(workload, trainer, lanes[-1].lane_cards)
    tables = [_rollout_table(workload, layout, trainer, assumptions) for layout in lanes]
    counts = [layout.lanes for layout in lanes]
    counts[-1] -= 1  # a SPEC needs at least one trainer lane
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
            commit=rounded(commit_seconds(workload, trainer)),
            helper=HelperCosts(lanes=1, seconds=tables[-1]),
        ),
        policy=ScheduleRules(colocated=True),
        colocate=ColocatedCosts(switch=rounded((switch_in + switch_out) / 2 + assumptions.engine_switch_s)),
    )


def colocated_trainer(
    workload: Workload, pools: Sequence[CardPool], assumptions: ColocatedAssumptions
) -> TrainerLayout:
    """All cards as one trainer, at the rate of the slowest, with the fastest pack size and checkpointing."""
    slowest = max(pools, key=lambda pool: training_pass_seconds(workload, pool.card, 1, True))
    pool = slowest.model_copy(
        update={
            "nodes": sum(pool.nodes for pool in pools),
            "network_gbit_s": min(pool.network_gbit_s for pool in pools),
        }
    )
    cards = sum(pool.cards for pool in pools)
    shard_cards = pool.per_node if assumptions.node_shards and cards % pool.per_node == 0 else cards
    pairs = ceil(workload.samples_per_step * workload.pairs_per_sample / cards) if assumptions.packed else 1
    layouts = [
        TrainerLayout(pool, cards, shard_cards, pack, checkpointing, assumptions.packed)
        for pack in range(1, pairs + 1)
        for checkpointing in (False, True)
    ]
    fitting = [layout for layout in layouts if memory_of_trainer(workload, layout).fits]
    if not fitting:
        needed = memory_of_trainer(workload, layouts[1])
        raise ConfigError(
            f"{workload.model} does not fit on {cards} colocated {pool.name}: one pair needs "
            f"{needed.total_gib:.0f} GiB per card, but {needed.available_gib:.0f} are free; add cards, or use LoRA"
        )
    return min(fitting, key=lambda layout: unit_seconds(workload, layout, workload.samples_per_step))


def _lanes(workload: Workload, pool: CardPool) -> GeneratorLayout:
    layout = generator_layout(workload, pool, pool.cards)
    if layout is None:
        raise ConfigError(f"{workload.model} does not fit on a node of {pool.per_node} {pool.name}")
    return layout


def _rollout_slice(workload: Workload, lanes: int) -> int:
    """The samples of a step spread over all lanes, rounded down to a size that cuts groups evenly."""
    share = ceil(workload.samples_per_step / lanes)
    return max(size for size in workload.slice_sizes() if size <= share)


def _rollout_table(
    workload: Workload, layout: GeneratorLayout, trainer: TrainerLayout, assumptions: ColocatedAssumptions
) -> dict[int, Decimal]:
    """Seconds by slice size; a rollout with sharded weights also gathers them at every denoising step."""
    gather_s = workload.denoise_steps * all_gather_seconds(workload.facts.weight_bytes, trainer)
    table = {}
    for size in workload.slice_sizes():
        seconds = slice_seconds(workload, layout.pool.card, size, layout.lane_cards)
        if assumptions.sharded_rollout:
            overlap = costs.CONSTANTS.gather_overlap  # type: ignore[attr-defined]  # a scenario may patch it
            seconds = max(seconds, gather_s) + (1 - overlap) * min(seconds, gather_s)
        table[size] = rounded(seconds)
    return table


@dataclass(frozen=True, slots=True)
class TechniqueRung:
    """The scheduling rules of a rung, whether time-steps are packed and spread (TSP), and whether the trainer may
    keep a copy of the weights per node."""

    name: str
    rules: ScheduleRules
    packed: bool
    node_shards: bool = True


STALE_SHARE = "0.5"

RUNGS = (
    TechniqueRung("disaggregated", ScheduleRules(order="batch", stream="batch", help="none"), packed=False),
    TechniqueRung("+ GAP", ScheduleRules(help="none"), packed=False),
    TechniqueRung("+ TSP", ScheduleRules(help="none"), packed=True),
    TechniqueRung("+ TAG", ScheduleRules(help="auto"), packed=True),
    TechniqueRung(
        "+ TCSS", ScheduleRules.model_validate({"help": "auto", "stale_fraction": STALE_SHARE}), packed=True
    ),
)


@dataclass(frozen=True, slots=True)
class LadderRow:
    """The result of a rung; `speedup` is relative to colocated, `split` is the use of the cards."""

    rung: str
    makespan_s: float
    speedup: float
    split: str


def simulate_rungs(
    workload: Workload,
    pools: Sequence[CardPool],
    steps: int,
    assumptions: ColocatedAssumptions,
    rungs: Sequence[TechniqueRung] = RUNGS,
) -> list[LadderRow]:
    """Simulates colocated first, then every rung. Raises ConfigError if the model does not fit the cards."""
    colocated_s = predict_makespan(colocated_spec(workload, pools, steps, assumptions))
    rows = [LadderRow("colocated", colocated_s, 1.0, "all cards in turn")]
    for rung in rungs:
        makespan_s, candidate = _best(workload, pools, rung, steps)
        rows.append(LadderRow(rung.name, makespan_s, colocated_s / makespan_s, candidate.layout.split))
    return rows


BEST_COLOCATED = ColocatedAssumptions(node_shards=True, packed=True)  # and no restart of an inference engine


def best_colocated(workload: Workload, pools: Sequence[CardPool], steps: int) -> float:
    """The makespan of a colocated system with the least overheads that we can think of."""
    return predict_makespan(colocated_spec(workload, pools, steps, BEST_COLOCATED))


@dataclass(frozen=True, slots=True)
class NodeSchedule:
    """The makespan of nodes that generate and train; with `in_turns` they all change their role together."""

    makespan_s: float
    in_turns: bool


def both_directions(
    workload: Workload, pools: Sequence[CardPool], steps: int, stale_share: str = STALE_SHARE
) -> NodeSchedule:
    """The faster of nodes on their own and of nodes in turns, with the best size of Train jobs.

    Full fine-tuning does not fit on one card, so the cards of a node act together, with the weights sharded inside
    the node. On their own, nodes send their gradients to one of them, which commits and publishes. In turns, all
    nodes receive the sum and update their own copy. Raises ConfigError if a node is too small.
    """
    sizes = [size for size in workload.slice_sizes() if size > 1] or [1]
    specs = [_node_spec(workload, pools, steps, job).with_rules(stale_fraction=stale_share) for job in sizes]
    alone_s = min(schedule_if_lanes_do_both(spec).makespan for spec in specs)
    in_turns_s = min(predict_makespan(with_best_slice(_in_turns(spec, workload, pools))) for spec in specs)
    return NodeSchedule(min(alone_s, in_turns_s), in_turns_s <= alone_s)


def _in_turns(spec: Spec, workload: Workload, pools: Sequence[CardPool]) -> Spec:
    """The same nodes as colocated ones; every node needs the sum of all gradients before its update."""
    nodes = sum(pool.nodes for pool in pools)
    all_reduce_s = 2 * _gradient_seconds(workload, pools) * (nodes - 1) / nodes
    commit = rounded(float(spec.trainer.commit) + all_reduce_s)
    trainer = spec.trainer.model_copy(update={"commit": commit, "reduce": Decimal(0)})
    return spec.with_changes(trainer=trainer).with_rules(colocated=True)


def _gradient_seconds(workload: Workload, pools: Sequence[CardPool]) -> float:
    """All gradients in fp32 over the slowest network of a node."""
    return 4.0 * workload.trained_parameters / min(map(network_bytes_s, pools))


def _node_spec(workload: Workload, pools: Sequence[CardPool], steps: int, job: int) -> Spec:
    """Nodes on their own. Gradients are added up, and weights published, along a chain of nodes."""
    trainers = [_node_trainer(workload, pool, job) for pool in pools]
    lanes = [_lanes(workload, pool.model_copy(update={"nodes": 1})) for pool in pools]
    tables = [_node_table(workload, layout) for layout in lanes]
    training = [rounded(unit_seconds(workload, each, job) / job) for each in trainers]
    switches = [
        rounded(sum(switch_seconds(workload, each, layout.lane_cards)) / 2)
        for each, layout in zip(trainers, lanes, strict=True)
    ]
    return Spec(
        steps=steps,
        prompts=workload.prompts,
        samples_per_prompt=workload.samples_per_prompt,
        slice="auto",
        generators=tuple(
            TimedGeneratorPool(
                name=pool.name,
                count=pool.nodes - (pool is pools[0]),  # one node is the trainer
                seconds=table,
                train_seconds=train_s,
                switch=switch,
            )
            for pool, table, train_s, switch in zip(pools, tables, training, switches, strict=True)
            if pool.nodes > (pool is pools[0])
        ),
        reward=TimedRewardPool(lanes=workload.reward_lanes, seconds=rounded(workload.reward_seconds)),
        trainer=TrainerCosts(
            seconds_per_sample=training[0],
            job=job,
            reduce=rounded(_gradient_seconds(workload, pools)),
            commit=rounded(commit_seconds(workload, trainers[0])),
            helper=HelperCosts(lanes=1, seconds=tables[0], switch_in=switches[0], switch_out=switches[0]),
        ),
        publish=rounded(publish_seconds(workload, min(map(network_bytes_s, pools)))),
        policy=ScheduleRules.model_validate({"assist": "both", "help": "search"}),
        colocate=ColocatedCosts(switch=max(switches)),
    )


def _node_trainer(workload: Workload, pool: CardPool, job: int) -> TrainerLayout:
    """The cards of one node as a trainer, with the fastest pack size and checkpointing."""
    node = pool.model_copy(update={"nodes": 1})
    pairs = ceil(job * workload.pairs_per_sample / pool.per_node)
    layouts = [
        TrainerLayout(node, pool.per_node, pool.per_node, pack, checkpointing, spread_steps=True)
        for pack in range(1, pairs + 1)
        for checkpointing in (False, True)
    ]
    fitting = [layout for layout in layouts if memory_of_trainer(workload, layout).fits]
    if not fitting:
        raise ConfigError(f"{workload.model} ({workload.tuning}) does not train on a node of {pool.name}")
    return min(fitting, key=lambda layout: unit_seconds(workload, layout, job))


def _node_table(workload: Workload, layout: GeneratorLayout) -> dict[int, Decimal]:
    """Seconds of a whole node by number of samples, spread over its lanes."""
    table = {}
    for size in range(1, workload.samples_per_prompt + 1):
        each = ceil(size / layout.lanes)
        table[size] = rounded(slice_seconds(workload, layout.pool.card, each, layout.lane_cards))
    return table


def rung_candidates(
    workload: Workload, pools: Sequence[CardPool], rung: TechniqueRung, steps: int
) -> Iterator[Candidate]:
    """Every split in quarters of a node, with every slice size, under the rung's rules."""
    unit = training_unit(workload, rung.rules.stream)
    capabilities = Capabilities(packed=rung.packed, shards="any" if rung.node_shards else "no_nodes")
    for trainer_pool in pools:
        quarter = max(1, trainer_pool.per_node // 4)
        for cards in range(quarter, trainer_pool.cards + 1, quarter):
            trainer = best_trainer(workload, trainer_pool, cards, unit, capabilities)
            left = {pool.name: pool.cards - (cards if pool is trainer_pool else 0) for pool in pools}
            lanes = [generator_layout(workload, pool, left[pool.name]) for pool in pools]
            generators = tuple(layout for layout in lanes if layout is not None)
            helper = generator_layout(workload, trainer_pool, cards)
            if trainer is None or not generators:
                continue
            layout = Layout(generators, trainer, helper.lane_cards if helper else None)
            yield from _slices(workload, layout, rung, steps)


def _slices(workload: Workload, layout: Layout, rung: TechniqueRung, steps: int) -> Iterator[Candidate]:
    for size in fitting_slices(workload, layout):
        rates = rates_of(workload, layout, size, rung.rules, steps)
        yield Candidate(layout, size, rung.rules, rates, least_makespan(rates))


def _best(
    workload: Workload, pools: Sequence[CardPool], rung: TechniqueRung, steps: int
) -> tuple[float, Candidate]:
    """The best candidate and its makespan; candidates whose bound is no better are not simulated."""
    found = sorted(rung_candidates(workload, pools, rung, steps), key=lambda c: c.bound_s)
    if not found:
        names = " + ".join(f"{pool.cards} {pool.name}" for pool in pools)
        raise ConfigError(f"{workload.model} ({workload.tuning}) does not fit {names} as '{rung.name}'")
    best_s, best = inf, found[0]
    for candidate in found:
        if candidate.bound_s >= best_s:
            break
        makespan_s = predict_makespan(candidate.spec(workload, steps))
        if makespan_s < best_s:
            best_s, best = makespan_s, candidate
    return best_s, best
