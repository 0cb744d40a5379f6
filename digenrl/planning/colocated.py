"""Colocated cards, for comparison: all of them generate a step, then all of them train it together.

A SPEC's colocated rule trains on all cards with perfect scaling. So its SPEC gets the training time from which
that rule returns the modeled one: that of all cards at the rate of the slowest.
"""

from __future__ import annotations

from itertools import combinations
from math import ceil, inf

from digenrl.config.spec import ColocatedCosts, HelperCosts, ScheduleRules, Spec, TimedGeneratorPool, TrainerCosts
from digenrl.planning.candidates import PlanOptions, rates_of
from digenrl.planning.costs import TrainerLayout, commit_seconds, switch_seconds, unit_seconds
from digenrl.planning.facts.cluster import CardPool, Cluster
from digenrl.planning.facts.workload import Workload
from digenrl.planning.layout import GeneratorLayout, Layout, best_trainer, generator_layout, lane_sizes
from digenrl.planning.results.plans import Plan
from digenrl.planning.results.simulated_plan import simulated_plan
from digenrl.planning.sites.groups import site_gbit_s
from digenrl.planning.spec_builder import reward_pool, rounded, slice_table
from digenrl.simulation.makespan import predict_makespan


def colocated_plan(workload: Workload, cluster: Cluster, options: PlanOptions) -> Plan | None:
    """All cards that can generate and train, one after the other; None if these are fewer than two."""
    lanes: list[GeneratorLayout] = []
    if options.capabilities.replica_cards > 1:
        return None
    for pool in cluster.pools:
        layout = generator_layout(workload, pool, pool.cards, options.capabilities)
        trains = joint_trainer(workload, cluster, [pool], options) is not None
        if layout is not None and layout.lane_cards == 1 and trains:
            lanes.append(layout)
    if sum(layout.lanes for layout in lanes) < 2:
        return None
    trainer = joint_trainer(workload, cluster, [layout.pool for layout in lanes], options)
    sizes = [set(lane_sizes(workload, layout)) for layout in lanes]
    common = sorted(set.intersection(*sizes), reverse=True)
    if trainer is None or not common:
        return None
    specs = [_spec(workload, lanes, trainer, size, options.steps) for size in common]
    spec = min(specs, key=predict_makespan)
    all_cards = Layout((), trainer, 1)
    rates = rates_of(workload, all_cards, common[0], ScheduleRules(stream="batch"), options.steps)
    return simulated_plan(workload, all_cards, rates, spec, ())


def joint_trainer(
    workload: Workload, cluster: Cluster, pools: list[CardPool], options: PlanOptions
) -> TrainerLayout | None:
    """The cards of these pools as one trainer: its ranks are synchronous, so the slowest sets the pace."""
    trainers = [_trainer(workload, cluster, pools, pool, options) for pool in pools]
    known = [trainer for trainer in trainers if trainer is not None]
    samples = workload.samples_per_step
    return max(known, key=lambda each: unit_seconds(workload, each, samples), default=None)


def _trainer(
    workload: Workload, cluster: Cluster, pools: list[CardPool], like: CardPool, options: PlanOptions
) -> TrainerLayout | None:
    """The cards of all `pools` as a trainer, as if each was one of `like`."""
    cards = sum(pool.cards for pool in pools)
    between = [site_gbit_s(cluster.sites, first.site, second.site) for first, second in combinations(pools, 2)]
    several_sites = any(gbit_s < inf for gbit_s in between)
    per_node = min(like.per_node, *(pool.cards for pool in pools)) if several_sites else like.per_node
    every = like.model_copy(
        update={
            "name": " + ".join(f"{pool.cards} {pool.name}" for pool in pools),
            "nodes": ceil(cards / per_node),
            "per_node": per_node,
            "network_gbit_s": min(*between, *(pool.network_gbit_s for pool in pools), inf),
            "usd_per_hour": sum(pool.cards * pool.usd_per_card_hour for pool in pools) / cards,
        }
    )
    return best_trainer(workload, every, cards, workload.samples_per_step, options.capabilities)


def _spec(
    workload: Workload, lanes: list[GeneratorLayout], trainer: TrainerLayout, slice_size: int, steps: int
) -> Spec:
    cards = sum(layout.lanes for layout in lanes)
    tables = [slice_table(workload, layout.pool, 1) for layout in lanes]
    counts = [layout.lanes for layout in lanes]
    counts[-1] -= 1  # one card is the SPEC's trainer
    step_s = unit_seconds(workload, trainer, workload.samples_per_step)
    return Spec(
        steps=steps,
        prompts=workload.prompts,
        samples_per_prompt=workload.samples_per_prompt,
        slice=slice_size,
        generators=tuple(
            TimedGeneratorPool(name=layout.pool.name, count=count, seconds=table)
            for layout, count, table in zip(lanes, counts, tables, strict=True)
            if count
        ),
        reward=reward_pool(workload, slice_size),
        trainer=TrainerCosts(
            seconds_per_sample=rounded(step_s / workload.samples_per_step * cards),
            commit=rounded(commit_seconds(workload, trainer)),
            helper=HelperCosts(lanes=1, seconds=tables[-1]),
        ),
        policy=ScheduleRules(colocated=True),
        colocate=ColocatedCosts(switch=rounded(sum(switch_seconds(workload, trainer, 1)) / 2)),
    )
