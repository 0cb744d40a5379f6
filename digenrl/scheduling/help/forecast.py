"""An exact look into the future: what would happen, by the same rules, if the trainer helped this much.

Searching for the best help means playing thousands of futures, so this model keeps only what times depend on:

- lanes of equal speed that start together end together, so they travel as one *bundle*, whose slices are kept
  as runs of (group, number of slices);
- training units cost the same, so only their number is kept, not their order;
- scorers serve first come, first served, at one pace, so their ends are known when a sample arrives.

A property test holds it to the nanosecond against runs driven through `decide`. Reward batches are played in
their common divisor with the slice. That is exact where a batch divides the slice (or is larger), and with one
reward lane for whole groups; several lanes with batches that leave a rest of a slice are an estimate. So is a run
in which a lane takes several slices at once: in `batch` order they are played as if they stood together in the
list, and rewards for them in batches of one slice. Every slice is still played once, so that no future is without
an end that has one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from heapq import heappop, heappush

from digenrl.records import LaneOffer
from digenrl.scheduling.dispatch import piece_ns
from digenrl.scheduling.help.forecast_facts import NEVER, Facts, Meter
from digenrl.scheduling.help.slice_lists import Runs, SliceList

HELPER_CLASS = -1
NO_STEP = -1  # of a bundle that delivers nothing
GROUPS_PER_NODE = 16  # so many group updates cost about as much as an instant
COPIES_PER_NODE = 256  # and so many copied entries

# (end, place in the order of all steps' lists, lane class, step, lanes that become free, slices)
Bundle = tuple[int, int, int, int, int, Runs]


class Forecast:
    """One possible future, advanced in place; `fork` before trying something.

    It rests only at moments when the trainer has to decide: at a bubble, or right after a commit.
    """

    __slots__ = (
        "_scored",
        "committed",
        "cursor_step",
        "done",
        "done_next",
        "facts",
        "holes",
        "idle",
        "meter",
        "now",
        "open_groups",
        "open_groups_next",
        "position",
        "publications",
        "published",
        "running",
        "scorer_free",
        "stale_next",
        "stale_used",
        "todo",
        "trained",
    )  # fmt: skip

    facts: Facts
    meter: Meter
    now: int
    running: list[Bundle]  # heap by end
    idle: list[int]  # idle lanes of each class
    todo: SliceList  # of the cursor's step
    position: int  # place in todo of the next unstarted slice
    holes: list[int]  # places behind it that are started; those of the next step's list count on from todo's end
    cursor_step: int
    stale_used: int  # stale samples of the cursor's step
    stale_next: int  # and of the next one's, since this forecast began
    open_groups: list[int]  # samples not yet scored, of each group of the current step
    open_groups_next: list[int]
    done: int  # scored units of the current step
    done_next: int
    trained: int  # trained units of the current step
    committed: int  # = the current step = the trainer's version
    published: int  # the generators' version
    publications: list[int]  # when versions above `published` arrive
    scorer_free: list[int]  # when each scorer is free, soonest first
    _scored: deque[tuple[int, int, Runs]]  # (end, step, samples of each group) of what is being scored

    def fork(self) -> Forecast:
        """An independent copy of this future."""
        other = Forecast.__new__(Forecast)
        other.facts, other.meter, other.now = self.facts, self.meter, self.now
        self.meter.nodes += 1 + (self.facts.copied_entries + len(self.running)) // COPIES_PER_NODE
        other.running, other.idle = self.running[:], self.idle[:]
        other.todo, other.position, other.cursor_step = self.todo, self.position, self.cursor_step
        other.holes = self.holes[:]
        other.stale_used, other.stale_next = self.stale_used, self.stale_next
        other.open_groups, other.open_groups_next = self.open_groups[:], self.open_groups_next[:]
        other.done, other.done_next, other.trained = self.done, self.done_next, self.trained
        other.committed, other.published = self.committed, self.published
        other.publications = self.publications[:]
        other.scorer_free, other._scored = self.scorer_free, self._scored.copy()
        return other

    def key(self) -> tuple[object, ...]:
        """Equal keys mean equal futures."""
        bundles = sorted((end, kind, step, runs) for end, _, kind, step, _, runs in self.running)
        self.meter.nodes += (self.facts.copied_entries + len(bundles)) // GROUPS_PER_NODE
        return (
            self.now, self.cursor_step, self.position, tuple(self.holes), self.stale_used, self.stale_next,
            self.done, self.done_next, self.trained,
            self.committed, self.published, tuple(self.publications), tuple(self.idle), tuple(bundles),
            tuple(self.open_groups), tuple(self.open_groups_next), tuple(self.scorer_free), tuple(self._scored),
        )  # fmt: skip

    def start_generators(self) -> None:
        """Idle generators take slices now: what the scheduler does before the trainer's first decision."""
        self._dispatch()

    # --- What the trainer can do -------------------------------------------------------------------------------

    @property
    def ready(self) -> int:
        """Units of the current step that could be trained now."""
        if self.facts.batch and self.done < self.facts.units:
            return 0
        return self.done - self.trained

    def run_to_decision(self) -> bool:
        """Trains what is ready until a bubble (False) or, after the last unit, through the commit (True)."""
        facts = self.facts
        while self.trained < facts.units:
            ready = self.ready
            if not ready:
                return False
            self._work(facts.whole_step_ns if facts.batch else ready * facts.unit_ns)
            self.trained += ready
        self._commit()
        return True

    def wait(self) -> bool:
        """Lets time pass until something is ready to train; False if that never happens without help."""
        while not self.ready:
            at = self._next_instant()
            if at == NEVER:
                self.now = NEVER
                return False
            self._settle(at)
            self._dispatch()
        return True

    def switch_in(self) -> None:
        """The helpers become able to generate."""
        self._work(self.facts.switch_in_ns)

    def switch_out(self) -> None:
        """The trainer becomes able to train."""
        self._work(self.facts.switch_out_ns)

    def can_start_round(self, current_step_only: bool) -> bool:
        """Whether a slice may start on the trainer's lanes."""
        if not self._startable(self.committed):
            return False
        return not current_step_only or self.cursor_step == self.committed

    def round(self) -> int:
        """Every helper takes what it can at once; returns how many took something."""
        facts, longest_ns, left = self.facts, 0, self.facts.helpers
        while left:
            startable = self._startable(self.committed)
            if not startable:
                break
            slices, lanes = self.todo.equal_takes(self.position, facts.helper.slices_at_once, left, startable)
            takes_ns = facts.helper.expected_ns(slices)
            self._start(lanes, slices, self.committed, HELPER_CLASS, takes_ns)
            longest_ns = max(longest_ns, takes_ns)
            left -= lanes
        self._work(longest_ns)
        return facts.helpers - left

    def current_step_unstarted(self) -> int:
        """Slices of the current step that nobody has started."""
        if self.cursor_step > self.committed:
            return 0
        return self._unstarted_here()

    def shortest_slice_ns(self) -> int:
        """What the quickest lane takes for what it takes at once."""
        return min((*self.facts.class_ns, self.facts.helper_ns))

    # --- How time passes ---------------------------------------------------------------------------------------

    def _work(self, duration: int) -> None:
        """The trainer is busy for so long; at the end generators take slices before it decides again."""
        until = self.now + duration
        self._pass_time(until)
        self._dispatch()

    def _commit(self) -> None:
        facts = self.facts
        self._pass_time(self.now + facts.commit_ns)
        self.committed += 1
        self.open_groups, self.done = self.open_groups_next, self.done_next
        self.open_groups_next = facts.fresh_groups[:]
        self.done_next = self.trained = 0
        self.publications.append(self.now + facts.publish_ns)
        self._settle(self.now)
        self._dispatch()

    def _pass_time(self, until: int) -> None:
        """Everything before `until` happens; at `until` itself generators have not yet taken slices."""
        while (at := self._next_instant()) < until:
            self._settle(at)
            self._dispatch()
        self._settle(until)

    def _next_instant(self) -> int:
        at = self.running[0][0] if self.running else NEVER
        if self._scored and self._scored[0][0] < at:
            at = self._scored[0][0]
        if self.publications and self.publications[0] < at:
            at = self.publications[0]
        return at

    def _settle(self, at: int) -> None:
        """All that is due at this instant is done: slices end, samples are scored, versions arrive."""
        self.now = at
        self.meter.nodes += 1
        running = self.running
        while running and running[0][0] <= at:
            _, _, lane_class, step, lanes, runs = heappop(running)
            self.meter.nodes += len(runs) // GROUPS_PER_NODE
            if lane_class != HELPER_CLASS:
                self.idle[lane_class] += lanes
            if self.facts.score_ns:
                self._queue_for_scoring(step, runs)
            else:
                self._mark_scored(step, runs, self.facts.slice_size)
        scored = self._scored
        while scored and scored[0][0] <= at:
            _, step, counts = scored.popleft()
            self.meter.nodes += len(counts) // GROUPS_PER_NODE
            self._mark_scored(step, counts, 1)
        while self.publications and self.publications[0] <= at:
            del self.publications[0]
            self.published += 1

    def _mark_scored(self, step: int, runs: Runs, samples_each: int) -> None:
        """Samples are scored: so many for each slice of these runs."""
        is_current = step == self.committed
        completed = 0
        if self.facts.by_sample:
            completed = samples_each * sum(count for _, count in runs)
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
        """Scorers take the samples in order, each when it is free, so the n-th unit's end is known at once."""
        facts, score_ns, raster_ns = self.facts, self.facts.score_ns, self.facts.score_raster_ns
        unit, units_of_slice = facts.score_unit, facts.slice_size // facts.score_unit
        ready = [max(self.now, free) for free in self.scorer_free]
        scorers, place = len(ready), 0
        together: dict[int, list[tuple[int, int]]] = {}
        for group, slices in runs:
            units = slices * units_of_slice
            for nth in range(place, place + units) if facts.by_sample else (place + units - 1,):
                end = ready[nth % scorers] + score_ns * (nth // scorers + 1)
                count = unit if facts.by_sample else units * unit
                together.setdefault(-(-end // raster_ns) * raster_ns, []).append((group, count))
            place += units
        self._scored.extend((end, step, tuple(counts)) for end, counts in together.items())
        self.meter.nodes += (scorers + (place if facts.by_sample else len(runs))) // GROUPS_PER_NODE
        full_turns, rest = divmod(place, scorers)
        later = [free + score_ns * (full_turns + 1) for free in ready[:rest]]
        self.scorer_free = [free + score_ns * full_turns for free in ready[rest:]] + later

    def _dispatch(self) -> None:
        """Idle generator lanes take slices, the quickest class first."""
        if self.facts.earliest_finish:
            self._dispatch_by_finish()
            return
        for lane_class, idle in enumerate(self.idle):
            while idle:
                startable = self._startable(self.published)
                if not startable:
                    return
                offer = self.facts.classes[lane_class]
                slices, lanes = self.todo.equal_takes(self.position, offer.slices_at_once, idle, startable)
                self._start(lanes, slices, self.published, lane_class, offer.expected_ns(slices))
                idle -= lanes
                self.idle[lane_class] = idle

    def _dispatch_by_finish(self) -> None:
        """As `handout` does it under `earliest_finish`: a lane starts behind what others would finish first."""
        again = True
        while again:
            again = False
            for lane_class, offer in enumerate(self.facts.classes):
                while idle := self.idle[lane_class]:
                    slices, lanes, behind = self._first_not_sooner_elsewhere(offer, offer.slices_at_once, idle)
                    if not lanes and offer.slices_at_once > 1:
                        slices, lanes, behind = self._first_not_sooner_elsewhere(offer, 1, 1)
                        again = again or lanes > 0
                    if not lanes:
                        break
                    self._start(lanes, slices, self.published, lane_class, offer.expected_ns(slices), behind)
                    self.idle[lane_class] = idle - lanes

    def _first_not_sooner_elsewhere(self, offer: LaneOffer, at_most: int, idle: int) -> tuple[int, int, int]:
        """Slices of the next take, how many equal lanes take as many there, and behind how many unstarted ones."""
        here = self._startable(self.published)
        in_all, behind = here + self._startable_next(here), 0
        while behind < in_all:
            todo, place, left = self.todo, self._place(behind), here - behind
            if left <= 0:
                todo, place, left = self._next_list(), place - todo.length, in_all - behind
            slices, lanes = todo.equal_takes(place, at_most, idle, left)
            reserved = self._reserved_before(slices, self.now + offer.expected_ns(slices))
            if reserved <= behind:
                return slices, lanes, behind
            behind = reserved
        return 0, 0, behind

    def _reserved_before(self, length: int, deadline: int) -> int:
        """As `dispatch.reserved_before`, for classes of lanes: this is asked at every instant played."""
        total, now = 0, self.now
        for offer, idle in zip(self.facts.classes, self.idle, strict=True):
            if idle:
                takes = (deadline - now - piece_ns(offer, length) - 1) // offer.slice_ns + 1
                if takes > 0:
                    total += idle * takes * offer.slices_at_once
        for end, _, lane_class, _, lanes, _ in self.running:
            if end < deadline and lane_class >= 0:
                offer = self.facts.classes[lane_class]
                takes = (deadline - end - piece_ns(offer, length) - 1) // offer.slice_ns + 1
                if takes > 0:
                    total += lanes * takes * offer.slices_at_once
        return total

    # --- What is left of the lists -----------------------------------------------------------------------------

    def _unstarted_here(self) -> int:
        """Of the cursor's step."""
        left = self.todo.length - self.position
        return left - bisect_left(self.holes, self.todo.length) if self.holes else left

    def _startable(self, version: int) -> int:
        """How many slices of the cursor's step may start on this version; moves the cursor to the next step."""
        left = self._unstarted_here()
        if not left:
            if self.cursor_step + 1 >= self.facts.steps or self.cursor_step > version:
                return 0
            self._open_next_list()
            left = self._unstarted_here()
        if self.cursor_step <= version:
            return left
        if self.cursor_step > version + 1:
            return 0
        return min(left, (self.facts.budget - self.stale_used) // self.facts.slice_size)

    def _startable_next(self, startable_here: int) -> int:
        """How many slices of the next step may start on the generators' version, behind all of the cursor's."""
        facts = self.facts
        if startable_here < self._unstarted_here() or self.cursor_step + 1 >= facts.steps:
            return 0
        if self.cursor_step > self.published:
            return 0
        started = len(self.holes) - bisect_left(self.holes, self.todo.length)
        stale = self.stale_next + (facts.next_stale if self.cursor_step + 1 == facts.next_step else 0)
        return min(self._next_list().length - started, (facts.budget - stale) // facts.slice_size)

    def _next_list(self) -> SliceList:
        facts = self.facts
        return facts.next_list if self.cursor_step + 1 == facts.next_step else facts.full_list

    def _open_next_list(self) -> None:
        facts, length = self.facts, self.todo.length
        self.todo = self._next_list()
        self.cursor_step += 1
        self.stale_used = self.stale_next + (facts.next_stale if self.cursor_step == facts.next_step else 0)
        self.stale_next = self.position = 0
        if self.holes:
            self.holes = [place - length for place in self.holes if place >= length]
            self._skip_holes()

    def _skip_holes(self) -> None:
        passed = 0
        while passed < len(self.holes) and self.holes[passed] == self.position < self.todo.length:
            self.position += 1
            passed += 1
        del self.holes[:passed]

    def _place(self, behind: int) -> int:
        """The place of the unstarted slice before which so many others stand."""
        place = self.position + behind
        for hole in self.holes:
            if hole > place:
                break
            place += 1
        return place

    def _start(
        self, lanes: int, slices: int, version: int, lane_class: int, takes_ns: int, behind: int = 0
    ) -> None:
        """So many lanes start as many slices each, behind so many unstarted ones."""
        if behind or self.holes:
            stretches = self._take_stretches(lanes * slices, behind)
        else:
            stretches = [(self.position, lanes * slices)]
            self.position += lanes * slices
        for place, count in stretches:
            step, todo = self.cursor_step, self.todo
            if place >= todo.length:
                step, place, todo = step + 1, place - todo.length, self._next_list()
            if step > version:
                if step == self.cursor_step:
                    self.stale_used += count * self.facts.slice_size
                else:
                    self.stale_next += count * self.facts.slice_size
            order = step * self.facts.slices_per_step + todo.position(place)
            bundle = (self.now + takes_ns, order, lane_class, step, lanes, todo.runs(place, count))
            heappush(self.running, bundle)
            lanes = 0  # they become free together, with the first of their slices

    def _take_stretches(self, count: int, behind: int) -> list[tuple[int, int]]:
        """Takes unstarted slices behind so many others: places and lengths of stretches without a hole.

        Slices that end together are scored in the order of the list, so a bundle has no hole in it.
        """
        stretches: list[tuple[int, int]] = []
        holes, border, place = self.holes, self.todo.length, self._place(behind)
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
        self._skip_holes()
        return stretches

    def generator_takes(self) -> list[tuple[LaneOffer, int, int]]:
        """What each generator lane offers, when it is free, and how many such lanes there are."""
        classes = self.facts.classes
        takes = [(classes[kind], end, count) for end, _, kind, _, count, _ in self.running if kind >= 0]
        return takes + [(offer, self.now, idle) for offer, idle in zip(classes, self.idle, strict=True)]
