"""Kills the driver of a three-step run at every record of its journal, resumes it, and compares the weights.

    python benchmarks/crash_points.py                          # worker processes: every record
    python benchmarks/crash_points.py --transport colocated
    python benchmarks/crash_points.py --transport ray --every 10

Each record has its own run. Its driver gets SIGKILL when it has written the record, before it acts on it. A
second driver resumes the run, which must end with the weights, bit for bit, of a run that was not killed.
According to its journal, every sample was trained exactly once.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.progress import Progress
from tiny_runs import FAILED, FINISHED, RESTARTED, TRANSPORTS, TinyRuns, count_samples, opened_runs, trained_files

from digenrl.run_folder.lines import located_lines

LEFT_AFTER_S = 20.0  # workers must have noticed the end of their driver by then


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """A run that was killed at a journal record and resumed."""

    record: int
    killed: bool  # False if the run finished before it wrote this record
    finished: bool
    restarted: bool  # no checkpoint was complete yet: the run was resumed with --restart
    equal: bool  # to the weights of the quiet run
    lost: int  # samples
    doubled: int
    left: int  # worker processes

    @property
    def good(self) -> bool:
        """Whether the kill changed nothing."""
        return self.finished and self.equal and not (self.lost or self.doubled or self.left)


class Crashes:
    """Runs with one transport, compared with a quiet one."""

    def __init__(self, runs: TinyRuns) -> None:
        self._runs = runs
        if runs.drive("quiet") != FINISHED:
            raise SystemExit(f"the quiet run failed: {(runs.root / 'quiet.error').read_text()}")
        quiet = runs.folder("quiet")
        self.steps = quiet.recipe.steps
        self._expected, self._samples = trained_files(quiet, self.steps), count_samples(quiet)
        self.records = sum(1 for _ in located_lines(quiet.journal))

    def crash(self, record: int) -> CrashPoint:
        """Kills a run at a record and resumes it."""
        name = f"killed-{record}"
        code = self._runs.drive(name, records=record)
        killed = code == -signal.SIGKILL
        if killed:
            code = self._runs.drive(name, resumes=True)
        left = self._runs.left_workers(name, LEFT_AFTER_S)
        if code == FAILED:
            print((self._runs.root / f"{name}.error").read_text(), file=sys.stderr)
            return CrashPoint(record, killed, False, False, False, 0, 0, len(left))
        folder = self._runs.folder(name)
        trained = count_samples(folder)
        return CrashPoint(
            record,
            killed,
            finished=True,
            restarted=code == RESTARTED,
            equal=trained_files(folder, self.steps) == self._expected,
            lost=len(self._samples - trained),
            doubled=sum(times > 1 for times in trained.values()),
            left=len(left),
        )


def run_points(crashes: Crashes, points: Sequence[int], as_json: bool) -> list[CrashPoint]:
    """Crashes at all points. The progress bar has no thread, since drivers are forked from this process."""
    found = []
    with Progress(console=Console(stderr=True), auto_refresh=False, disable=as_json) as progress:
        task = progress.add_task("killing drivers", total=len(points))
        for point in points:
            found.append(crashes.crash(point))
            progress.update(task, advance=1, refresh=True)
            if as_json:
                print(json.dumps(asdict(found[-1])), flush=True)
    return found


def main() -> None:
    """Prints the counts; exits with 1 if a kill changed anything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", choices=TRANSPORTS, default="local")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="kill at every N-th record")
    parser.add_argument("--first", type=int, default=1, metavar="RECORD", help="the first record to kill at")
    parser.add_argument("--json", action="store_true", help="print every point as a line of JSON")
    options = parser.parse_args()
    if min(options.every, options.first) < 1:
        parser.error(f"--every {options.every} --first {options.first}: both count from 1")
    with opened_runs(options.transport) as runs:
        crashes = Crashes(runs)
        points = range(options.first, crashes.records + 1, options.every)
        found = run_points(crashes, points, as_json=options.json)
    bad = [point for point in found if not point.good]
    if not options.json:
        killed = sum(point.killed for point in found)
        print(
            f"{options.transport}: {killed} drivers killed at {len(found)} of {crashes.records} records, "
            f"{sum(point.restarted for point in found)} of them before the first checkpoint; "
            f"samples lost: {sum(point.lost for point in found)}, "
            f"doubled: {sum(point.doubled for point in found)}; "
            f"other weights: {sum(not point.equal for point in found)}; "
            f"processes left: {sum(point.left for point in found)}"
        )
        for point in bad:
            print(point)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
