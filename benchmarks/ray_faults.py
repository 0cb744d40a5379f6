"""Twenty faults in one run: generators, machines and trainer ranks are killed. The weights must not change.

    python benchmarks/ray_faults.py             # about ten minutes on two cores
    python benchmarks/ray_faults.py --full      # all weights trained, sharded over two ranks

A Ray cluster of several nodes runs on this machine. The run has two trainer ranks and three generators, two of
them on a node that is killed and replaced. Its final weights are compared with those of an undisturbed run, and
its journal is searched for samples that were lost or trained twice.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from measured_runs import recipe  # first: it sets the number of threads
from ray_nodes import RayCluster, ray_cluster
from rich.console import Console
from rich.table import Table

from digenrl.config.recipes.recipe import Recipe
from digenrl.records import SampleId, Trained
from digenrl.run_folder.journal import read_journal
from digenrl.run_folder.lines import located_lines

STEP_TIMEOUT_S = 240.0
KINDS = ("generator", "machine", "trainer rank")


def settings(address: str, steps: int, full: bool) -> Recipe:
    training: dict[str, Any] = {"learning_rate": 1e-5, "pack_size": 16}
    home = {"resources": {"home": 1}}
    return recipe(
        steps=steps,
        mode="ray",
        batch={"prompts": 3, "samples_per_prompt": 8, "slice": 4},
        sample={"height": 32, "width": 64, "denoising_steps": 6},
        training=training if full else {**training, "lora": {"rank": 8, "alpha": 16}},
        techniques={"tag": "none" if full else "auto"},
        lanes={"device": "cpu", "rewards": 0, "threads": 1, "ranks": 2, "restarts": 1000, "patience_s": 60},
        cluster={
            "address": address,
            "trainer": home,
            "rewards": home,
            "encoder": home,
            "generators": [
                {"name": "near", **home},
                {"name": "far", "count": 2, "resources": {"far": 1}},
            ],
        },
        checkpoint={"every": 1000},
    )


class RunProcess:
    """A run in a separate process."""

    def __init__(self, chosen: Recipe, folder: Path) -> None:
        self.folder = folder
        file = folder.with_suffix(".yaml")
        file.write_text(yaml.safe_dump(chosen.model_dump(mode="json")))
        command = ["-c", "from digenrl.cli import main; main()", "train", str(file), "--out", str(folder)]
        self._log = folder.with_suffix(".log").open("w")
        self.process = subprocess.Popen([sys.executable, *command], stdout=self._log, stderr=self._log)

    def steps(self) -> int:
        """The number of finished optimizer steps."""
        metrics = self.folder / "metrics.jsonl"
        return sum(1 for _ in located_lines(metrics)) if metrics.exists() else 0

    def workers(self) -> dict[str, int]:
        """Process ids by worker: the processes whose output goes to the run's logs."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                target = (process / "fd" / "1").readlink()
            except OSError:
                continue
            if target.parent == self.folder / "logs":
                found[target.stem] = int(process.name)
        return found

    def wait_for_step(self, step: int) -> None:
        """Waits until `step` optimizer steps are done."""
        deadline_s = time.monotonic() + STEP_TIMEOUT_S
        while self.steps() < step:
            if self.process.poll() is not None:
                raise SystemExit(f"the run ended: {self.folder.with_suffix('.log').read_text()[-2000:]}")
            assert time.monotonic() < deadline_s, f"step {step} was not done within {STEP_TIMEOUT_S:.0f} s"
            time.sleep(0.05)

    def finish(self) -> None:
        """Waits for the end of the run."""
        if self.process.wait() != 0:
            raise SystemExit(f"the run failed: {self.folder.with_suffix('.log').read_text()[-2000:]}")


class FaultInjector:
    """Injects faults, with a fixed random seed."""

    def __init__(self, cluster: RayCluster, run: RunProcess) -> None:
        self._cluster, self._run = cluster, run
        self._far = cluster.add(num_cpus=2, resources={"far": 2})
        self._dice = random.Random("faults")

    def inject(self, kind: str) -> str:
        """Causes one fault after a random delay. Returns the name of the victim."""
        time.sleep(self._dice.random())
        if kind == "machine":
            self._cluster.kill(self._far)
            self._far = self._cluster.add(num_cpus=2, resources={"far": 2})
            return "far"
        prefix = "generator" if kind == "generator" else "trainer"
        workers = {name: pid for name, pid in self._run.workers().items() if name.startswith(prefix)}
        name = self._dice.choice(sorted(workers))
        os.kill(workers[name], signal.SIGKILL)
        return name


def count_samples(journal: Path) -> Counter[SampleId]:
    """How often each sample was trained, according to the journal."""
    trained: Counter[SampleId] = Counter()
    for decision in read_journal(journal):
        if isinstance(decision.event, Trained):
            trained.update(decision.event.job.slice.samples())
    return trained


def same_weights(one: Path, other: Path, step: int) -> tuple[bool, float]:
    """Whether two runs ended with bitwise equal weights, and the largest absolute difference."""
    import torch

    from digenrl.training.checkpoint.checkpoints import read_checkpoint

    first, second = (
        read_checkpoint(run / "checkpoints" / f"step_{step:06d}").trainer_state.weights for run in (one, other)
    )
    difference = max(float((first[name] - second[name]).abs().max()) for name in first)
    return all(torch.equal(first[name], second[name]) for name in first), difference


def main() -> None:
    """Runs with and without faults, and prints a table and the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--full", action="store_true", help="train all weights, sharded, instead of adapters")
    options = parser.parse_args()
    steps = 2 * options.faults + 4
    table = Table()
    for heading in ("fault", "kind", "killed", "after step", "time to next step"):
        table.add_column(heading, justify="right" if heading != "kind" else "left")
    with tempfile.TemporaryDirectory() as parent, ray_cluster(num_cpus=12, resources={"home": 8}) as cluster:
        chosen = settings(cluster.address, steps, options.full)
        disturbed = RunProcess(chosen, Path(parent) / "disturbed")
        faults = FaultInjector(cluster, disturbed)
        for index in range(options.faults):
            disturbed.wait_for_step(2 * index + 1)
            kind = KINDS[index % len(KINDS)]
            began_s, at_step = time.monotonic(), disturbed.steps()
            victim = faults.inject(kind)
            disturbed.wait_for_step(at_step + 1)
            table.add_row(str(index + 1), kind, victim, str(at_step), f"{time.monotonic() - began_s:.1f} s")
            print(f"{index + 1}/{options.faults} {kind} {victim}", file=sys.stderr, flush=True)
        disturbed.finish()
        undisturbed = RunProcess(chosen, Path(parent) / "undisturbed")
        undisturbed.finish()
        Console(width=100).print(table)
        trained = count_samples(disturbed.folder / "journal.jsonl")
        expected = steps * chosen.batch.prompts * chosen.batch.samples_per_prompt
        twice = sum(times > 1 for times in trained.values())
        print(f"samples: {len(trained)} of {expected} trained, {twice} of them twice")
        same, difference = same_weights(disturbed.folder, undisturbed.folder, steps)
        print(f"weights after {steps} steps: {'bitwise equal' if same else f'differ by {difference:.2e}'}")


if __name__ == "__main__":
    main()
