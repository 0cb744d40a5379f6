"""From the scheduler's state to a forecast that starts at this moment."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from heapq import heapify, heappush

from digenrl.records import Evaluate, Generate, LaneOffer, Score, Slice
from digenrl.scheduling.dispatch import expected_end_ns
from digenrl.scheduling.help.forecast import HELD_OUT, HELPER_CLASS, NO_STEP, Bundle, Forecast
from digenrl.scheduling.help.forecast_constants import NEVER, ForecastConstants, NodeCounter
from digenrl.scheduling.help.slice_lists import Runs, started_places, unstarted_slices
from digenrl.scheduling.order import positions
from digenrl.scheduling.state import Lane, SchedulerState, StepProgress, find_evaluation, is_wanted, open_step
from digenrl.scheduling.terms import Costs, Terms

MOST_CLASSES = 8  # up to this many different speeds are exact
SAME_SPEED = 1.1  # with more, lanes form a class if their times differ by less than this factor
MOST_BUNDLES = 32  # with more, the ends of jobs are rounded
END_STEPS_PER_SLICE = 8

Kind = tuple[int, int, tuple[int, ...]]  # of a lane: `publish_ns`, `slice_ns` and `take_ns`
Member = tuple[int, int, int]  # position, group and number of slices of a lane's job


def forecast_from_state(state: SchedulerState, at_ns: int) -> Forecast:
    """The future from a bubble of `state` on, after generators have taken what they may."""
    terms = state.terms
    generators = [lane for lane in state.present_lanes if lane.calibrated and (terms.colocated or not lane.helper)]
    by_kind: dict[Kind, list[Lane]] = {}
    for lane in generators:
        by_kind.setdefault((lane.publish_ns, lane.slice_ns, lane.take_ns), []).append(lane)
    classes, class_of = _classes(state.costs, by_kind)
    constants = ForecastConstants(state, classes)
    sent = max([lane.sent_version for lane in generators], default=state.committed)
    published, publications = _versions_ahead(state, constants, by_kind, at_ns)
    idle, without_weights = [0] * len(classes), [0] * len(classes)
    for lane in (state.lanes[index] for index in state.idle):
        lane_class = class_of[lane.publish_ns, lane.slice_ns, lane.take_ns]
        has_weights = lane.version >= published[constants.class_link[lane_class]]
        (idle if has_weights else without_weights)[lane_class] += 1
    helpers = [lane for lane in state.present_lanes if lane.helper and lane.calibrated and not terms.colocated]
    by_class = [(HELPER_CLASS, helpers), *((class_of[kind], lanes) for kind, lanes in by_kind.items())]
    running = _bundles_under_way(state, at_ns, by_class)
    for lane_class, lanes in enumerate(without_weights):
        if lanes:
            link = constants.class_link[lane_class]
            loaded_ns = _loaded_ns(state, at_ns, published[link], constants.publish_ns[link])
            heappush(running, (loaded_ns, NO_STEP, lane_class, NO_STEP, lanes, ()))
    current, following = state.current, open_step(state, state.committed + 1)
    slices, holes = unstarted_slices(terms, current), started_places(current)
    if following is not None:
        holes += [slices.length + place for place in started_places(following)]
    open_groups, open_groups_next = _open_samples(terms, current), _open_samples(terms, following)
    being_scored, scorer_free = _scores_under_way(state, at_ns)
    future = Forecast(
        constants=constants,
        counter=NodeCounter(),
        now=at_ns,
        running=running,
        idle=idle,
        slices=slices,
        position=0,
        holes=holes,
        slices_step=current.index,
        stale_used=current.stale_samples,
        stale_next=0,
        open_groups=open_groups,
        open_groups_next=open_groups_next,
        done=_units_scored(terms, open_groups),
        done_next=_units_scored(terms, open_groups_next),
        trained=_units_trained(terms, current),
        committed=state.committed,
        published=published,
        publications=publications,
        scorer_free=scorer_free,
        being_scored=being_scored,
        sent=sent,
        chunks=_unstarted_chunks(state, sent),
        sampling=sum(lanes for _, _, _, step, lanes, _ in running if step == HELD_OUT),
    )
    future.skip_holes()
    future.publish_newest()  # unless an evaluation keeps it waiting, as after a commit
    return future


def _versions_ahead(
    state: SchedulerState, constants: ForecastConstants, by_kind: Mapping[Kind, list[Lane]], at_ns: int
) -> tuple[list[int], list[tuple[int, int, int]]]:
    """The newest version on any generator lane of each link, and when each later one is expected to arrive."""
    published: list[int] = []
    publications: list[tuple[int, int, int]] = []
    lanes_of: list[list[Lane]] = [[] for _ in constants.publish_ns]
    for (own_ns, _, _), alike in by_kind.items():
        lanes_of[constants.publish_ns.index(state.costs.publication_ns(own_ns))] += alike
    for link, (publish_ns, lanes) in enumerate(zip(constants.publish_ns, lanes_of, strict=True)):
        newest = max([lane.version for lane in lanes])
        ahead = [
            (max(at_ns + 1, sent_ns + publish_ns), link, version)
            for version, sent_ns in state.publishing
            if version > newest
        ]
        sent = max([lane.sent_version for lane in lanes])
        if sent > max((version for _, _, version in ahead), default=newest):
            # Only lanes that have just joined, which are being sent the newest version.
            newest, ahead = sent, []
        published.append(newest)
        publications += ahead
    return published, sorted(publications)


def _unstarted_chunks(state: SchedulerState, version: int) -> int:
    evaluation = find_evaluation(state, version)
    return len(evaluation.unstarted) if evaluation is not None else 0


def _loaded_ns(state: SchedulerState, at_ns: int, version: int, publish_ns: int) -> int:
    """When idle lanes without a version that others have are expected to have loaded it."""
    sent_ns = min((sent_ns for published, sent_ns in state.publishing if published >= version), default=at_ns)
    return max(at_ns + 1, sent_ns + publish_ns)


def _classes(costs: Costs, own: Collection[Kind]) -> tuple[tuple[LaneOffer, ...], dict[Kind, int]]:
    """The offer of each class of lanes, fastest first, and the class of each kind of lane.

    If there are many kinds, as with measured times, a class holds lanes of nearly equal speed.
    """
    resolved = {kind: (costs.publication_ns(kind[0]), *kind[1:]) for kind in own}
    kinds = set(resolved.values())
    classes: list[list[Kind]] = []
    for publish_ns, slice_ns, take_ns in sorted(kinds, key=lambda kind: (len(kind[2]), kind)):
        fastest = classes[-1][0] if classes else (-1, 0, ())
        same_kind = (publish_ns, len(take_ns)) == (fastest[0], len(fastest[2]))
        alike = same_kind and slice_ns <= fastest[1] * SAME_SPEED
        if not alike or len(kinds) <= MOST_CLASSES:
            classes.append([])
        classes[-1].append((publish_ns, slice_ns, take_ns))
    typical = [_offer(members) for members in classes]
    ranks = [(offer.slice_ns, costs.publication_ns(offer.publish_ns)) for offer in typical]
    fastest_first = sorted(range(len(classes)), key=lambda index: ranks[index])
    places = {kind: place for place, index in enumerate(fastest_first) for kind in classes[index]}
    return tuple(typical[index] for index in fastest_first), {kind: places[resolved[kind]] for kind in own}


def _offer(members: list[Kind]) -> LaneOffer:
    publish_ns, _, take_ns = members[0]
    slice_ns = sum(slice_ns for _, slice_ns, _ in members) // len(members)
    return LaneOffer("", slice_ns, len(take_ns) or 1, take_ns, publish_ns=publish_ns)


def _bundles_under_way(
    state: SchedulerState, at_ns: int, by_class: Sequence[tuple[int, list[Lane]]]
) -> list[Bundle]:
    """The lanes' jobs as bundles. Overdue jobs are expected to end in the next instant."""
    terms, position = state.terms, positions(state.terms)
    members: dict[tuple[int, int, int], list[Member]] = {}
    twice = state.void_jobs | {copy for _, copy in state.copies}  # slices that others generate as well
    busy = [
        (lane_class, lane, lane.job) for lane_class, lanes in by_class for lane in lanes if lane.job is not None
    ]
    for lane_class, lane, job in busy:
        end = max(at_ns + 1, expected_end_ns(state, lane))
        step, member = NO_STEP, (0, 0, 0)
        if isinstance(job, Generate):
            piece = job.slice
            if job.id not in twice and is_wanted(state, piece):
                step, member = piece.step, (position(piece), piece.group, piece.size // terms.slice_size)
        elif isinstance(job, Evaluate) and is_wanted(state, job.chunk):
            step = HELD_OUT
        members.setdefault((end, lane_class, step), []).append(member)
    rounded = len(members) > MOST_BUNDLES
    if rounded:
        members = _with_rounded_ends(members, min(lane.slice_ns for _, lane, _ in busy))
    bundles: list[Bundle] = []
    for (end, lane_class, step), places in members.items():
        for stretch in (sorted(places),) if rounded else _stretches(sorted(places)):
            runs = tuple([(group, slices) for _, group, slices in stretch if slices])
            order = step * terms.slices_per_step + stretch[0][0]
            bundles.append((end, order, lane_class, step, len(stretch), runs))
    heapify(bundles)
    return bundles


def _stretches(places: list[Member]) -> Iterator[list[Member]]:
    """Slices that are neighbors in the list, since slices that end together are scored in its order."""
    first, follows = 0, places[0][0]
    for nth, (position, _, slices) in enumerate(places):
        if position > follows:
            yield places[first:nth]
            first = nth
        follows = position + slices
    yield places[first:]


def _with_rounded_ends(
    members: dict[tuple[int, int, int], list[Member]], slice_ns: int
) -> dict[tuple[int, int, int], list[Member]]:
    """Rounds the ends of jobs up to a fraction of a slice, to have fewer bundles at a little less precision."""
    step_ns = max(1, slice_ns // END_STEPS_PER_SLICE)
    merged: dict[tuple[int, int, int], list[Member]] = {}
    for (end, lane_class, step), places in members.items():
        merged.setdefault((-(-end // step_ns) * step_ns, lane_class, step), []).extend(places)
    return merged


def _open_samples(terms: Terms, step: StepProgress | None) -> list[int]:
    """Unscored samples of each group. A retired group never completes."""
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


def _scores_under_way(state: SchedulerState, at_ns: int) -> tuple[deque[tuple[int, int, Runs]], list[int]]:
    """When samples are expected to be scored, waiting ones in their order, and when each reward lane is idle."""
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
    return deque(scored), free
