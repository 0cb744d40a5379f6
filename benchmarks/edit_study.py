"""Does the editing demo learn, for every seed?

    python benchmarks/edit_study.py runs/edit_study            # three seeds, one after the other
    python benchmarks/edit_study.py runs/edit_study --at-once  # all at the same time
    python benchmarks/edit_study.py runs/edit_study --seeds 3 4 5

Runs that the folder already contains are not repeated. The same 128 held-out edits are scored before and after,
from the same noise; the standard error is that of the mean difference.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Console
from rich.table import Table

HELD_OUT = 128
COMMAND = (sys.executable, "-c", "from digenrl.cli import main; main()", "train", "edit_demo")


def start(seed: int, folder: Path, overrides: list[str]) -> subprocess.Popen[bytes]:
    """A run whose grids show every held-out edit, so that each reward is in their captions."""
    settings = [f"seed={seed}", f"evaluation.shown={HELD_OUT}", "mode=colocated", *overrides]
    return subprocess.Popen([*COMMAND, *settings, "--out", str(folder)], stdout=subprocess.DEVNULL)


def rewards(captions: Path) -> list[float]:
    """The reward of every held-out edit."""
    return [item["reward"] for item in json.loads(captions.read_text())["items"]]


def row(seed: int, folder: Path) -> tuple[str, ...]:
    """Seed, mean reward before and after, gain, its standard error, and their ratio."""
    first, *_, last = sorted((folder / "samples").glob("step_*.json"))
    before, after = rewards(first), rewards(last)
    gains = [new - old for old, new in zip(before, after, strict=True)]
    error = stdev(gains) / sqrt(len(gains))
    gain = fmean(gains)
    figures = (fmean(before), fmean(after), gain, error)
    return (str(seed), *(f"{figure:.4f}" for figure in figures), f"{gain / error:.1f}")


def main() -> None:
    """Runs all seeds and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--at-once", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2))
    given, overrides = parser.parse_known_args()
    running = []
    for seed in given.seeds:
        path = given.folder / f"seed-{seed}"
        if not path.exists():
            running.append(start(seed, path, overrides))
            if not given.at_once:
                running[-1].wait()
    for process in running:
        if process.wait() != 0:
            raise SystemExit(f"a run ended with code {process.returncode}")
    table = Table("seed", "before", "after", "gain", "standard error", "gain / standard error")
    for seed in given.seeds:
        table.add_row(*row(seed, given.folder / f"seed-{seed}"))
    Console().print(table)


if __name__ == "__main__":
    main()
