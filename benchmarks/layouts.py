"""Do several cards train the weights that one card trains? The editing demo, with a divided trainer.

    python benchmarks/layouts.py runs/layouts                   # on a machine with two or four GPUs
    python benchmarks/layouts.py runs/layouts --device cpu      # processes instead of cards
    python benchmarks/layouts.py runs/layouts model.compile=false --at-once 2 --json

The table shows the last step's gradient norm, and how much the change of the weights by training differs from that
on one card: the norm of the difference over the norm of the change. The order of sums differs between layouts, so
they agree up to rounding.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import load_file

import digenrl.demo

ONE = "one card"
STEPS = 3
SETTINGS = ("edit_demo", f"steps={STEPS}", "evaluation=null", "batch.prompts=4", "lanes.threads=1")
TRAINED = {"LoRA": ("training.lora={rank: 8}",), "all weights": ()}
LAYOUTS: dict[str, tuple[str, ...]] = {
    ONE: (),
    "two ranks": ("lanes.ranks=2",),
    "four ranks": ("lanes.ranks=4",),
    "two stages": ("lanes.ranks=2", "training.stages=auto"),
}
LAYOUTS_OF_LORA: dict[str, tuple[str, ...]] = {
    "two ranks, sharded base": ("lanes.ranks=2", "lanes.shard_base=true"),
    "four ranks, sharded base": ("lanes.ranks=4", "lanes.shard_base=true"),
    "two cards per replica": ("lanes.ranks=2", "lanes.cards_per_replica=2"),
    "four cards, two per replica": ("lanes.ranks=4", "lanes.cards_per_replica=2"),
    "two cards per generator": ("lanes.cards_per_generator=2",),
}

Weights = dict[str, np.ndarray]


class Row(NamedTuple):
    trained: str
    layout: str
    gradient_norm: float
    difference: float


class Run:
    """A run in its own processes. Its folder must be new."""

    def __init__(self, folder: Path, settings: tuple[str, ...]) -> None:
        self._folder, self._log = folder / "run", folder / "log"
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", "digenrl", "train", *settings, "--out", str(self._folder)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)

    def has_ended(self) -> bool:
        if self._process.poll():
            sys.exit(f"the run failed; its output is in {self._log}")
        return self._process.returncode is not None

    def gradient_norm(self) -> float:
        last = (self._folder / "metrics.jsonl").read_text().splitlines()[-1]
        return float(json.loads(last)["gradient_norm"])

    def change(self) -> Weights:
        """Of the weights by training. That of an adapted layer is the product of its two factors."""
        lora = self._folder / "lora"
        if lora.is_dir():
            factors = _tensors(lora)
            names = [name for name in factors if ".lora_A." in name]
            return {name: factors[name.replace(".lora_A.", ".lora_B.")] @ factors[name] for name in names}
        before = _tensors(Path(digenrl.demo.__path__[0]) / "edit_model" / "transformer")
        return {name: tensor - before[name] for name, tensor in _tensors(self._folder / "transformer").items()}


def _tensors(folder: Path) -> Weights:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update({name: tensor.astype(np.float64) for name, tensor in load_file(path).items()})
    return found


def difference(change: Weights, of_one: Weights) -> float:
    """Relative, over all weights."""
    if set(change) != set(of_one):
        sys.exit("the runs trained different weights")
    apart = sum(float(((change[name] - of_one[name]) ** 2).sum()) for name in of_one)
    return float((apart / sum(float((tensor**2).sum()) for tensor in of_one.values())) ** 0.5)


def measured(folder: Path, device: str, at_once: int, settings: list[str]) -> list[Row]:
    """A row per run."""
    lanes = (f"lanes.trainer={device}", f"lanes.generators=[{device}]", "lanes.rewards=[cpu]")
    plans = {
        (trained, layout): (*SETTINGS, *lanes, *more, *own, *settings)
        for trained, more in TRAINED.items()
        for layout, own in (LAYOUTS | (LAYOUTS_OF_LORA if trained == "LoRA" else {})).items()
    }
    waiting = list(plans)
    running: dict[tuple[str, str], Run] = {}
    ended: dict[tuple[str, str], Run] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            key = waiting.pop(0)
            running[key] = Run(folder / "-".join(key).replace(" ", "_"), plans[key])
        ended |= {key: run for key, run in running.items() if run.has_ended()}
        running = {key: run for key, run in running.items() if key not in ended}
        time.sleep(0.2)
    of_one = {trained: ended[trained, ONE].change() for trained in TRAINED}
    return [
        Row(trained, layout, run.gradient_norm(), difference(run.change(), of_one[trained]))
        for (trained, layout), run in ((key, ended[key]) for key in plans)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder for the runs")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="override settings of all runs")
    parser.add_argument("--device", default="cuda:0", help="of the first rank")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"{options.folder}: exists; name a new folder")
    console = Console(stderr=options.json)
    with console.status("training"):
        rows = measured(options.folder.absolute(), options.device, options.at_once, options.settings)
    if options.json:
        print(json.dumps([row._asdict() for row in rows]))
        return
    table = Table("trained", "layout", "gradient norm", "difference", title=f"after {STEPS} steps")
    for row in rows:
        table.add_row(row.trained, row.layout, f"{row.gradient_norm:.8f}", f"{row.difference:.1e}")
    console.print(table)


if __name__ == "__main__":
    main()
