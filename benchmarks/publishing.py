"""Bytes per published weight version, whole and as a patch, by what is trained, learning rate and precision.

    python benchmarks/publishing.py [--numbers 1000000] [--json rows.json]

Weights and Adam updates are synthetic: gradients are noise with a weak constant direction, as in RL. A version is
published after every update, with the codec that runs use; every patch is applied and compared bit for bit. Runs
publish in float32; bfloat16 shows what rounded weights would take.
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from digenrl.byte_codecs import has_zstd
from digenrl.exchange.patches import Patch, VersionBytes, apply_patch, make_patch

WARM_UP_UPDATES, VERSIONS = 30, 4
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8
DIRECTION = 0.1  # the constant part of a gradient; its noise has a standard deviation of 1
WEIGHT_STD = {"lora": 0.01, "full": 0.02}
CASES = [("lora", 3e-4), ("lora", 1e-4), ("lora", 1e-5), ("full", 1e-5), ("full", 1e-6)]
DTYPES = (torch.float32, torch.bfloat16)
LINK_BYTES_PER_S = 100e6 / 8


@dataclass(frozen=True)
class Row:
    """Means over some versions. Bytes are per trained number, rates in bytes of whole weights per second."""

    trained: str
    learning_rate: float
    dtype: str
    changed_share: float
    whole_bytes: float
    patch_bytes: float
    encode_mb_s: float
    decode_mb_s: float

    @property
    def ratio(self) -> float:
        """How many times smaller a patch is."""
        return self.whole_bytes / self.patch_bytes


def adam_versions(numbers: int, std: float, learning_rate: float) -> Iterator[Tensor]:
    """Weights after consecutive updates, beginning when the moments have settled."""
    generator = torch.Generator().manual_seed(0)
    weights = std * torch.randn(numbers, generator=generator)
    direction = DIRECTION * torch.randn(numbers, generator=generator).sign()
    first, second = torch.zeros(numbers), torch.zeros(numbers)
    for update in range(1, WARM_UP_UPDATES + VERSIONS + 1):
        gradient = direction + torch.randn(numbers, generator=generator)
        first.lerp_(gradient, 1 - BETA_1)
        second.lerp_(gradient.square(), 1 - BETA_2)
        step = (first / (1 - BETA_1**update)) / ((second / (1 - BETA_2**update)).sqrt() + EPSILON)
        weights = weights - learning_rate * step
        if update >= WARM_UP_UPDATES:
            yield weights


def version_bytes(name: str, weights: Tensor) -> VersionBytes:
    """A version as the exchange holds it."""
    content = weights.view(torch.uint8).numpy()
    return VersionBytes(name, content, zlib.crc32(content.data), weights.itemsize)


def measure(trained: str, learning_rate: float, dtype: torch.dtype, numbers: int) -> Row:
    """Patches from version to version."""
    versions = [each.to(dtype) for each in adam_versions(numbers, WEIGHT_STD[trained], learning_rate)]
    changed = patch_bytes = 0
    encode_s = decode_s = 0.0
    for old, new in pairwise(versions):
        base, version = version_bytes("old", old), version_bytes("new", new)
        started_s = time.perf_counter()
        encoded = make_patch(base, version).encode()
        encoded_s = time.perf_counter()
        found = apply_patch(Patch.decode(encoded), base)
        decode_s += time.perf_counter() - encoded_s
        encode_s += encoded_s - started_s
        assert (found.content == version.content).all(), "the patch is not exact"
        changed += int((old != new).sum())
        patch_bytes += len(encoded)
    count = numbers * (len(versions) - 1)
    total_mb = count * dtype.itemsize / 1e6
    name = str(dtype).removeprefix("torch.")
    shares = changed / count, dtype.itemsize, patch_bytes / count
    return Row(trained, learning_rate, name, *shares, total_mb / encode_s, total_mb / decode_s)


def print_table(rows: list[Row]) -> None:
    """Prints the rows, with the seconds that a version of 100 million numbers takes over 100 Mbit/s."""
    codec = "zstd" if has_zstd() else "zlib"
    table = Table(title=f"bytes per trained number and version ({codec}); 100 M numbers over 100 Mbit/s")
    names = (
        "trained",
        "learning rate",
        "dtype",
        "changed",
        "whole",
        "patch",
        "ratio",
        "whole s",
        "patch s",
        "coding",
    )
    for name in names:
        table.add_column(name, justify="left" if name in ("trained", "dtype") else "right")
    for row in rows:
        seconds = [f"{size * 1e8 / LINK_BYTES_PER_S:.0f}" for size in (row.whole_bytes, row.patch_bytes)]
        coding = f"{row.encode_mb_s:.0f} / {row.decode_mb_s:.0f} MB/s"
        sizes = f"{row.whole_bytes:.2f}", f"{row.patch_bytes:.2f}", f"{row.ratio:.1f}x"
        facts = row.trained, f"{row.learning_rate:g}", row.dtype, f"{row.changed_share:.0%}"
        table.add_row(*facts, *sizes, *seconds, coding)
    Console(width=130).print(table)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--numbers", type=int, default=1_000_000, help="trained numbers per version")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    arguments = parser.parse_args()
    rows = [measure(trained, rate, dtype, arguments.numbers) for trained, rate in CASES for dtype in DTYPES]
    print_table(rows)
    if arguments.json is not None:
        facts = [asdict(row) | {"ratio": row.ratio} for row in rows]
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
