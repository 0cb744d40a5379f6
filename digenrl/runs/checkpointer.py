"""Where a run stood at its last commit: what a checkpoint needs besides the trainer's state."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from digenrl.config.recipes.files import fingerprint
from digenrl.records import Action, Committed, Event
from digenrl.run_folder.folder import RunFolder, RunLines
from digenrl.run_folder.log_files import rotate_logs
from digenrl.run_folder.segments import in_background
from digenrl.scheduling import RecordedStep, SchedulerState
from digenrl.scheduling.recorded_versions import VersionRecord


@dataclass(frozen=True, slots=True)
class RunPosition:
    """Where a run stood after `step` optimizer steps."""

    step: int
    at_ns: int
    jobs_issued: int
    positions: Mapping[str, int]  # lengths of the files that grow
    recorded: tuple[RecordedStep, ...] = ()  # stale samples of the open steps
    evaluations: tuple[int, ...] = ()  # older versions that were still being evaluated

    @property
    def repeats_stale_samples(self) -> bool:
        """Whether samples of the first step were generated with the version before."""
        return any(step.index == self.step and step.stale for step in self.recorded)

    def facts(self, recipe_fingerprint: str) -> dict[str, Any]:
        """What a checkpoint's state.json says about it."""
        return {
            "at_ns": self.at_ns,
            "jobs_issued": self.jobs_issued,
            "positions": dict(self.positions),
            "recorded": [asdict(step) for step in self.recorded],
            "evaluations": list(self.evaluations),
            "fingerprint": recipe_fingerprint,
        }


class Checkpointer:
    """An observer that remembers the run's position at every commit, for the Save job that may follow."""

    def __init__(self, folder: RunFolder, lines: RunLines, start: RunPosition) -> None:
        self._folder, self._lines = folder, lines
        self.position = start
        self._compressing: threading.Thread | None = None
        self._versions = VersionRecord(start.step, start.recorded)

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        """At a commit, everything about the step is written: the files are as long as a resumed run needs them."""
        self._versions.observe(event, actions)
        if isinstance(event, Committed):
            self._versions.forget_before(state.committed)
            self.position = RunPosition(
                state.committed,
                event.at_ns,
                state.jobs_issued,
                self._lines.positions(),
                self._versions.steps(state.committed),
                tuple(each.version for each in state.evaluations if each.version < state.committed),
            )

    def facts(self, step: int) -> dict[str, Any]:
        """The facts for the checkpoint of the last version. Brings the run's files to disk first."""
        assert step == self.position.step, f"a checkpoint of step {step}, but the run is at {self.position.step}"
        self._lines.sync()
        if self._compressing is None or not self._compressing.is_alive():
            self._compressing = in_background(rotate_logs, self._folder.logs)
        return self.position.facts(fingerprint(self._folder.recipe))
