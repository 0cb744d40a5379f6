"""The time of a slice, a training pass, a gather, a commit, a publication and a role switch, in seconds.

Compute is a roofline per card: matrix products and attention at shares of its bf16 rate, element-wise work at its
memory bandwidth, and kernel launches on the host as a floor for small batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, hypot

from digenrl.config.recipes.base_precision import STORED_BYTES, UNQUANTIZED, BasePrecision
from digenrl.planning.facts.cards import Card
from digenrl.planning.facts.cluster import CardPool
from digenrl.planning.facts.constants import CONSTANTS
from digenrl.planning.facts.model_facts import BYTES_BF16, ForwardWork
from digenrl.planning.facts.workload import Workload
from digenrl.planning.memory import STATE_BYTES_PER_PARAMETER, SUM_BYTES_PER_PARAMETER, helper_fits_with_training

GB = 1e9
GBIT = 1e9 / 8
TERA = 1e12


@dataclass(frozen=True, slots=True)
class TrainerLayout:
    """The parallelism of the trainer's cards.

    `shard_cards` cards share one copy of the weights: 1 is plain data parallelism, all cards FSDP, the cards of a
    node hybrid sharding. `pack` pairs share one forward and backward. With `spread_steps` the pairs of a sample
    are distributed over ranks (time-step parallelism); without it one rank trains all steps of a sample. The cards
    of a replica (`replica_cards`) compute each pair together (context parallelism), as one rank.
    """

    pool: CardPool
    cards: int
    shard_cards: int
    pack: int
    checkpointing: bool
    spread_steps: bool = True
    replica_cards: int = 1

    def __post_init__(self) -> None:
        assert 1 <= self.shard_cards <= self.cards, "a copy of the weights is sharded over the trainer's cards"
        assert self.pack >= 1
        assert self.cards % self.replica_cards == 0, "all replicas have equally many cards"

    @property
    def replicas(self) -> int:
        """How many pairs are computed at a time."""
        return self.cards // self.replica_cards


def forward_seconds(workload: Workload, card: Card, rows: int, lane_cards: int = 1) -> float:
    """A transformer forward of `rows` sequences on a lane of `lane_cards` tensor-parallel cards."""
    work, base = workload.forward_work, workload.generating_base or workload.base
    busy_s = rows * sum(_phases(work, card, base)) / lane_cards
    busy_s += dequantize_seconds(workload, card, base) / lane_cards
    return hypot(work.launch_s, busy_s) + _tensor_parallel_seconds(workload, card, rows, lane_cards)


def slice_seconds(workload: Workload, card: Card, size: int, lane_cards: int = 1) -> float:
    """Denoising and decoding `size` samples on one lane; guidance doubles the rows of every forward.

    Pairs are only encoded, in at most the time of decoding.
    """
    decode_s = size * workload.decode_flop / (card.bf16_tflops * TERA * CONSTANTS.decode_share)
    if workload.float32_vae:
        decode_s *= CONSTANTS.float32_decode
    if workload.pairs:
        return decode_s
    forward_s = forward_seconds(workload, card, size * workload.branches, lane_cards)
    return workload.denoise_steps * forward_s + decode_s


def lane_slice_seconds(workload: Workload, pool: CardPool, size: int, lane_cards: int = 1) -> float:
    """The time of a slice on a lane of the pool: measured if possible, else modeled.

    Includes scoring if there are no reward lanes.
    """
    scoring_s = 0.0 if workload.reward_lanes else size * workload.reward_seconds
    if pool.measured.slice_seconds is not None:
        return pool.measured.slice_s(size) + scoring_s
    return slice_seconds(workload, pool.card, size, lane_cards) + scoring_s


def training_pass_seconds(workload: Workload, card: Card, pairs: float, checkpointing: bool) -> float:
    """Forward and backward of `pairs` packed (sample, time-step) pairs on one card, without gathers."""
    work = workload.forward_work
    matmul_s, attention_s, traffic_s = _phases(work, card, workload.base)
    without_gradient = workload.reference_forward + workload.old_policy_forward
    forwards = 1.0 + checkpointing + without_gradient
    weight_gradients = 2.0 if workload.tuning == "full" else 1.0  # frozen weights need no gradient
    attention_backward, traffic_backward = CONSTANTS.attention_backward, CONSTANTS.traffic_backward
    if work.compiled:
        attention_backward, traffic_backward = (
            CONSTANTS.compiled_attention_backward,
            CONSTANTS.compiled_traffic_backward,
        )
    per_row_s = (
        matmul_s * (forwards + weight_gradients)
        + attention_s * (forwards + attention_backward)
        + traffic_s * (forwards + traffic_backward)
    )
    launches = CONSTANTS.checkpointed_launches if checkpointing else CONSTANTS.training_launches
    launch_s = work.launch_s * (launches + without_gradient)
    dequantize_s = dequantize_seconds(workload, card, workload.base) * (forwards + 1.0)
    return hypot(launch_s, pairs * workload.trained_branches * per_row_s + dequantize_s)


def dequantize_seconds(workload: Workload, card: Card, base: BasePrecision) -> float:
    """Dequantizing all weights once: they are read, written in bf16, and read again by the products.

    fp8 is multiplied as it is.
    """
    if base in (UNQUANTIZED, "fp8"):
        return 0.0
    bytes_per_weight = STORED_BYTES[base] + 2 * BYTES_BF16
    return workload.facts.block_weights * bytes_per_weight / (card.memory_gb_s * GB)


def gather_seconds(workload: Workload, trainer: TrainerLayout) -> float:
    """The communication of one training pass: weights for forward and backward, and full gradients in fp32."""
    gradients = 4.0 * workload.trained_parameters if workload.tuning == "full" else 0.0
    sent = 2 * workload.weight_bytes + gradients
    return all_gather_seconds(sent, trainer)


def packed_pass_seconds(workload: Workload, trainer: TrainerLayout, pairs: int) -> float:
    """One pass of `pairs` pairs, with gathers that partly overlap with compute."""
    share = pairs / trainer.replica_cards
    compute_s = training_pass_seconds(workload, trainer.pool.card, share, trainer.checkpointing)
    compute_s += _token_exchange_seconds(workload, trainer, pairs)
    gather_s = gather_seconds(workload, trainer)
    exposed = (1 - CONSTANTS.gather_overlap) * min(compute_s, gather_s)
    return max(compute_s, gather_s) + exposed


def unit_seconds(workload: Workload, trainer: TrainerLayout, samples: int) -> float:
    """Training the trained share of `samples` samples that arrive together (a group, or a whole step).

    The rank with the most pairs sets the time; its pairs are cut into the fewest equal packs, part by part.
    """
    trained, pairs_per_sample = workload.trained_samples(samples), workload.pairs_per_sample
    if trainer.spread_steps:
        pairs = ceil(trained * pairs_per_sample / trainer.replicas)
    else:
        pairs = ceil(trained / trainer.replicas) * pairs_per_sample
    one_rank_s = trainer.pool.measured.train_seconds_per_sample
    if one_rank_s is not None:
        return samples * one_rank_s * pairs / (trained * pairs_per_sample)
    parts = min(workload.parts_per_group, pairs)
    passes = parts * ceil(pairs / parts / trainer.pack)
    small, larger_passes = divmod(pairs, passes)
    seconds = (passes - larger_passes) * packed_pass_seconds(workload, trainer, small)
    if larger_passes:
        seconds += larger_passes * packed_pass_seconds(workload, trainer, small + 1)
    return seconds


def commit_seconds(workload: Workload, trainer: TrainerLayout) -> float:
    """All updates of a batch: an all-reduce of gradients over the copies, and an optimizer step per shard."""
    if trainer.pool.measured.commit_seconds is not None:
        return trainer.pool.measured.commit_seconds
    if not workload.has_cost_model:
        return 0.0
    shards = trainer.shard_cards if workload.tuning == "full" else 1  # every card has all adapters
    copies = trainer.cards // shards
    gradient_bytes = 4.0 * workload.trained_parameters
    between_copies_s = 0.0
    if copies > 1:
        link = _link_bytes_s(trainer.pool, trainer.cards)
        between_copies_s = 2 * gradient_bytes * (copies - 1) / copies / link
    shard = workload.trained_parameters / shards
    optimizer_s = shard * CONSTANTS.optimizer_bytes_per_parameter / (trainer.pool.card.memory_gb_s * GB)
    fixed_s = CONSTANTS.optimizer_fixed_s + CONSTANTS.collective_latency_s
    return workload.updates_per_batch * (between_copies_s + optimizer_s + fixed_s)


def publish_seconds(workload: Workload, link_bytes_s: float) -> float:
    """Sending a weight version to all generators, pipelined over the nodes: the slowest link carries it once."""
    latency = CONSTANTS.adapter_swap_s if workload.tuning == "lora" else CONSTANTS.collective_latency_s
    return workload.published_bytes / link_bytes_s + latency


def switch_seconds(workload: Workload, trainer: TrainerLayout, lane_cards: int) -> tuple[float, float]:
    """Switching the trainer to generation, and back to training.

    A lane needs a full copy of the weights, which is gathered unless each card holds one. If the copy does not fit
    in memory together with the training state, the state is offloaded to the host and loaded again.
    """
    if trainer.pool.measured.switch_seconds is not None:
        return trainer.pool.measured.switch_seconds, trainer.pool.measured.switch_seconds
    if not workload.has_cost_model:
        return 0.0, 0.0
    gathered_bytes = workload.weight_bytes / lane_cards
    gather_s = 0.0 if trainer.shard_cards == 1 else all_gather_seconds(gathered_bytes, trainer)
    swap_s = CONSTANTS.adapter_swap_s
    if helper_fits_with_training(workload, trainer.pool.card, trainer.shard_cards, lane_cards):
        return gather_s + swap_s, swap_s
    state_bytes = workload.trained_parameters * STATE_BYTES_PER_PARAMETER / trainer.shard_cards
    offload_s = state_bytes / (trainer.pool.card.host_gb_s * GB * CONSTANTS.host_link_share)
    return gather_s + swap_s + offload_s, swap_s + offload_s


def lone_switch_seconds(workload: Workload, trainer: TrainerLayout) -> tuple[float, float]:
    """Switching one card that acts alone to generation, and back; adapters stay where they are."""
    if trainer.pool.measured.switch_seconds is None and workload.tuning == "lora":
        return 0.0, 0.0
    return switch_seconds(workload, trainer, 1)


def reduce_seconds(workload: Workload, cards: int, link_bytes_s: float) -> float:
    """Adding up the gradient sums of `cards` other cards, which all reach the trainer's card over one link.

    Between two updates of a batch, the new weights go the other way.
    """
    if not workload.has_cost_model:
        return 0.0
    sums_bytes = cards * workload.trained_parameters * SUM_BYTES_PER_PARAMETER
    sums_s = sums_bytes / link_bytes_s + CONSTANTS.collective_latency_s
    weights_s = workload.published_bytes / link_bytes_s + CONSTANTS.collective_latency_s
    return workload.updates_per_batch * sums_s + (workload.updates_per_batch - 1) * weights_s


def network_bytes_s(pool: CardPool) -> float:
    """The bandwidth of collectives between nodes; the cards of a node share its network."""
    return pool.network_gbit_s * GBIT * CONSTANTS.collective_share


def _phases(work: ForwardWork, card: Card, base: BasePrecision) -> tuple[float, float, float]:
    """The time of one row's matrix products, attention and element-wise work."""
    rate = card.bf16_tflops * TERA
    in_fp8 = base == "fp8" and card.fp8
    matmul_share = CONSTANTS.matmul_share * (CONSTANTS.fp8_matmul_speedup if in_fp8 else 1.0)
    attention_share = CONSTANTS.attention_share
    if work.masked_attention:
        attention_share = CONSTANTS.masked_attention_share
    elif work.compiled:
        attention_share = CONSTANTS.compiled_attention_share
    return (
        work.matmul_flop / (rate * matmul_share),
        work.attention_flop / (rate * attention_share),
        work.traffic_bytes / (card.memory_gb_s * GB),
    )


def _tensor_parallel_seconds(workload: Workload, card: Card, rows: int, lane_cards: int) -> float:
    """Two all-reduces of the hidden state per block, inside the node."""
    if lane_cards == 1:
        return 0.0
    facts = workload.facts
    sent = 2 * facts.blocks * rows * facts.block_hidden_bytes(workload.tokens)
    link = card.card_link_gb_s * GB * CONSTANTS.collective_share
    return 2 * sent * (lane_cards - 1) / lane_cards / link


def _token_exchange_seconds(workload: Workload, trainer: TrainerLayout, pairs: int) -> float:
    """The exchanges of a pass between the cards of a replica.

    In each block of every forward and backward, a card sends queries, keys, values and outputs of its tokens.
    """
    cards, facts = trainer.replica_cards, workload.facts
    if cards == 1:
        return 0.0
    passes = 2 + trainer.checkpointing + workload.reference_forward + workload.old_policy_forward
    own_bytes = facts.block_hidden_bytes(workload.tokens) / cards
    sent = 4 * own_bytes * (cards - 1) / cards * facts.blocks * pairs * workload.trained_branches
    return passes * sent / _link_bytes_s(trainer.pool, cards)


def _link_bytes_s(pool: CardPool, cards: int) -> float:
    """The slowest link of a ring over `cards` cards of the pool, node by node."""
    inside = pool.card.card_link_gb_s * GB * CONSTANTS.collective_share
    return inside if cards <= pool.per_node else min(inside, network_bytes_s(pool))


def all_gather_seconds(total_bytes: float, trainer: TrainerLayout) -> float:
    """An all-gather inside each shard group."""
    ranks = trainer.shard_cards
    if ranks == 1:
        return 0.0
    received = total_bytes * (ranks - 1) / ranks
    return received / _link_bytes_s(trainer.pool, ranks) + CONSTANTS.collective_latency_s
