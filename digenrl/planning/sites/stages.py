"""A trainer in stages over the cards of several pools: where the model is cut, and how long a step trains.

Cards of one site are neighbors in the chain, so the pipeline crosses the slow link between two sites once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import ceil

from digenrl.planning.candidates import PlanOptions
from digenrl.planning.costs import GB, GBIT, TrainerLayout, commit_seconds, network_bytes_s, training_pass_seconds
from digenrl.planning.facts.cluster import CardPool, Cluster
from digenrl.planning.facts.workload import Workload
from digenrl.planning.memory import GIB, RECOMPUTED_BLOCKS, available_gib, trained_state_bytes
from digenrl.planning.sites.groups import site_gbit_s
from digenrl.stages.partition import Partition, best_partition

MOST_STAGES = 16
MOST_SITES = 4  # up to this number, every order of sites is tried
PACKS = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class StagedTrainer:
    """Cards in the order of their stages, and the cut with the shortest step. Packs are the micro-batches."""

    cards: tuple[CardPool, ...]  # the pool of each card
    cut: Partition
    commit_s: float

    @property
    def step_s(self) -> float:
        """The time to train and commit a step."""
        return self.cut.step_s + self.commit_s

    @property
    def slowest_link(self) -> tuple[int, float]:
        """The link that takes longest for a pack, as the index of the stage before it, and its seconds."""
        seconds = self.cut.link_s
        return max(enumerate(seconds), key=lambda entry: entry[1])


def best_stages(workload: Workload, cluster: Cluster, options: PlanOptions) -> StagedTrainer | None:
    """The fastest trainer in stages over all cards; None if no cut fits or there are too many cards."""
    if cluster.cards > min(MOST_STAGES, workload.facts.blocks):
        return None
    pairs = workload.trained_samples(workload.samples_per_step) * workload.pairs_per_sample
    found = [
        staged
        for cards in _chains(cluster)
        for checkpointing in options.capabilities.checkpointing
        for pack in PACKS
        if pack <= pairs and (staged := _staged(workload, cluster, cards, pack, checkpointing)) is not None
    ]
    return min(found, key=lambda staged: staged.step_s, default=None)


def link_bytes_s(cluster: Cluster, cards: Sequence[CardPool], stage: int) -> float:
    """The bandwidth between a stage's card and the next; cards of a pool fill one node after the other."""
    first, second = cards[stage], cards[stage + 1]
    if first == second:
        place = cards[: stage + 1].count(first)
        if place % first.per_node:
            return first.card.card_link_gb_s * GB
        return network_bytes_s(first)
    between = site_gbit_s(cluster.sites, first.site, second.site)
    return GBIT * min(between, first.network_gbit_s, second.network_gbit_s)


def _chains(cluster: Cluster) -> Iterator[tuple[CardPool, ...]]:
    """The cards of all pools, site by site, for every order of the sites."""
    sites = cluster.site_names
    for order in permutations(sites) if len(sites) <= MOST_SITES else [sites]:
        pools = [pool for site in order for pool in cluster.pools if pool.site == site]
        yield tuple(pool for pool in pools for _ in range(pool.cards))


def _staged(
    workload: Workload, cluster: Cluster, cards: tuple[CardPool, ...], pack: int, checkpointing: bool
) -> StagedTrainer | None:
    facts, count = workload.facts, len(cards)
    pairs = workload.trained_samples(workload.samples_per_step) * workload.pairs_per_sample
    passes = {pool: training_pass_seconds(workload, pool.card, pack, checkpointing) for pool in set(cards)}
    first_s = passes[cards[0]]
    forwards = 1 + workload.reference_forward + workload.old_policy_forward  # each sends activations
    rates = [link_bytes_s(cluster, cards, stage) for stage in range(count - 1)]
    hidden_bytes = pack * workload.trained_branches * facts.block_hidden_bytes(workload.tokens)
    try:
        cut = best_partition(
            [first_s / facts.blocks] * facts.blocks,
            [first_s / passes[pool] for pool in cards],
            forwards * hidden_bytes,
            rates,
            micro_batches=ceil(pairs / pack),
            fits=lambda stage, first, end: (
                _stage_bytes(workload, end - first, count, pack, checkpointing)
                <= GIB * available_gib(cards[stage].card)
            ),
        )
    except ValueError:  # no cut fits
        return None
    return StagedTrainer(cards, cut, _commit_seconds(workload, cards, rates))


def _stage_bytes(workload: Workload, blocks: int, stages: int, pack: int, checkpointing: bool) -> float:
    """The memory of a stage: its blocks, all adapters with their state, and the activations of packs in flight."""
    facts = workload.facts
    share = blocks / facts.blocks
    state = trained_state_bytes(workload)
    if workload.tuning == "full":
        state *= share  # includes the weights
    else:
        state += share * workload.training_weight_bytes
    hidden = facts.block_hidden_bytes(workload.tokens)
    block = workload.activations_per_block * hidden
    rows = pack * workload.trained_branches
    per_row = blocks * (hidden if checkpointing else block)
    recomputed = rows * RECOMPUTED_BLOCKS * block if checkpointing else 0.0
    return state + 2 * stages * rows * per_row + recomputed


def _commit_seconds(workload: Workload, cards: Sequence[CardPool], rates: Sequence[float]) -> float:
    """The optimizer step of the slowest card and, for adapters, the sum of their gradients over all stages."""
    alone = [TrainerLayout(pool, 1, 1, 1, False) for pool in set(cards)]
    optimizer_s = max(commit_seconds(workload, each) for each in alone)
    if workload.tuning == "full":
        return optimizer_s / len(cards)
    gradient_bytes = 4.0 * workload.trained_parameters * 2 * (len(cards) - 1) / len(cards)
    return optimizer_s + workload.updates_per_batch * gradient_bytes / min(rates)
