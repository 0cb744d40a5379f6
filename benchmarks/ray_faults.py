"""Twenty faults in one run: generators killed, machines lost, trainer ranks killed. The weights must not notice.

    python benchmarks/ray_faults.py             # about ten minutes on two cores
    python benchmarks/ray_faults.py --full      # all weights trained, sharded over two ranks

A cluster of several machines on this one. The run has two trainer ranks and three generators, two of them on a
machine that is lost and added again. Its final weights are compared with those of a run that nobody disturbed, and
its journal is read for samples that were lost or trained twice.
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
from ray_nodes import Nodes, several
from rich.console import Console
from rich.table import Table

from digenrl.config.recipe import Recipe
from digenrl.records import SampleId, Trained
from digenrl.run_folder.journal import read_journal
from digenrl.run_folder.lines import read_lines

PATIENCE_S = 240.0
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


class Watched:
    """A run in a process of its own."""

    def __init__(self, chosen: Recipe, folder: Path) -> None:
        self.folder = folder
        file = folder.with_suffix(".yaml")
        file.write_text(yaml.safe_dump(chosen.model_dump(mode="json")))
        command = ["-c", "from digenrl.cli import main; main()", "train", str(file), "--out", str(folder)]
        self._log = folder.with_suffix(".log").open("w")
        self.process = subprocess.Popen([sys.executable, *command], stdout=self._log, stderr=self._log)

    def steps(self) -> int:
        """Optimizer steps so far."""
        metrics = self.folder / "metrics.jsonl"
        return sum(1 for _ in read_lines(metrics)) if metrics.exists() else 0

    def workers(self) -> dict[str, int]:
        """Processes by worker: those that print into the run's logs."""
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
        """Until so many steps are done."""
        deadline_s = time.monotonic() + PATIENCE_S
        while self.steps() < step:
            if self.process.poll() is not None:
                raise SystemExit(f"the run ended: {self.folder.with_suffix('.log').read_text()[-2000:]}")
            assert time.monotonic() < deadline_s, f"no step {step} in {PATIENCE_S:.0f} s"
            time.sleep(0.05)

    def finish(self) -> None:
        """To its end."""
        if self.process.wait() != 0:
            raise SystemExit(f"the run failed: {self.folder.with_suffix('.log').read_text()[-2000:]}")


class Faults:
    """What goes wrong, by dice that always fall the same way."""

    def __init__(self, nodes: Nodes, run: Watched) -> None:
        self._nodes, self._run = nodes, run
        self._far = nodes.add(num_cpus=2, resources={"far": 2})
        self._dice = random.Random("faults")

    def strike(self, kind: str) -> str:
        """One fault, at some moment of a step; returns what it hit."""
        time.sleep(self._dice.random())
        if kind == "machine":
            self._nodes.kill(self._far)
            self._far = self._nodes.add(num_cpus=2, resources={"far": 2})
            return "far"
        prefix = "generator" if kind == "generator" else "trainer"
        workers = {name: pid for name, pid in self._run.workers().items() if name.startswith(prefix)}
        name = self._dice.choice(sorted(workers))
        os.kill(workers[name], signal.SIGKILL)
        return name


def count_samples(journal: Path) -> Counter[SampleId]:
    """How often the loop heard of each sample that it is trained."""
    trained: Counter[SampleId] = Counter()
    for decision in read_journal(journal):
        if isinstance(decision.event, Trained):
            trained.update(sample for piece in decision.event.slices for sample in piece.samples())
    return trained


def same_weights(one: Path, other: Path, step: int) -> tuple[bool, float]:
    """Whether two runs ended with the same weights to the last bit, and how far they are apart."""
    import torch

    from digenrl.training.checkpoint.checkpoints import read_checkpoint

    first, second = (
        read_checkpoint(run / "checkpoints" / f"step_{step:06d}").trainer_state.weights for run in (one, other)
    )
    apart = max(float((first[name] - second[name]).abs().max()) for name in first)
    return all(torch.equal(first[name], second[name]) for name in first), apart


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--full", action="store_true", help="all weights, sharded, instead of adapters")
    options = parser.parse_args()
    steps = 2 * options.faults + 4
    table = Table()
    for heading in ("fault", "what", "hit", "after step", "next step after"):
        table.add_column(heading, justify="right" if heading != "what" else "left")
    with tempfile.TemporaryDirectory() as parent, several(num_cpus=12, resources={"home": 8}) as nodes:
        chosen = settings(nodes.address, steps, options.full)
        hurt = Watched(chosen, Path(parent) / "hurt")
        faults = Faults(nodes, hurt)
        for index in range(options.faults):
            hurt.wait_for_step(2 * index + 1)
            kind = KINDS[index % len(KINDS)]
            began_s, at_step = time.monotonic(), hurt.steps()
            hit = faults.strike(kind)
            hurt.wait_for_step(at_step + 1)
            table.add_row(str(index + 1), kind, hit, str(at_step), f"{time.monotonic() - began_s:.1f} s")
            print(f"{index + 1}/{options.faults} {kind} {hit}", file=sys.stderr, flush=True)
        hurt.finish()
        quiet = Watched(chosen, Path(parent) / "quiet")
        quiet.finish()
        Console(width=100).print(table)
        trained = count_samples(hurt.folder / "journal.jsonl")
        wanted = steps * chosen.batch.prompts * chosen.batch.samples_per_prompt
        twice = sum(times > 1 for times in trained.values())
        print(f"samples: {len(trained)} of {wanted} trained, {twice} of them twice")
        same, apart = same_weights(hurt.folder, quiet.folder, steps)
        print(f"weights after {steps} steps: {'the same to the last bit' if same else f'apart by {apart:.2e}'}")


if __name__ == "__main__":
    main()
