"""The constants of one run's schedule: how much work, which techniques, and the expected costs."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import gcd

from digenrl.records import AssistName, DispatchRuleName, HelpRuleName, OrderRuleName, StreamRuleName


@dataclass(frozen=True, slots=True)
class SharedWorkRule:
    """How lanes that both generate and train choose their work.

    A lane takes up to `slices_at_once`, unless its offer says otherwise. `pieces` are the numbers of slices that
    it generates together, one after the other, in every step before it trains; by lane, in their order. Pieces
    that are too large are generated in several jobs. From then on the lane generates only if there is nothing to
    train. Without pieces, it always generates first. With `leaves_to_faster`, it leaves work that other lanes
    would finish earlier. With `strict`, a lane that has generated its pieces waits while others have some left,
    and the idle lane that would finish its piece first is served first, instead of the fastest one. At most
    `most_stale` samples of a step start on the version one behind; None: as many as the run allows. A lane starts
    such samples if it is not needed for the current step before they end, or needed for no more than `late_share`
    of their time.
    """

    pieces: tuple[tuple[int, ...], ...] = ()
    slices_at_once: int = 1
    leaves_to_faster: bool = True
    strict: bool = True
    most_stale: int | None = None
    late_share: float = 0.0

    def quota(self, lane: int) -> int | None:
        """The slices of a step that a lane generates before it trains; None: all that there are."""
        return sum(self.pieces[lane]) if lane < len(self.pieces) else None

    def next_piece(self, lane: int, taken: int) -> int | None:
        """What is left of the piece that a lane has begun with the slices it has taken; None if it has no more.

        >>> rule = SharedWorkRule(pieces=((2, 4),))
        >>> [rule.next_piece(0, taken) for taken in (0, 1, 2, 6)]
        [2, 1, 4, None]
        """
        pieces = self.pieces[lane] if lane < len(self.pieces) else ()
        return next((end - taken for end in accumulate(pieces) if taken < end), None)


@dataclass(frozen=True, slots=True)
class Terms:
    """The work of a run and the techniques that are on. `slice_size` divides `samples_per_prompt`.

    A step is a list of slices. A lane takes one slice per job or, if its offer says so, several.
    """

    steps: int
    prompts: int
    samples_per_prompt: int
    slice_size: int
    order: OrderRuleName = "generation"
    stream: StreamRuleName = "group"
    help: HelpRuleName = "none"
    assist: AssistName = "trainer"  # who helps whom; with "both", every lane that can train does both
    shared_work: SharedWorkRule = SharedWorkRule()  # with assist "both"
    job_samples: int = 0  # samples of a group that are trained together; 0: all of them
    updates: int = 1  # optimizer updates of a step, if lanes train on their own
    update_of_place: tuple[int, ...] = ()  # by place; empty: an update trains some samples of every group
    updates_need_all_rewards: bool = False
    dispatch: DispatchRuleName = "eager"
    stale_budget: int = 0  # samples of a step that may come from the version one behind
    colocated: bool = False
    scorers: int = 0  # reward lanes; 0 means that generators score what they make
    score_batch: int = 1  # the most samples of one slice in a Score job
    search_budget: int = 500  # nodes that one help decision may visit
    slice_failures_per_group: int = 3  # failed slices after which a group is quarantined
    replacements_per_step: int = 64  # quarantined groups of one step beyond which the run gives up
    hedge_after: float = 0.0  # times its expected time, after which an idle lane gets the slice, too; 0: never
    encodes: bool = False  # whether the scheduler issues Encode jobs
    evaluate_every: int = 0  # versions between evaluations; 0: never
    evaluation_chunks: int = 0
    save_every: int = 0  # versions between checkpoints; 0: never

    @property
    def shares_work(self) -> bool:
        """Whether lanes both generate and train, each on its own."""
        return self.assist == "both"

    def is_trained_in(self, place: int, update: int) -> bool:
        """Whether an update trains samples of the group at this place."""
        return not self.update_of_place or self.update_of_place[place] == update

    def samples_of_update(self, update: int) -> int:
        """The samples in the Train jobs of an update."""
        places = sum(self.is_trained_in(place, update) for place in range(self.prompts))
        return places * self.samples_per_prompt

    @property
    def updates_per_group(self) -> int:
        """The updates that train samples of a group, each an equal part of them."""
        return 1 if self.update_of_place else self.updates

    @property
    def train_unit(self) -> int:
        """Samples of a complete group that one Train job holds."""
        return self.job_samples or self.samples_per_prompt

    @property
    def slices_per_group(self) -> int:
        return self.samples_per_prompt // self.slice_size

    @property
    def slices_per_step(self) -> int:
        return self.prompts * self.slices_per_group

    def slices_in(self, samples: int) -> int:
        """The number of slices that make up this many samples."""
        return samples // self.slice_size

    @property
    def score_unit(self) -> int:
        """Samples that always pass through scoring together: every Score job holds a multiple of these."""
        return gcd(min(self.score_batch, self.slice_size), self.slice_size)

    @property
    def samples_per_step(self) -> int:
        return self.prompts * self.samples_per_prompt

    def evaluates(self, version: int) -> bool:
        """Whether this version is due for evaluation. The last one always is."""
        return self.evaluate_every > 0 and (version % self.evaluate_every == 0 or version == self.steps)

    def saves(self, version: int) -> bool:
        """Whether this version is due for a checkpoint. The last one always is."""
        return self.save_every > 0 and (version % self.save_every == 0 or version == self.steps)


@dataclass(frozen=True, slots=True)
class Costs:
    """Expected times: exact in a simulation, measured in a live run. Slice times belong to the lanes."""

    train_sample_ns: Fraction
    commit_ns: int = 0
    publish_ns: int = 0  # unless a lane has its own
    switch_in_ns: int = 0
    switch_out_ns: int = 0
    score_ns: int = 0  # per sample
    evaluate_ns: int = 0  # per held-out chunk
    score_chunk_ns: int = 0  # per held-out chunk
    save_ns: int = 0
    send_ns: int = 0  # until a lane that trains on its own has sent its gradient sums
    reduce_ns: int = 0  # adding these up, before a commit; a live run measures it as part of the commit

    def publication_ns(self, own_ns: int) -> int:
        """The time until a lane has a new version, given its own time, or -1 if it has none."""
        return self.publish_ns if own_ns < 0 else own_ns

    def train_ns(self, samples: int) -> int:
        """The time of a Train job, rounded half to even."""
        return round(samples * self.train_sample_ns)

    def score_batch_ns(self, samples: int) -> int:
        return samples * self.score_ns
