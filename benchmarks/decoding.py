"""Decoding with the VAE in fp32, the default, and in bf16: time and memory, with random weights.

python benchmarks/decoding.py                 # all families, on a GPU
python benchmarks/decoding.py sd3 wan
python benchmarks/decoding.py --tiny          # small samples, on a CPU
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from digenrl.models.contract import SampleSize
from digenrl.models.family import Family
from digenrl.models.loading.pipelines import building_on
from digenrl.models.registry import FAMILIES
from digenrl.models.transfers import synchronize

WARM_UP, ROUNDS = 2, 3
WORK = {
    "sd3": [(SampleSize(512, 512), 8)],
    "flux": [(SampleSize(512, 512), 8)],
    "qwen_image": [(SampleSize(512, 512), 8)],
    "wan": [(SampleSize(240, 416, 33), 1), (SampleSize(480, 832, 33), 1)],
    "hunyuan_video": [(SampleSize(480, 480, 53), 1)],
}
TINY = [(SampleSize(32, 32), 1)]


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of sample: seconds and, on a GPU, the peak memory of each dtype."""

    family: str
    size: tuple[int, int, int]
    samples: int
    bf16_s: float
    fp32_s: float
    bf16_bytes: int
    fp32_bytes: int


def latents_of(family: Family, vae: torch.nn.Module, size: SampleSize, rows: int) -> Tensor:
    """Random latents for samples of this size, of the VAE's dtype and device."""
    config: Any = vae.config
    channels = config.get("latent_channels") or config.get("z_dim")
    frames = () if family.name in ("sd3", "flux") else ((size.frames - 1) // 4 + 1,)
    shape = (rows, channels, *frames, size.height // 8, size.width // 8)
    weight = next(vae.parameters())
    return torch.randn(shape, device=weight.device, dtype=weight.dtype)


@torch.no_grad()
def measure(
    family: Family, size: SampleSize, rows: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, int]:
    """The mean seconds of a decode, and the peak bytes on a GPU."""
    with building_on(dtype, device):
        vae = family.vae.build().eval()
    latents = latents_of(family, vae, size, rows)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP):
        vae.decode(latents)
    synchronize(device)
    began = time.perf_counter()
    for _ in range(ROUNDS):
        vae.decode(latents)
    synchronize(device)
    seconds = (time.perf_counter() - began) / ROUNDS
    return seconds, torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def row_of(family: Family, size: SampleSize, rows: int, device: torch.device) -> Row:
    """Both dtypes, one after the other."""
    bf16_s, bf16_bytes = measure(family, size, rows, torch.bfloat16, device)
    fp32_s, fp32_bytes = measure(family, size, rows, torch.float32, device)
    shape = (size.height, size.width, size.frames)
    return Row(family.name, shape, rows, bf16_s, fp32_s, bf16_bytes, fp32_bytes)


def shown(rows: list[Row]) -> Table:
    table = Table("", "samples", "bf16", "fp32", "time", "memory", box=None)
    for row in rows:
        name = f"{row.family} {' x '.join(map(str, row.size))}"
        cells = [
            f"{seconds * 1e3:.0f} ms, {peak / 2**30:.1f} GiB"
            for seconds, peak in ((row.bf16_s, row.bf16_bytes), (row.fp32_s, row.fp32_bytes))
        ]
        memory = f"{row.fp32_bytes / row.bf16_bytes:.2f}x" if row.bf16_bytes else "-"
        table.add_row(name, str(row.samples), *cells, f"{row.fp32_s / row.bf16_s:.2f}x", memory)
    return table


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help=f"all by default: {', '.join(WORK)}")
    parser.add_argument("--tiny", action="store_true", help="small samples, on the CPU")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    options = parser.parse_args()
    if unknown := set(options.families) - WORK.keys():
        sys.exit(f"unknown family {min(unknown)}; known: {', '.join(WORK)}")
    if not options.tiny and not torch.cuda.is_available():
        sys.exit("no GPU was found; add --tiny to run on the CPU")
    device = torch.device("cpu" if options.tiny else "cuda")
    rows = [
        row_of(FAMILIES[name], size, count, device)
        for name in options.families or WORK
        for size, count in (TINY if options.tiny else WORK[name])
    ]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        Console().print(shown(rows))


if __name__ == "__main__":
    main()
