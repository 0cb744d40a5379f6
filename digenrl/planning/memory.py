"""The memory of one generator or trainer card: weights, optimizer state, gradients and activations, in GiB."""

from __future__ import annotations

from dataclasses import dataclass

from digenrl.planning.facts.cards import Card
from digenrl.planning.facts.constants import CONSTANTS
from digenrl.planning.facts.model_facts import BYTES_FP32, Tokens
from digenrl.planning.facts.workload import Workload

GIB = float(2**30)

# Of a trained parameter, adapter or not: fp32 weight, fp32 gradient, and AdamW's two fp32 moments.
STATE_BYTES_PER_PARAMETER = 16.0
# Gradient sums that several cards add up are 64-bit integers.
SUM_BYTES_PER_PARAMETER = 8.0
# While one sharded block computes, the next one is prefetched.
GATHERED_BLOCKS = 2
# Checkpointing saves the hidden state of every block, and two blocks' activations during recomputation.
RECOMPUTED_BLOCKS = 2
# The decoder's widest layers: 128 channels, four live tensors; videos are decoded in short chunks.
DECODE_VALUES_PER_PIXEL = 128 * 4
DECODE_FRAMES_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Peak memory of one card."""

    weights_gib: float
    optimizer_gib: float
    activations_gib: float
    available_gib: float

    @property
    def total_gib(self) -> float:
        return self.weights_gib + self.optimizer_gib + self.activations_gib

    @property
    def fits(self) -> bool:
        return self.total_gib <= self.available_gib


def generator_memory(workload: Workload, card: Card, size: int, lane_cards: int = 1) -> MemoryReport:
    """A card of a lane of `lane_cards` that generates slices of `size` samples; text encoders run elsewhere.

    Of an evaluation, a single sample must fit: larger batches are divided where memory runs out. If it has frozen
    weights of its own, they are on the card besides the others.
    """
    adapters = 4.0 * workload.trained_parameters if workload.tuning == "lora" else 0.0
    sample = workload.height, workload.width, workload.frames
    held_out_bytes = workload.facts.weight_bytes / lane_cards if workload.held_out_weights else 0.0
    held_out = _denoising_and_decoding(
        workload, workload.held_out_tokens, 1 / lane_cards, workload.held_out_size or sample
    )
    working = max(
        *_denoising_and_decoding(workload, workload.tokens, size / lane_cards, sample),
        held_out_bytes + max(held_out),
    )
    return MemoryReport(
        weights_gib=(workload.weight_bytes / lane_cards + adapters + _vae_bytes(workload)) / GIB,
        optimizer_gib=0.0,
        activations_gib=working / GIB,
        available_gib=available_gib(card),
    )


def _denoising_and_decoding(
    workload: Workload, tokens: Tokens, samples: float, size: tuple[int, int, int]
) -> tuple[float, float]:
    """Bytes in use while `samples` of this height, width and frames are denoised, and while one is decoded."""
    height, width, frames = size
    block_bytes = workload.activations_per_block * workload.facts.block_hidden_bytes(tokens)
    denoising = samples * workload.branches * RECOMPUTED_BLOCKS * block_bytes
    decoded_values = height * width * min(frames, DECODE_FRAMES_AT_ONCE) * DECODE_VALUES_PER_PIXEL
    return denoising, decoded_values * workload.vae_value_bytes


def trainer_memory(
    workload: Workload, card: Card, shard_cards: int, pairs: int, checkpointing: bool
) -> MemoryReport:
    """A trainer card that holds one of `shard_cards` shards and trains `pairs` pairs per pass.

    A trainer with whole weights also has the VAE, with which it can generate.
    """
    facts, state = workload.facts, trained_state_bytes(workload)
    activations = activation_gib(workload, pairs, checkpointing)
    if workload.tuning == "full":
        weights, state = 0.0, state / shard_cards  # the state includes the fp32 weights
        gradient = BYTES_FP32 * workload.trained_parameters / shard_cards
        activations = max(activations, gradient / GIB)  # when a backward ends, its gradient has replaced them
    else:
        weights = workload.training_weight_bytes / shard_cards
    if shard_cards > 1 or workload.tuning == "full":
        weights += GATHERED_BLOCKS * workload.training_weight_bytes / facts.blocks
    if shard_cards == 1:
        weights += _vae_bytes(workload)
    return MemoryReport(
        weights_gib=weights / GIB,
        optimizer_gib=state / GIB,
        activations_gib=activations,
        available_gib=available_gib(card),
    )


def trained_state_bytes(workload: Workload) -> float:
    """What a trainer keeps of all trained parameters besides a pass: weights, moments, a gradient, and copies."""
    return workload.trained_parameters * (STATE_BYTES_PER_PARAMETER + BYTES_FP32 * workload.weight_copies)


def shared_card_memory(workload: Workload, card: Card, size: int, pairs: int, checkpointing: bool) -> MemoryReport:
    """A card that generates slices of `size` samples and trains `pairs` pairs per pass, one after the other.

    Frozen weights serve both. Weights that are trained are there twice: as published, and as a trainer's state.
    """
    generating = generator_memory(workload, card, size, 1)
    training = trainer_memory(workload, card, 1, pairs, checkpointing)
    frozen = (_vae_bytes(workload) + (workload.weight_bytes if workload.tuning == "lora" else 0.0)) / GIB
    sums = workload.trained_parameters * SUM_BYTES_PER_PARAMETER / GIB
    return MemoryReport(
        weights_gib=generating.weights_gib + training.weights_gib - frozen,
        optimizer_gib=training.optimizer_gib + sums,
        activations_gib=max(generating.activations_gib, training.activations_gib),
        available_gib=generating.available_gib,
    )


def _vae_bytes(workload: Workload) -> float:
    return float(workload.facts.vae_parameters * workload.vae_value_bytes)


def activation_gib(workload: Workload, pairs: int, checkpointing: bool) -> float:
    """Activations that `pairs` pairs save for their backward."""
    facts = workload.facts
    hidden_bytes = facts.block_hidden_bytes(workload.tokens)
    block_bytes = workload.activations_per_block * hidden_bytes
    if checkpointing:
        per_row = facts.blocks * hidden_bytes + RECOMPUTED_BLOCKS * block_bytes
    else:
        per_row = facts.blocks * block_bytes
    return pairs * workload.trained_branches * per_row / GIB


def smallest_lane(workload: Workload, card: Card, per_node: int) -> int | None:
    """The fewest tensor-parallel cards of a node that can generate one sample, or None."""
    lane_cards = 1
    while lane_cards <= per_node:
        if generator_memory(workload, card, 1, lane_cards).fits:
            return lane_cards
        lane_cards *= 2
    return None


def helper_fits_with_training(workload: Workload, card: Card, shard_cards: int, lane_cards: int) -> bool:
    """Whether a trainer card can hold a generator's copy of the weights in addition to its training state."""
    generating = generator_memory(workload, card, 1, lane_cards)
    state = trained_state_bytes(workload)
    training = state / shard_cards if workload.tuning == "full" else state
    if workload.tuning == "lora" and shard_cards > 1:
        training += workload.training_weight_bytes / shard_cards
    return generating.total_gib + training / GIB <= generating.available_gib


def available_gib(card: Card) -> float:
    """The memory of a card that plans may use."""
    return card.memory_gib * (1 - CONSTANTS.memory_headroom)
