"""Do whole runs have the same weights, whatever their lanes do? The editing demo on one device, in several ways.

    python benchmarks/equal_runs.py runs/equal                   # on cuda:0, with deterministic kernels
    python benchmarks/equal_runs.py runs/equal --device cpu
    python benchmarks/equal_runs.py runs/equal --json

All weights are trained, or LoRA adapters: in one process that alternates, with two generators, and in a run that
is killed after its third step and resumed. These must have the same weights. So must runs with one and two
generators that also train; they sum gradients as integers. All runs take place at once. Each compiles its kernels
itself, without the compiler's cache.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from safetensors import safe_open

STEPS = 4
SETTINGS = ("edit_demo", f"steps={STEPS}", "evaluation=null", "checkpoint.every=2")
TRAINED = {"all weights": (), "LoRA": ("training.lora={rank: 8}",)}
KILLED = "killed and resumed"


def lanes(device: str) -> dict[str, dict[str, tuple[str, ...]]]:
    """The settings of each way to run, by runs that are compared."""
    trainer, rewards = f"lanes.trainer={device}", "lanes.rewards=[cpu]"
    one = (trainer, rewards, f"lanes.generators=[{device}]")
    two = (trainer, rewards, f"lanes.generators=[{device},{device}]")
    both = ("techniques.assist=both", "techniques.tag=search", "training.job_samples=4")
    return {
        "the trainer trains": {"colocated": (trainer, "mode=colocated"), "two generators": two, KILLED: one},
        "generators train, too": {"one generator": (*one, *both), "two generators": (*two, *both)},
    }


class Run:
    """A run in its own processes. Its folder must be new."""

    def __init__(self, folder: Path, settings: tuple[str, ...], kill: bool) -> None:
        self.folder = folder
        self._kill = kill
        folder.mkdir(parents=True)
        self._process = self._start(*settings, "--out", str(folder / "run"))

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
        for name in caches.values():
            shutil.rmtree(self.folder / name, ignore_errors=True)
        environment = os.environ | {key: str(self.folder / name) for key, name in caches.items()}
        command = [sys.executable, "-m", "digenrl", "train", *arguments]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def has_ended(self) -> bool:
        """Kills and resumes the run first, if that is its kind."""
        if self._kill and self._steps() >= 3:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._kill = False
            self._process = self._start("--resume", str(self.folder / "run"))
        return self._process.poll() is not None

    def _steps(self) -> int:
        metrics = self.folder / "run" / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0

    def digest(self) -> str:
        """Of the names and values of the trained weights and the optimizer's state after the last step."""
        if self._process.returncode or self._kill:
            sys.exit(f"{self.folder}: the run failed; its output is in {self.folder / 'log'}")
        found = hashlib.sha256()
        for path in sorted((self.folder / "run" / "checkpoints" / f"step_{STEPS:06}").glob("*.safetensors")):
            with safe_open(path, framework="numpy") as file:
                for name in sorted(file.keys()):
                    found.update(name.encode() + file.get_tensor(name).tobytes())
        return found.hexdigest()[:12]


def equal_runs(folder: Path, device: str, settings: list[str]) -> dict[str, dict[str, dict[str, str]]]:
    """The digest of every run, by what is trained and by the way to run."""
    deterministic = () if device == "cpu" else ("model.deterministic=true",)
    runs = {
        compared: {
            way: {
                trained: Run(
                    folder / "-".join([compared, way, trained]).replace(" ", "_"),
                    (*SETTINGS, *deterministic, *own, *more, *settings),
                    kill=way == KILLED,
                )
                for trained, more in TRAINED.items()
            }
            for way, own in ways.items()
        }
        for compared, ways in lanes(device).items()
    }
    waiting = [run for ways in runs.values() for each in ways.values() for run in each.values()]
    while waiting := [run for run in waiting if not run.has_ended()]:
        time.sleep(0.2)
    return {
        compared: {way: {trained: run.digest() for trained, run in each.items()} for way, each in ways.items()}
        for compared, ways in runs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder for the runs")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="override settings of all runs")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", action="store_true", help="print the digests as JSON")
    options = parser.parse_args()
    if options.folder.exists():
        parser.error(f"{options.folder}: exists; name a new folder")
    console = Console(stderr=options.json)
    with console.status("training: ten runs at once"):
        digests = equal_runs(options.folder.absolute(), options.device, options.settings)
    equal = all(
        len({each[trained] for each in ways.values()}) == 1 for ways in digests.values() for trained in TRAINED
    )
    if options.json:
        print(json.dumps({"equal": equal, "digests": digests}))
    else:
        table = Table("", "run", *TRAINED, title=f"weights and optimizer state after step {STEPS}")
        for compared, ways in digests.items():
            for way, each in ways.items():
                table.add_row(compared, way, *each.values())
            table.add_section()
        console.print(table, "Equal, bit for bit." if equal else "Runs differ.")
    sys.exit(not equal)


if __name__ == "__main__":
    main()
