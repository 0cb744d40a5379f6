"""The constants of the cost model, each with its source. One set serves every card and every family.

Fitted to bf16 measurements on one NVIDIA H200 of forwards and LoRA training: 34 rows of plain diffusers, eager,
with and without gradient checkpointing, 1 to 8 samples a pass, and 19 of this runtime, compiled, 1 to 48.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constants:
    """Shares are of the data sheet's number; factors multiply the forward's cost."""

    # Measured: 766 of 989 TFLOPS in plain large matrix products.
    matmul_share: float = 0.775
    # Fitted: the fast attention kernel, the one of compiled rollouts, and the one that a text mask forces.
    attention_share: float = 0.335
    rollout_attention_share: float = 0.47
    masked_attention_share: float = 0.125
    # Fitted: backward of attention and of element-wise work, in forwards.
    attention_backward: float = 3.1
    traffic_backward: float = 1.1
    # Fitted: kernels launched by a training pass, in forwards' launches (adapters and checkpoints add theirs).
    training_launches: float = 4.3
    checkpointed_launches: float = 8.3
    # Measured: 54.7 of 63 GB/s between pinned host memory and the card.
    host_link_share: float = 0.87
    # Assumed: what collectives reach of a link, and how much of the shorter of compute and gather hides in the
    # longer.
    collective_share: float = 0.8
    gather_overlap: float = 0.7
    # A convention: models' decode_gflop_per_pixel is fitted to times at this share.
    decode_share: float = 0.4
    # Assumed: fixed time of a collective over all ranks, of an optimizer step and of swapping adapters on a lane.
    collective_latency_s: float = 0.005
    optimizer_fixed_s: float = 0.05
    adapter_swap_s: float = 0.05
    # AdamW in fp32 reads and writes weight, gradient and two moments, and writes the bf16 copy.
    optimizer_bytes_per_parameter: float = 30.0
    # Assumed: memory left to the driver, the caching allocator's fragments and communication buffers.
    memory_headroom: float = 0.08


CONSTANTS = Constants()
