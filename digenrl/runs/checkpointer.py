"""Checkpoints from the driver's side: where the run stood at its last commit, and when the trainer saves it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from digenrl.driver.dispatcher import Dispatcher
from digenrl.driver.pending_jobs import Completed
from digenrl.records import Action, Committed, Event
from digenrl.run_folder.folder import RunFolder, RunLines
from digenrl.scheduling import SchedulerState
from digenrl.telemetry.trace import TRAINER_LANE, Span, Work
from digenrl.worker.assignment import TRAINER
from digenrl.worker.orders import SaveCheckpoint


@dataclass(frozen=True, slots=True)
class RunPosition:
    """Where a run stood when so many optimizer steps were taken: all that going on needs besides weights."""

    step: int
    at_ns: int
    leases_issued: int
    positions: Mapping[str, int]  # of the files that grow

    def facts(self, fingerprint: str) -> dict[str, Any]:
        """For a checkpoint's state.json."""
        return {
            "at_ns": self.at_ns,
            "leases_issued": self.leases_issued,
            "positions": dict(self.positions),
            "fingerprint": fingerprint,
        }


class Checkpointer:
    """An observer, the last of all, that places a bookmark at every commit and has every n-th saved."""

    def __init__(
        self,
        folder: RunFolder,
        lines: RunLines,
        runtime: Dispatcher,
        opening: RunPosition,
        describe: Callable[[RunPosition], Mapping[str, Any]],
        on_span: Callable[[Span], None],
    ) -> None:
        self._folder, self._lines, self._runtime = folder, lines, runtime
        self._describe, self._on_span = describe, on_span
        self.bookmark = opening
        self.saved_step: int | None = None
        self._asked_step: int | None = None  # the last that the trainer was told to save
        self._saving = 0

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        """At a commit everything about the step is written: the files are as long as they will be at a resume."""
        if not isinstance(event, Committed):
            return
        self.bookmark = RunPosition(state.committed, event.at_ns, state.leases_issued, self._lines.positions())
        if state.committed % self._folder.recipe.checkpoint.every == 0 or state.finished:
            self.save()

    def save(self) -> None:
        """Has the trainer save the last version; goes on beside everything else."""
        bookmark = self.bookmark
        self._lines.sync()
        self._saving += 1
        self._asked_step = bookmark.step

        def saved(answered: Completed) -> None:
            self._saving -= 1
            self.saved_step = bookmark.step
            span = Span(TRAINER_LANE, Work.SAVE, answered.began_ns, answered.at_ns, bookmark.step - 1)
            self._on_span(span)

        order = SaveCheckpoint(
            str(self._folder.path), bookmark.step, self._describe(bookmark), self._folder.recipe.checkpoint.keep
        )
        self._runtime.send(TRAINER, order, saved)

    def save_now(self) -> None:
        """Saves the last version unless that was asked for, and waits until it is on the disk."""
        if self._asked_step != self.bookmark.step:
            self.save()
        while self._saving:
            self._runtime.receive()
