"""The time of a full fine-tuning checkpoint, and of its checksums with one core and with all cores.

    python benchmarks/saving.py                  # weights and moments of 0.1 G parameters, in fp32
    python benchmarks/saving.py --billions 2.2   # as large as SD3.5 medium's
    python benchmarks/saving.py --out /scratch   # another disk than that of temporary files

Saving and reading include checksums with all cores. Values are random. The checkpoint is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from digenrl.checksums import file_checksum
from digenrl.training.checkpoint.checkpoints import read_checkpoint, save_checkpoint
from digenrl.training.trainer_state import OptimizerState, TrainerState

WIDTH = 4096


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds. Checksums are computed for all saved files."""

    gigabytes: float
    saving_s: float
    reading_s: float
    one_core_s: float
    all_cores_s: float
    same: bool  # whether checksums agree and the weights read back are bitwise equal

    @property
    def gain(self) -> float:
        """The speed-up of checksums with all cores."""
        return self.one_core_s / self.all_cores_s


def state_of(parameters: int) -> TrainerState:
    """A trainer's state with random values."""
    weights = {f"block {index}": torch.randn(WIDTH, WIDTH) for index in range(max(1, parameters // WIDTH**2))}
    moments = {
        name: {"exp_avg": torch.randn_like(value), "exp_avg_sq": torch.rand_like(value)}
        for name, value in weights.items()
    }
    optimizer = OptimizerState({"lr": 1e-5}, moments)
    return TrainerState(batch=1, updates_done=1, pack_size=1, weights=weights, optimizer=optimizer)


def measure(parameters: int, folder: Path) -> Measured:
    """Writes, checks and reads one checkpoint."""
    state = state_of(parameters)
    saving_s, path = timed(lambda: save_checkpoint(folder, 1, state, {}))
    files = sorted(path.rglob("*.safetensors"))
    one_core_s, alone = timed(lambda: [file_checksum(file, threads=1) for file in files])
    all_cores_s, together = timed(lambda: [file_checksum(file) for file in files])
    reading_s, read = timed(lambda: read_checkpoint(path))
    weights = read.trainer_state.weights
    same = all(torch.equal(value, weights[name]) for name, value in state.weights.items())
    return Measured(
        gigabytes=sum(file.stat().st_size for file in files) / 1e9,
        saving_s=saving_s,
        reading_s=reading_s,
        one_core_s=one_core_s,
        all_cores_s=all_cores_s,
        same=same and alone == together,
    )


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def shown(result: Measured) -> Table:
    table = Table("", "seconds", "GB/s", box=None)
    for name, seconds in (
        ("saving", result.saving_s),
        ("reading", result.reading_s),
        ("checksums, one core", result.one_core_s),
        ("checksums, all cores", result.all_cores_s),
    ):
        table.add_row(name, f"{seconds:.2f}", f"{result.gigabytes / seconds:.2f}")
    return table


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--billions", type=float, default=0.1, help="billions of parameters, with 12 bytes each")
    parser.add_argument("--out", type=Path, help="folder for the temporary checkpoint")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.out) as folder:
        result = measure(round(options.billions * 1e9), Path(folder))
    if options.json:
        print(json.dumps(asdict(result) | {"gain": result.gain}))
        return
    out = Console()
    out.print(f"a checkpoint of {result.gigabytes:.2f} GB")
    out.print(shown(result))
    same = "all bits are equal" if result.same else "THE WEIGHTS READ BACK DIFFER"
    out.print(f"one core / all cores: {result.gain:.2f}x; {same}")


if __name__ == "__main__":
    main()
