"""Measurements on one NVIDIA H200 that calibrate the cost model: bf16, torch 2.11, diffusers 0.42, random weights.

Sizes are the image's side in pixels (SD3.5-M, FLUX.1, Qwen-Image) or the frames of a clip of 480x832 (Wan) or
480x640 (Hunyuan). Rows with another attention kernel are left out.
"""

# Plain diffusers, eager: (family, size, samples in one forward, seconds)
FORWARD_ROWS = (
    ("flux", 512, 1, 0.066),
    ("flux", 512, 2, 0.1144),
    ("flux", 512, 4, 0.2234),
    ("flux", 512, 8, 0.4358),
    ("flux", 1024, 1, 0.1969),
    ("flux", 1024, 2, 0.387),
    ("flux", 1024, 4, 0.7617),
    ("flux", 1024, 8, 1.5054),
    ("qwen", 512, 1, 0.1542),
    ("qwen", 512, 2, 0.2079),
    ("qwen", 512, 4, 0.3773),
    ("qwen", 512, 8, 0.7179),
    ("wan", 33, 1, 1.2266),
    ("wan", 33, 2, 2.4614),
    ("hunyuan", 33, 1, 1.1031),
    ("hunyuan", 33, 2, 2.2496),
)

# The same: (family, size, checkpointing, pairs in one LoRA r=32 forward and backward, seconds, peak GiB)
TRAINING_ROWS = (
    ("flux", 512, True, 1, 0.7561, 23.1),
    ("flux", 512, True, 2, 0.4064, 23.8),
    ("flux", 512, True, 4, 0.7402, 25.2),
    ("flux", 512, True, 8, 1.4464, 28.1),
    ("flux", 512, False, 1, 0.2658, 28.7),
    ("flux", 512, False, 2, 0.2899, 35.1),
    ("flux", 512, False, 4, 0.5122, 47.9),
    ("flux", 512, False, 8, 1.0002, 73.3),
    ("qwen", 512, True, 1, 0.9614, 39.3),
    ("qwen", 512, True, 2, 1.1049, 40.2),
    ("qwen", 512, True, 4, 1.5012, 42.2),
    ("qwen", 512, True, 8, 2.337, 46.0),
    ("qwen", 512, False, 1, 0.5203, 53.7),
    ("qwen", 512, False, 2, 0.4744, 69.0),
    ("qwen", 512, False, 4, 0.8463, 99.5),
    ("wan", 33, True, 1, 4.8403, 36.5),
    ("wan", 33, True, 2, 9.5938, 45.9),
    ("hunyuan", 33, True, 1, 4.8843, 29.8),
    ("hunyuan", 33, True, 2, 9.4386, 35.5),
)

# This runtime, compiled, as printed by benchmarks/gpu.py. Prompts have 128 tokens unless the family pads them.
COMPILED_FORWARD_ROWS = (
    ("sd3", 512, 1, 0.0105),
    ("sd3", 512, 8, 0.0459),
    ("flux", 512, 1, 0.0414),
    ("flux", 512, 8, 0.2982),
    ("qwen", 512, 1, 0.0408),
    ("qwen", 512, 8, 0.2364),
    ("wan", 33, 1, 0.8788),
    ("hunyuan", 33, 1, 0.4329),
)

# The same, packed as the trainer chose: (family, size, pairs, seconds of a pair, peak GiB)
COMPILED_TRAINING_ROWS = (
    ("sd3", 512, 48, 0.01464, 83.0),
    ("flux", 512, 14, 0.0842, 113.7),
    ("qwen", 512, 16, 0.0629, 127.5),
    ("wan", 33, 1, 2.325, 119.3),
    ("hunyuan", 33, 2, 1.178, 122.1),
)

# Slower than the pack of two in the next row, so it includes a warm-up: used for memory only.
WARM_UP_ROW = ("flux", 512, True, 1, 0.7561, 23.1)

# (GiB of all weights, seconds from pinned host memory to the card)
ONLOAD_ROWS = ((22.2, 0.440), (38.1, 0.750), (26.6, 0.535), (23.9, 0.469))
