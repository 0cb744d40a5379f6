"""Facts about a device: its name, its memory, and its rate of large matrix products."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from digenrl.config.profiles import DeviceFacts, rounded
from digenrl.host_memory import physical_bytes
from digenrl.models.passes.matrix_rate import matrix_tflops


def device_facts(device: torch.device) -> DeviceFacts:
    """The facts of this device, queried and measured; takes well under a second on a GPU."""
    rate = rounded(matrix_tflops(device))
    if device.type != "cuda":
        threads = torch.get_num_threads()
        name = f"{_processor()}, {threads} thread{'s' if threads > 1 else ''}"
        return DeviceFacts(name=name, memory_bytes=physical_bytes(), fp32_tflops=rate, torch=torch.__version__)
    card = torch.cuda.get_device_properties(device)
    return DeviceFacts(name=card.name, memory_bytes=card.total_memory, bf16_tflops=rate, torch=torch.__version__)


def _processor() -> str:
    """The processor's model name, from Linux if available."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
