"""The scheduler's state: immutable, so that `decide` is a function and any moment can be kept or replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from digenrl.records import LaneOffer, Lease, Slice
from digenrl.scheduling.terms import Costs, Terms

UNLIMITED = 1 << 30
NO_VERSION = -2  # below what any step admits, the first included


@dataclass(frozen=True, slots=True)
class Lane:
    """One device that can generate. It is free, or holds exactly one lease; a lost one never comes back.

    `slice_ns` is the time for all that it takes at once; a new measurement replaces it. `take_ns` are the offered
    times of 1, 2, ... slices together, up to as many; none where it takes one slice at a time.
    """

    index: int
    name: str
    slice_ns: int
    helper: bool  # one of the trainer's own lanes
    version: int
    lease: Lease | None = None
    present: bool = True
    take_ns: tuple[int, ...] = ()

    @property
    def slices_at_once(self) -> int:
        """So many neighbouring slices of a group, at most, are one lease."""
        return len(self.take_ns) or 1

    @property
    def offer(self) -> LaneOffer:
        """What it offers by the newest measurements."""
        return LaneOffer(self.name, self.slice_ns, self.slices_at_once, self.take_ns)

    def expected_ns(self, slices: int) -> int:
        """The time of so many slices together."""
        return self.offer.expected_ns(slices) if self.take_ns else self.slice_ns


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """How far a group is, as sets of samples (bits). A retired group is in quarantine and was replaced."""

    scored: int = 0
    trained: int = 0
    stale: int = 0  # samples handed out on the version one behind
    failures: int = 0
    retired: bool = False


@dataclass(frozen=True, slots=True, order=True)
class ReadyUnit:
    """Samples that may be trained, in the order in which they became ready; ties go to the lower group."""

    ready_ns: int
    group: int
    first: int
    size: int


@dataclass(frozen=True, slots=True)
class StepProgress:
    """One open step: what is still to be handed out, what is ready to train, what remains."""

    index: int
    cursor: int  # position of the next slice never handed out
    reissue: tuple[Slice, ...]  # lost, failed or replacing slices: handed out before the cursor
    groups: tuple[GroupProgress, ...]  # replacements stand behind the first `prompts` groups
    ready: tuple[ReadyUnit, ...]
    unscored_groups: int
    untrained_groups: int
    stale_samples: int
    ahead: tuple[int, ...] = ()  # positions from the cursor on that are handed out, or of a group in quarantine


@dataclass(frozen=True, slots=True)
class ScoringJob:
    """What a reward lane holds."""

    slice: Slice
    started_ns: int


# --- What the trainer is doing: one class per state of life. ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class HelpPlan:
    """How long the trainer helps in one bubble."""

    rounds_left: int
    stop_when_ready: bool  # return after a round when there is something to train
    current_step_only: bool  # start a round only while a slice of the current step is unstarted


@dataclass(frozen=True, slots=True)
class Free:
    """Nothing in hand. `bubble_decided`: this bubble's decision was taken, and it was to wait."""

    bubble_decided: bool = False


@dataclass(frozen=True, slots=True)
class Training:
    """Replaying these samples."""

    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True)
class Committing:
    """Taking the optimizer step."""


@dataclass(frozen=True, slots=True)
class SwitchingIn:
    """Changing its lanes' role to generating: to help by a plan, or (colocated) for the next step."""

    plan: HelpPlan | None


@dataclass(frozen=True, slots=True)
class BetweenRounds:
    """Its lanes can generate and none of them does."""

    plan: HelpPlan
    first: bool  # no round was run yet


@dataclass(frozen=True, slots=True)
class Helping:
    """A round is running: at least one of its lanes holds a lease."""

    plan: HelpPlan


@dataclass(frozen=True, slots=True)
class SwitchingOut:
    """Changing its lanes' role back to training."""


@dataclass(frozen=True, slots=True)
class Generating:
    """Colocated: all lanes, the trainer's and the generators', make the step's slices."""


TrainerState = Free | Training | Committing | SwitchingIn | BetweenRounds | Helping | SwitchingOut | Generating


@dataclass(frozen=True, slots=True)
class PlannedBubble:
    """What to do at the bubble that opens at `opens_ns`: so many rounds of help, or none."""

    opens_ns: int
    rounds: int


@dataclass(frozen=True, slots=True)
class BubblePlan:
    """What a help policy intends for the coming bubbles of a step; it holds while reality goes as predicted."""

    step: int
    bubbles: tuple[PlannedBubble, ...]
    exact: bool  # nothing better exists, by prediction
    length: int  # how many bubbles it had when it was made


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """Everything `decide` knows."""

    terms: Terms
    costs: Costs
    lanes: tuple[Lane, ...]
    idle: tuple[int, ...]  # free generator lanes, quickest first, then lower index
    helpers: tuple[int, ...]
    steps: tuple[StepProgress, ...]  # the current step and, where there is one, the next
    scorers: tuple[ScoringJob | None, ...]
    unscored: tuple[Slice, ...]  # generated, waiting for a scorer, oldest first
    trainer: TrainerState
    committed: int = 0  # optimizer steps taken = newest version
    publishing: tuple[tuple[int, int], ...] = ()  # (version, when it is expected on the generators)
    leases_issued: int = 0
    bubble_plan: BubblePlan | None = None

    @property
    def finished(self) -> bool:
        """All optimizer steps are taken."""
        return self.committed == self.terms.steps

    @property
    def current(self) -> StepProgress:
        """The lowest uncommitted step; a finished run has none."""
        return self.steps[0]


def initial_state(
    terms: Terms,
    costs: Costs,
    generators: Sequence[LaneOffer],
    helpers: Sequence[LaneOffer] = (),
    *,
    committed: int = 0,
    leases_issued: int = 0,
) -> SchedulerState:
    """The newest version is on every lane; nothing is handed out.

    A run that goes on after a stop gives the optimizer steps it has `committed` (its newest version) and, so that
    answers from before the stop are recognised as late, how many leases it had issued. Steps and versions keep
    their numbers, and `terms.steps` counts from the beginning.
    """
    assert 0 <= committed <= terms.steps, f"{committed} of {terms.steps} steps are committed"
    offers = [(offer, False) for offer in generators] + [(offer, True) for offer in helpers]
    lanes = tuple(
        lane_of(index, offer, is_helper, version=committed) for index, (offer, is_helper) in enumerate(offers)
    )
    generating = [lane for lane in lanes if terms.colocated or not lane.helper]
    return SchedulerState(
        terms=terms,
        costs=costs,
        lanes=lanes,
        idle=tuple(lane.index for lane in sorted(generating, key=lambda lane: (lane.slice_ns, lane.index))),
        helpers=() if terms.colocated else tuple(lane.index for lane in lanes if lane.helper),
        steps=tuple(fresh_step(terms, index) for index in range(committed, min(committed + 2, terms.steps))),
        scorers=(None,) * terms.scorers,
        unscored=(),
        trainer=Generating() if terms.colocated else Free(),
        committed=committed,
        leases_issued=leases_issued,
    )


def lane_of(index: int, offer: LaneOffer, helper: bool, version: int) -> Lane:
    """A free lane, as offered."""
    at_once = offer.slices_at_once
    take_ns = tuple(offer.expected_ns(slices) for slices in range(1, at_once + 1)) if at_once > 1 else ()
    return Lane(index, offer.name, offer.slice_ns, helper, version, take_ns=take_ns)


def fresh_step(terms: Terms, index: int) -> StepProgress:
    """A step of which nothing is handed out yet."""
    return StepProgress(
        index=index,
        cursor=0,
        reissue=(),
        groups=(GroupProgress(),) * terms.prompts,
        ready=(),
        unscored_groups=terms.prompts,
        untrained_groups=terms.prompts,
        stale_samples=0,
    )


def reconsider_help(state: SchedulerState) -> SchedulerState:
    """Opens a waiting trainer's bubble again: there is something to start that was not there before."""
    return replace(state, trainer=Free()) if state.trainer == Free(bubble_decided=True) else state


def put_step(state: SchedulerState, step: StepProgress) -> SchedulerState:
    """The state with one of its open steps replaced."""
    steps = tuple(step if step.index == other.index else other for other in state.steps)
    return replace(state, steps=steps)


def put_lane(state: SchedulerState, lane: Lane) -> SchedulerState:
    """The state with one of its lanes replaced."""
    before, after = state.lanes[: lane.index], state.lanes[lane.index + 1 :]
    return replace(state, lanes=(*before, lane, *after))


def put_group(step: StepProgress, index: int, group: GroupProgress) -> tuple[GroupProgress, ...]:
    """The step's groups with one of them replaced."""
    return (*step.groups[:index], group, *step.groups[index + 1 :])


def open_step(state: SchedulerState, index: int) -> StepProgress | None:
    """The open step of this number, or None if it is committed or not yet open."""
    for step in state.steps:
        if step.index == index:
            return step
    return None
