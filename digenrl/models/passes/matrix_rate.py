"""A device's rate of large matrix products."""

from __future__ import annotations

from time import perf_counter

import torch

from digenrl.models.transfers import synchronize

SIDE = {"cuda": 8192, "cpu": 256}  # of the matrices, by type of device
TYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
WARM_UPS = 3  # products
TIMED = {"cuda": 10, "cpu": 1}  # products per round
ROUNDS = {"cuda": 1, "cpu": 20}  # other processes slow a CPU down, short rounds less often than long ones


def matrix_tflops(device: torch.device) -> float:
    """The rate of a few products of square matrices: in bf16 on a GPU; on a CPU in fp32, the best of several.

    Their values are random: with equal values a GPU needs less power, and clocks higher than it can sustain.
    """
    side, dtype = SIDE[device.type], TYPE[device.type]
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(side, side, dtype=dtype, device=device, generator=generator) for _ in range(2))
    out = torch.empty_like(left)
    for _ in range(WARM_UPS):
        torch.matmul(left, right, out=out)
    synchronize(device)
    seconds = []
    for _ in range(ROUNDS[device.type]):
        began = perf_counter()
        for _ in range(TIMED[device.type]):
            torch.matmul(left, right, out=out)
        synchronize(device)
        seconds.append(perf_counter() - began)
    return TIMED[device.type] * 2 * side**3 / min(seconds) / 1e12
