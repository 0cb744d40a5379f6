"""The time of scheduling decisions and simulations at cluster size.

python benchmarks/speed.py
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from digenrl.config.reading import parse_model
from digenrl.config.spec import Spec
from digenrl.records import Event
from digenrl.scheduling import SchedulerState, Terms, decide
from digenrl.scheduling.help.choose_help import choose_help
from digenrl.scheduling.state import Free
from digenrl.simulation.simulator import simulate
from digenrl.simulation.spec_costs import initial_scheduler_state
from digenrl.simulation.virtual_cluster import VirtualCluster

LIVE_BUDGET: int = Terms.__dataclass_fields__["search_budget"].default  # type: ignore[assignment]


@dataclass(frozen=True)
class Figure:
    """A measurement, and the limit that it should stay below."""

    what: str
    measured: float
    limit: float
    unit: str


def cluster_spec(lanes: int, prompts: int, group: int, steps: int, **rules: Any) -> Spec:
    """Equal generator lanes, an eighth as many helpers; training takes nearly as long as generation."""
    return parse_model(
        Spec,
        {
            "steps": steps,
            "prompts": prompts,
            "samples_per_prompt": group,
            "slice": 1,
            "generators": [{"name": "card", "count": lanes, "seconds": {1: 1.0}}],
            "reward": {"lanes": max(1, lanes // 8), "seconds": 0.05},
            "trainer": {
                "seconds_per_sample": round(0.9 / lanes, 6),
                "commit": 0.2,
                "helper": {"lanes": max(1, lanes // 8), "seconds": {1: 1.1}, "switch_in": 0.1, "switch_out": 0.1},
            },
            "publish": 0.3,
            "policy": rules,
        },
    )


def timed_decisions(spec: Spec) -> list[float]:
    """Seconds of every call of `decide` in a whole run without help. Help decisions are timed separately."""
    return [seconds for _, _, seconds in _driven(initial_scheduler_state(spec, LIVE_BUDGET))]


def _driven(state: SchedulerState) -> Iterator[tuple[SchedulerState, Event, float]]:
    cluster = VirtualCluster(state)
    while not state.finished:
        event = cluster.next_event()
        began = time.thread_time()
        state, actions = decide(state, event)
        seconds = time.thread_time() - began
        for action in actions:
            cluster.submit(action)
        yield state, event, seconds


def timed_searches(spec: Spec, jitter: bool) -> list[float]:
    """Seconds of new help decisions at the moments of a run when the trainer is free.

    `jitter` desynchronizes the lanes, as measured times do.
    """
    dice = random.Random(0)
    state = initial_scheduler_state(spec, LIVE_BUDGET)
    if jitter:
        lanes = (replace(lane, slice_ns=int(lane.slice_ns * dice.uniform(0.95, 1.05))) for lane in state.lanes)
        state = replace(state, lanes=tuple(lanes))
    seconds: list[float] = []
    for seen, event, _ in _driven(state):
        if isinstance(seen.trainer, Free) and not seen.finished and not seen.current.ready and len(seconds) < 200:
            began = time.thread_time()
            choose_help(replace(seen, bubble_plan=None), event.at_ns)
            seconds.append(time.thread_time() - began)
    return seconds


def p99(values: list[float]) -> float:
    """The value that one in a hundred exceeds."""
    return statistics.quantiles(values, n=100)[98]


def measure() -> list[Figure]:
    """All figures. The memory is the process's peak."""
    big = cluster_spec(1024, 1024, 16, steps=2, stale_fraction=0.5)
    figures = [
        Figure("decide, p99, 1,024 lanes x 16,384 samples per step", 1e3 * p99(timed_decisions(big)), 1, "ms")
    ]
    for name, lanes, prompts, jitter in (
        ("16 lanes x 64 samples", 16, 4, False),
        ("64 lanes x 512 samples", 64, 32, False),
        ("64 desynchronized lanes", 64, 32, True),
        ("1,024 lanes x 16,384 samples", 1024, 1024, False),
    ):
        for help_rule, stale in (("search", 0), ("auto", 0.5)):
            spec = cluster_spec(lanes, prompts, 16, steps=2, help=help_rule, stale_fraction=stale)
            typical = 1e3 * statistics.median(timed_searches(spec, jitter))
            figures.append(Figure(f"{name}, help {help_rule}: median decision", typical, 5, "ms"))
    began = time.perf_counter()
    simulate(cluster_spec(64, 32, 16, steps=50, help="auto", stale_fraction=0.5))
    figures.append(Figure("simulate 64 lanes x 512 samples x 50 steps", time.perf_counter() - began, 20, "s"))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures.append(Figure("peak memory of this benchmark", peak_mb, 500, "MB"))
    return figures


def main() -> None:
    """Measures and prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    figures = measure()
    if options.json:
        print(
            json.dumps(
                [{field: getattr(f, field) for field in ("what", "measured", "limit", "unit")} for f in figures]
            )
        )
        return
    table = Table(title=f"Speed (budget of a live decision: {LIVE_BUDGET} nodes)")
    for heading in ("", "measured", "limit"):
        table.add_column(heading, justify="right" if heading else "left")
    for figure in figures:
        table.add_row(figure.what, f"{figure.measured:.3g} {figure.unit}", f"{figure.limit:g} {figure.unit}")
    Console().print(table)


if __name__ == "__main__":
    main()
