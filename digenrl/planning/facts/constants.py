"""The constants of the cost model, each with its source. One set serves all cards and all models.

Fitted to bf16 measurements of forwards and LoRA training on one NVIDIA H200: 34 rows of plain diffusers, eager,
with and without gradient checkpointing, 1 to 8 samples per pass, and 13 rows of this runtime, compiled, 1 to 48.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constants:
    """Shares are relative to the data sheet; factors multiply the cost of a forward."""

    # Measured: 766 of 989 TFLOPS in large matrix products.
    matmul_share: float = 0.775
    # Fitted: matrix products with a base in fp8 over those in bf16, in passes of FLUX.1 and Qwen-Image.
    fp8_matmul_speedup: float = 2.1
    # Fitted: the fast attention kernel, cuDNN's, which compiled models use, and the one that a text mask requires.
    attention_share: float = 0.335
    compiled_attention_share: float = 0.547
    masked_attention_share: float = 0.125
    # Fitted: backward of attention and of element-wise work, in forwards. Compilation fuses more of a forward.
    attention_backward: float = 3.1
    traffic_backward: float = 1.1
    compiled_attention_backward: float = 2.79
    compiled_traffic_backward: float = 1.4
    # Fitted: kernel launches of a training pass, in launches of a forward (adapters and checkpointing add some).
    training_launches: float = 4.3
    checkpointed_launches: float = 8.3
    # Measured: 54.7 of 63 GB/s between pinned host memory and the card.
    host_link_share: float = 0.87
    # Assumed: the share of a link's bandwidth that collectives reach, and the overlap of compute and gather, as a
    # share of the shorter of the two.
    collective_share: float = 0.8
    gather_overlap: float = 0.7
    # A convention: decode_gflop_per_pixel of a model is fitted to times at this share.
    decode_share: float = 0.4
    # A VAE in fp32 over one in bf16: 1.34 to 1.62 in five families on an H200, with TF32 convolutions.
    float32_decode: float = 1.5
    # Assumed: fixed times of a collective over all ranks, of an optimizer step, and of loading adapters on a lane.
    collective_latency_s: float = 0.005
    optimizer_fixed_s: float = 0.05
    adapter_swap_s: float = 0.05
    # AdamW in fp32 reads and writes weight, gradient and two moments, and writes the bf16 copy.
    optimizer_bytes_per_parameter: float = 30.0
    # Assumed: memory left for the driver, fragmentation of the caching allocator and communication buffers.
    memory_headroom: float = 0.08
    # Measured with synthetic updates (docs/benchmarks.md): a patch over a whole version, for adapters at a
    # learning rate of 3e-4 and weights at 1e-5; and the rate at which a loaded CPU core makes patches.
    adapter_patch_share: float = 0.68
    bfloat16_adapter_patch_share: float = 0.37
    float32_patch_share: float = 0.5
    bfloat16_patch_share: float = 0.085
    patch_bytes_s: float = 140e6


CONSTANTS = Constants()
