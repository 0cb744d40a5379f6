"""What each technique brings on one generator lane and one trainer lane, two cores of this machine.

    python benchmarks/overlap.py            # about three minutes on an idle machine with two cores

All runs train the demo's model on the same samples. The first takes turns in one process (colocated); then
generation and training are apart, first without and then with each technique in turn. The limit of two cores is
twice the samples that one core does per CPU second when it generates and trains in turn, packs included.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from live_runs import LiveRun, recipe, run  # first: it sets the number of threads
from rich.console import Console
from rich.progress import track
from rich.table import Table

NAIVE = {"gap": False, "tsp": False, "tag": "none", "tcss": 0.0}
LADDER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("naive", NAIVE),
    ("+ GAP", NAIVE | {"gap": True}),
    ("+ TSP", NAIVE | {"gap": True, "tsp": True}),
    ("+ TAG", NAIVE | {"gap": True, "tsp": True, "tag": "auto"}),
    ("+ TCSS", NAIVE | {"gap": True, "tsp": True, "tag": "auto", "tcss": 1.0}),
)


@dataclass(frozen=True)
class Row:
    """One way to run. Shares are of the time; stale and helped ones of the samples."""

    name: str
    samples_per_s: float
    over_naive: float
    of_limit: float
    generator_idle: float
    trainer_idle: float
    helped: float
    stale: float


def rate(done: LiveRun) -> float:
    """Samples per second over the settled steps."""
    steps = done.settled()
    return sum(step["samples"] for step in steps) / sum(step["step_s"] for step in steps)


def cpu_rate(done: LiveRun, skip: int = 2) -> float:
    """Samples per CPU second of a run in this process."""
    samples = sum(step["samples"] for step in done.log.steps[skip:-1])
    return samples / (done.log.cpu_s[-2] - done.log.cpu_s[skip - 1])


def mean(done: LiveRun, name: str) -> float:
    return fmean(step.get(name, 0.0) for step in done.settled())


def climb(steps: int, show: bool) -> tuple[list[Row], float]:
    """All rows, and the limit of two cores in samples per second."""
    runs: list[tuple[str, LiveRun]] = []
    with tempfile.TemporaryDirectory() as parent:
        plans: list[tuple[str, dict[str, Any]]] = [
            ("colocated", {"mode": "colocated", "techniques": {"tag": "none"}}),
            *((name, {"techniques": techniques}) for name, techniques in LADDER),
        ]
        for index, (name, changes) in enumerate(track(plans, "running", disable=not show, transient=True)):
            runs.append((name, run(recipe(steps=steps, **changes), Path(parent) / str(index))))
    limit = 2 * cpu_rate(runs[0][1])
    naive = rate(runs[1][1])
    return [row(name, done, naive, limit) for name, done in runs], limit


def row(name: str, done: LiveRun, naive: float, limit: float) -> Row:
    generator = "device-0" if done.recipe.mode == "colocated" else "generator-0"
    return Row(
        name=name,
        samples_per_s=rate(done),
        over_naive=rate(done) / naive,
        of_limit=rate(done) / limit,
        generator_idle=1 - mean(done, f"busy/{generator}"),
        trainer_idle=1 - mean(done, "busy/trainer"),
        helped=mean(done, "helped_share"),
        stale=mean(done, "stale_share"),
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows, limit = climb(options.steps, show=not options.json and sys.stderr.isatty())
    if options.json:
        print(json.dumps({"two_core_limit": limit, "rows": [asdict(each) for each in rows]}))
        return
    table = Table(title=f"limit of two cores: {limit:.1f} samples/s", title_justify="left")
    for heading in ("", "samples/s", "x naive", "of limit", "gen. idle", "train. idle", "helped", "stale"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for each in rows:
        cells = (f"{each.samples_per_s:.1f}", f"{each.over_naive:.2f}", f"{each.of_limit:.2f}")
        shares = (each.generator_idle, each.trainer_idle, each.helped, each.stale)
        table.add_row(each.name, *cells, *(f"{share:.0%}" for share in shares))
    Console().print(table)


if __name__ == "__main__":
    main()
