"""The overhead of Ray in the driver: seconds per event and per step, and the bytes that it receives.

    python benchmarks/ray_overhead.py           # a few short runs, on two idle cores

The same recipe runs alternately with worker processes and on a Ray cluster started on this machine. `loop` is the
CPU time of the driver's main thread, which decides and submits jobs and which all workers wait for; `process`
includes Ray's threads in the same process. Both are medians over steps, because every tenth step the driver also
predicts the next ones. Tensors (prompts, trajectories, pixels, weights) travel between workers. The driver
receives only results and counts their bytes. For comparison, the bytes of the weights published
per step are printed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from unittest.mock import patch

from counted_pickle import CountedPickle
from measured_runs import recipe, run  # first: it sets the number of threads
from rich.console import Console
from rich.table import Table

from digenrl.config.recipes.recipe import Recipe
from digenrl.run_folder.journal import read_journal
from digenrl.transports.ray import transport as ray_transport

WHOLE_GROUPS = 8
KINDS = (("local", WHOLE_GROUPS), ("ray", WHOLE_GROUPS), ("ray", 4))


@dataclass(frozen=True)
class Row:
    """One run. Times and bytes are per step."""

    mode: str
    slice: int
    steps: int
    step_s: float
    events_per_step: float
    loop_ms: float
    process_ms: float
    result_bytes_per_step: float | None
    weights_bytes_per_step: float

    @property
    def share(self) -> float:
        """The share of a step that the driver's loop uses."""
        return self.loop_ms / 1000 / self.step_s


def settings(mode: str, slice_size: int, steps: int, prompts: int) -> Recipe:
    return recipe(
        steps=steps,
        mode=mode,
        batch={"prompts": prompts, "samples_per_prompt": 8, "slice": slice_size},
        sample={"height": 32, "width": 64, "denoising_steps": 8},
        training={"learning_rate": 1e-6, "pack_size": 16, "lora": {"rank": 8, "alpha": 16}},
        techniques={"tag": "none"},
        cluster={"address": "local"} if mode == "ray" else {},
        lanes={"device": "cpu", "rewards": 1, "threads": 1, "generators": 1},
    )


def measure(chosen: Recipe, folder: Path) -> Row:
    """Runs the recipe. The first two steps and the last are not counted."""
    reports = CountedPickle()  # all that the driver receives
    with patch.object(ray_transport, "pickle", reports):
        done = run(chosen, folder)
    events = sum(1 for _ in read_journal(folder / "journal.jsonl")) / chosen.steps
    return Row(
        mode=chosen.mode,
        slice=int(chosen.batch.slice),
        steps=chosen.steps,
        step_s=fmean(step["step_s"] for step in done.steady_steps()),
        events_per_step=events,
        loop_ms=typical_ms(done.log.loop_s),
        process_ms=typical_ms(done.log.cpu_s),
        result_bytes_per_step=reports.bytes_read / chosen.steps if chosen.topology.uses_ray else None,
        weights_bytes_per_step=fmean(step["publish_bytes"] for step in done.steady_steps()),
    )


def typical_ms(seconds: list[float]) -> float:
    """The median increase per step of a cumulative time, without the first two steps and the last."""
    return median(later - sooner for sooner, later in pairwise(seconds[1:-1])) * 1000


def median_row(rows: list[Row]) -> Row:
    """The row with the median share of the driver."""
    share = median([row.share for row in rows])
    return min(rows, key=lambda row: abs(row.share - share))


def main() -> None:
    """Runs all rounds and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=7, help="prompts per step; more take longer")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: dict[tuple[str, int], list[Row]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as parent:
        for index in range(options.rounds):
            for mode, slice_size in KINDS:
                chosen = settings(mode, slice_size, options.steps, options.prompts)
                folder = Path(parent) / f"{mode}-{slice_size}-{index}"
                rows[mode, slice_size].append(measure(chosen, folder))
    if options.json:
        print(json.dumps([asdict(row) for of_kind in rows.values() for row in of_kind]))
        return
    show([median_row(of_kind) for of_kind in rows.values()])
    by_mode = {mode: median(row.step_s for row in rows[mode, WHOLE_GROUPS]) for mode in ("local", "ray")}
    ratio = by_mode["ray"] / by_mode["local"]
    print(f"step time on Ray / with worker processes, slices of whole groups: {ratio:.3f}")


def show(shown: list[Row]) -> None:
    """Prints one row per kind of run."""
    table = Table()
    for heading in (
        "mode",
        "slice",
        "step",
        "events",
        "loop",
        "per event",
        "share of a 2 s step",
        "process",
        "results",
    ):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    for row in shown:
        received = "-" if row.result_bytes_per_step is None else f"{row.result_bytes_per_step / 1e3:.1f} kB"
        table.add_row(
            row.mode,
            str(row.slice),
            f"{row.step_s:.2f} s",
            f"{row.events_per_step:.0f}",
            f"{row.loop_ms:.1f} ms",
            f"{row.loop_ms / row.events_per_step:.2f} ms",
            f"{row.loop_ms / 2000:.1%}",
            f"{row.process_ms:.1f} ms",
            received,
        )
    Console(width=110).print(table)
    weights = shown[-1].weights_bytes_per_step
    print(f"per step, except `per event`; weights sent between workers: {weights / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
