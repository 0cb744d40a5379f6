"""One technique after the other: the same workload on the same cards, from colocated to everything switched on.

Every rung gets the split, slice and packing that are best for it, found as the planner finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from digenrl.config.reading import ConfigError
from digenrl.config.spec import ScheduleRules, Spec
from digenrl.planning.bounds import least_makespan
from digenrl.planning.candidates import Candidate, pace_of
from digenrl.planning.cluster import CardPool
from digenrl.planning.colocated import ColocatedAssumptions, colocated_spec
from digenrl.planning.constants import CONSTANTS, Constants
from digenrl.planning.layout import Abilities, Layout, best_trainer, fitting_slices, generator_layout
from digenrl.planning.spec_builder import unit_of
from digenrl.planning.workload import Workload


@dataclass(frozen=True, slots=True)
class Rung:
    """A rung's name, the policy it runs under, whether time-steps are packed and spread (TSP), and whether the
    trainer may keep a copy of the weights per node."""

    name: str
    policy: ScheduleRules
    packed: bool
    node_shards: bool = True


STALE_SHARE = "0.5"

RUNGS = (
    Rung("disaggregated", ScheduleRules(order="batch", stream="batch", help="none"), packed=False),
    Rung("+ GAP", ScheduleRules(help="none"), packed=False),
    Rung("+ TSP", ScheduleRules(help="none"), packed=True),
    Rung("+ TAG", ScheduleRules(help="auto"), packed=True),
    Rung("+ TCSS", ScheduleRules.model_validate({"help": "auto", "stale_fraction": STALE_SHARE}), packed=True),
)


@dataclass(frozen=True, slots=True)
class Standing:
    """A rung's outcome; `speedup` is over colocated, `split` says which cards did what."""

    rung: str
    makespan_s: float
    speedup: float
    split: str


def climb(
    workload: Workload,
    pools: Sequence[CardPool],
    evaluate: Callable[[Spec], float],
    steps: int,
    assumptions: ColocatedAssumptions,
    constants: Constants = CONSTANTS,
    rungs: Sequence[Rung] = RUNGS,
) -> list[Standing]:
    """Colocated first, then every rung. Raises ConfigError where the model does not fit the cards."""
    colocated_s = evaluate(colocated_spec(workload, pools, steps, assumptions, constants))
    standings = [Standing("colocated", colocated_s, 1.0, "all cards in turn")]
    for rung in rungs:
        makespan_s, candidate = _best(workload, pools, rung, evaluate, steps, constants)
        standings.append(Standing(rung.name, makespan_s, colocated_s / makespan_s, candidate.layout.split))
    return standings


def rung_candidates(
    workload: Workload, pools: Sequence[CardPool], rung: Rung, steps: int, constants: Constants = CONSTANTS
) -> Iterator[Candidate]:
    """Every split in quarters of a node, and every slice of it, under the rung's policy."""
    unit = unit_of(workload, rung.policy.stream)
    abilities = Abilities(packed=rung.packed, shards="any" if rung.node_shards else "no_nodes")
    for trainer_pool in pools:
        quarter = max(1, trainer_pool.per_node // 4)
        for cards in range(quarter, trainer_pool.cards + 1, quarter):
            trainer = best_trainer(workload, trainer_pool, cards, unit, constants, abilities)
            left = {pool.name: pool.cards - (cards if pool is trainer_pool else 0) for pool in pools}
            lanes = [generator_layout(workload, pool, left[pool.name], constants) for pool in pools]
            generators = tuple(layout for layout in lanes if layout is not None)
            helper = generator_layout(workload, trainer_pool, cards, constants)
            if trainer is None or not generators:
                continue
            layout = Layout(generators, trainer, helper.lane_cards if helper else None)
            yield from _slices(workload, layout, rung, steps, constants)


def _slices(
    workload: Workload, layout: Layout, rung: Rung, steps: int, constants: Constants
) -> Iterator[Candidate]:
    for size in fitting_slices(workload, layout, constants):
        pace = pace_of(workload, layout, size, rung.policy, steps, constants)
        yield Candidate(layout, size, rung.policy, pace, least_makespan(pace))


def _best(
    workload: Workload,
    pools: Sequence[CardPool],
    rung: Rung,
    evaluate: Callable[[Spec], float],
    steps: int,
    constants: Constants,
) -> tuple[float, Candidate]:
    """Best bound first; what cannot beat the best in hand is not simulated."""
    found = sorted(rung_candidates(workload, pools, rung, steps, constants), key=lambda c: c.bound_s)
    if not found:
        names = " + ".join(f"{pool.cards} {pool.name}" for pool in pools)
        raise ConfigError(f"{workload.model} ({workload.tuning}) does not fit {names} as '{rung.name}'")
    best_s, best = inf, found[0]
    for candidate in found:
        if candidate.bound_s >= best_s:
            break
        makespan_s = evaluate(candidate.spec(workload, steps, constants))
        if makespan_s < best_s:
            best_s, best = makespan_s, candidate
    return best_s, best
