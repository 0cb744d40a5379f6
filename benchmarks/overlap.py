"""The gain of each technique with one generator lane and one trainer lane, on two cores of this machine.

    python benchmarks/overlap.py            # about a quarter of an hour on an idle machine with two cores

All runs train the demo's model on the same samples. The first run alternates between generation and training in
one process (colocated). The others separate them, at first without any technique and then adding one at a time.
"both" is on-policy, as everything before it, and lets both lanes generate and train; TCSS adds to TAG alone.

The limit of two cores is what two colocated runs do at the same time, each alone on its core: their samples per
CPU second, added up. They never wait for each other and exchange nothing, but they share the last-level cache and
the memory bandwidth, as two lanes do. "of idle" relates to twice the samples per CPU second of one colocated run
while the other core is idle: it ignores that busy cores slow each other down.

The speed of a machine varies over time. Therefore every round runs all variants once, ratios are computed within a
round, and the table shows the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Any

from measured_runs import LiveRun, recipe, run  # first: it sets the number of threads
from rich.console import Console
from rich.progress import track
from rich.table import Table

NAIVE = {"gap": False, "tsp": False, "tag": "none", "tcss": 0.0}
COLOCATED = {"mode": "colocated", "techniques": {"tag": "none"}}
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("colocated", COLOCATED),
    ("naive", {"techniques": NAIVE}),
    ("+ GAP", {"techniques": NAIVE | {"gap": True}}),
    ("+ TSP", {"techniques": NAIVE | {"gap": True, "tsp": True}}),
    ("+ TAG", {"techniques": NAIVE | {"gap": True, "tsp": True, "tag": "auto"}}),
    ("+ both", {"techniques": NAIVE | {"gap": True, "tsp": True, "tag": "auto", "assist": "both"}}),
    ("+ TCSS", {"techniques": NAIVE | {"gap": True, "tsp": True, "tag": "auto", "tcss": 1.0}}),
)
FEWEST_STEPS = 5
UNPACKED = ("naive", "+ GAP")  # their steps take several times as long: half as many are enough


@dataclass(frozen=True)
class Row:
    """One variant. Idle shares are of time; `helped`, `assisted` and `stale` are shares of the samples."""

    samples_per_s: float
    over_naive: float
    of_limit: float
    of_idle_limit: float
    generator_idle: float
    trainer_idle: float
    helped: float
    assisted: float
    stale: float


def rate(done: LiveRun) -> float:
    """Samples per second over the steady steps."""
    steps = done.steady_steps()
    return sum(step["samples"] for step in steps) / sum(step["step_s"] for step in steps)


def cpu_rate(done: LiveRun, skip: int = 2) -> float:
    """Samples per CPU second of a colocated run."""
    samples = sum(step["samples"] for step in done.log.steps[skip:-1])
    return samples / (done.log.cpu_s[-2] - done.log.cpu_s[skip - 1])


def pinned_cpu_rate(core: int, steps: int, folder: Path) -> float:
    """Samples per CPU second of a colocated run on one core."""
    os.sched_setaffinity(0, {core})
    return cpu_rate(run(recipe(steps=steps, **COLOCATED), folder))


def two_core_limit(steps: int, folder: Path) -> float:
    """Samples per second of two colocated runs at the same time, each alone on its core."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    with ProcessPoolExecutor(len(cores), get_context("spawn")) as pool:
        runs = [pool.submit(pinned_cpu_rate, core, steps, folder / f"core-{core}") for core in cores]
        return sum(each.result() for each in runs)


def mean(done: LiveRun, name: str) -> float:
    return fmean(step.get(name, 0.0) for step in done.steady_steps())


def one_round(steps: int, folder: Path) -> dict[str, Row]:
    """Runs every variant once."""
    done = {}
    for index, (name, changes) in enumerate(VARIANTS):
        count = max(FEWEST_STEPS, steps // 2) if name in UNPACKED else steps
        done[name] = run(recipe(steps=count, **changes), folder / str(index))
    limit, idle_limit = two_core_limit(steps, folder), 2 * cpu_rate(done["colocated"])
    naive = rate(done["naive"])
    return {name: row(each, naive, limit, idle_limit) for name, each in done.items()}


def row(done: LiveRun, naive: float, limit: float, idle_limit: float) -> Row:
    generator = "device-0" if done.recipe.topology.one_process else "generator-0"
    return Row(
        samples_per_s=rate(done),
        over_naive=rate(done) / naive,
        of_limit=rate(done) / limit,
        of_idle_limit=rate(done) / idle_limit,
        generator_idle=1 - mean(done, f"busy/{generator}"),
        trainer_idle=1 - mean(done, "busy/trainer"),
        helped=mean(done, "helped_share"),
        assisted=mean(done, "assisted_share"),
        stale=mean(done, "stale_share"),
    )


def median_row(rows: list[Row]) -> Row:
    """The median of each field."""
    return Row(*(median(getattr(each, field.name) for each in rows) for field in fields(Row)))


def main() -> None:
    """Runs all rounds and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.steps < FEWEST_STEPS:
        parser.error(
            f"--steps: {options.steps}, but the first and last steps do not count; use {FEWEST_STEPS} or more"
        )
    quiet = options.json or not sys.stderr.isatty()
    rounds = []
    with tempfile.TemporaryDirectory() as parent:
        for index in track(range(options.rounds), "rounds", disable=quiet, transient=True):
            rounds.append(one_round(options.steps, Path(parent) / str(index)))
    rows = {name: median_row([each[name] for each in rounds]) for name, _ in VARIANTS}
    if options.json:
        print(json.dumps({name: asdict(each) for name, each in rows.items()}))
        return
    table = Table()
    ratios_of = ("x naive", "of limit", "of idle")
    shares_of = ("gen idle", "train idle", "helped", "assisted", "stale")
    for heading in ("", "samples/s", *ratios_of, *shares_of):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, each in rows.items():
        ratios = (each.over_naive, each.of_limit, each.of_idle_limit)
        cells = (f"{each.samples_per_s:.1f}", *(f"{ratio:.2f}" for ratio in ratios))
        shares = (each.generator_idle, each.trainer_idle, each.helped, each.assisted, each.stale)
        table.add_row(name, *cells, *(f"{share:.0%}" for share in shares))
    Console(width=120).print(table)
    for name in ("+ both", "+ TCSS"):
        print(f"{name}, share of the limit by round:", *(f"{each[name].of_limit:.2f}" for each in rounds))


if __name__ == "__main__":
    main()
