"""What a single device gains by scoring beside it instead of in turn.

    python benchmarks/scoring_aside.py      # about a minute on an idle machine with two cores

The demo's model is trained in mode colocated, with `lanes.rewards` 0 and 1, by two rewards: one that waits for a
server, 0.02 s for each sample, and the OCR model of the demo, which takes a core. Both runs train the same.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measured_runs import LiveRun, recipe, run  # first: it sets the number of threads
from rich.console import Console
from rich.table import Table
from torch import Tensor

REWARDS: dict[str, Any] = {
    "a server": {"name": "function", "target": "scoring_aside:served", "arguments": {"seconds_per_sample": 0.02}},
    "OCR on a core": {"name": "ocr", "detect": False, "width": 96},
}


def served(
    pixels_BFCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Any], seconds_per_sample: float
) -> list[float]:
    """Brightness, after the time that a server would take."""
    time.sleep(seconds_per_sample * len(prompts))
    return [float(value) for value in pixels_BFCHW.mean(dim=(1, 2, 3, 4))]


def seconds(done: LiveRun) -> float:
    """Of a settled step."""
    steps = done.settled(skip=1)
    return sum(step["step_s"] for step in steps) / len(steps)


def main() -> None:
    """Runs all, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    steps = parser.parse_args().steps
    table = Table("reward", "step, in turn", "step, aside", "in turn / aside", box=None)
    with tempfile.TemporaryDirectory() as folder:
        for name, reward in REWARDS.items():
            took = [
                seconds(
                    run(
                        recipe(mode="colocated", steps=steps, rewards=[reward], lanes={"rewards": lanes}),
                        Path(folder) / f"{name}-{lanes}",
                    )
                )
                for lanes in (0, 1)
            ]
            table.add_row(name, *(f"{each:.2f} s" for each in took), f"{took[0] / took[1]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
