"""What a Ray cluster costs the driver: seconds per event and per step, and the bytes that it gets.

    python benchmarks/ray_overhead.py           # a few short runs, on two idle cores

The same recipe runs with worker processes and on a Ray that is started on this machine, in turn. Driver seconds
are CPU seconds of the driver's process with all its threads. Tensors (prompts, trajectories, pixels, weights) go
between workers; the driver gets reports alone, and counts their bytes. For comparison: the bytes of the new
weights that a step brings to the generators.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from live_runs import recipe, run  # first: it sets the number of threads
from rich.console import Console
from rich.table import Table

from digenrl.config.recipe import Recipe
from digenrl.runs.journal import read_journal

LIMIT = 0.03  # of a step


@dataclass(frozen=True)
class Row:
    """One run."""

    mode: str
    steps: int
    step_s: float
    events_per_step: float
    driver_ms_per_step: float
    driver_ms_per_event: float
    report_bytes_per_step: float | None
    weights_bytes_per_step: float

    @property
    def share(self) -> float:
        """The driver's part of a step."""
        return self.driver_ms_per_step / 1000 / self.step_s


def settings(mode: str, steps: int, prompts: int) -> Recipe:
    return recipe(
        steps=steps,
        mode=mode,
        batch={"prompts": prompts, "samples_per_prompt": 8, "slice": 4},
        sample={"height": 32, "width": 64, "denoising_steps": 8},
        training={"learning_rate": 1e-6, "pack_size": 16, "lora": {"rank": 8, "alpha": 16}},
        techniques={"tag": "none"},
        cluster={"address": "local"},
        lanes={"device": "cpu", "rewards": 1, "threads": 1, "generators": 1},
    )


def measure(chosen: Recipe, folder: Path) -> Row:
    """One run, without its first two steps and its last."""
    got: list[int] = []
    done = run(chosen, folder, lambda grounds: got.append(getattr(grounds, "driver_bytes", lambda: 0)()))
    cpu_s = [later - sooner for sooner, later in zip(done.log.cpu_s, done.log.cpu_s[1:], strict=False)][1:-1]
    events = sum(1 for _ in read_journal(folder / "journal.jsonl")) / chosen.steps
    per_step_ms = fmean(cpu_s) * 1000
    return Row(
        mode=chosen.mode,
        steps=chosen.steps,
        step_s=fmean(step["step_s"] for step in done.settled()),
        events_per_step=events,
        driver_ms_per_step=per_step_ms,
        driver_ms_per_event=per_step_ms / events,
        report_bytes_per_step=got[0] / chosen.steps if chosen.mode == "ray" else None,
        weights_bytes_per_step=fmean(step["publish_bytes"] for step in done.settled()),
    )


def middle(rows: list[Row]) -> Row:
    """The row with the median share of the driver."""
    chosen = median([row.share for row in rows])
    return min(rows, key=lambda row: abs(row.share - chosen))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=10, help="of a step; more take longer")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: dict[str, list[Row]] = {"local": [], "ray": []}
    with tempfile.TemporaryDirectory() as parent:
        for index in range(options.rounds):
            for mode in rows:
                chosen = settings(mode, options.steps, options.prompts)
                rows[mode].append(measure(chosen, Path(parent) / f"{mode}-{index}"))
    shown = {mode: middle(of_mode) for mode, of_mode in rows.items()}
    ratio = median(row.step_s for row in rows["ray"]) / median(row.step_s for row in rows["local"])
    if options.json:
        print(
            json.dumps(
                {"ratio": ratio, "rows": {mode: [asdict(row) for row in each] for mode, each in rows.items()}}
            )
        )
        return
    show(shown, ratio, options.rounds)


def show(shown: dict[str, Row], ratio: float, rounds: int) -> None:
    table = Table()
    table.add_column("mode")
    for heading in (
        "step",
        "events a step",
        "driver a step",
        "driver an event",
        "share of a step",
        "reports a step",
    ):
        table.add_column(heading, justify="right")
    for row in shown.values():
        received: Any = "-" if row.report_bytes_per_step is None else f"{row.report_bytes_per_step / 1e3:.1f} kB"
        table.add_row(
            row.mode,
            f"{row.step_s:.2f} s",
            f"{row.events_per_step:.0f}",
            f"{row.driver_ms_per_step:.1f} ms",
            f"{row.driver_ms_per_event:.2f} ms",
            f"{row.share:.1%}",
            received,
        )
    Console(width=110).print(table)
    on_ray = shown["ray"]
    print(
        f"tensors between workers: {on_ray.tensor_bytes_per_step / 1e6:.1f} MB a step, none of them to the driver"
    )
    print(f"a step on Ray over one with worker processes, medians of {rounds} rounds: {ratio:.3f}")
    of_two_s = on_ray.driver_ms_per_step / 2000
    print(f"driver's seconds of a step of 2 s: {of_two_s:.1%}, limit {LIMIT:.0%}")


if __name__ == "__main__":
    main()
