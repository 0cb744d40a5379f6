"""The gain from scoring in the background of a single device instead of in turn with its other work.

    python benchmarks/background_scoring.py # about a minute on an idle machine with two cores

The demo's model is trained in mode colocated, with `lanes.rewards` 0 and 1 and with two rewards: one that waits
0.02 s per sample for a server, and the demo's OCR model, which uses a CPU core. Both runs compute the same
weights.
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
    "a server": {
        "name": "function",
        "target": "background_scoring:served",
        "arguments": {"seconds_per_sample": 0.02},
    },
    "OCR on a core": {"name": "ocr", "detect": False, "width": 96},
}


def served(
    pixels_BFCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Any], seconds_per_sample: float
) -> list[float]:
    """Returns the brightness, after the time that a server would take."""
    time.sleep(seconds_per_sample * len(prompts))
    return [float(value) for value in pixels_BFCHW.mean(dim=(1, 2, 3, 4))]


def step_seconds(done: LiveRun) -> float:
    """The mean duration of a steady step."""
    steps = done.steady_steps(skip=1)
    return sum(step["step_s"] for step in steps) / len(steps)


def main() -> None:
    """Runs every reward in both ways and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    steps = parser.parse_args().steps
    table = Table("reward", "step, in turn", "step, in background", "in turn / in background", box=None)
    with tempfile.TemporaryDirectory() as folder:
        for name, reward in REWARDS.items():
            measured_s = [
                step_seconds(
                    run(
                        recipe(mode="colocated", steps=steps, rewards=[reward], lanes={"rewards": lanes}),
                        Path(folder) / f"{name}-{lanes}",
                    )
                )
                for lanes in (0, 1)
            ]
            table.add_row(name, *(f"{each:.2f} s" for each in measured_s), f"{measured_s[0] / measured_s[1]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
