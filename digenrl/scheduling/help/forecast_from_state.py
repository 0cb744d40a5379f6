"""From the scheduler's state to a forecast: how the future looks at this moment."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappush

from digenrl.records import Generate, LaneOffer, Score, Slice
from digenrl.scheduling.dispatch import expected_end_ns
from digenrl.scheduling.help.forecast import HELPER_CLASS, NO_STEP, Bundle, Forecast
from digenrl.scheduling.help.forecast_facts import NEVER, Facts, Meter
from digenrl.scheduling.help.slice_lists import Runs, holes_in, unstarted_slices
from digenrl.scheduling.order import positions
from digenrl.scheduling.state import Lane, SchedulerState, StepProgress, is_wanted, open_step
from digenrl.scheduling.terms import Terms

MOST_CLASSES = 8  # up to this many different speeds are kept apart exactly
SAME_SPEED = 1.1  # beyond, lanes are alike whose times differ by less than this factor
MOST_BUNDLES = 32  # above this, lanes that are out of step with each other are rounded together
RASTER_PER_SLICE = 8

Kind = tuple[int, tuple[int, ...]]  # what tells lanes apart: `slice_ns` and `take_ns`
Member = tuple[int, int, int]  # position, group and number of slices of what a lane makes


def forecast_from_state(state: SchedulerState, at_ns: int) -> Forecast:
    """The future as it looks at a bubble of `state`, when generators have taken what they may."""
    terms = state.terms
    shares_cards = terms.colocated
    generators = [lane for lane in state.lanes if lane.present and (shares_cards or not lane.helper)]
    classes, class_of = _classes(generators)
    current, following = state.current, open_step(state, state.committed + 1)

    future = Forecast.__new__(Forecast)
    future.facts, future.meter = Facts(state, classes), Meter()
    future.now, future.committed = at_ns, state.committed
    future.published, future.publications = _versions_ahead(state, generators, at_ns)
    future.idle = [0] * len(classes)
    without_weights = [0] * len(classes)
    for lane in (state.lanes[index] for index in state.idle):
        lanes_of_class = future.idle if lane.version >= future.published else without_weights
        lanes_of_class[class_of[lane.slice_ns, lane.take_ns]] += 1
    future.running = _bundles_under_way(state, at_ns, class_of)
    loaded_ns = _loaded_ns(state, at_ns, future.published)
    for lane_class, lanes in enumerate(without_weights):
        if lanes:
            heappush(future.running, (loaded_ns, NO_STEP, lane_class, NO_STEP, lanes, ()))
    future.open_groups = _open_samples(terms, current)
    future.open_groups_next = _open_samples(terms, following)
    future.done = _units_scored(terms, future.open_groups)
    future.done_next = _units_scored(terms, future.open_groups_next)
    future.trained = _units_trained(terms, current)
    future.cursor_step, future.position = current.index, 0
    future.todo, future.stale_used = unstarted_slices(terms, current), current.stale_samples
    future.holes, future.stale_next = holes_in(current), 0
    if following is not None:
        future.holes += [future.todo.length + place for place in holes_in(following)]
    future._skip_holes()
    future._scored = deque()
    _resume_scoring(future, state, at_ns)
    return future


def _versions_ahead(state: SchedulerState, generators: list[Lane], at_ns: int) -> tuple[int, list[int]]:
    """The newest version on a generator, and when each later one is expected there."""
    newest = max((lane.version for lane in generators), default=state.committed)
    expected = [max(at_ns + 1, due) for version, due in state.publishing if version > newest]
    if newest + len(expected) < state.committed:
        # Nobody but lanes that have just joined: what they are being sent is the newest version.
        return state.committed, []
    return newest, expected


def _loaded_ns(state: SchedulerState, at_ns: int, version: int) -> int:
    """When idle lanes that wait for a version which others have are expected to have it."""
    dues = [due for published, due in state.publishing if published >= version]
    return max(at_ns + 1, min(dues, default=at_ns + state.costs.publish_ns))


def _classes(generators: list[Lane]) -> tuple[tuple[LaneOffer, ...], dict[Kind, int]]:
    """What a lane of each class offers, quickest first, and which class a kind of lane belongs to.

    Lanes whose measured times all differ a little are put into classes of nearly equal speed.
    """
    kinds = {(lane.slice_ns, lane.take_ns) for lane in generators}
    classes: list[list[Kind]] = []
    for slice_ns, take_ns in sorted(kinds, key=lambda kind: (len(kind[1]), kind)):
        quickest = classes[-1][0] if classes else (0, ())
        alike = len(take_ns) == len(quickest[1]) and slice_ns <= quickest[0] * SAME_SPEED
        if not alike or len(kinds) <= MOST_CLASSES:
            classes.append([])
        classes[-1].append((slice_ns, take_ns))
    typical = [
        _offer(sum(slice_ns for slice_ns, _ in members) // len(members), members[0][1]) for members in classes
    ]
    quickest_first = sorted(range(len(classes)), key=lambda index: typical[index].slice_ns)
    class_of = {kind: place for place, index in enumerate(quickest_first) for kind in classes[index]}
    return tuple(typical[index] for index in quickest_first), class_of


def _offer(slice_ns: int, take_ns: tuple[int, ...]) -> LaneOffer:
    return LaneOffer("", slice_ns, len(take_ns) or 1, take_ns)


def _bundles_under_way(state: SchedulerState, at_ns: int, class_of: dict[Kind, int]) -> list[Bundle]:
    """The leases as bundles; what should have ended already is expected any moment."""
    slices_per_step, slice_size, position = (
        state.terms.slices_per_step,
        state.terms.slice_size,
        positions(state.terms),
    )
    members: dict[tuple[int, int, int], list[Member]] = {}
    busy = [(lane, lane.job) for lane in state.lanes if lane.job is not None]
    for lane, job in busy:
        end = max(at_ns + 1, expected_end_ns(state, lane))
        lane_class = HELPER_CLASS if lane.helper else class_of[lane.slice_ns, lane.take_ns]
        step, member = NO_STEP, (0, 0, 0)
        if isinstance(job, Generate) and is_wanted(state, job.slice):
            piece = job.slice
            step, member = piece.step, (position(piece), piece.group, piece.size // slice_size)
        members.setdefault((end, lane_class, step), []).append(member)
    rounded = len(members) > MOST_BUNDLES
    if rounded:
        members = _rounded_up(members, min(lane.slice_ns for lane, _ in busy))
    bundles: list[Bundle] = []
    for (end, lane_class, step), places in members.items():
        for stretch in (sorted(places),) if rounded else _stretches(sorted(places)):
            runs = tuple((group, slices) for _, group, slices in stretch if slices)
            order = step * slices_per_step + stretch[0][0]
            bundles.append((end, order, lane_class, step, len(stretch), runs))
    heapify(bundles)
    return bundles


def _stretches(places: list[Member]) -> Iterator[list[Member]]:
    """Slices that stand together in the list: those that end together are scored in its order."""
    first, follows = 0, places[0][0]
    for nth, (position, _, slices) in enumerate(places):
        if position > follows:
            yield places[first:nth]
            first = nth
        follows = position + slices
    yield places[first:]


def _rounded_up(
    members: dict[tuple[int, int, int], list[Member]], slice_ns: int
) -> dict[tuple[int, int, int], list[Member]]:
    """Many lanes out of step with each other: ends move up to a common raster, which costs a little precision."""
    raster_ns = max(1, slice_ns // RASTER_PER_SLICE)
    merged: dict[tuple[int, int, int], list[Member]] = {}
    for (end, lane_class, step), places in members.items():
        merged.setdefault((-(-end // raster_ns) * raster_ns, lane_class, step), []).extend(places)
    return merged


def _open_samples(terms: Terms, step: StepProgress | None) -> list[int]:
    """Samples not yet scored, of each group; a retired group never completes."""
    if step is None:
        return [terms.samples_per_prompt] * terms.prompts
    whole = terms.samples_per_prompt
    return [NEVER if group.retired else whole - group.scored.bit_count() for group in step.groups]


def _units_scored(terms: Terms, open_samples: list[int]) -> int:
    if terms.stream != "sample":
        return open_samples.count(0)
    kept = [samples for samples in open_samples if samples < NEVER]
    return terms.samples_per_prompt * len(kept) - sum(kept)


def _units_trained(terms: Terms, step: StepProgress) -> int:
    if terms.stream != "sample":
        return terms.prompts - step.untrained_groups
    return sum(group.trained.bit_count() for group in step.groups if not group.retired)


def _score_end(state: SchedulerState, job: Score, at_ns: int) -> tuple[int, int, Runs]:
    """When a Score job is expected to end, and what it scores."""
    costs, piece = state.costs, job.piece
    if not isinstance(piece, Slice):
        return max(at_ns + 1, job.issued_ns + costs.score_chunk_ns), NO_STEP, ()
    end_ns = max(at_ns + 1, job.issued_ns + costs.score_batch_ns(piece.size))
    return end_ns, piece.step, ((piece.group, piece.size),) if is_wanted(state, piece) else ()


def _resume_scoring(future: Forecast, state: SchedulerState, at_ns: int) -> None:
    """Samples in the scorers' hands end when expected; the waiting ones follow in their order."""
    costs, unit = state.costs, state.terms.score_unit
    unit_ns = costs.score_batch_ns(unit)
    jobs = [job for job in state.scorers if job is not None]
    scored: list[tuple[int, int, Runs]] = sorted(_score_end(state, job, at_ns) for job in jobs)
    free = [at_ns] * (len(state.scorers) - len(jobs)) + [end for end, _, _ in scored]
    for piece in state.unscored:
        if not isinstance(piece, Slice):
            insort(free, max(at_ns, free.pop(0)) + costs.score_chunk_ns)
            continue
        for first in range(0, piece.size, unit):
            end = max(at_ns, free.pop(0)) + unit_ns
            insort(free, end)
            scored.append((end, piece.step, ((piece.group, min(unit, piece.size - first)),)))
    scored.sort(key=lambda each: each[0])  # a large batch under way may end after a small one that starts later
    future._scored.extend(scored)
    future.scorer_free = free
