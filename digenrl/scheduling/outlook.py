"""From the scheduler's state to a forecast: how the future looks at this moment."""

from __future__ import annotations

from collections import deque

from digenrl.scheduling.forecast import (
    HELPER_CLASS,
    NEVER,
    Bundle,
    Facts,
    Forecast,
    Meter,
    unstarted_slices,
)
from digenrl.scheduling.state import SchedulerState, StepProgress, open_step
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
    future.published = max((lane.version for lane in generators), default=state.committed)
    future.publications = [max(at_ns + 1, due) for version, due in state.publishing if version > future.published]
    future.idle = [0] * len(class_ns)
    for index in state.idle:
        future.idle[class_of[state.lanes[index].slice_ns]] += 1
    future.running = _bundles_under_way(state, at_ns, class_of)
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
    members: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    leased = [(lane, lane.lease) for lane in state.lanes if lane.lease is not None]
    for lane, lease in leased:
        end = max(at_ns + 1, lease.started_ns + lane.slice_ns)
        lane_class = HELPER_CLASS if lane.helper else class_of[lane.slice_ns]
        members.setdefault((end, lane_class, lease.slice.step), []).append((lease.epoch, lease.slice.group))
    if len(members) > MOST_BUNDLES:
        members = _rounded_up(members, min(lane.slice_ns for lane, _ in leased))
    ordered = sorted(members.items(), key=lambda item: (item[0][0], min(item[1])))
    return [
        (end, sequence, lane_class, step, len(slices), tuple((group, 1) for _, group in sorted(slices)))
        for sequence, ((end, lane_class, step), slices) in enumerate(ordered)
    ]


def _rounded_up(
    members: dict[tuple[int, int, int], list[tuple[int, int]]], slice_ns: int
) -> dict[tuple[int, int, int], list[tuple[int, int]]]:
    """Many lanes out of step with each other: ends move up to a common raster, which costs a little precision."""
    raster_ns = max(1, slice_ns // RASTER_PER_SLICE)
    merged: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
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
    jobs = [job for job in state.scorers if job is not None]
    under_way = sorted(
        (max(at_ns + 1, job.started_ns + state.costs.score_ns), job.slice.step, ((job.slice.group, 1),))
        for job in jobs
    )
    free = [at_ns] * (len(state.scorers) - len(jobs)) + [end for end, _, _ in under_way]
    future._scored.extend(under_way)
    for piece in state.unscored:
        for _ in range(piece.size):
            end = max(at_ns, free.pop(0)) + state.costs.score_ns
            free.append(end)
            future._scored.append((end, piece.step, ((piece.group, 1),)))
    future.scorer_free = free
