"""Records which samples were generated with the previous version, so that a resumed run can repeat them.

The record is updated during a run, or read from the journal when a run is resumed. The scheduler then generates
the recorded samples with the same versions again, so that the resumed run equals the uninterrupted one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from digenrl.records import NO_JOB, Action, Committed, Event, Generate, Generated, Quarantine, Slice
from digenrl.scheduling.state import RecordedStep


class VersionRecord:
    """Follows the decisions of a run that has `committed` steps. `earlier` records are continued."""

    def __init__(self, committed: int = 0, earlier: Iterable[RecordedStep] = ()) -> None:
        self._committed = committed
        self._stale: dict[int, dict[int, int]] = defaultdict(dict)  # by step, then by group: samples as bits
        self._closed: set[int] = set()
        self._running: dict[int, Generate] = {}
        for step in earlier:
            self._stale[step.index] |= dict(step.stale)
            self._closed |= {step.index} if step.closed else set()

    def observe(self, event: Event, actions: Sequence[Action]) -> None:
        """Enters a decision.

        A job counts with the version it was issued on until its result reports the version used.
        """
        if isinstance(event, Generated) and event.job.id in self._running:
            piece = event.job.slice
            self._end_jobs(piece)
            self._mark(piece, stale=event.version < piece.step)
        elif isinstance(event, Committed):
            self._committed = event.job.step + 1
        for action in actions:
            if isinstance(action, Generate):
                if action.hedges == NO_JOB:
                    self._end_jobs(action.slice)
                    self._mark(action.slice, stale=action.stale)
                self._running[action.id] = action
            elif isinstance(action, Quarantine):
                self._stale[action.step].pop(action.group, None)

    def steps(self, first: int) -> tuple[RecordedStep, ...]:
        """The record of this step and all later ones."""
        known = {*self._stale, *self._closed, *range(first, self._committed + 1)}
        return tuple(
            RecordedStep(index, tuple(sorted(self._stale[index].items())), self._is_closed(index))
            for index in sorted(known)
            if index >= first
        )

    def forget_before(self, step: int) -> None:
        """Drops what is known about earlier steps."""
        self._stale = defaultdict(dict, {index: each for index, each in self._stale.items() if index >= step})
        self._closed = {index for index in self._closed if index >= step}
        self._running = {key: job for key, job in self._running.items() if job.slice.step >= step}

    def _is_closed(self, step: int) -> bool:
        return step in self._closed or step <= self._committed

    def _mark(self, piece: Slice, *, stale: bool) -> None:
        groups = self._stale[piece.step]
        others = groups.pop(piece.group, 0) & ~piece.mask()
        if samples := others | (piece.mask() if stale else 0):
            groups[piece.group] = samples

    def _end_jobs(self, piece: Slice) -> None:
        """Results of other jobs with these samples do not count any more."""
        self._running = {
            key: job
            for key, job in self._running.items()
            if (job.slice.step, job.slice.group) != (piece.step, piece.group)
            or not job.slice.mask() & piece.mask()
        }
