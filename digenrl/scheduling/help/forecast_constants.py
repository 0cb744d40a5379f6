"""What all forecasts from one moment have in common, and a counter of the work that they cost."""

from __future__ import annotations

from digenrl.records import LaneOffer
from digenrl.scheduling.dispatch import piece_ns
from digenrl.scheduling.help.slice_lists import SliceList, unstarted_slices
from digenrl.scheduling.state import SchedulerState, open_step

NEVER = 1 << 62
# If a step has more groups than this, the times of scores are rounded: single scores hardly matter then.
EXACT_SCORES_UP_TO = 256
SCORE_STEPS_PER_SLICE = 8


class NodeCounter:
    """Counts simulated instants over all forks of a forecast. Other work counts as the equivalent in instants."""

    __slots__ = ("nodes",)

    def __init__(self) -> None:
        self.nodes = 0


class ForecastConstants:
    """What does not change while a forecast runs; shared by all its forks."""

    __slots__ = (
        "_pieces_ns", "batch", "budget", "by_sample", "chunk_ns", "class_at_once", "class_link", "class_ns",
        "classes", "commit_ns", "copied_entries", "earliest_finish", "fresh_groups", "full_list", "helper",
        "helper_ns", "helpers", "next_list", "next_stale", "next_step", "publish_ns", "save_ns", "score_chunk_ns",
        "score_ns", "score_round_ns", "score_unit", "slice_size", "slices_per_step", "steps", "switch_in_ns",
        "switch_out_ns", "terms", "unit_ns", "units", "whole_step_ns",
    )  # fmt: skip

    def __init__(self, state: SchedulerState, classes: tuple[LaneOffer, ...]) -> None:
        terms, costs = state.terms, state.costs
        self.classes = classes  # the offer of each class of equal generator lanes, fastest first
        self.class_ns = class_ns = tuple(offer.slice_ns for offer in classes)
        self.class_at_once = tuple(offer.slices_at_once for offer in classes)
        self._pieces_ns: dict[int, tuple[int, ...]] = {}
        # Classes that get new versions at the same time share a link.
        class_publish_ns = [costs.publication_ns(offer.publish_ns) for offer in classes]
        self.publish_ns = tuple(sorted(set(class_publish_ns)))  # of each link, the fastest first
        self.class_link = tuple(self.publish_ns.index(each) for each in class_publish_ns)
        self.helpers = len(state.helpers)
        helpers = [state.lanes[index] for index in state.helpers]
        slowest = max(helpers, key=lambda lane: lane.slice_ns, default=None)
        self.helper = slowest.offer if slowest is not None else LaneOffer("", NEVER)
        self.helper_ns = self.helper.slice_ns
        self.slices_per_step = terms.slices_per_step
        self.slice_size = terms.slice_size
        self.steps = terms.steps
        self.full_list = SliceList(terms, first=0)
        # Slices of the step after the current one may have been started.
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
        group_ns = costs.train_ns(terms.samples_per_prompt)
        self.unit_ns = costs.train_ns(1) if self.by_sample else group_ns
        self.whole_step_ns = terms.prompts * group_ns
        self.terms = terms
        self.commit_ns, self.save_ns = costs.commit_ns, costs.save_ns
        self.chunk_ns, self.score_chunk_ns = costs.evaluate_ns, costs.score_chunk_ns
        self.switch_in_ns, self.switch_out_ns = costs.switch_in_ns, costs.switch_out_ns
        self.score_unit = terms.score_unit  # samples that are scored together
        self.score_ns = costs.score_batch_ns(self.score_unit) if terms.scorers else 0  # for one unit
        self.score_round_ns = 1
        if terms.prompts > EXACT_SCORES_UP_TO and class_ns:
            self.score_round_ns = max(1, class_ns[0] // SCORE_STEPS_PER_SLICE)
        self.earliest_finish = terms.dispatch == "earliest_finish"

    def pieces_ns(self, slices: int) -> tuple[int, ...]:
        """The time of each class for this many slices, in full jobs and a last one for the rest."""
        times = self._pieces_ns.get(slices)
        if times is None:
            times = self._pieces_ns[slices] = tuple(piece_ns(offer, slices) for offer in self.classes)
        return times

    def chunks_of(self, version: int) -> int:
        """The held-out chunks of a version: 0 if it is not evaluated."""
        return self.terms.evaluation_chunks if self.classes and self.terms.evaluates(version) else 0
