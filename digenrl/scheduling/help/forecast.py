"""A fast, exact simulation of the coming steps: what would happen if the trainer helped in a certain way.

A search for the best help simulates thousands of futures, so this model keeps only what times depend on:

- equal lanes that start together end together, so they are one *bundle*, whose slices are kept as runs of
  (group, number of slices);
- training units cost the same, so only their number is kept, not their order;
- reward lanes take samples in order and need the same time for each, so the end of a score is known when its
  sample arrives.

Slices are dispatched by the scheduler's own rules. A property test requires that whole forecasts equal runs of the
scheduler, to the nanosecond. Rewards are scored in units of the greatest common divisor of batch and slice. That
is exact if the batch divides the slice or is larger, and with one reward lane if whole groups are trained. It is
an estimate for several reward lanes whose batches do not divide the slice. Runs in which lanes take several slices
at once are estimates, too: in `batch` order such slices are treated as neighbors in the list, and their rewards
are scored in batches of one slice.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from digenrl.records import LaneOffer
from digenrl.scheduling.dispatch import assign_by_finish, first_unreserved
from digenrl.scheduling.help.forecast_constants import NEVER, ForecastConstants, NodeCounter
from digenrl.scheduling.help.slice_lists import Runs, SliceList
from digenrl.scheduling.staleness import admitted_samples

HELPER_CLASS = -1
NO_STEP = -1  # of a bundle that produces nothing
HELD_OUT = -2  # of a bundle of held-out chunks
GROUPS_PER_NODE = 16  # group updates that cost about as much as an instant
COPIES_PER_NODE = 256  # copied entries that cost about as much as an instant

# (end, order over the lists of all steps, lane class, step, lanes that become idle, slices)
Bundle = tuple[int, int, int, int, int, Runs]


@dataclass(slots=True)
class Forecast:
    """One possible future, advanced in place. `fork` it before trying something.

    It stops only when the trainer has to decide: at a bubble, or right after a commit.
    """

    constants: ForecastConstants
    counter: NodeCounter
    now: int
    running: list[Bundle]  # heap by end
    idle: list[int]  # idle lanes of each class
    slices: SliceList  # of the step from which slices are taken next
    position: int  # place in `slices` of the next unstarted slice
    holes: list[int]  # started places behind it; those of the next step's list follow the end of this list
    slices_step: int  # the step of `slices`
    stale_used: int  # stale samples of that step
    stale_next: int  # stale samples of the step after it, since this forecast began
    open_groups: list[int]  # unscored samples of each group of the current step
    open_groups_next: list[int]
    done: int  # scored units of the current step
    done_next: int
    trained: int  # trained units of the current step
    committed: int  # the current step, and the trainer's version
    published: list[int]  # the generators' version, by link
    publications: list[tuple[int, int, int]]  # (when it arrives, link, version), soonest first
    scorer_free: list[int]  # when each reward lane is idle, soonest first
    being_scored: deque[tuple[int, int, Runs]]  # (end, step, samples of each group)
    sent: int  # the newest version that was published, loaded or not
    chunks: int = 0  # unstarted held-out chunks of that version
    sampling: int = 0  # those that lanes hold
    saves: bool = False  # whether the trainer writes a checkpoint next

    def fork(self) -> Forecast:
        """An independent copy of this future."""
        self.count_fork()
        return self.copy()

    def count_fork(self) -> None:
        """Counts the work of a fork."""
        self.counter.nodes += 1 + (self.constants.copied_entries + len(self.running)) // COPIES_PER_NODE

    def copy(self) -> Forecast:
        """A fork that does not count."""
        return Forecast(
            self.constants, self.counter, self.now, self.running[:], self.idle[:], self.slices, self.position,
            self.holes[:], self.slices_step, self.stale_used, self.stale_next, self.open_groups[:],
            self.open_groups_next[:], self.done, self.done_next, self.trained, self.committed, self.published[:],
            self.publications[:], self.scorer_free, self.being_scored.copy(), self.sent, self.chunks,
            self.sampling, self.saves,
        )  # fmt: skip

    def key(self) -> tuple[object, ...]:
        """Equal keys mean equal futures."""
        bundles = sorted((end, kind, step, runs) for end, _, kind, step, _, runs in self.running)
        self.counter.nodes += (self.constants.copied_entries + len(bundles)) // GROUPS_PER_NODE
        return (
            self.now, self.slices_step, self.position, tuple(self.holes), self.stale_used, self.stale_next,
            self.done, self.done_next, self.trained,
            self.committed, tuple(self.published), tuple(self.publications), tuple(self.idle), tuple(bundles),
            tuple(self.open_groups), tuple(self.open_groups_next), tuple(self.scorer_free),
            tuple(self.being_scored), self.sent, self.chunks, self.sampling,
        )  # fmt: skip

    def start_generators(self) -> None:
        """Idle generators take slices, as they do before the trainer's first decision."""
        self._dispatch()

    # --- What the trainer can do -------------------------------------------------------------------------------

    @property
    def ready(self) -> int:
        """Units of the current step that could be trained now."""
        if self.constants.batch and self.done < self.constants.units:
            return 0
        return self.done - self.trained

    def run_to_decision(self) -> bool:
        """Trains what is ready until a bubble (False) or, after the last unit, through the commit (True)."""
        constants = self.constants
        if self.saves:
            self.saves = False
            self._work(constants.save_ns)
        while self.trained < constants.units:
            ready = self.ready
            if not ready:
                return False
            self._work(constants.whole_step_ns if constants.batch else ready * constants.unit_ns)
            self.trained += ready
        self._commit()
        return True

    def wait(self) -> bool:
        """Lets time pass until something is ready to train. False if that never happens without help."""
        while not self.ready:
            at = self._next_instant()
            if at == NEVER:
                self.now = NEVER
                return False
            if self._settle(at):
                self._dispatch()
        return True

    def switch_in(self) -> None:
        """The trainer's lanes switch to generating."""
        self._work(self.constants.switch_in_ns)

    def switch_out(self) -> None:
        """The trainer's lanes switch back to training."""
        self._work(self.constants.switch_out_ns)

    def can_start_round(self, current_step_only: bool) -> bool:
        """Whether a slice may start on the trainer's lanes."""
        if not self._startable(self.committed):
            return False
        return not current_step_only or self.slices_step == self.committed

    def round(self) -> int:
        """Every helper takes as many slices as it can at once. Returns how many helpers took some."""
        constants, longest_ns, left = self.constants, 0, self.constants.helpers
        while left:
            startable = self._startable(self.committed)
            if not startable:
                break
            at_once = constants.helper.slices_at_once
            slices, lanes = self.slices.equal_takes(self.position, at_once, left, startable)
            takes_ns = constants.helper.expected_ns(slices)
            self._start(lanes, slices, self.committed, HELPER_CLASS, takes_ns)
            longest_ns = max(longest_ns, takes_ns)
            left -= lanes
        self._work(longest_ns)
        return constants.helpers - left

    def current_step_unstarted(self) -> int:
        """Unstarted slices of the current step."""
        if self.slices_step > self.committed:
            return 0
        return self._unstarted_here()

    def shortest_slice_ns(self) -> int:
        """The shortest time of a full job on any lane."""
        return min((*self.constants.class_ns, self.constants.helper_ns))

    # --- How time passes ---------------------------------------------------------------------------------------

    def _work(self, duration_ns: int) -> None:
        """The trainer is busy for this long. At the end generators take slices before it decides again."""
        self._pass_time(self.now + duration_ns)
        self._dispatch()

    def _commit(self) -> None:
        constants = self.constants
        # A version to be evaluated is published before the next commit.
        while self.sent < self.committed and constants.chunks_of(self.committed):
            at = self._next_instant()
            if at == NEVER:
                break
            if self._settle(at):
                self._dispatch()
        self._pass_time(self.now + constants.commit_ns)
        self.committed += 1
        self.saves = constants.terms.saves(self.committed)
        self.open_groups, self.done = self.open_groups_next, self.done_next
        self.open_groups_next = constants.fresh_groups[:]
        self.done_next = self.trained = 0
        self.publish_newest()
        self._settle(self.now)
        self._dispatch()

    def publish_newest(self) -> None:
        """Publishes the newest version once all chunks of the one before are sampled."""
        if self.chunks or self.sampling or self.sent == self.committed:
            return
        self.sent = self.committed
        self.chunks = self.constants.chunks_of(self.sent)
        for link, publish_ns in enumerate(self.constants.publish_ns):
            insort(self.publications, (self.now + publish_ns, link, self.sent))

    def _pass_time(self, until: int) -> None:
        """Everything before `until` happens. At `until` itself generators have not yet taken slices."""
        while (at := self._next_instant()) < until:
            if self._settle(at):
                self._dispatch()
        self._settle(until)

    def _next_instant(self) -> int:
        running, scored, publications = self.running, self.being_scored, self.publications
        at = running[0][0] if running else NEVER
        if scored and scored[0][0] < at:
            at = scored[0][0]
        if publications and publications[0][0] < at:
            at = publications[0][0]
        return at

    def _settle(self, at: int) -> bool:
        """Everything that is due at this instant is done: slices end, samples are scored, versions arrive.

        Returns whether generators may take slices now that they could not take before.
        """
        self.now = at
        counter, running, scored = self.counter, self.running, self.being_scored
        counter.nodes += 1
        may_start = False
        while running and running[0][0] <= at:
            may_start = True
            _, _, lane_class, step, lanes, runs = heappop(running)
            counter.nodes += len(runs) // GROUPS_PER_NODE
            if lane_class != HELPER_CLASS:
                self.idle[lane_class] += lanes
            if step == HELD_OUT:
                self._end_chunks(lanes)
            elif self.constants.score_ns:
                self._queue_for_scoring(step, runs)
            else:
                self._mark_scored(step, runs, self.constants.slice_size)
        while scored and scored[0][0] <= at:
            _, step, counts = scored.popleft()
            counter.nodes += len(counts) // GROUPS_PER_NODE
            self._mark_scored(step, counts, 1)
        while self.publications and self.publications[0][0] <= at:
            may_start = True
            _, link, version = self.publications.pop(0)
            self.published[link] = version
        return may_start

    def _end_chunks(self, chunks: int) -> None:
        """Sampled chunks queue for the reward lanes, and the newest version may have waited for the last one."""
        self.sampling -= chunks
        if self.constants.score_ns and self.constants.score_chunk_ns:
            free = self.scorer_free[:]
            for _ in range(chunks):
                insort(free, max(self.now, free.pop(0)) + self.constants.score_chunk_ns)
            self.scorer_free = free
        self.publish_newest()

    def _mark_scored(self, step: int, runs: Runs, samples_each: int) -> None:
        """Samples are scored, `samples_each` for each entry that the runs count."""
        is_current = step == self.committed
        completed = 0
        if self.constants.by_sample:
            for _, count in runs:
                completed += samples_each * count
        else:
            open_groups = self.open_groups if is_current else self.open_groups_next
            for group, count in runs:
                left = open_groups[group] - samples_each * count
                open_groups[group] = left
                if not left:
                    completed += 1
        if is_current:
            self.done += completed
        else:
            self.done_next += completed

    def _queue_for_scoring(self, step: int, runs: Runs) -> None:
        """Reward lanes take samples in order, each when it is idle, so the end of the n-th unit is known now.

        `scoring.start_scoring` in closed form.
        """
        constants = self.constants
        score_ns, round_ns, unit = constants.score_ns, constants.score_round_ns, constants.score_unit
        units_of_slice = constants.slice_size // unit
        idle = bisect_left(self.scorer_free, self.now)
        ready = [self.now] * idle + self.scorer_free[idle:]
        if ready[-1] > ready[0] + score_ns:  # a reward lane is busy for longer, and does not take turns
            self._queue_one_by_one(step, runs, ready)
            return
        scorers, place = len(ready), 0
        together: dict[int, list[tuple[int, int]]] = {}
        for group, slices in runs:
            units = slices * units_of_slice
            place += units
            single = constants.by_sample
            for nth in range(place - units, place) if single else (place - 1,):
                end = ready[nth % scorers] + score_ns * (nth // scorers + 1)
                if round_ns > 1:
                    end = -(-end // round_ns) * round_ns
                count = (group, unit if single else units * unit)
                if end in together:
                    together[end].append(count)
                else:
                    together[end] = [count]
        self.being_scored.extend([(end, step, tuple(counts)) for end, counts in together.items()])
        self.counter.nodes += (scorers + (place if constants.by_sample else len(runs))) // GROUPS_PER_NODE
        full_turns, rest = divmod(place, scorers)
        took = score_ns * full_turns
        later = [free + took + score_ns for free in ready[:rest]]
        self.scorer_free = [free + took for free in ready[rest:]] + later

    def _queue_one_by_one(self, step: int, runs: Runs, free: list[int]) -> None:
        """The same for reward lanes that are free at any times, soonest first."""
        constants, units_of_slice = self.constants, self.constants.slice_size // self.constants.score_unit
        for group, slices in runs:
            for _ in range(slices * units_of_slice):
                end = free.pop(0) + constants.score_ns
                insort(free, end)
                self.being_scored.append((end, step, ((group, constants.score_unit),)))
            self.counter.nodes += slices * units_of_slice // GROUPS_PER_NODE
        self.scorer_free = free

    # --- Dispatch ----------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Idle generator lanes take held-out chunks, then slices, the fastest class first."""
        constants = self.constants
        if self.chunks:
            self._dispatch_chunks()
        if constants.earliest_finish:
            self._dispatch_by_finish()
            return
        for lane_class, idle in enumerate(self.idle):
            while idle:
                version = self.published[constants.class_link[lane_class]]
                startable = self._startable(version)
                if not startable:
                    break
                offer = constants.classes[lane_class]
                slices, lanes = self.slices.equal_takes(self.position, offer.slices_at_once, idle, startable)
                self._start(lanes, slices, version, lane_class, offer.expected_ns(slices))
                idle -= lanes
                self.idle[lane_class] = idle

    def _dispatch_chunks(self) -> None:
        """Idle lanes that have the version take its chunks."""
        constants = self.constants
        for lane_class, idle in enumerate(self.idle):
            lanes = min(idle, self.chunks)
            if lanes and self.published[constants.class_link[lane_class]] == self.sent:
                self.idle[lane_class] -= lanes
                self.chunks -= lanes
                self.sampling += lanes
                heappush(self.running, (self.now + constants.chunk_ns, HELD_OUT, lane_class, HELD_OUT, lanes, ()))

    def _dispatch_by_finish(self) -> None:
        """The same with `dispatch: earliest_finish`. Lanes whose version admits no slice do not count."""
        constants = self.constants
        if not any(self.idle):
            return
        can_start = [self._startable(version) > 0 for version in self.published]
        able = [can_start[link] for link in constants.class_link]
        if any(able):
            assign_by_finish(
                constants.class_at_once,
                lambda lane_class: self.idle[lane_class] if able[lane_class] else 0,
                lambda lane_class, at_most: self._take_by_finish(lane_class, at_most, able),
            )

    def _take_by_finish(self, lane_class: int, at_most: int, able: Sequence[bool]) -> bool:
        """Lanes of this class take the first piece that no other lane would finish sooner; False if none does."""
        constants, idle = self.constants, self.idle[lane_class]
        version = self.published[constants.class_link[lane_class]]
        here, lanes = self._startable(version), 0
        together = idle if at_most == constants.class_at_once[lane_class] else 1

        def length_at(behind: int) -> int:
            nonlocal lanes
            slices, place, left = self.slices, self._place(behind), here - behind
            if left <= 0:
                left += self._startable_next(version, here)
                if left <= 0:
                    return 0
                slices, place = self._next_list(), place - slices.length
            length, lanes = slices.equal_takes(place, at_most, together, left)
            return length

        def reserved(length: int) -> int:
            return self.reserved_before(length, self.now + constants.pieces_ns(length)[lane_class], able)

        behind, length = first_unreserved(length_at, reserved)
        if not length:
            return False
        self._start(lanes, length, version, lane_class, constants.pieces_ns(length)[lane_class], behind)
        self.idle[lane_class] = idle - lanes
        return True

    def reserved_before(self, length: int, deadline_ns: int, able: Sequence[bool]) -> int:
        """`dispatch.reserved_before` of able classes, without a list of lanes: it is called very often."""
        constants, now, total = self.constants, self.now, 0
        class_ns, at_once = constants.class_ns, constants.class_at_once
        # The latest moment at which a lane of each class could start the piece and finish it first.
        latest_ns = [
            deadline_ns - takes_ns - 1 if counts else -1
            for takes_ns, counts in zip(constants.pieces_ns(length), able, strict=True)
        ]
        if max(latest_ns) < now:
            return 0
        for lane_class, idle in enumerate(self.idle):
            left_ns = latest_ns[lane_class] - now
            if idle and left_ns >= 0:
                total += idle * (left_ns // class_ns[lane_class] + 1) * at_once[lane_class]
        for end, _, lane_class, _, lanes, _ in self.running:
            if lane_class >= 0 and latest_ns[lane_class] >= end:
                jobs = (latest_ns[lane_class] - end) // class_ns[lane_class] + 1
                total += lanes * jobs * at_once[lane_class]
        return total

    def generators(self) -> list[tuple[LaneOffer, int, int]]:
        """What generator lanes offer, when they are free, and the number of such lanes."""
        classes, now = self.constants.classes, self.now
        lanes = [(classes[kind], end, count) for end, _, kind, _, count, _ in self.running if kind >= 0]
        return lanes + [(offer, now, idle) for offer, idle in zip(classes, self.idle, strict=True) if idle]

    # --- What is left of the lists -----------------------------------------------------------------------------

    def _unstarted_here(self) -> int:
        """Unstarted slices of the step from which slices are taken next."""
        length, holes = self.slices.length, self.holes
        return length - self.position - bisect_left(holes, length) if holes else length - self.position

    def _startable(self, version: int) -> int:
        """How many slices of one step may start on this version. Moves on to the next step at a list's end."""
        constants, step = self.constants, self.slices_step
        left = self._unstarted_here()
        if not left:
            if step + 1 >= constants.steps or step > version:
                return 0
            self._open_next_list()
            step, left = self.slices_step, self._unstarted_here()
        if step <= version:
            return left
        admitted = admitted_samples(step, version, self.stale_used, constants.budget)
        return min(left, admitted // constants.slice_size)

    def _startable_next(self, version: int, startable_here: int) -> int:
        """How many slices of the next step may start on this version, behind all of this one."""
        constants, step = self.constants, self.slices_step + 1
        if startable_here < self._unstarted_here() or step >= constants.steps:
            return 0
        started = len(self.holes) - bisect_left(self.holes, self.slices.length)
        stale = self.stale_next + (constants.next_stale if step == constants.next_step else 0)
        admitted = admitted_samples(step, version, stale, constants.budget)
        return min(self._next_list().length - started, admitted // constants.slice_size)

    def _next_list(self) -> SliceList:
        constants = self.constants
        return constants.next_list if self.slices_step + 1 == constants.next_step else constants.full_list

    def _open_next_list(self) -> None:
        constants, length = self.constants, self.slices.length
        self.slices = self._next_list()
        self.slices_step += 1
        self.stale_used = self.stale_next
        if self.slices_step == constants.next_step:
            self.stale_used += constants.next_stale
        self.stale_next = self.position = 0
        if self.holes:
            self.holes = [place - length for place in self.holes if place >= length]
            self.skip_holes()

    def skip_holes(self) -> None:
        """Moves the position behind places that are started."""
        passed = 0
        while passed < len(self.holes) and self.holes[passed] == self.position < self.slices.length:
            self.position += 1
            passed += 1
        del self.holes[:passed]

    def _place(self, behind: int) -> int:
        """The place of the unstarted slice that comes behind this many others."""
        place = self.position + behind
        for hole in self.holes:
            if hole > place:
                break
            place += 1
        return place

    def _start(
        self, lanes: int, slices: int, version: int, lane_class: int, takes_ns: int, behind: int = 0
    ) -> None:
        """These lanes start `slices` slices each, behind this many unstarted ones."""
        if behind or self.holes:
            stretches = self._take_stretches(lanes * slices, behind)
        else:
            stretches = [(self.position, lanes * slices)]
            self.position += lanes * slices
        for place, count in stretches:
            step, slice_list = self.slices_step, self.slices
            if place >= slice_list.length:
                step, place, slice_list = step + 1, place - slice_list.length, self._next_list()
            if step > version:
                if step == self.slices_step:
                    self.stale_used += count * self.constants.slice_size
                else:
                    self.stale_next += count * self.constants.slice_size
            order = step * self.constants.slices_per_step + slice_list.first + place
            bundle = (self.now + takes_ns, order, lane_class, step, lanes, slice_list.runs(place, count))
            heappush(self.running, bundle)
            lanes = 0  # they become idle together, with the first of their slices

    def _take_stretches(self, count: int, behind: int) -> list[tuple[int, int]]:
        """Takes unstarted slices behind this many others: places and lengths of stretches without a hole.

        Slices that end together are scored in the order of the list, so a bundle has no hole in it.
        """
        stretches: list[tuple[int, int]] = []
        holes, border, place = self.holes, self.slices.length, self._place(behind)
        nth = bisect_left(holes, place)
        while count:
            end = holes[nth] if nth < len(holes) else place + count
            if place < border:
                end = min(end, border)
            length = min(count, end - place)
            if length:
                stretches.append((place, length))
                holes[nth:nth] = range(place, place + length)
                nth += length
                count -= length
            place += length
            while nth < len(holes) and holes[nth] == place:
                place += 1
                nth += 1
        self.skip_holes()
        return stretches
