"""Unequal lanes on two machines: the planner's prediction from measured costs against a measured run.

    python benchmarks/ray_unequal.py            # about five minutes on two idle cores

A Ray cluster with two worker nodes runs on this machine, with a fast generator and one that is three times slower.
Two short runs measure slices of two sizes. `digenrl plan` chooses the slice size and the techniques from these
costs, a run starts from the plan, and its duration is compared with the prediction. Groups whose last slice came
from the slow lane although the fast lane was idle long enough to generate it are counted: there should be none.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from measured_runs import LiveRun, recipe, run  # first: it sets the number of threads
from ray_nodes import ray_cluster

from digenrl.config.recipes.files import read_recipe
from digenrl.config.recipes.recipe import Recipe

SLOWDOWN = 3.0
SIZES = (2, 8)
DIGENRL = (sys.executable, "-c", "from digenrl.cli import main; main()")


def settings(address: str, steps: int, slice_size: int | str) -> Recipe:
    home = {"resources": {"home": 1}}
    return recipe(
        steps=steps,
        mode="ray",
        batch={"prompts": 6, "samples_per_prompt": 8, "slice": slice_size},
        sample={"height": 32, "width": 64, "denoising_steps": 10, "window": {"kind": "all", "fraction": 0.3}},
        training={"learning_rate": 1e-6, "pack_size": 16, "lora": {"rank": 8, "alpha": 16}},
        techniques={"tag": "none"},
        cluster={
            "address": address,
            "trainer": home,
            "rewards": home,
            "encoder": home,
            "generators": [
                {"name": "fast", "labels": {"class": "fast"}},
                {"name": "slow", "labels": {"class": "slow"}, "slowdown": SLOWDOWN},
            ],
        },
    )


def measured_costs(runs: Mapping[int, LiveRun]) -> dict[str, dict[str, Any]]:
    """The costs that the runs had measured at their end, by pool."""
    last = {size: done.log.states[-1] for size, done in runs.items()}
    costs = last[max(SIZES)].costs
    trains = {
        "train_seconds_per_sample": float(costs.train_sample_ns) / 1e9,
        "commit_seconds": costs.commit_ns / 1e9,
        "switch_seconds": 0.001,
    }
    slices = {
        pool: {size: state.lanes[lane].slice_ns / 1e9 for size, state in last.items()}
        for lane, pool in enumerate(("fast", "slow"))
    }
    publish_s = costs.publish_ns / 1e9
    return {
        "fast": {"slice_seconds": slices["fast"], "publish_seconds": publish_s, **trains},
        "slow": {"slice_seconds": slices["slow"], "publish_seconds": publish_s},  # it never trains
    }


def write_cluster_file(costs: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Writes a cluster file: a fast machine that trains and generates, and a slow one that generates."""
    pools = [
        {"name": "fast", "nodes": 1, "per_node": 2, "labels": {"class": "fast"}, "measured": dict(costs["fast"])},
        {"name": "slow", "nodes": 1, "per_node": 1, "labels": {"class": "slow"}, "measured": dict(costs["slow"])},
    ]
    path.write_text(yaml.safe_dump({"pools": pools}))


def make_plan(recipe_file: Path, cluster: Path, folder: Path) -> tuple[Path, Path]:
    """Runs `digenrl plan`. Returns the plan's file and its SPEC."""
    plan, spec = folder / "plan.yaml", folder / "spec.yaml"
    command = ("plan", str(recipe_file), "--cluster", str(cluster), "--on-policy", "--ranks", "1", "--keep", "3")
    subprocess.run([*DIGENRL, *command, "--out", str(plan), "--spec", str(spec)], check=True)
    content = yaml.safe_load(plan.read_text())
    for pool in content["cluster"]["generators"]:
        if pool["name"] == "slow":
            pool["slowdown"] = SLOWDOWN
    content["cluster"]["trainer"] = {"resources": {"home": 1}}  # the head stands for the fast machine's other card
    plan.write_text(yaml.safe_dump(content, sort_keys=False))
    return plan, spec


def predicted_s(spec: Path, steps: int) -> float:
    """The simulator's makespan for this number of steps."""
    content = yaml.safe_load(spec.read_text()) | {"steps": steps}
    spec.write_text(yaml.safe_dump(content, sort_keys=False))
    answer = subprocess.run(
        [*DIGENRL, "simulate", str(spec), "--json"], check=True, capture_output=True, text=True
    )
    return float(json.loads(answer.stdout)["makespan"])


def needless_waits(spans: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """The number of groups that the slow lane completed, and of those that the idle fast lane could have."""
    made = [span for span in spans if span["work"] == "generate"]
    fast = sorted((s["start_ns"], s["end_ns"]) for s in made if s["lane"] == "generator-0")
    typical_ns = median(end - start for start, end in fast)
    last = {}
    for span in sorted(made, key=lambda span: span["end_ns"]):
        last[span["step"], span["group"]] = span
    by_slow = [span for span in last.values() if span["lane"] == "generator-1"]
    gaps = [(end, start) for (_, end), (start, _) in pairwise(fast)]
    needless = sum(
        any(min(stop, span["end_ns"]) - max(start, span["start_ns"]) > 1.3 * typical_ns for start, stop in gaps)
        for span in by_slow
    )
    return len(by_slow), needless


def main() -> None:
    """Prints the plan and the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent, ray_cluster(num_cpus=8, resources={"home": 8}) as cluster:
        folder = Path(parent)
        cluster.add(num_cpus=1, labels={"class": "fast"})
        cluster.add(num_cpus=1, labels={"class": "slow"})
        runs = {size: run(settings(cluster.address, 6, size), folder / f"size-{size}") for size in SIZES}
        write_cluster_file(measured_costs(runs), folder / "cluster.yaml")
        recipe_file = folder / "unequal.yaml"
        plain = settings(cluster.address, options.steps, "auto").model_dump(mode="json")
        recipe_file.write_text(yaml.safe_dump(plain))
        plan, spec = make_plan(recipe_file, folder / "cluster.yaml", folder)
        expected_s = predicted_s(spec, options.steps)
        from digenrl.config.plan_files import overrides_of, read_plan

        done = run(read_recipe(str(recipe_file), overrides_of(read_plan(plan), [])), folder / "planned")
        measured_s = done.log.steps[-1]["at_s"]
        times = f"predicted {expected_s:.1f} s, measured {measured_s:.1f} s, {measured_s / expected_s - 1:+.1%}"
        print(f"{options.steps} steps: {times}")
        completed, needless = needless_waits(done.spans())
        print(f"groups completed by the slow lane: {completed}; the idle fast lane could have done it: {needless}")


if __name__ == "__main__":
    main()
