"""What a Ray cluster costs the driver: seconds per event and per step, and the bytes that it gets.

    python benchmarks/ray_overhead.py           # a few short runs, on two idle cores

The same recipe runs with worker processes and on a Ray that is started on this machine, in turn. `loop` are CPU
seconds of the thread that decides and sends, which everybody waits for; `process` adds the threads of Ray in the
same process. Both are medians over steps: every tenth step the driver also predicts the next ones. Tensors
(prompts, trajectories, pixels, weights) go between workers; the driver gets reports alone, and counts their bytes.
For comparison: the bytes of the new weights that a step brings to the generators.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from measured_runs import recipe, run  # first: it sets the number of threads
from rich.console import Console
from rich.table import Table

from digenrl.config.recipe import Recipe
from digenrl.run_folder.journal import read_journal

WHOLE_GROUPS = 8
KINDS = (("local", WHOLE_GROUPS), ("ray", WHOLE_GROUPS), ("ray", 4))


@dataclass(frozen=True)
class Row:
    """One run."""

    mode: str
    slice: int
    steps: int
    step_s: float
    events_per_step: float
    loop_ms: float
    process_ms: float
    report_bytes_per_step: float | None
    weights_bytes_per_step: float

    @property
    def share(self) -> float:
        """The loop's part of a step."""
        return self.loop_ms / 1000 / self.step_s


def settings(mode: str, slice_size: int, steps: int, prompts: int) -> Recipe:
    return recipe(
        steps=steps,
        mode=mode,
        batch={"prompts": prompts, "samples_per_prompt": 8, "slice": slice_size},
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
    events = sum(1 for _ in read_journal(folder / "journal.jsonl")) / chosen.steps
    return Row(
        mode=chosen.mode,
        slice=int(chosen.batch.slice),
        steps=chosen.steps,
        step_s=fmean(step["step_s"] for step in done.settled()),
        events_per_step=events,
        loop_ms=typical_ms(done.log.loop_s),
        process_ms=typical_ms(done.log.cpu_s),
        report_bytes_per_step=got[0] / chosen.steps if chosen.topology.uses_ray else None,
        weights_bytes_per_step=fmean(step["publish_bytes"] for step in done.settled()),
    )


def typical_ms(seconds: list[float]) -> float:
    """What a step adds to a clock, by the median of all but the first two and the last."""
    return median(later - sooner for sooner, later in pairwise(seconds[1:-1])) * 1000


def middle(rows: list[Row]) -> Row:
    """The row with the median share of the driver."""
    chosen = median([row.share for row in rows])
    return min(rows, key=lambda row: abs(row.share - chosen))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=7, help="of a step; more take longer")
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
    show([middle(of_kind) for of_kind in rows.values()])
    by_mode = {mode: median(row.step_s for row in rows[mode, WHOLE_GROUPS]) for mode in ("local", "ray")}
    ratio = by_mode["ray"] / by_mode["local"]
    print(f"a step on Ray over one with worker processes, whole groups as slices: {ratio:.3f}")


def show(shown: list[Row]) -> None:
    """One row for each kind of run."""
    table = Table()
    for heading in (
        "mode",
        "slice",
        "step",
        "events",
        "loop",
        "an event",
        "of a step of 2 s",
        "process",
        "reports",
    ):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    for row in shown:
        received = "-" if row.report_bytes_per_step is None else f"{row.report_bytes_per_step / 1e3:.1f} kB"
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
    print(f"per step, but for `an event`; the weights alone, between workers: {weights / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
