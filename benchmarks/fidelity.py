"""How well the simulator predicts real runs: their step times, from measured costs, and their decisions.

    python benchmarks/fidelity.py                 # 20 short runs with different settings, on two idle cores
    python benchmarks/fidelity.py --assist both   # likewise, with lanes that generate and train

The journal of every run is replayed: run and simulator use the same scheduler, so every action must be the same.
The simulator then predicts the duration of a steady step from the costs that the run had measured at its end.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from measured_runs import LiveRun, recipe, run  # first: it sets the number of threads
from replaying import initial_state_of, replayed
from rich.console import Console
from rich.progress import track
from rich.table import Table

from digenrl.config.recipes.recipe import Recipe
from digenrl.runs.step_time_prediction import predicted_step_s


@dataclass(frozen=True)
class Row:
    """One run: its settings, and the simulator's prediction."""

    settings: str
    measured_s: float
    predicted_s: float
    decisions: int
    different: int  # decisions that differ in the replay

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return self.predicted_s / self.measured_s - 1


def settings_of(index: int, steps: int, assist: str) -> Recipe:
    """Random settings that depend on the index alone. Lanes do both only with GAP and help."""
    draw = random.Random(f"fidelity {index}")
    group = draw.choice([4, 6, 8, 12])
    slices = [size for size in range(2, group + 1) if group % size == 0]
    batch = {"prompts": draw.choice([3, 4, 6, 8]), "samples_per_prompt": group, "slice": draw.choice(slices)}
    techniques: dict[str, Any] = {
        "gap": draw.random() < 0.8,
        "tsp": draw.random() < 0.8,
        "tag": draw.choice(["none", "greedy", "search", "auto"]),
        "tcss": draw.choice([0.0, 0.0, 0.25, 0.5, 1.0]),
    }
    if assist == "both":
        techniques |= {"assist": assist, "gap": True, "tag": draw.choice(["greedy", "search", "auto"])}
    denoising = draw.choice([4, 6, 8, 10])
    fraction = draw.choice([0.5, 0.75, 0.99])
    return recipe(
        steps=steps,
        batch=batch,
        techniques=techniques,
        sample={"denoising_steps": denoising, "window": {"kind": "all", "fraction": fraction}},
    )


def description_of(chosen: Recipe) -> str:
    batch, techniques = chosen.batch, chosen.techniques
    on = [name for name in ("gap", "tsp") if getattr(techniques, name)]
    shape = f"{batch.prompts}x{batch.samples_per_prompt}/{batch.slice} N{chosen.sample.denoising_steps}"
    return f"{shape} {'+'.join(on) or '-'} {techniques.tag} {techniques.tcss:g}"


def compare(done: LiveRun) -> Row:
    """Replays the run's decisions and predicts its step time."""
    facts = json.loads((done.folder / "run.json").read_text())["initial_state"]
    pairs = list(replayed(initial_state_of(facts), done.folder / "journal.jsonl"))
    return Row(
        settings=description_of(done.recipe),
        measured_s=fmean(step["step_s"] for step in done.steady_steps()),
        predicted_s=predicted_step_s(done.log.states[-1]),
        decisions=len(pairs),
        different=sum(live.actions != again.actions for live, again in pairs),
    )


def main() -> None:
    """Runs all settings and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--assist", choices=["trainer", "both"], default="trainer", help="as techniques.assist")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    quiet = options.json or not sys.stderr.isatty()
    with tempfile.TemporaryDirectory() as parent:
        for index in track(range(options.runs), "running", disable=quiet, transient=True):
            rows.append(compare(run(settings_of(index, options.steps, options.assist), Path(parent) / str(index))))
    typical = median(abs(row.error) for row in rows)
    if options.json:
        print(json.dumps({"median_error": typical, "rows": [asdict(row) for row in rows]}))
        return
    table = Table()
    for heading in ("settings", "measured", "predicted", "error", "decisions", "differ"):
        table.add_column(heading, justify="left" if heading == "settings" else "right", no_wrap=True)
    for row in rows:
        times = (f"{row.measured_s:.3f}", f"{row.predicted_s:.3f}", f"{row.error:+.1%}")
        table.add_row(row.settings, *times, str(row.decisions), str(row.different))
    Console(width=100).print(table)
    print(f"median error of the step time over {len(rows)} runs: {typical:.1%}")
    print(f"decisions that differ in the replay: {sum(row.different for row in rows)}")


if __name__ == "__main__":
    main()
