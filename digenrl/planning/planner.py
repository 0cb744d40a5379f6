"""Sizes the pools: branch and bound over splits, slices and policies, simulating only what can still win.

Candidates are taken in the order of their bounds. The search ends when the best bound left is no better than the
best plan in hand (within `tolerance`), so what is not simulated could not have won. Pools too large to try every
trainer size are searched on a coarse grid of whole nodes first, then twice as finely around the best, and again.
All that is with one slice size for all lanes; the best splits are then given slices per pool where these pay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import Protocol

from digenrl.config.reading import ConfigError
from digenrl.config.spec import Spec
from digenrl.planning.candidates import Candidate, PlanOptions, candidates, splits
from digenrl.planning.cluster import CardPool, Cluster
from digenrl.planning.constants import CONSTANTS, Constants
from digenrl.planning.layout import GeneratorLayout, memory_of_trainer
from digenrl.planning.memory import MemoryReport, generator_memory, trainer_memory
from digenrl.planning.plans import Plan, PlanResult
from digenrl.planning.reasons import why_it_lost, why_it_won
from digenrl.planning.slicing import better_slices
from digenrl.planning.workload import Workload

Evaluate = Callable[[Spec], float]
Progress = Callable[[int, int], None]

# Pools up to this many cards are tried at every size; larger ones at this many sizes, then between them.
EVERY_SIZE_UP_TO = 32
COARSE_SIZES = 12
# Simulations granted to each split that will be shown, beyond what the search for the best gave it.
POLISH = 4
# So many splits, however few are shown, are given slices per pool, with so many simulations for each.
SLICED_SPLITS = 6
SLICING_TRIES = 6
# Stale starts change what is computed: a larger share has to bring at least this much.
STALE_MUST_BRING = 0.01

ONE_CARD = "a cluster of one card cannot generate and train apart; add a card, or train with mode=colocated"
NEEDED_MEASUREMENTS = (
    "one pool at least needs measured.slice_seconds for a size that divides the samples of a prompt, and one "
    "measured.train_seconds_per_sample"
)


class Outcome(Protocol):
    """What a full simulation says about a SPEC."""

    @property
    def makespan(self) -> float: ...
    @property
    def step_end(self) -> tuple[float, ...]: ...
    @property
    def throughput(self) -> float: ...
    @property
    def efficiency(self) -> float: ...
    @property
    def generator_idle(self) -> float: ...
    @property
    def trainer_idle(self) -> float: ...


Inspect = Callable[[Spec], Outcome]


@dataclass
class _Search:
    """The search's memory: the best candidate of every split seen, and what it has cost so far."""

    workload: Workload
    options: PlanOptions
    constants: Constants
    evaluate: Evaluate
    progress: Progress
    best_of_split: dict[str, tuple[float, Candidate]] = field(default_factory=dict)
    found: list[Candidate] = field(default_factory=list)
    tried: set[int] = field(default_factory=set)  # identities of candidates, which `found` keeps alive
    considered: int = 0
    refined: int = 0  # simulations that refined what was found
    least_bound_left: float = inf

    def score(self, candidate: Candidate, makespan_s: float) -> float:
        """Lower is better: seconds, or dollars for the same samples."""
        return makespan_s * (candidate.layout.usd_per_hour if self.options.objective == "cost" else 1.0)

    @property
    def splits_wanted(self) -> int:
        return max(self.options.keep, SLICED_SPLITS)

    def best(self) -> float:
        return min((score for score, _ in self.best_of_split.values()), default=inf)

    def explore(self, found: Iterable[Candidate], budget: int) -> None:
        """Best bound first, until no candidate left can beat the plan in hand by more than the tolerance.

        At most `budget` simulations; what they leave open is remembered in `least_bound_left`.
        """
        queue = sorted(found, key=lambda candidate: self.score(candidate, candidate.bound_s))
        self.considered += len(queue)
        for place, candidate in enumerate(queue):
            self.progress(self.considered - len(queue) + place, self.considered)
            bound = self.score(candidate, candidate.bound_s)
            if budget == 0 or (self._cannot_win(bound) and len(self.best_of_split) >= self.splits_wanted):
                self.least_bound_left = min(self.least_bound_left, bound)
                break
            if self._cannot_win(bound) and candidate.layout.split in self.best_of_split:
                self.least_bound_left = min(self.least_bound_left, bound)
                continue
            self._try(candidate)
            budget -= 1
        self.found += queue
        self.progress(self.considered, self.considered)

    def polish(self) -> None:
        """Gives the splits that will be shown a few more of their own candidates: a runner-up at its best."""
        shown = sorted(self.best_of_split, key=lambda split: self.best_of_split[split][0])[: self.options.keep]
        tries = dict.fromkeys(shown, POLISH)
        for candidate in sorted(self.found, key=lambda candidate: candidate.bound_s):
            split = candidate.layout.split
            if tries.get(split, 0) == 0 or id(candidate) in self.tried:
                continue
            if self.score(candidate, candidate.bound_s) < self.best_of_split[split][0]:
                tries[split] -= 1
                self._try(candidate)

    def less_stale(self, candidate: Candidate, makespan_s: float) -> tuple[Candidate, float]:
        """The candidate with the smallest stale share that costs next to nothing, and its makespan."""
        limit_s = makespan_s * (1 + STALE_MUST_BRING)
        for share in sorted(share for share in self.options.stale_shares if share < candidate.pace.stale_share):
            calmer = candidate.with_stale_share(share)
            if calmer.bound_s > limit_s:
                continue
            self.refined += 1
            seconds = self.evaluate(calmer.spec(self.workload, self.options.steps, self.constants))
            if seconds <= limit_s:
                return calmer, seconds
        return candidate, makespan_s

    def slice_by_pool(self, candidate: Candidate, makespan_s: float) -> Candidate:
        """The candidate with slices per pool, where the prediction says that these pay."""

        def makespan(sliced: Candidate) -> float:
            self.refined += 1
            return self.evaluate(sliced.spec(self.workload, self.options.steps, self.constants))

        return better_slices(
            candidate, makespan_s, self.workload, self.constants, makespan, self.options.tolerance, SLICING_TRIES
        )

    def _cannot_win(self, bound: float) -> bool:
        return bound >= self.best() * (1 - self.options.tolerance)

    def _try(self, candidate: Candidate) -> None:
        self.tried.add(id(candidate))
        spec = candidate.spec(self.workload, self.options.steps, self.constants)
        score = self.score(candidate, self.evaluate(spec))
        split = candidate.layout.split
        if score < self.best_of_split.get(split, (inf,))[0]:
            self.best_of_split[split] = (score, candidate)


def plan(
    workload: Workload,
    cluster: Cluster,
    options: PlanOptions,
    evaluate: Evaluate,
    inspect: Inspect,
    progress: Progress = lambda done, total: None,
    constants: Constants = CONSTANTS,
) -> PlanResult:
    """The best plans for the workload on the cluster, best first, at most one per split of the cards.

    `evaluate` predicts a SPEC's makespan in seconds; `inspect` simulates the few plans that are shown.
    The trainer is of one class of cards: its ranks move in step, so a slower class would set the pace.
    Raises ConfigError, in one line, when the model does not fit the cluster.
    """
    search = _Search(workload, options, constants, evaluate, progress)
    several = len(cluster.pools) > 1
    sizes = {pool: _first_sizes(pool, several, options.ranks) for pool in cluster.pools}
    if not any(sizes.values()):
        raise ConfigError(_too_many_ranks(cluster, options))
    tried: set[tuple[CardPool, int]] = set()
    budget = options.max_evaluations
    while True:
        fresh = [(pool, size) for pool in sizes for size in sizes[pool] if (pool, size) not in tried]
        if not fresh:
            break
        tried.update(fresh)
        search.explore(
            (
                candidate
                for pool, size in fresh
                for candidate in candidates(
                    workload, splits(workload, cluster, pool, size, options, constants), options, constants
                )
            ),
            budget if len(tried) == len(fresh) else budget // 4,
        )
        if options.ranks is None:
            sizes = _between(search, sizes)
    if not search.best_of_split:
        raise ConfigError(_does_not_fit(workload, cluster, options, constants))
    search.polish()
    return _result(search, inspect, all(pool.cards - 1 <= EVERY_SIZE_UP_TO for pool in cluster.pools))


def _first_sizes(pool: CardPool, others_generate: bool, ranks: int | None) -> list[int]:
    """Trainer sizes to begin with; with other pools to generate, a whole pool may train."""
    most = pool.cards if others_generate else pool.cards - 1
    if ranks is not None:
        return [ranks] if ranks <= most else []
    if most <= EVERY_SIZE_UP_TO:
        return list(range(1, most + 1))
    inside_a_node = [size for size in (1, 2, 4) if size < pool.per_node]
    nodes = most // pool.per_node
    marks = {max(1, round(nodes * (mark / COARSE_SIZES) ** 2)) for mark in range(1, COARSE_SIZES + 1)}
    return inside_a_node + sorted(mark * pool.per_node for mark in marks)


def _between(search: _Search, sizes: dict[CardPool, list[int]]) -> dict[CardPool, list[int]]:
    """The coarse grid of the best trainer's pool, with whole nodes halfway to its neighbours added."""
    if not search.best_of_split:
        return sizes
    _, best = min(search.best_of_split.values(), key=lambda entry: entry[0])
    pool, size = best.layout.trainer.pool, best.layout.trainer.cards
    if len(sizes[pool]) >= pool.cards - 1 or size not in sizes[pool]:
        return sizes
    grid = sizes[pool]
    place = grid.index(size)
    halfway = {
        (size + neighbour) // 2 // pool.per_node * pool.per_node
        for neighbour in grid[max(0, place - 1) : place + 2]
    }
    return {**sizes, pool: sorted({*grid, *(mark for mark in halfway if mark > 0)})}


def _result(search: _Search, inspect: Inspect, every_size: bool) -> PlanResult:
    by_score_then_price = sorted(
        search.best_of_split.values(), key=lambda entry: (entry[0], entry[1].layout.usd_per_hour)
    )
    keep = search.options.keep
    plans = []
    for place, (score, found) in enumerate(by_score_then_price[: search.splits_wanted]):
        candidate, makespan_s = search.less_stale(found, score / search.score(found, 1.0))
        sliced = search.slice_by_pool(candidate, makespan_s)
        if place < keep:
            plans.append(_finished(search, candidate, inspect))
        if sliced is not candidate:
            plans.append(_finished(search, sliced, inspect))
    # Where it differs from the quick prediction, the inspection has the say.
    plans = _best_of_each_split(sorted(plans, key=_by_inspection(search.options)))[:keep]
    best = plans[0]
    told = [replace(best, why=why_it_won(best, search.workload))]
    told += [replace(other, why=why_it_lost(other, best, search.options.objective)) for other in plans[1:]]
    first = best.makespan_s * (best.layout.usd_per_hour if search.options.objective == "cost" else 1.0)
    proven_gap = max(0.0, 1 - min(search.least_bound_left, search.best()) / first)
    return PlanResult(
        workload=search.workload,
        plans=tuple(told),
        considered=search.considered,
        evaluated=len(search.tried) + search.refined,
        proven_gap=proven_gap,
        every_size=every_size,
    )


def _best_of_each_split(plans: list[Plan]) -> list[Plan]:
    """The first plan of every split, in order."""
    first: dict[str, Plan] = {}
    for plan in plans:
        first.setdefault(plan.layout.split, plan)
    return list(first.values())


def _by_inspection(options: PlanOptions) -> Callable[[Plan], tuple[float, float]]:
    if options.objective == "cost":
        return lambda plan: (plan.usd_per_1000_samples, plan.makespan_s)
    return lambda plan: (plan.makespan_s, plan.usd_per_1000_samples)


def _finished(search: _Search, candidate: Candidate, inspect: Inspect) -> Plan:
    workload = search.workload
    spec = candidate.spec(workload, search.options.steps, search.constants)
    outcome = inspect(spec)
    usd_per_second = candidate.layout.usd_per_hour / 3600
    return Plan(
        layout=candidate.layout,
        pace=candidate.pace,
        spec=spec,
        makespan_s=outcome.makespan,
        step_s=_settled_step_s(outcome),
        samples_per_second=outcome.throughput,
        efficiency=outcome.efficiency,
        generator_busy=1 - outcome.generator_idle,
        trainer_busy=1 - outcome.trainer_idle,
        usd_per_1000_samples=1000 * usd_per_second / outcome.throughput,
        slices=candidate.own_slices,
        generator_memory=tuple(
            _lane_memory(search, generator, own)
            for generator, own in zip(candidate.layout.generators, candidate.own_slices, strict=True)
        ),
        trainer_memory=_trainer_memory(search, candidate),
    )


def _settled_step_s(outcome: Outcome) -> float:
    """From one commit to the next, once the pipeline is full."""
    ends = outcome.step_end
    return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else ends[0]


def _lane_memory(search: _Search, generator: GeneratorLayout, slice_size: int) -> MemoryReport | None:
    """None where slices of this size were measured, and so did fit."""
    pool, headroom = generator.pool, search.constants.memory_headroom
    if pool.measured.slice_seconds is not None:
        return None
    return generator_memory(search.workload, pool.card, slice_size, generator.lane_cards, headroom)


def _trainer_memory(search: _Search, candidate: Candidate) -> MemoryReport | None:
    trainer = candidate.layout.trainer
    if trainer.pool.measured.train_seconds_per_sample is not None:
        return None
    return memory_of_trainer(search.workload, trainer, search.constants.memory_headroom)


def _too_many_ranks(cluster: Cluster, options: PlanOptions) -> str:
    if cluster.cards == 1:
        return ONE_CARD
    pool = max(cluster.pools, key=lambda pool: pool.cards)
    left = "" if len(cluster.pools) > 1 else ", and one card at least has to generate"
    return (
        f"--ranks: {options.ranks} ranks are more than one class of cards has: {pool.name}, the largest, has "
        f"{pool.cards}{left}; use fewer"
    )


def _does_not_fit(workload: Workload, cluster: Cluster, options: PlanOptions, constants: Constants) -> str:
    """What the roomiest class lacks, in one line."""
    if cluster.cards == 1:
        return ONE_CARD
    if not workload.catalogued:
        return _not_measured(workload, cluster)
    headroom, abilities = constants.memory_headroom, options.abilities
    pool = max(cluster.pools, key=lambda pool: pool.card.memory_gib * pool.cards)
    if not pool.card.described:
        return f"no pool is of a card that the catalogue knows, and {NEEDED_MEASUREMENTS}, on cards of their own"
    shards = pool.cards if len(cluster.pools) > 1 else pool.cards - 1
    if abilities.shards == "as_trained" and workload.tuning == "lora":
        shards = 1
    lane_cards = pool.per_node if abilities.tensor_parallel else 1
    checkpointing = abilities.checkpointing[-1]
    generating = generator_memory(workload, pool.card, 1, lane_cards, headroom)
    training = trainer_memory(workload, pool.card, shards, 1, checkpointing, headroom)
    way_out = "add cards or take larger ones" + (", or use LoRA" if workload.tuning == "full" else "")
    if not checkpointing:
        way_out += ", or set training.gradient_checkpointing"
    return (
        f"{workload.model} ({workload.tuning}) does not fit this cluster of {cluster.cards} cards: {pool.name}, "
        f"the roomiest, has {training.available_gib:.1f} GiB free a card; training over {shards} needs "
        f"{training.total_gib:.1f} a card and generating over {lane_cards} needs {generating.total_gib:.1f}, "
        f"on cards of their own; {way_out}"
    )


def _not_measured(workload: Workload, cluster: Cluster) -> str:
    """What a model outside the catalogue lacks, in one line."""
    sizes = ", ".join(map(str, workload.slice_sizes()))
    for pool in cluster.pools:
        table = pool.measured.slice_seconds
        if table is not None and not any(pool.measured.covers(size) for size in workload.slice_sizes()):
            return (
                f"{pool.name}: measured.slice_seconds has {', '.join(map(str, sorted(table)))}, which covers no "
                f"size that divides samples_per_prompt = {workload.samples_per_prompt}; measure one of {sizes}"
            )
    return (
        f"{workload.model} is not in the catalogue, so that only measured costs can plan it: "
        f"{NEEDED_MEASUREMENTS}, on cards of their own"
    )
