"""Lanes that both generate and train, each on its own: which idle lane takes a slice, and which a Train job.

With `assist: both`, a complete group becomes Train jobs of `job_samples` samples. Any lane that can train and
serves the step's version may take any of them, and a lane that changes its role pays for the switch first. When
nothing is left to train, lanes send their gradient sums. When all are sent, the trainer commits; its own lanes
keep their sums and must be idle then.

Slices of the next step, started on the version one behind, come after all work of the current step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from digenrl.records import Action, Generate, Role, Slice, Train
from digenrl.scheduling.changes import replace
from digenrl.scheduling.dispatch import piece_ns
from digenrl.scheduling.shared_gradients import commit_if_complete, send_gradients
from digenrl.scheduling.slice_assignment import SlicePicker
from digenrl.scheduling.state import (
    GroupProgress,
    Lane,
    Outcome,
    ReadyUnit,
    SchedulerState,
    StepProgress,
    is_available,
    put_step,
)
from digenrl.units import UNLIMITED

LATE = 1.25  # times what a job was expected to take

# --- Decisions -------------------------------------------------------------------------------------------------


def hand_out_work(state: SchedulerState, at_ns: int) -> Outcome:
    """Gives slices and Train jobs to idle lanes, and commits a step whose gradients are complete."""
    if state.all_committed:
        return state, ()
    state, sent = send_gradients(state, at_ns)
    jobs: tuple[Action, ...] = ()
    if any(is_available(state, state.lanes[index]) for index in state.idle):
        state, jobs = _Allocation(state, at_ns).hand_out()
    state, commit = commit_if_complete(state, at_ns)
    return state, (*sent, *jobs, *commit)


class _Allocation:
    """Work for the idle lanes of one instant."""

    def __init__(self, state: SchedulerState, at_ns: int) -> None:
        self._state, self._at_ns = state, at_ns
        self._rule = state.terms.shared_work
        self._picker = SlicePicker(state)
        step, terms = state.current, state.terms
        self._ready, self._later = list(step.ready), list[ReadyUnit]()
        if terms.updates > 1:
            self._ready.clear()
            for unit in step.ready:
                is_now = terms.is_trained_in(step.place(unit.group), step.update)
                (self._ready if is_now else self._later).append(unit)
        self._leaves_to_faster = self._rule.leaves_to_faster
        self._jobs: dict[int, Generate | Train] = {}
        self._lanes = [lane for lane in state.present_lanes if lane.calibrated and is_available(state, lane)]
        self._free_ns = {lane.index: max(at_ns, lane.ends_ns) if lane.job else at_ns for lane in self._lanes}
        self._waited_for = list(self._lanes)
        # By role and size: when each lane would finish such a piece, if it were its next, and the lane's index.
        self._finishes: dict[tuple[Role, int], list[tuple[int, int]]] = {}

    def hand_out(self) -> Outcome:
        state = self._state
        self._offer_to_idle_lanes()
        if not self._jobs and all(lane.job is None for lane in self._lanes):
            self._leaves_to_faster = False  # each lane has left the work to another one
            self._offer_to_idle_lanes()
        lanes, step = list(state.lanes), state.current
        for index, job in self._jobs.items():
            lanes[index] = _with_job(lanes[index], job, self._free_ns[index], state)
        state = replace(
            state,
            lanes=tuple(lanes),
            idle=tuple(index for index in state.idle if index not in self._jobs),
            steps=self._picker.steps(),
            jobs_issued=state.jobs_issued + len(self._jobs),
        )
        if len(self._ready) + len(self._later) < len(step.ready):
            ready = tuple(sorted((*self._ready, *self._later))) if self._later else tuple(self._ready)
            groups = _with_training(state.current, self._jobs)
            state = put_step(state, replace(state.current, ready=ready, groups=groups))
        return state, tuple(self._jobs.values())

    def _offer_to_idle_lanes(self) -> None:
        lanes = [self._state.lanes[index] for index in self._state.idle]
        if self._rule.pieces and self._rule.strict:  # what is finished first belongs to the first groups
            lanes.sort(key=self._piece_ns)
        for lane in lanes:
            if lane.index not in self._jobs and is_available(self._state, lane):
                self._offer_work(lane)

    def _offer_work(self, lane: Lane) -> None:
        if self._left_of_quota(lane):
            taken = self._take_slice(lane, of_current_step=True) or self._take_training(lane)
        else:
            taken = self._take_training(lane) or (
                not self._waits_for_others() and self._take_slice(lane, of_current_step=True)
            )
        if not taken and self._may_work_ahead(lane):
            self._take_slice(lane, until_ns=self._may_work_ahead_until(lane))

    def _left_of_quota(self, lane: Lane) -> int:
        """The slices of the step that it should still generate. A lane that cannot train takes all that it can."""
        quota = self._rule.quota(lane.index) if lane.train_sample_ns else None
        if quota is None:
            return UNLIMITED
        given = self._jobs.get(lane.index)
        if isinstance(given, Generate) and given.slice.step == self._state.committed:
            quota -= self._state.terms.slices_in(given.slice.size)
        return max(0, quota - lane.taken)

    def _waits_for_others(self) -> bool:
        """Whether a lane without pieces left should wait because other lanes have some."""
        others = self._waited_for  # pieces only become fewer, so a lane that is removed stays removed
        while others and (self._is_late(others[-1]) or not self._left_of_quota(others[-1])):
            others.pop()
        return self._rule.strict and bool(others)

    def _is_late(self, lane: Lane) -> bool:
        """Whether its job takes so long that other lanes should not wait for its next one."""
        job = lane.job
        return job is not None and self._at_ns - job.issued_ns > LATE * (lane.ends_ns - job.issued_ns)

    def _take_training(self, lane: Lane) -> bool:
        state = self._state
        if not self._ready or not lane.train_sample_ns or lane.version != state.committed:
            return False
        end_ns = self._at_ns + lane.switch_ns("train") + self._train_ns(lane, self._ready[0].size)
        if self._leaves_to_faster and self._others_train_all(lane, end_ns):
            return False
        unit = self._ready.pop(0)
        piece = Slice(state.committed, unit.group, unit.first, unit.size)
        step = state.current
        job = Train(self._next_id(), self._at_ns, piece, lane.index, step.update, step.attempt)
        self._give(lane, job, end_ns)
        return True

    def _train_ns(self, lane: Lane, samples: int) -> int:
        return lane.train_ns(samples) // self._state.terms.updates_per_group

    def _others_train_all(self, lane: Lane, end_ns: int) -> bool:
        """Whether the other lanes would finish everything that is ready before this lane has finished one job.

        As long as slices of the step are unstarted, others may generate instead.
        """
        if self._picker.unstarted(current_step_only=True):
            return False
        left, size = len(self._ready), self._ready[0].size
        for other, finish_ns in self._others_before(lane, "train", size, end_ns):
            if other.version == lane.version:
                left -= (end_ns - 1 - finish_ns) // max(1, self._train_ns(other, size)) + 1
                if left <= 0:
                    return True
        return False

    def _others_before(self, lane: Lane, role: Role, size: int, end_ns: int) -> Iterator[tuple[Lane, int]]:
        """The other lanes that would finish a piece of this size earlier, soonest first, and when.

        The order is kept while lanes take work. Otherwise each of hundreds of idle lanes would look at all others.
        """
        finishes = self._finishes.get((role, size))
        if finishes is None:
            able = (other for other in self._lanes if role == "generate" or other.train_sample_ns)
            finishes = sorted((self._finish_ns(other, role, size), other.index) for other in able)
            self._finishes[role, size] = finishes
        for finish_ns, index in finishes:
            if finish_ns >= end_ns:
                return
            if index != lane.index:
                yield self._state.lanes[index], finish_ns

    def _finish_ns(self, lane: Lane, role: Role, size: int) -> int:
        length_ns = piece_ns(lane, size) if role == "generate" else max(1, self._train_ns(lane, size))
        return self._free_ns[lane.index] + self._next_switch_ns(lane, role) + length_ns

    def _next_switch_ns(self, lane: Lane, role: Role) -> int:
        """The time until it can work in this role, after a job that it was given at this instant."""
        job = self._jobs.get(lane.index)
        if job is None:
            return lane.switch_ns(role)
        if isinstance(job, Generate) == (role == "generate"):
            return 0
        return lane.switch_in_ns if role == "generate" else lane.switch_out_ns

    def _take_slice(self, lane: Lane, *, of_current_step: bool = False, until_ns: int | None = None) -> bool:
        picker, version = self._picker, lane.version
        if not picker.may_start(version, current_step_only=of_current_step):
            return False
        length = self._slices_at_once(lane, lane.taken if of_current_step else lane.taken_ahead)
        start_ns = self._at_ns + lane.switch_ns("generate")
        in_time = 1 - self._rule.late_share
        while until_ns is not None and length and start_ns + in_time * lane.expected_ns(length) > until_ns:
            length -= 1
        if not length:
            return False
        end_ns = start_ns + lane.expected_ns(length)
        if self._leaves_to_faster and self._others_generate_all(lane, length, end_ns):
            return False
        piece = picker.take(version, 0, length)
        assert piece is not None
        self._give(lane, Generate(self._next_id(), self._at_ns, piece, lane.index, version), end_ns)
        return True

    def _slices_at_once(self, lane: Lane, taken: int) -> int:
        """Its next piece after the slices that it has taken of a step, or as many as it can take.

        The rest of a group is then cut evenly: a small last job would be slow for its size.
        """
        at_once = lane.slices_at_once
        if at_once == 1:
            return 1
        rest = self._picker.length_at(lane.version, 0, self._state.terms.slices_per_group)
        piece = self._rule.next_piece(lane.index, taken)
        if piece is not None and piece <= at_once:
            return min(rest, piece)
        jobs = -(-rest // at_once)
        return -(-rest // jobs)

    def _piece_ns(self, lane: Lane) -> int:
        """The time of its next piece, or of the largest job that it takes."""
        piece = self._rule.next_piece(lane.index, lane.taken) or lane.slices_at_once
        return lane.expected_ns(min(piece, lane.slices_at_once))

    def _others_generate_all(self, lane: Lane, length: int, end_ns: int) -> bool:
        """Whether the other lanes would finish all unstarted slices before this lane has finished these."""
        unstarted = self._picker.unstarted(current_step_only=True) or self._picker.unstarted()
        for other, finish_ns in self._others_before(lane, "generate", length, end_ns):
            if other.version < lane.version:
                continue
            left = self._left_of_quota(other)
            if not self._rule.strict and (left or not self._ready):
                left = UNLIMITED
            jobs = (end_ns - 1 - finish_ns) // other.slice_ns + 1
            unstarted -= min(left, jobs * other.slices_at_once)
            if unstarted <= 0:
                return True
        return False

    def _may_work_ahead(self, lane: Lane) -> bool:
        """Whether all slices of the step are started, and the lane has no sums that it should send soon."""
        if self._picker.unstarted(current_step_only=True) or not self._picker.may_start(lane.version):
            return False
        return not lane.trained or lane.helper or self._state.current.unscored_groups > 0

    def _may_work_ahead_until(self, lane: Lane) -> int | None:
        """When the lane may be needed for the current step again; None: not any more.

        It trains when the next group is complete. The trainer's own lanes must be idle for the commit.
        """
        if self._state.current.unscored_groups and lane.train_sample_ns:
            return self._next_complete_group_ns()
        return self._earliest_commit_ns() if lane.helper else None

    def _next_complete_group_ns(self) -> int:
        """When the next group of the current step is expected to be complete, if all of it is under way."""
        step, complete_ns = self._state.current, dict[int, int]()
        for lane in self._state.present_lanes:
            job = self._jobs.get(lane.index, lane.job)
            if isinstance(job, Generate) and job.slice.step == step.index:
                end_ns = self._free_ns.get(lane.index, self._at_ns)
                complete_ns[job.slice.group] = max(end_ns, complete_ns.get(job.slice.group, 0))
        return min(complete_ns.values(), default=self._at_ns)

    def _earliest_commit_ns(self) -> int:
        """A lower bound of when the current step can be committed."""
        state, latest_ns = self._state, self._at_ns
        step = state.current
        for lane in state.present_lanes:
            job = self._jobs.get(lane.index, lane.job)
            if isinstance(job, Generate | Train) and job.slice.step == step.index:
                latest_ns = max(latest_ns, self._free_ns.get(lane.index, self._at_ns))
        whole = state.terms.samples_per_prompt
        open_samples = sum(
            whole - (group.trained | group.training).bit_count() for group in step.groups if not group.retired
        )
        rate = sum(1 / float(lane.train_sample_ns) for lane in self._lanes if lane.train_sample_ns)
        return max(latest_ns, self._at_ns + round(open_samples / rate)) if rate else latest_ns

    def _give(self, lane: Lane, job: Generate | Train, end_ns: int) -> None:
        listed = [key for key in self._finishes if key[0] == "generate" or lane.train_sample_ns]
        for key in listed:
            del self._finishes[key][bisect_left(self._finishes[key], (self._finish_ns(lane, *key), lane.index))]
        self._jobs[lane.index] = job
        self._free_ns[lane.index] = end_ns
        for key in listed:
            insort(self._finishes[key], (self._finish_ns(lane, *key), lane.index))

    def _next_id(self) -> int:
        return self._state.jobs_issued + len(self._jobs)


def _with_job(lane: Lane, job: Generate | Train, ends_ns: int, state: SchedulerState) -> Lane:
    """The lane with its job. Slices count towards its quota of their step."""
    if isinstance(job, Train):
        return replace(lane, job=job, ends_ns=ends_ns, role="train")
    slices = state.terms.slices_in(job.slice.size)
    if job.slice.step == state.committed:
        return replace(lane, job=job, ends_ns=ends_ns, role="generate", taken=lane.taken + slices)
    return replace(lane, job=job, ends_ns=ends_ns, role="generate", taken_ahead=lane.taken_ahead + slices)


def _with_training(step: StepProgress, jobs: dict[int, Generate | Train]) -> tuple[GroupProgress, ...]:
    """The step's groups, with the samples of these jobs marked."""
    groups = list(step.groups)
    for job in jobs.values():
        if isinstance(job, Train):
            group = groups[job.slice.group]
            groups[job.slice.group] = replace(group, training=group.training | job.slice.mask())
    return tuple(groups)
