"""The scheduler's promises, checked on the events that go into `decide` and the actions that come out.

1. Every sample issued ends exactly once: trained, or quarantined. None is trained twice, none is dropped.
2. A trajectory has one version. It is at most one behind its step, and stale samples stay within the budget.
3. No commit with a missing, doubled or foreign sample. Groups are complete, or replaced as a whole.
5. Training goes before helping. While the trainer's lanes generate, it neither trains nor commits.
6. Versions only grow. A lane works with the version it was given; a held-out chunk with the version it is about.
7. A worker holds one job at a time, and job ids are never used twice. A lane is calibrated before it gets work.
   Two jobs generate the same slice only if one hedges the other; the result of the slower one is dropped.
8. If lanes train on their own: only on the step's version, and the gradients of every sample of an update are in
   exactly one of the sums that are added for it. Sums that were lost count nowhere.

The auditor keeps its own records and does not rely on the scheduler's state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from digenrl.records import (
    NO_JOB,
    NO_LANE,
    Action,
    ArtifactLost,
    Calibrate,
    Calibrated,
    Commit,
    Committed,
    Evaluate,
    Evaluated,
    Event,
    Export,
    Generate,
    Generated,
    GradientsSent,
    HeldOutChunk,
    Job,
    JobFailed,
    LaneJob,
    Publish,
    Published,
    Quarantine,
    Restore,
    Restored,
    RoleSwitched,
    Save,
    Saved,
    Score,
    Scored,
    SendGradients,
    Slice,
    SwitchRole,
    TakeUpdate,
    Train,
    Trained,
    UpdateTaken,
    WorkerJoined,
    WorkerLost,
    holding_lane,
)
from digenrl.scheduling.state import NO_VERSION, SchedulerState


class BrokenPromiseError(AssertionError):
    """The scheduler broke one of its promises; the message says which."""


@dataclass(slots=True)
class _GroupRecord:
    """Sets of samples of one group, as bits, by how far they have come."""

    generating: int = 0
    generated: int = 0
    sent_to_score: int = 0
    scored: int = 0
    score_failed: int = 0
    sent_to_train: int = 0
    trained: int = 0
    stale: int = 0  # issued on the version one behind
    retired: bool = False
    place: int = -1

    @property
    def being_scored(self) -> int:
        return self.sent_to_score & ~self.scored & ~self.score_failed

    def forget(self, mask: int) -> None:
        """The samples are lost, and as if they had never been issued."""
        self.generated &= ~mask
        self.sent_to_score &= ~mask
        self.scored &= ~mask
        self.sent_to_train &= ~mask
        self.stale &= ~mask


@dataclass(slots=True)
class _StepRecord:
    groups: dict[int, _GroupRecord] = field(default_factory=dict)

    def group(self, index: int) -> _GroupRecord:
        return self.groups.setdefault(index, _GroupRecord(place=index))

    def kept(self) -> list[_GroupRecord]:
        return [group for group in self.groups.values() if not group.retired]

    def stale_samples(self) -> int:
        return sum(group.stale.bit_count() for group in self.groups.values() if not group.retired)


class Auditor:
    """Checks every promise after every decision, and counts what a run did."""

    def __init__(self, initial: SchedulerState) -> None:
        self._terms = initial.terms
        self._whole_group = (1 << initial.terms.samples_per_prompt) - 1
        self._lane_version = {lane.index: lane.version for lane in initial.lanes}
        self._helpers = {lane.index for lane in initial.lanes if lane.helper}
        self._lane_jobs: dict[int, LaneJob] = {}
        self._hedged: set[Slice] = set()  # slices that two lanes have been given
        self._void_jobs: set[int] = set()  # whose copy was faster
        self._uncalibrated: set[int] = set()
        self._scores: dict[int, Score] = {}  # by reward lane
        self._void_scores: set[int] = set()
        self._trainer_job: Job | None = None
        self._held_gradients: dict[int, list[Slice]] = defaultdict(list)  # by lane
        self._sent_gradients: dict[int, list[Slice]] = {}  # by job
        self._update = self._attempt = 0
        self._next_id = initial.jobs_issued
        self._steps: dict[int, _StepRecord] = {}
        # Quarantined groups of committed steps of which something is still being generated or scored.
        self._outliving: dict[tuple[int, int], _GroupRecord] = {}
        self._sampled: set[HeldOutChunk] = set()
        self._scored_chunks: set[HeldOutChunk] = set()
        self._committed = initial.committed
        self._role = "generate" if initial.terms.colocated else "train"
        self.trained_samples = 0
        self.stale_samples = 0
        self.helped_samples = 0
        self.assisted_samples = 0  # trained by lanes that are not the trainer's own
        self.quarantined_groups = 0

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        """Enters the event, then the actions that follow from it; raises BrokenPromiseError."""
        absorb = self._EVENTS.get(type(event))
        if absorb is not None:
            absorb(self, event)
        for action in actions:
            if isinstance(action, Job):
                _promise(action.id >= self._next_id, "7: job id {} was used before", action.id)
                self._next_id = action.id + 1
            enter = self._ACTIONS.get(type(action))
            if enter is not None:
                enter(self, action)
        _promise(state.committed == self._committed, "6: the scheduler's version is the number of commits")

    # --- Events -----------------------------------------------------------------------------------------------

    def _joined(self, event: WorkerJoined) -> None:
        lane = len(self._lane_version)
        self._lane_version[lane] = NO_VERSION
        if not event.offer.slice_ns:
            self._uncalibrated.add(lane)

    def _lost(self, event: WorkerLost) -> None:
        if event.pool == "generator":
            self._return_lane_job(event.lane)
            self._lose_gradients(self._held_gradients.pop(event.lane, []))
            self._lane_version[event.lane] = NO_VERSION
        elif event.pool == "reward":
            self._return_score(event.lane)
        elif event.pool == "trainer":
            self._trainer_job = None
            self._role = "train"
            for lane in tuple(self._lane_jobs):
                if lane in self._helpers or self._terms.colocated:
                    self._return_lane_job(lane)
            for lane in self._helpers:
                self._lose_gradients(self._held_gradients.pop(lane, []))
            if self._terms.shares_work and self._update == 0:
                return
            self._attempt += self._terms.shares_work
            self._begin_update(0)
            self._forget_training()

    def _generated(self, event: Generated) -> None:
        job = event.job
        if self._lane_jobs.get(job.lane) != job:
            return  # late or doubled: its samples must not be used, which the checks below would notice
        del self._lane_jobs[job.lane]
        if job.id in self._void_jobs:
            self._void_jobs.remove(job.id)
            return
        piece = job.slice
        self._void_jobs.update(copy.id for copy in self._copies(piece))
        group = self._group(piece)
        group.generating &= ~piece.mask()
        if group.retired:
            self._forget_if_over(piece, group)
            return
        _promise(not group.generated & piece.mask(), "1: {} was generated twice", piece)
        group.generated |= piece.mask()
        if event.version >= piece.step:
            group.stale &= ~piece.mask()
        if not self._terms.scorers:
            group.sent_to_score |= piece.mask()
            if event.score_failure:
                group.score_failed |= piece.mask()
            else:
                group.scored |= piece.mask()
        if job.lane in self._helpers and not self._terms.colocated:
            self.helped_samples += piece.size

    def _evaluated(self, event: Evaluated) -> None:
        job = event.job
        if self._lane_jobs.get(job.lane) == job:
            del self._lane_jobs[job.lane]
            _promise(job.chunk not in self._sampled, "1: {} was sampled twice", job.chunk)
            self._sampled.add(job.chunk)
            if not self._terms.scorers:
                self._scored_chunks.add(job.chunk)

    def _calibrated(self, event: Calibrated) -> None:
        if self._lane_jobs.get(event.job.lane) == event.job:
            del self._lane_jobs[event.job.lane]
            self._uncalibrated.discard(event.job.lane)

    def _scored(self, event: Scored) -> None:
        self._end_score(event.job, failed=False)

    def _failed(self, event: JobFailed) -> None:
        job = event.job
        if isinstance(job, Score):
            self._end_score(job, failed=True)
        elif isinstance(job, LaneJob) and self._lane_jobs.get(job.lane) == job:
            self._return_lane_job(job.lane)

    def _artifact_lost(self, event: ArtifactLost) -> None:
        if not self._take_back(event.job):
            return  # late, or the loss is known
        for job_id in event.gradients:
            self._lose_gradients(self._sent_gradients.pop(job_id))
        for piece in event.slices:
            if piece.step >= self._committed:
                self._forget_slice(piece)

    def _take_back(self, job: Job) -> bool:
        """The job is open again. Returns whether the loss of slices that it reports is news."""
        lane = holding_lane(job)
        if lane is not None:
            is_held = self._lane_jobs.get(lane) == job
            if is_held:
                self._return_lane_job(lane)
            return is_held
        if isinstance(job, Score):
            is_news = self._scores.get(job.scorer) == job and job.id not in self._void_scores
            if self._scores.get(job.scorer) == job:
                self._return_score(job.scorer)
            if is_news and isinstance(job.piece, HeldOutChunk):
                self._sampled.discard(job.piece)
            return is_news
        if isinstance(job, Commit | TakeUpdate):
            self._end_trainer_job(job)
        elif isinstance(job, Train):
            self._end_trainer_job(job)
            self._step(job.slice).group(job.slice.group).sent_to_train &= ~job.slice.mask()
        return True

    def _forget_slice(self, piece: Slice) -> None:
        """It is as if it had never been issued. Score jobs that still work on it are void."""
        group, mask = self._step(piece).group(piece.group), piece.mask()
        _promise(self._terms.shares_work or not group.trained & mask, "1: {} was lost after training", piece)
        if group.retired:
            return
        group.forget(mask)
        for job in self._scores.values():
            scored = job.piece
            if not isinstance(scored, Slice) or (scored.step, scored.group) != (piece.step, piece.group):
                continue
            if scored.mask() & mask:
                self._void_scores.add(job.id)

    def _trained(self, event: Trained) -> None:
        job, piece = event.job, event.job.slice
        if job.lane == NO_LANE:
            self._end_trainer_job(job)
        elif self._lane_jobs.get(job.lane) != job:
            return
        else:
            del self._lane_jobs[job.lane]
            if not self._is_open(piece.step, job.attempt):
                return
            self._held_gradients[job.lane].append(piece)
            if job.lane not in self._helpers and (job.update == 0 or self._terms.update_of_place):
                self.assisted_samples += piece.size
        group = self._step(piece).group(piece.group)
        _promise(not group.trained & piece.mask(), "1: {} was trained twice", piece)
        group.trained |= piece.mask()

    def _gradients_sent(self, event: GradientsSent) -> None:
        job = event.job
        if self._lane_jobs.get(job.lane) == job:
            del self._lane_jobs[job.lane]
            if self._is_open(job.step, job.attempt):
                self._sent_gradients[job.id] = self._held_gradients.pop(job.lane)

    def _update_taken(self, event: UpdateTaken) -> None:
        self._end_trainer_job(event.job)
        self._begin_update(event.job.update + 1)
        if not self._terms.update_of_place:
            self._forget_training()

    def _committed_step(self, event: Committed) -> None:
        self._end_trainer_job(event.job)
        step = event.job.step
        self._begin_update(0)
        self._attempt = 0
        record = self._steps.pop(step)
        self.trained_samples += sum(group.trained.bit_count() for group in record.kept())
        self.stale_samples += record.stale_samples()
        self._committed += 1
        for index, group in record.groups.items():
            if group.generating or group.being_scored:
                _promise(group.retired, "1: work on group {} outlives the commit of step {}", index, step)
                self._outliving[step, index] = group
        self._forget_old()
        for lane in self._lane_version:
            if lane in self._helpers or self._terms.colocated:
                self._lane_version[lane] = self._committed

    def _published(self, event: Published) -> None:
        for lane in event.lanes:
            if self._lane_version.get(lane, NO_VERSION) < event.job.version:
                self._lane_version[lane] = event.job.version

    def _role_switched(self, event: RoleSwitched) -> None:
        self._end_trainer_job(event.job)
        if event.job.role == "train":
            self._role = "train"

    def _trainer_done(self, event: Saved | Restored) -> None:
        self._end_trainer_job(event.job)

    # --- Actions ----------------------------------------------------------------------------------------------

    def _generate(self, job: Generate) -> None:
        piece = job.slice
        self._take_lane(job)
        group = self._step(piece).group(piece.group)
        _promise(not group.retired, "3: {} belongs to a quarantined group", piece)
        _promise(not group.generated & piece.mask(), "1: {} is generated already", piece)
        if job.hedges == NO_JOB:
            _promise(not group.generating & piece.mask(), "1: {} is being generated already", piece)
        else:
            self._hedged.add(piece)
            hedged = [copy.id for copy in self._copies(piece) if copy.id != job.id]
            _promise(hedged == [job.hedges], "7: {} hedges a job, but {} are under way", job, hedged)
        _promise(job.version == self._lane_version[job.lane], "6: {} is not what the lane serves", job)
        _promise(piece.step - 1 <= job.version <= piece.step, "2: {} is more than one version behind", job)
        group.generating |= piece.mask()
        if job.stale:
            group.stale |= piece.mask()
            stale = self._steps[piece.step].stale_samples()
            _promise(stale <= self._terms.stale_budget, "2: {} stale samples in step {}", stale, piece.step)

    def _evaluate(self, job: Evaluate) -> None:
        self._take_lane(job)
        version = self._lane_version[job.lane]
        _promise(job.chunk.version == version, "6: {} needs another version than {}", job, version)

    def _score(self, job: Score) -> None:
        _promise(job.scorer not in self._scores, "7: reward lane {} was given a second job", job.scorer)
        self._scores[job.scorer] = job
        if isinstance(job.piece, HeldOutChunk):
            _promise(job.piece in self._sampled, "3: {} is scored but was never sampled", job.piece)
            return
        group, mask = self._step(job.piece).group(job.piece.group), job.piece.mask()
        _promise(group.generated & mask == mask, "3: {} is scored but was never generated", job.piece)
        _promise(not group.sent_to_score & mask, "1: {} is scored twice", job.piece)
        group.sent_to_score |= mask

    def _train(self, job: Train) -> None:
        if job.lane == NO_LANE:
            self._take_trainer(job)
        else:
            self._take_lane(job)
            version = self._lane_version[job.lane]
            _promise(job.update == self._update, "8: {} is trained in update {}", job, self._update)
            _promise(version == job.slice.step, "8: lane {} trains {} on version {}", job.lane, job, version)
        _promise(self._role == "train", "5: training while the trainer's lanes generate")
        piece, mask = job.slice, job.slice.mask()
        group = self._step(piece).group(piece.group)
        _promise(piece.step == self._committed, "3: {} is foreign to step {}", piece, self._committed)
        _promise(not group.retired, "3: {} belongs to a quarantined group", piece)
        _promise(group.scored & mask == mask, "3: {} is trained without a score", piece)
        _promise(not group.sent_to_train & mask, "1: {} is trained twice", piece)
        group.sent_to_train |= mask

    def _commit(self, job: Commit) -> None:
        self._take_trainer(job)
        _promise(self._role == "train", "5: a commit while the trainer's lanes generate")
        record = self._steps[job.step]
        kept, stale = record.kept(), record.stale_samples()
        _promise(len(kept) == self._terms.prompts, "3: step {} has {} groups", job.step, len(kept))
        whole = all(group.trained == self._whole_group for group in kept)
        _promise(whole, "3: step {} commits with samples missing", job.step)
        if self._terms.shares_work:
            self._check_gradients(job)
        _promise(stale <= self._terms.stale_budget, "2: {} stale samples in step {}", stale, job.step)

    def _check_newest(self, job: Publish | Export) -> None:
        _promise(job.version == self._committed, "6: version {} is not the newest", job.version)

    def _switch(self, job: SwitchRole) -> None:
        self._take_trainer(job)
        if job.role == "train":
            _promise(self._role == "generate", "5: the trainer returns without having helped")
            return
        self._role = "generate"
        if self._terms.colocated:
            return
        ready = any(self._is_ready(group) for group in self._steps.get(self._committed, _StepRecord()).kept())
        _promise(self._terms.stream == "batch" or not ready, "5: help begins while something is ready to train")

    def _quarantine(self, action: Quarantine) -> None:
        record = self._steps[action.step]
        old = record.group(action.group)
        _promise(not old.retired, "1: group {} is quarantined twice", action.group)
        _promise(old.trained != self._whole_group, "1: group {} is trained and quarantined", action.group)
        _promise(action.replaced_by not in record.groups, "3: group {} exists already", action.replaced_by)
        old.retired = True
        record.group(action.replaced_by).place = old.place
        self.quarantined_groups += 1

    def _take_update(self, job: TakeUpdate) -> None:
        self._take_trainer(job)
        _promise(job.update == self._update < self._terms.updates - 1, "8: {} in update {}", job, self._update)
        self._check_gradients(job)

    def _check_gradients(self, job: Commit | TakeUpdate) -> None:
        """Every sample of the update is in the sums of the trainer's own lanes, or in others that are added."""
        _promise(self._helpers.isdisjoint(self._lane_jobs), "8: a commit while the trainer's lanes are busy")
        pieces = [piece for lane in self._helpers for piece in self._held_gradients.get(lane, [])]
        pieces += [piece for job_id in job.gradients for piece in self._sent_gradients.get(job_id, [])]
        covered: dict[int, int] = defaultdict(int)
        for piece in pieces:
            _promise(not covered[piece.group] & piece.mask(), "8: the gradient of {} is added twice", piece)
            covered[piece.group] |= piece.mask()
        kept = {
            index
            for index, group in self._steps[job.step].groups.items()
            if not group.retired and self._terms.is_trained_in(group.place, self._update)
        }
        whole = covered.keys() == kept and all(mask == self._whole_group for mask in covered.values())
        _promise(whole, "8: step {} commits without some gradients", job.step)

    # --- Bookkeeping ------------------------------------------------------------------------------------------

    def _is_open(self, step: int, attempt: int) -> bool:
        """Whether gradients of this attempt at a step still count; attempts of other steps do not."""
        return (self._committed, self._attempt) == (step, attempt)

    def _step(self, piece: Slice) -> _StepRecord:
        _promise(piece.step >= self._committed, "1: {} appears after its step was committed", piece)
        return self._steps.setdefault(piece.step, _StepRecord())

    def _group(self, piece: Slice) -> _GroupRecord:
        """Its group, which may be a quarantined one of a committed step."""
        if piece.step >= self._committed:
            return self._step(piece).group(piece.group)
        outliving = self._outliving.get((piece.step, piece.group))
        _promise(outliving is not None, "1: {} appears after its step was committed", piece)
        assert outliving is not None
        return outliving

    def _begin_update(self, update: int) -> None:
        self._update = update
        self._held_gradients.clear()
        self._sent_gradients.clear()

    def _forget_old(self) -> None:
        """Drops hedged slices of committed steps, and scored chunks of earlier versions."""
        self._hedged = {
            piece
            for piece in self._hedged
            if piece.step >= self._committed or (piece.step, piece.group) in self._outliving
        }
        old = {chunk for chunk in self._scored_chunks if chunk.version < self._committed}
        self._sampled -= old
        self._scored_chunks -= old

    def _forget_training(self) -> None:
        for group in self._steps.get(self._committed, _StepRecord()).groups.values():
            group.sent_to_train = group.trained = 0

    def _lose_gradients(self, pieces: Sequence[Slice]) -> None:
        """Their samples are as if they had never been trained."""
        for piece in pieces:
            group = self._step(piece).group(piece.group)
            group.trained &= ~piece.mask()
            group.sent_to_train &= ~piece.mask()

    def _take_lane(self, job: LaneJob) -> None:
        calibrates = isinstance(job, Calibrate)
        _promise(calibrates == (job.lane in self._uncalibrated), "7: {}, calibrated or not", job)
        _promise(job.lane not in self._lane_jobs, "7: lane {} was given a second job", job.lane)
        self._lane_jobs[job.lane] = job

    def _return_lane_job(self, lane: int) -> None:
        """The job will not be done: its samples are as if they had never been issued."""
        job = self._lane_jobs.pop(lane, None)
        if isinstance(job, Train) and self._is_open(job.slice.step, job.attempt):
            self._step(job.slice).group(job.slice.group).sent_to_train &= ~job.slice.mask()
        if not isinstance(job, Generate):
            return
        if job.id in self._void_jobs or self._copies(job.slice):
            self._void_jobs.discard(job.id)
            return  # another lane has generated it, or carries on with it
        group = self._group(job.slice)
        group.generating &= ~job.slice.mask()
        if not group.retired:
            group.stale &= ~job.slice.mask()
        self._forget_if_over(job.slice, group)

    def _copies(self, piece: Slice) -> list[Generate]:
        """The jobs that lanes hold for a slice that was given to two of them, without void ones."""
        if piece not in self._hedged:
            return []  # only its own lane, which is not searched for: this runs for every slice
        held = (job for job in self._lane_jobs.values() if isinstance(job, Generate) and job.slice == piece)
        return [job for job in held if job.id not in self._void_jobs]

    def _end_score(self, job: Score, failed: bool) -> None:
        if self._scores.get(job.scorer) != job:
            return
        del self._scores[job.scorer]
        is_void = job.id in self._void_scores
        self._void_scores.discard(job.id)
        if is_void:
            return
        if isinstance(job.piece, HeldOutChunk):
            self._scored_chunks.add(job.piece)
            return
        group, mask = self._group(job.piece), job.piece.mask()
        if failed:
            group.score_failed |= mask
        else:
            group.scored |= mask
        self._forget_if_over(job.piece, group)

    def _return_score(self, scorer: int) -> None:
        job = self._scores.pop(scorer, None)
        if job is None:
            return
        is_void = job.id in self._void_scores
        self._void_scores.discard(job.id)
        if isinstance(job.piece, Slice) and not is_void:
            group = self._group(job.piece)
            group.sent_to_score &= ~job.piece.mask()
            self._forget_if_over(job.piece, group)

    def _take_trainer(self, job: Job) -> None:
        _promise(self._trainer_job is None, "7: the trainer was given {} beside {}", job, self._trainer_job)
        self._trainer_job = job

    def _end_trainer_job(self, job: Job) -> None:
        _promise(self._trainer_job == job, "7: {} answers no job that the trainer holds", job)
        self._trainer_job = None

    def _forget_if_over(self, piece: Slice, group: _GroupRecord) -> None:
        if not group.generating and not group.being_scored:
            self._outliving.pop((piece.step, piece.group), None)

    def _is_ready(self, group: _GroupRecord) -> bool:
        if self._terms.stream == "sample":
            return bool(group.scored & ~group.sent_to_train)
        return group.scored == self._whole_group and not group.sent_to_train

    _EVENTS: ClassVar[dict[type[Event], Callable[[Auditor, Any], None]]] = {
        WorkerJoined: _joined,
        WorkerLost: _lost,
        Generated: _generated,
        Evaluated: _evaluated,
        Calibrated: _calibrated,
        Scored: _scored,
        JobFailed: _failed,
        ArtifactLost: _artifact_lost,
        Trained: _trained,
        GradientsSent: _gradients_sent,
        UpdateTaken: _update_taken,
        Committed: _committed_step,
        Published: _published,
        RoleSwitched: _role_switched,
        Saved: _trainer_done,
        Restored: _trainer_done,
    }
    _ACTIONS: ClassVar[dict[type[Action], Callable[[Auditor, Any], None]]] = {
        Generate: _generate,
        Evaluate: _evaluate,
        Calibrate: _take_lane,
        Score: _score,
        Train: _train,
        SendGradients: _take_lane,
        TakeUpdate: _take_update,
        Commit: _commit,
        Save: _take_trainer,
        Restore: _take_trainer,
        Publish: _check_newest,
        Export: _check_newest,
        SwitchRole: _switch,
        Quarantine: _quarantine,
    }


def _promise(kept: bool, sentence: str, *names: object) -> None:
    """The sentence is built only if the promise is broken: this runs several times for every event."""
    if not kept:
        raise BrokenPromiseError(f"promise {sentence.format(*names)}")
