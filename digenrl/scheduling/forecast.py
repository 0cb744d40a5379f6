"""An exact look into the future: what would happen, by the same rules, if the trainer helped this much.

Searching for the best help means playing thousands of futures, so this model keeps only what times depend on:

- lanes of equal speed that start together end together, so they travel as one *bundle*, whose slices are kept
  as runs of (group, number of slices);
- training units cost the same, so only their number is kept, not their order;
- scorers serve first come, first served, at one pace, so their ends are known when a sample arrives.

A property test holds it to the nanosecond against runs driven through `decide`. Reward batches are played in
their common divisor with the slice. That is exact where a batch divides the slice (or is larger), and with one
reward lane for whole groups; several lanes with batches that leave a rest of a slice are an estimate.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from digenrl.scheduling.order import group_at
from digenrl.scheduling.state import SchedulerState, StepProgress, open_step
from digenrl.scheduling.terms import Terms

NEVER = 1 << 62
HELPER_CLASS = -1
NO_STEP = -1  # of a bundle that delivers nothing
GROUPS_PER_NODE = 16  # so many group updates cost about as much as an instant
COPIES_PER_NODE = 256  # and so many copied entries
# With more groups than this in a step, scores are expected on a raster: each single one hardly matters then.
EXACT_SCORES_UP_TO = 256
SCORE_RASTER_PER_SLICE = 8

Runs = tuple[tuple[int, int], ...]  # (group, number of slices)
Bundle = tuple[int, int, int, int, int, Runs]  # (end, sequence, lane class, step, lanes, slices)


class Meter:
    """Counts the work of looking ahead, over all forks, in nodes: instants played, or as much work as one."""

    __slots__ = ("nodes",)

    def __init__(self) -> None:
        self.nodes = 0


class SliceList:
    """The slices of a step that are still to be handed out: one by one, or as a stretch of the full list."""

    __slots__ = ("_by_group", "_first", "_listed", "_per_group", "_prompts", "length")

    def __init__(self, terms: Terms, first: int, listed: tuple[int, ...] | None = None) -> None:
        self._first, self._listed = first, listed
        self._by_group, self._per_group = terms.order == "generation", terms.slices_per_group
        self._prompts = terms.prompts
        self.length = terms.slices_per_step - first if listed is None else len(listed)

    def runs(self, position: int, count: int) -> Runs:
        """The groups of `count` slices from `position` on."""
        if self._listed is not None:
            return tuple((group, 1) for group in self._listed[position : position + count])
        at = self._first + position
        if not self._by_group:
            return tuple((place % self._prompts, 1) for place in range(at, at + count))
        whole = self._per_group
        group, offset = divmod(at, whole)
        if offset + count <= whole:
            return ((group, count),)
        last_group, in_last = divmod(at + count, whole)
        head = ((group, whole - offset),)
        tail = ((last_group, in_last),) if in_last else ()
        return (*head, *((between, whole) for between in range(group + 1, last_group)), *tail)


class Facts:
    """What does not change while looking ahead; shared by all forks of a forecast."""

    __slots__ = (
        "batch", "budget", "by_sample", "class_ns", "commit_ns", "copied_entries", "earliest_finish",
        "fresh_groups", "full_list", "helper_ns", "helpers", "next_list", "next_stale", "next_step", "publish_ns",
        "score_ns", "score_raster_ns", "score_unit", "slice_size", "steps", "switch_in_ns", "switch_out_ns",
        "unit_ns", "units", "whole_step_ns",
    )  # fmt: skip

    def __init__(self, state: SchedulerState, class_ns: tuple[int, ...]) -> None:
        terms, costs = state.terms, state.costs
        self.class_ns = class_ns  # slice time of each class of generator lanes, quickest first
        self.helpers = len(state.helpers)
        self.helper_ns = max((state.lanes[index].slice_ns for index in state.helpers), default=NEVER)
        self.slice_size = terms.slice_size
        self.steps = terms.steps
        self.full_list = SliceList(terms, first=0)
        # The list of the step after the current one may be begun already.
        following = open_step(state, state.committed + 1)
        self.next_step = state.committed + 1
        self.next_list = self.full_list if following is None else unstarted_slices(terms, following)
        self.next_stale = 0 if following is None else following.stale_samples
        self.copied_entries = 2 * terms.prompts + terms.scorers
        self.fresh_groups = [terms.samples_per_prompt] * terms.prompts
        self.budget = terms.stale_budget
        self.by_sample = terms.stream == "sample"
        self.batch = terms.stream == "batch"
        self.units = terms.samples_per_step if self.by_sample else terms.prompts
        self.unit_ns = costs.train_ns(1 if self.by_sample else terms.samples_per_prompt)
        self.whole_step_ns = costs.train_ns(terms.samples_per_step)
        self.commit_ns, self.publish_ns = costs.commit_ns, costs.publish_ns
        self.switch_in_ns, self.switch_out_ns = costs.switch_in_ns, costs.switch_out_ns
        self.score_unit = terms.score_unit  # so many samples are scored together
        self.score_ns = costs.score_batch_ns(self.score_unit) if terms.scorers else 0  # for so many
        self.score_raster_ns = 1
        if terms.prompts > EXACT_SCORES_UP_TO and class_ns:
            self.score_raster_ns = max(1, class_ns[0] // SCORE_RASTER_PER_SLICE)
        self.earliest_finish = terms.dispatch == "earliest_finish"


class Forecast:
    """One possible future, advanced in place; `fork` before trying something.

    It rests only at moments when the trainer has to decide: at a bubble, or right after a commit.
    """

    __slots__ = (
        "_scored",
        "_sequence",
        "committed",
        "cursor_step",
        "done",
        "done_next",
        "facts",
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
    position: int  # of the next unstarted slice in todo
    cursor_step: int
    stale_used: int  # stale samples of the cursor's step
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
    _sequence: int

    def fork(self) -> Forecast:
        """An independent copy of this future."""
        other = Forecast.__new__(Forecast)
        other.facts, other.meter, other.now = self.facts, self.meter, self.now
        self.meter.nodes += 1 + (self.facts.copied_entries + len(self.running)) // COPIES_PER_NODE
        other.running, other.idle = self.running[:], self.idle[:]
        other.todo, other.position, other.cursor_step = self.todo, self.position, self.cursor_step
        other.stale_used = self.stale_used
        other.open_groups, other.open_groups_next = self.open_groups[:], self.open_groups_next[:]
        other.done, other.done_next, other.trained = self.done, self.done_next, self.trained
        other.committed, other.published = self.committed, self.published
        other.publications = self.publications[:]
        other.scorer_free, other._scored = self.scorer_free, self._scored.copy()
        other._sequence = self._sequence
        return other

    def key(self) -> tuple[object, ...]:
        """Equal keys mean equal futures."""
        bundles = sorted((end, kind, step, runs) for end, _, kind, step, _, runs in self.running)
        self.meter.nodes += (self.facts.copied_entries + len(bundles)) // GROUPS_PER_NODE
        return (
            self.now, self.cursor_step, self.position, self.stale_used, self.done, self.done_next, self.trained,
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
        """Every helper takes one next slice; returns how many did."""
        left = self.facts.helpers
        while left:
            count = min(left, self._startable(self.committed))
            if not count:
                break
            self._start(count, self.committed, HELPER_CLASS, self.facts.helper_ns)
            left -= count
        self._work(self.facts.helper_ns)
        return self.facts.helpers - left

    def current_step_unstarted(self) -> int:
        """Slices of the current step that nobody has started."""
        if self.cursor_step > self.committed:
            return 0
        return self.todo.length - self.position

    def shortest_slice_ns(self) -> int:
        """What the quickest lane takes for a slice."""
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
        for lane_class, idle in enumerate(self.idle):
            while idle:
                count = min(idle, self._startable(self.published))
                if not count:
                    return
                slice_ns = self.facts.class_ns[lane_class]
                if self.facts.earliest_finish:
                    count = self._not_left_for_quicker(count, slice_ns)
                    if not count:
                        return
                self._start(count, self.published, lane_class, slice_ns)
                idle -= count
                self.idle[lane_class] = idle

    def _startable(self, version: int) -> int:
        """How many slices of the cursor's step may start on this version; moves the cursor to the next step."""
        left = self.todo.length - self.position
        if not left:
            if self.cursor_step + 1 >= self.facts.steps or self.cursor_step > version:
                return 0
            left = self._open_next_list()
        if self.cursor_step <= version:
            return left
        if self.cursor_step > version + 1:
            return 0
        return min(left, (self.facts.budget - self.stale_used) // self.facts.slice_size)

    def _open_next_list(self) -> int:
        facts = self.facts
        self.cursor_step += 1
        self.position = 0
        if self.cursor_step == facts.next_step:
            self.todo, self.stale_used = facts.next_list, facts.next_stale
        else:
            self.todo, self.stale_used = facts.full_list, 0
        return self.todo.length

    def _start(self, count: int, version: int, lane_class: int, slice_ns: int) -> None:
        runs = self.todo.runs(self.position, count)
        self.position += count
        if self.cursor_step > version:
            self.stale_used += count * self.facts.slice_size
        self._sequence += 1
        heappush(self.running, (self.now + slice_ns, self._sequence, lane_class, self.cursor_step, count, runs))

    def _not_left_for_quicker(self, count: int, slice_ns: int) -> int:
        """Of `count` idle lanes of one class, how many take a slice rather than leave it to quicker lanes.

        As `slices_not_finished_before`, without a list of all lanes: this is asked at every instant played.
        """
        class_ns, deadline = self.facts.class_ns, self.now + slice_ns
        left = self._startable_in_all()
        for lane_class, idle in enumerate(self.idle):
            left -= idle * ((slice_ns - 1) // class_ns[lane_class])
        for end, _, lane_class, _, lanes, _ in self.running:
            if end < deadline and lane_class >= 0:
                left -= lanes * ((deadline - end - 1) // class_ns[lane_class])
        return max(0, min(count, left))

    def generator_times(self) -> list[tuple[int, int]]:
        """When each generator lane is free, and what it takes for a slice."""
        class_ns = self.facts.class_ns
        busy = [(end, class_ns[kind], count) for end, _, kind, _, count, _ in self.running if kind >= 0]
        lanes = [(end, slice_ns) for end, slice_ns, count in busy for _ in range(count)]
        for lane_class, idle in enumerate(self.idle):
            lanes += [(self.now, class_ns[lane_class])] * idle
        return lanes

    def _startable_in_all(self) -> int:
        """As `_startable`, over the cursor's step and the next."""
        here = self._startable(self.published)
        if here < self.todo.length - self.position or self.cursor_step + 1 >= self.facts.steps:
            return here
        if self.cursor_step + 1 > self.published + 1:
            return here
        return here + min(self.facts.full_list.length, self.facts.budget // self.facts.slice_size)


def unstarted_slices(terms: Terms, step: StepProgress) -> SliceList:
    """What is still to be handed out of a step, in order."""
    if not step.reissue and len(step.groups) == terms.prompts:
        return SliceList(terms, step.cursor)
    again = tuple(piece.group for piece in step.reissue)
    ahead = (group_at(terms, position) for position in range(step.cursor, terms.slices_per_step))
    return SliceList(terms, 0, again + tuple(group for group in ahead if not step.groups[group].retired))
