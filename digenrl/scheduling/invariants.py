"""The promises about scheduling, as checks on what goes in and out of `decide`, in one place.

1. Every sample issued ends exactly once: trained, or in quarantine. None is trained twice, none is dropped.
2. A trajectory carries one version. It is at most one behind its step, and within the set share.
3. No commit with a missing, doubled or foreign sample; groups are whole, or replaced whole.
5. Training work goes before helping; while a trainer's lanes generate, it neither trains nor commits.
6. Versions only grow, and a lane works with the version it was given.

The auditor keeps its own books from events and actions alone; it does not trust the scheduler's state. Where a run
goes on after a stop, it begins with the opening's number of commits and of leases so far.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from digenrl.records import (
    Action,
    Commit,
    Committed,
    Event,
    Generate,
    Help,
    Lease,
    Publish,
    Published,
    Quarantine,
    Return,
    SamplesScored,
    Score,
    ScoreFailed,
    Slice,
    SliceDone,
    SliceFailed,
    Train,
    Trained,
    TrainerReturned,
    WorkerJoined,
    WorkerLost,
)
from digenrl.scheduling.state import NO_VERSION, SchedulerState


class BrokenPromiseError(AssertionError):
    """The scheduler broke one of its promises; the message says which."""


@dataclass(slots=True)
class _GroupBook:
    """Sets of samples of one group, as bits, by how far they have come."""

    being_made: int = 0
    generated: int = 0
    sent_to_score: int = 0
    scored: int = 0
    score_failed: int = 0
    sent_to_train: int = 0
    trained: int = 0
    stale: int = 0  # made, or being made, on the version one behind
    retired: bool = False

    @property
    def being_scored(self) -> int:
        return self.sent_to_score & ~self.scored & ~self.score_failed


@dataclass(slots=True)
class _StepBook:
    groups: dict[int, _GroupBook] = field(default_factory=dict)
    stale_samples: int = 0

    def group(self, index: int) -> _GroupBook:
        return self.groups.setdefault(index, _GroupBook())

    def kept(self) -> list[_GroupBook]:
        return [group for group in self.groups.values() if not group.retired]


class Auditor:
    """Checks every promise after every decision, and counts what a run did."""

    def __init__(self, opening: SchedulerState) -> None:
        self._terms = opening.terms
        self._whole_group = (1 << opening.terms.samples_per_prompt) - 1
        self._lane_version = {lane.index: lane.version for lane in opening.lanes}
        self._helpers = {lane.index for lane in opening.lanes if lane.helper}
        self._leases: dict[int, Lease] = {}  # by lane
        self._next_epoch = opening.leases_issued
        self._steps: dict[int, _StepBook] = {}
        # Groups in quarantine, of committed steps, of which something is still being made or scored.
        self._outliving: dict[tuple[int, int], _GroupBook] = {}
        self._committed = opening.committed
        self._trainer = "train"
        self.trained_samples = 0
        self.stale_samples = 0
        self.helped_samples = 0
        self.quarantined_groups = 0

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        """Enters the event, then the actions that followed from it; raises BrokenPromiseError."""
        absorb = self._EVENTS.get(type(event))
        if absorb is not None:
            absorb(self, event)
        for action in actions:
            enter = self._ACTIONS.get(type(action))
            if enter is not None:
                enter(self, action)
        _promise(state.committed == self._committed, "6: the scheduler's version is the number of commits")

    # --- Facts ------------------------------------------------------------------------------------------------

    def _joined(self, event: WorkerJoined) -> None:
        self._lane_version[len(self._lane_version)] = NO_VERSION

    def _lost(self, event: WorkerLost) -> None:
        lease = self._leases.get(event.lane)
        if lease is not None:
            self._void(lease)
        self._lane_version[event.lane] = NO_VERSION

    def _done(self, event: SliceDone) -> None:
        lease = event.lease
        if self._leases.get(lease.lane) != lease:
            return  # late or doubled: its samples must not be used, which the checks below would notice
        del self._leases[lease.lane]
        piece = lease.slice
        group = self._group(piece)
        group.being_made &= ~piece.mask()
        if group.retired:
            self._forget_if_over(piece, group)
            return
        _promise(not group.generated & piece.mask(), "1: {} was made twice", piece)
        group.generated |= piece.mask()
        if lease.lane in self._helpers and not self._terms.colocated:
            self.helped_samples += piece.size

    def _failed(self, event: SliceFailed) -> None:
        if self._leases.get(event.lease.lane) == event.lease:
            self._void(event.lease)

    def _scored(self, event: SamplesScored) -> None:
        group = self._group_being_scored(event.slice)
        if group is not None:
            group.scored |= event.slice.mask()
            self._forget_if_over(event.slice, group)

    def _score_failed(self, event: ScoreFailed) -> None:
        group = self._group_being_scored(event.slice)
        if group is not None:
            group.score_failed |= event.slice.mask()
            self._forget_if_over(event.slice, group)

    def _trained(self, event: Trained) -> None:
        for piece in event.slices:
            group = self._step(piece).group(piece.group)
            _promise(not group.trained & piece.mask(), "1: {} was trained twice", piece)
            group.trained |= piece.mask()

    def _committed_step(self, event: Committed) -> None:
        book = self._steps.pop(event.step)
        self.trained_samples += sum(group.trained.bit_count() for group in book.kept())
        self.stale_samples += sum(group.stale.bit_count() for group in book.kept())
        self._committed += 1
        for index, group in book.groups.items():
            if group.being_made or group.being_scored:
                _promise(group.retired, "1: work on group {} outlives the commit of step {}", index, event.step)
                self._outliving[event.step, index] = group
        for lane in self._lane_version:
            if lane in self._helpers or self._terms.colocated:
                self._lane_version[lane] = self._committed

    def _published(self, event: Published) -> None:
        for lane in event.lanes:
            if self._lane_version.get(lane, NO_VERSION) < event.version:
                self._lane_version[lane] = event.version

    def _returned(self, event: TrainerReturned) -> None:
        self._trainer = "train"

    # --- Orders -----------------------------------------------------------------------------------------------

    def _generate(self, action: Generate) -> None:
        lease, piece = action.lease, action.lease.slice
        _promise(lease.lane not in self._leases, "1: lane {} was given a second slice", lease.lane)
        _promise(lease.epoch >= self._next_epoch, "1: epoch {} was used before", lease.epoch)
        self._next_epoch = lease.epoch + 1
        group = self._step(piece).group(piece.group)
        _promise(not group.retired, "3: {} belongs to a group in quarantine", piece)
        _promise(not group.generated & piece.mask(), "1: {} is made already", piece)
        _promise(not group.being_made & piece.mask(), "1: {} is being made already", piece)
        _promise(lease.version == self._lane_version[lease.lane], "6: {} is not what the lane serves", lease)
        _promise(piece.step - 1 <= lease.version <= piece.step, "2: {} is more than one version behind", lease)
        self._leases[lease.lane] = lease
        group.being_made |= piece.mask()
        if lease.stale:
            self._enter_stale(piece, group)

    def _score(self, action: Score) -> None:
        group = self._step(action.slice).group(action.slice.group)
        mask = action.slice.mask()
        _promise(group.generated & mask == mask, "3: {} is scored but was never made", action.slice)
        _promise(not group.sent_to_score & mask, "1: {} is scored twice", action.slice)
        group.sent_to_score |= mask

    def _train(self, action: Train) -> None:
        _promise(self._trainer == "train", "5: training while the trainer's lanes generate")
        for piece in action.slices:
            group, mask = self._step(piece).group(piece.group), piece.mask()
            _promise(piece.step == self._committed, "3: {} is foreign to step {}", piece, self._committed)
            _promise(not group.retired, "3: {} belongs to a group in quarantine", piece)
            _promise(group.scored & mask == mask, "3: {} is trained without a score", piece)
            _promise(not group.sent_to_train & mask, "1: {} is trained twice", piece)
            group.sent_to_train |= mask

    def _commit(self, action: Commit) -> None:
        _promise(self._trainer == "train", "5: a commit while the trainer's lanes generate")
        kept = self._steps[action.step].kept()
        _promise(len(kept) == self._terms.prompts, "3: step {} has {} groups", action.step, len(kept))
        whole = all(group.trained == self._whole_group for group in kept)
        _promise(whole, "3: step {} commits with samples missing", action.step)
        stale = sum(group.stale.bit_count() for group in kept)
        _promise(stale <= self._terms.stale_budget, "2: {} stale samples in step {}", stale, action.step)

    def _publish(self, action: Publish) -> None:
        _promise(action.version == self._committed, "6: version {} is not the newest", action.version)

    def _help(self, action: Help) -> None:
        self._trainer = "generate"
        if self._terms.colocated:
            return
        ready = any(self._is_ready(group) for group in self._steps.get(self._committed, _StepBook()).kept())
        _promise(self._terms.stream == "batch" or not ready, "5: help begins while something is ready to train")

    def _return(self, action: Return) -> None:
        _promise(self._terms.colocated or self._trainer == "generate", "5: a return from nowhere")

    def _quarantine(self, action: Quarantine) -> None:
        book = self._steps[action.step]
        old = book.group(action.group)
        _promise(not old.retired, "1: group {} goes into quarantine twice", action.group)
        _promise(old.trained != self._whole_group, "1: group {} is trained and in quarantine", action.group)
        _promise(action.replaced_by not in book.groups, "3: group {} exists already", action.replaced_by)
        book.stale_samples -= old.stale.bit_count()
        old.retired = True
        book.group(action.replaced_by)
        self.quarantined_groups += 1

    # --- Bookkeeping ------------------------------------------------------------------------------------------

    def _step(self, piece: Slice) -> _StepBook:
        _promise(piece.step >= self._committed, "1: {} turns up after its step was committed", piece)
        return self._steps.setdefault(piece.step, _StepBook())

    def _group(self, piece: Slice) -> _GroupBook:
        """Its group; of a committed step, one in quarantine of which something is still under way."""
        if piece.step >= self._committed:
            return self._step(piece).group(piece.group)
        outliving = self._outliving.get((piece.step, piece.group))
        _promise(outliving is not None, "1: {} turns up after its step was committed", piece)
        assert outliving is not None
        return outliving

    def _group_being_scored(self, piece: Slice) -> _GroupBook | None:
        """Its group, if these samples are being scored; any other answer is late or doubled."""
        if piece.step < self._committed and (piece.step, piece.group) not in self._outliving:
            return None
        group = self._group(piece)
        return group if group.being_scored & piece.mask() == piece.mask() else None

    def _forget_if_over(self, piece: Slice, group: _GroupBook) -> None:
        if not group.being_made and not group.being_scored:
            self._outliving.pop((piece.step, piece.group), None)

    def _enter_stale(self, piece: Slice, group: _GroupBook) -> None:
        book, budget = self._steps[piece.step], self._terms.stale_budget
        group.stale |= piece.mask()
        book.stale_samples += piece.size
        _promise(book.stale_samples <= budget, "2: {} stale samples in step {}", book.stale_samples, piece.step)

    def _void(self, lease: Lease) -> None:
        """The lease will not be fulfilled: its samples are as if never handed out."""
        del self._leases[lease.lane]
        piece = lease.slice
        group = self._group(piece)
        group.being_made &= ~piece.mask()
        self._forget_if_over(piece, group)
        if lease.stale and not group.retired:
            group.stale &= ~piece.mask()
            self._steps[piece.step].stale_samples -= piece.size

    def _is_ready(self, group: _GroupBook) -> bool:
        if self._terms.stream == "sample":
            return bool(group.scored & ~group.sent_to_train)
        return group.scored == self._whole_group and not group.sent_to_train

    _EVENTS: ClassVar[dict[type[Event], Callable[[Auditor, Any], None]]] = {
        WorkerJoined: _joined,
        WorkerLost: _lost,
        SliceDone: _done,
        SliceFailed: _failed,
        SamplesScored: _scored,
        ScoreFailed: _score_failed,
        Trained: _trained,
        Committed: _committed_step,
        Published: _published,
        TrainerReturned: _returned,
    }
    _ACTIONS: ClassVar[dict[type[Action], Callable[[Auditor, Any], None]]] = {
        Generate: _generate,
        Score: _score,
        Train: _train,
        Commit: _commit,
        Publish: _publish,
        Help: _help,
        Return: _return,
        Quarantine: _quarantine,
    }


def _promise(kept: bool, sentence: str, *names: object) -> None:
    """The sentence is put together only when it is needed: this runs several times for every event."""
    if not kept:
        raise BrokenPromiseError(f"promise {sentence.format(*names)}")
