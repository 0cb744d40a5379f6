"""From the scheduler's state to a forecast: how the future looks at this moment."""

from __future__ import annotations

from bisect import insort
from collections import deque
from heapq import heappush

from digenrl.records import Slice
from digenrl.scheduling.forecast import (
    HELPER_CLASS,
    NEVER,
    NO_STEP,
    Bundle,
    Facts,
    Forecast,
    Meter,
    Runs,
    unstarted_slices,
)
from digenrl.scheduling.state import Lane, SchedulerState, StepProgress, open_step
from digenrl.scheduling.terms import Terms

MOST_CLASSES = 8  # up to this many different speeds are kept apart exactly
SAME_SPEED = 1.1  # beyond, lanes are alike whose times differ by less than this factor
MOST_BUNDLES = 32  # above this, lanes that are out of step with each other are rounded together
RASTER_PER_SLICE = 8


def forecast_from(state: SchedulerState, at_ns: int) -> Forecast:
    """The future as it looks at a bubble of `state`, when generators have taken what they may."""
    terms = state.terms
    shares_cards = terms.colocated
    generators = [lane for lane in state.lanes if lane.present and (shares_cards or not lane.helper)]
    class_ns, class_of = _speed_classes({lane.slice_ns for lane in generators})
    current, following = state.current, open_step(state, state.committed + 1)

    future = Forecast.__new__(Forecast)
    future.facts, future.meter = Facts(state, class_ns), Meter()
    future.now, future.committed = at_ns, state.committed
    future.published, future.publications = _versions_ahead(state, generators, at_ns)
    future.idle = [0] * len(class_ns)
    without_weights = [0] * len(class_ns)
    for lane in (state.lanes[index] for index in state.idle):
        lanes_of_class = future.idle if lane.version >= future.published else without_weights
        lanes_of_class[class_of[lane.slice_ns]] += 1
    future.running = _bundles_under_way(state, at_ns, class_of)
    loaded_ns = _loaded_ns(state, at_ns, future.published)
    for lane_class, lanes in enumerate(without_weights):
        if lanes:
            heappush(future.running, (loaded_ns, len(future.running), lane_class, NO_STEP, lanes, ()))
    future._sequence = len(future.running)
    future.open_groups = _open_samples(terms, current)
    future.open_groups_next = _open_samples(terms, following)
    future.done = _units_scored(terms, future.open_groups)
    future.done_next = _units_scored(terms, future.open_groups_next)
    future.trained = _units_trained(terms, current)
    future.cursor_step, future.position = current.index, 0
    future.todo, future.stale_used = unstarted_slices(terms, current), current.stale_samples
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


def _is_wanted(state: SchedulerState, piece: Slice) -> bool:
    """Whether these samples still count; those of a group in quarantine are made, or scored, for nothing."""
    step = open_step(state, piece.step)
    return step is not None and not step.groups[piece.group].retired


def _speed_classes(speeds: set[int]) -> tuple[tuple[int, ...], dict[int, int]]:
    """The slice times of the classes of lanes, quickest first, and which class a slice time belongs to.

    Lanes whose measured times all differ a little are put into classes of nearly equal speed.
    """
    ordered = sorted(speeds)
    if len(ordered) <= MOST_CLASSES:
        return tuple(ordered), {slice_ns: index for index, slice_ns in enumerate(ordered)}
    classes: list[list[int]] = []
    for slice_ns in ordered:
        if not classes or slice_ns > classes[-1][0] * SAME_SPEED:
            classes.append([])
        classes[-1].append(slice_ns)
    class_of = {slice_ns: index for index, members in enumerate(classes) for slice_ns in members}
    return tuple(sum(members) // len(members) for members in classes), class_of


def _bundles_under_way(state: SchedulerState, at_ns: int, class_of: dict[int, int]) -> list[Bundle]:
    """The leases as bundles; what should have ended already is expected any moment."""
    members: dict[tuple[int, int, int], list[tuple[int, Runs]]] = {}
    leased = [(lane, lane.lease) for lane in state.lanes if lane.lease is not None]
    for lane, lease in leased:
        end = max(at_ns + 1, lease.started_ns + lane.slice_ns)
        lane_class = HELPER_CLASS if lane.helper else class_of[lane.slice_ns]
        wanted = _is_wanted(state, lease.slice)
        step, runs = (lease.slice.step, ((lease.slice.group, 1),)) if wanted else (NO_STEP, ())
        members.setdefault((end, lane_class, step), []).append((lease.epoch, runs))
    if len(members) > MOST_BUNDLES:
        members = _rounded_up(members, min(lane.slice_ns for lane, _ in leased))
    ordered = sorted(members.items(), key=lambda item: (item[0][0], min(item[1])))
    return [
        (end, sequence, lane_class, step, len(slices), tuple(run for _, runs in sorted(slices) for run in runs))
        for sequence, ((end, lane_class, step), slices) in enumerate(ordered)
    ]


def _rounded_up(
    members: dict[tuple[int, int, int], list[tuple[int, Runs]]], slice_ns: int
) -> dict[tuple[int, int, int], list[tuple[int, Runs]]]:
    """Many lanes out of step with each other: ends move up to a common raster, which costs a little precision."""
    raster_ns = max(1, slice_ns // RASTER_PER_SLICE)
    merged: dict[tuple[int, int, int], list[tuple[int, Runs]]] = {}
    for (end, lane_class, step), slices in members.items():
        merged.setdefault((-(-end // raster_ns) * raster_ns, lane_class, step), []).extend(slices)
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


def _resume_scoring(future: Forecast, state: SchedulerState, at_ns: int) -> None:
    """Samples in the scorers' hands end when expected; the waiting ones follow in their order."""
    costs, unit = state.costs, state.terms.score_unit
    unit_ns = costs.score_batch_ns(unit)
    jobs = [job for job in state.scorers if job is not None]
    scored: list[tuple[int, int, Runs]] = sorted(
        (
            max(at_ns + 1, job.started_ns + costs.score_batch_ns(job.slice.size)),
            job.slice.step,
            ((job.slice.group, job.slice.size),) if _is_wanted(state, job.slice) else (),
        )
        for job in jobs
    )
    free = [at_ns] * (len(state.scorers) - len(jobs)) + [end for end, _, _ in scored]
    for piece in state.unscored:
        for _ in range(piece.size // unit):
            end = max(at_ns, free.pop(0)) + unit_ns
            insort(free, end)
            scored.append((end, piece.step, ((piece.group, unit),)))
    scored.sort(key=lambda each: each[0])  # a large batch under way may end after a small one that starts later
    future._scored.extend(scored)
    future.scorer_free = free
