"""Kills, stops and hangs of real workers in one run: each must be noticed in time, and must change nothing.

    python benchmarks/process_faults.py --faults 100
    python benchmarks/process_faults.py --transport ray --faults 100

A worker is killed (SIGKILL), stopped (SIGSTOP), or its reward never returns. The driver must notice a killed
worker at once, a stopped one after `lanes.patience_s`, and a job that hangs after its deadline. The next step must
follow. In the end the run is compared with one that was not disturbed: the same samples, and the same weights.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from random import Random

from rich.console import Console
from rich.table import Table
from tiny_runs import FINISHED, TinyRuns, count_samples, opened_runs, trained_files

KINDS = ("kill", "stop", "hang")
PATIENCE_S = 10.0
MANY_STEPS = 1_000_000
SLACK_S = 20.0  # of a busy machine
STUCK_S, START_S = 180.0, 900.0  # of a busy machine, too
DEADLINES_S = {"kill": SLACK_S, "stop": PATIENCE_S + SLACK_S, "hang": 10 * PATIENCE_S + SLACK_S}
REWARD = '''
import time
from pathlib import Path

HANGS = Path(__file__).with_name("hang")


def brightness(pixels, prompts, metadata):
    """Brightness. If there is a file `hang`, removes it and never returns."""
    if HANGS.exists():
        HANGS.unlink()
        time.sleep(1e6)
    return pixels.flatten(1).mean(dim=1).tolist()
'''


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault, the seconds until the driver noticed it, and until the next step was committed."""

    kind: str
    worker: str
    noticed_s: float
    recovered_s: float

    @property
    def in_time(self) -> bool:
        """Whether it was noticed before the deadline of its kind."""
        return self.noticed_s <= DEADLINES_S[self.kind]


class DisturbedRun:
    """A run with more steps than it will take, whose workers are disturbed."""

    def __init__(self, runs: TinyRuns, seed: int) -> None:
        self._runs, self._dice = runs, Random(seed)
        self._disturbed: set[int] = set()  # process ids; one that was stopped may exist for a while
        self.path = runs.root / "disturbed"
        self._pid = runs.begin("disturbed")
        self._wait(lambda: self.steps() >= 1, "the first step", START_S)

    def steps(self) -> int:
        """Committed steps."""
        metrics = self.path / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def inject(self, kind: str) -> InjectedFault:
        """Causes a fault and waits until the run has recovered from it."""
        time.sleep(self._dice.random())
        losses, began_s = self._losses(), time.monotonic()
        if kind == "hang":
            worker = "reward"
            (self._runs.root / "hang").touch()
            self._wait(lambda: not (self._runs.root / "hang").exists(), "a reward to hang")
            began_s = time.monotonic()
        else:
            worker, process = self._dice.choice(sorted(self._undisturbed_workers().items()))
            self._disturbed.add(process)
            os.kill(process, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        self._wait(lambda: self._losses() > losses, f"the loss of {worker}")
        noticed_s, steps = time.monotonic() - began_s, self.steps()
        self._wait(lambda: self.steps() > steps, "the next step")
        return InjectedFault(kind, worker, noticed_s, time.monotonic() - began_s)

    def stop(self) -> int:
        """Asks the run to save and stop; returns its steps."""
        os.kill(self._pid, signal.SIGTERM)
        os.waitpid(self._pid, 0)
        return self.steps()

    def _undisturbed_workers(self) -> dict[str, int]:
        found = self._runs.workers("disturbed")
        return {name: process for name, process in found.items() if process not in self._disturbed}

    def _losses(self) -> int:
        return (self.path / "journal.jsonl").read_bytes().count(b'"WorkerLost"')

    def _wait(self, true: Callable[[], bool], what: str, within_s: float = STUCK_S) -> None:
        until_s = time.monotonic() + within_s
        while not true():
            if os.waitpid(self._pid, os.WNOHANG)[0]:
                error = self.path.with_suffix(".error")
                raise SystemExit(f"the run ended: {error.read_text() if error.exists() else ''}")
            if time.monotonic() > until_s:
                os.kill(self._pid, signal.SIGKILL)
                raise SystemExit(f"stuck: waited {within_s:.0f} s for {what}")
            time.sleep(0.1)


def same_as_quiet(runs: TinyRuns, steps: int) -> tuple[bool, int, int]:
    """Whether the weights are those of an undisturbed run; samples that were lost, and trained twice."""
    content = runs.recipe.read_text().replace(f"steps: {MANY_STEPS}", f"steps: {steps}")
    runs.recipe.write_text(content)
    if runs.drive("quiet") != FINISHED:
        raise SystemExit(f"the quiet run failed: {(runs.root / 'quiet.error').read_text()}")
    quiet, disturbed = runs.folder("quiet"), runs.folder("disturbed")
    trained = count_samples(disturbed)
    lost = len(count_samples(quiet) - trained)
    doubled = sum(times > 1 for times in trained.values())
    return trained_files(quiet, steps) == trained_files(disturbed, steps), lost, doubled


def show(faults: list[InjectedFault]) -> None:
    """Prints a row per kind."""
    table = Table("fault", "count", "noticed (median)", "noticed (longest)", "deadline", "next step (longest)")
    for kind in KINDS:
        found = sorted((each for each in faults if each.kind == kind), key=lambda each: each.noticed_s)
        if found:
            middle, longest = found[len(found) // 2].noticed_s, found[-1].noticed_s
            recovered = max(each.recovered_s for each in found)
            row = (f"{middle:.1f} s", f"{longest:.1f} s", f"{DEADLINES_S[kind]:.0f} s", f"{recovered:.1f} s")
            table.add_row(kind, str(len(found)), *row)
    Console(width=110).print(table)


def main() -> None:
    """Prints a table and the comparison; exits with 1 if a fault was noticed late or changed anything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=("local", "ray"), default="local")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print every fault as JSON")
    options = parser.parse_args()
    lanes = {"patience_s": PATIENCE_S}
    changes = {"steps": MANY_STEPS, "rewards": "hanging:brightness", "checkpoint": {"every": MANY_STEPS}}
    with opened_runs(options.transport, lanes=lanes, **changes) as runs:
        (runs.root / "hanging.py").write_text(REWARD)
        run, faults = DisturbedRun(runs, options.seed), []
        for index in range(options.faults):
            faults.append(run.inject(KINDS[index % len(KINDS)]))
            print(f"{index + 1}/{options.faults} {faults[-1]}", file=sys.stderr, flush=True)
        steps = run.stop()
        same, lost, doubled = same_as_quiet(runs, steps)
    late = sum(not each.in_time for each in faults)
    if options.json:
        print(json.dumps({"faults": [asdict(each) for each in faults], "same": same}))
    else:
        show(faults)
        print(
            f"{options.transport}: {len(faults)} faults in {steps} steps, 0 stuck, {late} noticed late; samples "
            f"lost: {lost}, doubled: {doubled}; weights {'bitwise equal' if same else 'differ'}"
        )
    sys.exit(bool(late or lost or doubled or not same))


if __name__ == "__main__":
    main()
