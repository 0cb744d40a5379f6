"""The planner: branch and bound over splits, slices and scheduling rules.

Candidates are simulated in the order of their bounds. The search ends when no remaining bound beats the best plan
by more than `tolerance`, so a candidate that was not simulated could not have won. In large pools the trainer
sizes are searched on a coarse grid of whole nodes first, which is then refined around the best size. This search
uses one slice size for all lanes; afterwards the best splits get a slice size per pool if that pays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf

from digenrl.config.reading import ConfigError
from digenrl.config.spec import Spec
from digenrl.planning.both_directions import SharedResult, best_shared_plan
from digenrl.planning.candidates import STALE_MIN_GAIN, Candidate, PlanOptions, better_slices, candidates, splits
from digenrl.planning.colocated import colocated_plan
from digenrl.planning.facts.cluster import CardPool, Cluster
from digenrl.planning.facts.workload import Workload
from digenrl.planning.layout import possible_shards
from digenrl.planning.memory import generator_memory, trainer_memory
from digenrl.planning.results.plan_kinds import compared, why_it_lost, why_it_won
from digenrl.planning.results.plans import Plan, PlanResult
from digenrl.planning.results.simulated_plan import simulated_plan
from digenrl.planning.sites.trainer_places import compare_places
from digenrl.simulation.makespan import predict_makespan

Progress = Callable[[int, int], None]

# Pools up to this many cards are searched at every trainer size; larger ones start with a coarse grid.
EVERY_SIZE_UP_TO = 32
COARSE_SIZES = 12
# Additional simulations for each split that will be shown.
POLISH_TRIES = 4
# The number of splits that get a slice size per pool, and the simulations for each of them.
SLICED_SPLITS = 6
SLICING_TRIES = 6

ONE_CARD = "a cluster of one card has no card left to generate; add a card, or train with mode=colocated"
NEEDED_MEASUREMENTS = (
    "at least one pool needs measured.slice_seconds for a size that divides samples_per_prompt, and another card "
    "measured.train_seconds_per_sample"
)


@dataclass
class _Search:
    """The state of the search: the best candidate of every split, and the simulations so far."""

    workload: Workload
    options: PlanOptions
    progress: Progress
    best_of_split: dict[str, tuple[float, Candidate]] = field(default_factory=dict)
    found: list[Candidate] = field(default_factory=list)
    tried: set[int] = field(default_factory=set)  # ids of candidates, which `found` keeps alive
    considered: int = 0
    refined: int = 0  # simulations after the search, for staleness and slices
    least_bound_left: float = inf

    def score(self, candidate: Candidate, makespan_s: float) -> float:
        """The objective, to be minimized: seconds, or dollars for the same samples."""
        return makespan_s * (candidate.layout.usd_per_hour if self.options.objective == "cost" else 1.0)

    @property
    def splits_wanted(self) -> int:
        return max(self.options.keep, SLICED_SPLITS)

    def best_score(self) -> float:
        return min((score for score, _ in self.best_of_split.values()), default=inf)

    def explore(self, found: Iterable[Candidate], budget: int) -> None:
        """Simulates candidates, best bound first, until none can beat the best plan by more than the tolerance.

        Runs at most `budget` simulations; `least_bound_left` is the best bound that was not simulated.
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
        """Simulates a few more candidates of the splits that will be shown, to show each at its best."""
        shown = sorted(self.best_of_split, key=lambda split: self.best_of_split[split][0])[: self.options.keep]
        tries = dict.fromkeys(shown, POLISH_TRIES)
        for candidate in sorted(self.found, key=lambda candidate: candidate.bound_s):
            split = candidate.layout.split
            if tries.get(split, 0) == 0 or id(candidate) in self.tried:
                continue
            if self.score(candidate, candidate.bound_s) < self.best_of_split[split][0]:
                tries[split] -= 1
                self._try(candidate)

    def less_stale(self, candidate: Candidate, makespan_s: float) -> tuple[Candidate, float]:
        """The candidate with the smallest stale share that is almost as fast, and its makespan."""
        limit_s = makespan_s * (1 + STALE_MIN_GAIN)
        for share in sorted(share for share in self.options.stale_shares if share < candidate.rates.stale_share):
            fresher = candidate.with_stale_share(share)
            if fresher.bound_s > limit_s:
                continue
            seconds = self._refined_makespan(fresher)
            if seconds <= limit_s:
                return fresher, seconds
        return candidate, makespan_s

    def slice_by_pool(self, candidate: Candidate, makespan_s: float) -> tuple[Candidate, float]:
        """The candidate with a slice size per pool, if it is predicted to beat the makespan, and its own."""
        return better_slices(
            candidate, makespan_s, self.workload, self._refined_makespan, self.options.tolerance, SLICING_TRIES
        )

    def spec(self, candidate: Candidate) -> Spec:
        return candidate.spec(self.workload, self.options.steps)

    def _refined_makespan(self, candidate: Candidate) -> float:
        self.refined += 1
        return predict_makespan(self.spec(candidate))

    def _cannot_win(self, bound: float) -> bool:
        return bound >= self.best_score() * (1 - self.options.tolerance)

    def _try(self, candidate: Candidate) -> None:
        self.tried.add(id(candidate))
        score = self.score(candidate, predict_makespan(self.spec(candidate)))
        split = candidate.layout.split
        if score < self.best_of_split.get(split, (inf,))[0]:
            self.best_of_split[split] = (score, candidate)


def plan(
    workload: Workload, cluster: Cluster, options: PlanOptions, progress: Progress = lambda done, total: None
) -> PlanResult:
    """The best plans for the workload on the cluster, best first, at most one per split of the cards.

    The trainer uses cards of one pool: its ranks are synchronous, so a slower card would delay all others.
    Raises ConfigError if the model does not fit the cluster.
    """
    search = _Search(workload, options, progress)
    check_ranks(cluster, options)
    sizes = _sizes_by_pool(cluster, options)
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
                for candidate in candidates(workload, splits(workload, cluster, pool, size, options), options)
            ),
            budget if len(tried) == len(fresh) else budget // 4,
        )
        if options.ranks is None:
            sizes = _refined_sizes(search, sizes)
    if not search.best_of_split:
        raise ConfigError(_does_not_fit(workload, cluster, options))
    search.polish()
    every_size = all(pool.cards - 1 <= EVERY_SIZE_UP_TO for pool in cluster.pools)
    shared = best_shared_plan(workload, cluster, options)
    result = _result(search, every_size, shared, colocated_plan(workload, cluster, options))
    return replace(result, trainer_places=compare_places(workload, cluster, options))


def check_ranks(cluster: Cluster, options: PlanOptions) -> None:
    """Raises ConfigError if no pool has cards for the trainer."""
    if not any(_sizes_by_pool(cluster, options).values()):
        raise ConfigError(_too_many_ranks(cluster, options))


def _sizes_by_pool(cluster: Cluster, options: PlanOptions) -> dict[CardPool, list[int]]:
    several = len(cluster.pools) > 1
    return {pool: _first_sizes(pool, several, options.ranks) for pool in cluster.pools}


def _first_sizes(pool: CardPool, others_generate: bool, ranks: int | None) -> list[int]:
    """The first trainer sizes to search; a whole pool can train if other pools generate."""
    most = pool.cards if others_generate else pool.cards - 1
    if ranks is not None:
        return [ranks] if ranks <= most else []
    if most <= EVERY_SIZE_UP_TO:
        return list(range(1, most + 1))
    inside_a_node = [size for size in (1, 2, 4) if size < pool.per_node]
    nodes = most // pool.per_node
    marks = {max(1, round(nodes * (mark / COARSE_SIZES) ** 2)) for mark in range(1, COARSE_SIZES + 1)}
    return inside_a_node + sorted(mark * pool.per_node for mark in marks)


def _refined_sizes(search: _Search, sizes: dict[CardPool, list[int]]) -> dict[CardPool, list[int]]:
    """The same sizes, and around the best trainer those halfway to its neighbors, in whole nodes."""
    if not search.best_of_split:
        return sizes
    _, best = min(search.best_of_split.values(), key=lambda entry: entry[0])
    pool, size = best.layout.trainer.pool, best.layout.trainer.cards
    if len(sizes[pool]) >= pool.cards - 1 or size not in sizes[pool]:
        return sizes
    grid = sizes[pool]
    place = grid.index(size)
    halfway = {
        (size + neighbor) // 2 // pool.per_node * pool.per_node for neighbor in grid[max(0, place - 1) : place + 2]
    }
    return {**sizes, pool: sorted({*grid, *(mark for mark in halfway if mark > 0)})}


def _result(search: _Search, every_size: bool, shared: SharedResult, colocated: Plan | None) -> PlanResult:
    order, objective = _simulated_order(search.options), search.options.objective
    split_plans = _split_plans(search)
    plans = sorted([*split_plans, *([shared.plan] if shared.plan else [])], key=order)
    best = plans[0]
    explained = [replace(best, why=why_it_won(best, search.workload))]
    explained += [replace(other, why=why_it_lost(other, best, objective)) for other in plans[1:]]
    if colocated is not None:
        colocated = replace(colocated, why=why_it_lost(colocated, best, objective))
    first = best.makespan_s * (best.layout.usd_per_hour if objective == "cost" else 1.0)
    proven_gap = max(0.0, 1 - min(search.least_bound_left, search.best_score()) / first)
    return PlanResult(
        workload=search.workload,
        plans=tuple(explained),
        considered=search.considered + shared.considered,
        evaluated=len(search.tried) + search.refined + shared.evaluated,
        proven_gap=proven_gap,
        every_size=every_size,
        colocated=colocated,
        comparison=compared(split_plans[0], shared, colocated, objective),
    )


def _split_plans(search: _Search) -> list[Plan]:
    """The best splits, each simulated with its best slices and rules, best first."""
    by_score_then_price = sorted(
        search.best_of_split.values(), key=lambda entry: (entry[0], entry[1].layout.usd_per_hour)
    )
    keep = search.options.keep
    plans: list[Plan] = []
    scores: list[float] = []  # of the splits so far, with their best slices
    for place, (score, found) in enumerate(by_score_then_price[: search.splits_wanted]):
        candidate, makespan_s = search.less_stale(found, score / search.score(found, 1.0))
        if place < keep:
            plans.append(_simulated(search, candidate))
        else:  # shown only if its slices beat one of the others
            makespan_s = min(makespan_s, sorted(scores)[keep - 1] / search.score(candidate, 1.0))
        sliced, makespan_s = search.slice_by_pool(candidate, makespan_s)
        if sliced is not candidate:
            plans.append(_simulated(search, sliced))
        scores.append(search.score(candidate, makespan_s))
    # The full simulation overrides the quick prediction.
    return _best_of_each_split(sorted(plans, key=_simulated_order(search.options)))[:keep]


def _best_of_each_split(plans: list[Plan]) -> list[Plan]:
    """The first plan of every split, in order."""
    first: dict[str, Plan] = {}
    for plan in plans:
        first.setdefault(plan.layout.split, plan)
    return list(first.values())


def _simulated_order(options: PlanOptions) -> Callable[[Plan], tuple[float, float]]:
    if options.objective == "cost":
        return lambda plan: (plan.usd_per_1000_samples, plan.makespan_s)
    return lambda plan: (plan.makespan_s, plan.usd_per_1000_samples)


def _simulated(search: _Search, candidate: Candidate) -> Plan:
    spec, slices = search.spec(candidate), candidate.own_slices
    return simulated_plan(search.workload, candidate.layout, candidate.rates, spec, slices)


def _too_many_ranks(cluster: Cluster, options: PlanOptions) -> str:
    if cluster.cards == 1:
        return ONE_CARD
    pool = max(cluster.pools, key=lambda pool: pool.cards)
    left = "" if len(cluster.pools) > 1 else ", and at least one card has to generate"
    return (
        f"--ranks: {options.ranks} ranks are more than any pool has cards: {pool.name}, the largest, has "
        f"{pool.cards}{left}; use fewer ranks"
    )


def _does_not_fit(workload: Workload, cluster: Cluster, options: PlanOptions) -> str:
    """The memory that is missing on the pool with the most memory, in one line."""
    if cluster.cards == 1:
        return ONE_CARD
    if not workload.has_cost_model:
        return _not_measured(workload, cluster)
    capabilities = options.capabilities
    pool = max(cluster.pools, key=lambda pool: pool.card.memory_gib * pool.cards)
    if not pool.card.described:
        return f"no pool has a card of the catalog, so the plan needs measured costs: {NEEDED_MEASUREMENTS}"
    cards = options.ranks or (pool.cards if len(cluster.pools) > 1 else pool.cards - 1)
    shards = max(possible_shards(workload, pool, cards, capabilities))
    lane_cards = pool.per_node if capabilities.tensor_parallel else 1
    checkpointing = capabilities.checkpointing[-1]
    generating = generator_memory(workload, pool.card, 1, lane_cards)
    training = trainer_memory(workload, pool.card, shards, 1, checkpointing)
    way_out = "add cards or use larger ones" if shards > 1 else "use larger cards"
    if workload.tuning == "full":
        way_out += ", or use LoRA"
    elif workload.base != "nf4":
        way_out += ", or quantize the frozen weights (model.base=nf4)"
    if not checkpointing:
        way_out += ", or set training.gradient_checkpointing"
    return (
        f"{workload.model} ({workload.tuning}) does not fit this cluster of {cluster.cards} cards: {pool.name}, "
        f"the largest pool, has {training.available_gib:.1f} GiB free per card; training over {shards} needs "
        f"{training.total_gib:.1f} GiB per card, and generating over {lane_cards} needs "
        f"{generating.total_gib:.1f} GiB per card, on separate cards; {way_out}"
    )


def _not_measured(workload: Workload, cluster: Cluster) -> str:
    """The measurements that are missing for a model without a cost model, in one line."""
    sizes = ", ".join(map(str, workload.slice_sizes()))
    for pool in cluster.pools:
        table = pool.measured.slice_seconds
        if table is not None and not any(pool.measured.covers(size) for size in workload.slice_sizes()):
            return (
                f"{pool.name}: measured.slice_seconds has {', '.join(map(str, sorted(table)))}, which covers no "
                f"size that divides samples_per_prompt = {workload.samples_per_prompt}; measure one of {sizes}"
            )
    return f"{workload.model} is not in the catalog, so the plan needs measured costs: {NEEDED_MEASUREMENTS}"
