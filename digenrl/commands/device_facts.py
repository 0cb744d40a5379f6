"""Facts about a device: its name, its memory, and its rate of large matrix products."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from time import perf_counter

import torch

from digenrl.config.profiles import DeviceFacts, rounded
from digenrl.models.transfers import synchronize

SIDE = {"cuda": 8192, "cpu": 512}  # of the matrices, by type of device
TYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
WARM_UPS, TIMED = 3, 10  # products


def device_facts(device: torch.device) -> DeviceFacts:
    """The facts of this device, queried and measured; takes well under a second on a GPU."""
    rate = rounded(matrix_tflops(device))
    if device.type != "cuda":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        threads = torch.get_num_threads()
        name = f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}"
        return DeviceFacts(name=name, memory_bytes=memory, fp32_tflops=rate, torch=torch.__version__)
    card = torch.cuda.get_device_properties(device)
    return DeviceFacts(name=card.name, memory_bytes=card.total_memory, bf16_tflops=rate, torch=torch.__version__)


def matrix_tflops(device: torch.device) -> float:
    """The mean rate of a few products of square matrices: in bf16 on a GPU, in fp32 on a CPU.

    Their values are random: with equal values a GPU needs less power, and clocks higher than it can sustain.
    """
    side, dtype = SIDE[device.type], TYPE[device.type]
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(side, side, dtype=dtype, device=device, generator=generator) for _ in range(2))
    out = torch.empty_like(left)
    for _ in range(WARM_UPS):
        torch.matmul(left, right, out=out)
    synchronize(device)
    began = perf_counter()
    for _ in range(TIMED):
        torch.matmul(left, right, out=out)
    synchronize(device)
    return TIMED * 2 * side**3 / (perf_counter() - began) / 1e12


def _processor() -> str:
    """The processor's model name, from Linux if available."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
