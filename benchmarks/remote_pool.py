"""Live runs with generators behind a slow link: what they cost the near ones, and what crosses the link.

    python benchmarks/remote_pool.py --mbit 100 --steps 12 [--json]

The trainer, the driver and one generator are on Ray's head node. A second node has another generator. It is in a
network namespace, to which a virtual link with a token bucket (`tc tbf`) leads. Three runs train all weights of
the demo's model: without the second generator, with it over a link without limit, and with it over the slow link.
Generators are slowed down by waiting, because all processes share the cores of one machine. "Idle" is the share of
the time between commits in which the near generator did not generate, "after a commit" the time until it began a
slice with the new version. Needs Linux, root, and the commands `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from measured_runs import LiveRun, recipe, run
from rich.console import Console
from rich.table import Table
from shaped_links import FAR_HOST, NAMESPACE, NEAR_HOST, bytes_sent, shaped_link
from shaped_nodes import Node, ray_environment, ray_nodes

UNLIMITED_MBIT = 20_000.0
SLOWDOWN = 4.0  # of generators, by waiting
SKIPPED = 2  # steps before the pipeline is full
NEAR, FAR = "near", "far"  # pools, and resources of Ray's nodes


@dataclass(frozen=True, slots=True)
class PoolRun:
    """One run. Bytes are per version and cover everything on the link, encoded prompts too."""

    name: str
    step_s: float
    near_idle: float
    after_commit_s: float
    far_share: float  # of all slices
    link_bytes: float
    version_bytes: float  # of a whole version
    weights: str  # a checksum


def pool_recipe(address: str, steps: int, pools: list[str]) -> Any:
    near = {"cpus": 0, "resources": {NEAR: 1}}
    generators = [{"name": pool, "cpus": 0, "resources": {pool: 1}, "slowdown": SLOWDOWN} for pool in pools]
    places = {"trainer": near, "rewards": near, "encoder": near, "generators": generators}
    return recipe(
        mode="ray",
        steps=steps,
        training={"learning_rate": 1e-5},
        techniques={"tag": "none"},
        cluster={"address": address, "start_timeout_s": 180, **places},
    )


def measured(name: str, finished: LiveRun, link_bytes: int) -> PoolRun:
    """Reads a run's spans, metrics and weights."""
    spans, steps = finished.spans(), finished.log.steps
    near, far = "generator-0", "generator-1"
    commits = sorted(span["end_ns"] for span in spans if span["work"] == "commit")[SKIPPED:-1]
    slices = [span for span in spans if span["work"] == "generate"]
    own = sorted((span["start_ns"], span["end_ns"]) for span in slices if span["lane"] == near)
    busy = sum(max(0, min(end, commits[-1]) - max(start, commits[0])) for start, end in own)
    waits = [min(start for start, _ in own if start >= commit) - commit for commit in commits[:-1]]
    weights = sorted(finished.folder.glob("transformer/*.safetensors"))
    return PoolRun(
        name,
        step_s=(commits[-1] - commits[0]) / 1e9 / (len(commits) - 1),
        near_idle=1 - busy / (commits[-1] - commits[0]),
        after_commit_s=median(waits) / 1e9,
        far_share=fmean(span["lane"] == far for span in slices),
        link_bytes=link_bytes / len(steps),
        version_bytes=steps[-1]["publish_bytes"],
        weights=hashlib.sha256(b"".join(file.read_bytes() for file in weights)).hexdigest()[:12],
    )


def show(runs: list[PoolRun]) -> None:
    """Prints a row per run."""
    table = Table(
        "run", "s per step", "near lane idle", "after a commit", "slices from far", "MB on the link per step"
    )
    table.add_column("MB of a version")
    table.add_column("weights")
    for each in runs:
        table.add_row(
            each.name,
            f"{each.step_s:.2f}",
            f"{each.near_idle:.1%}",
            f"{each.after_commit_s * 1e3:.0f} ms",
            f"{each.far_share:.0%}",
            f"{each.link_bytes / 1e6:.2f}",
            f"{each.version_bytes / 1e6:.2f}",
            each.weights,
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0, help="rate of the slow link")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        parser.error("needs root, and the commands ip and tc (package iproute2)")
    cases = {
        "near only": (UNLIMITED_MBIT, [NEAR]),
        "near and far, no limit": (UNLIMITED_MBIT, [NEAR, FAR]),
        f"near and far, {options.mbit:g} Mbit/s": (options.mbit, [NEAR, FAR]),
    }
    runs = []
    nodes = [Node(NEAR, NEAR_HOST, None, {NEAR: 8}), Node(FAR, FAR_HOST, NAMESPACE, {FAR: 8})]
    with ray_environment() as scratch:
        for index, (name, (mbit, pools)) in enumerate(cases.items()):
            with shaped_link(mbit), ray_nodes(nodes, scratch) as address:
                before = bytes_sent()
                finished = run(pool_recipe(address, options.steps, pools), Path(scratch) / str(index))
                runs.append(measured(name, finished, bytes_sent() - before))
            print(asdict(runs[-1]), file=sys.stderr)
    if options.json:
        print(json.dumps([asdict(each) for each in runs]))
    else:
        show(runs)


if __name__ == "__main__":
    main()
