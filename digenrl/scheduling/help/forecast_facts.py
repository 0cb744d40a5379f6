"""What all futures that are played from one moment have in common, and the work that went into playing them."""

from __future__ import annotations

from digenrl.records import LaneOffer
from digenrl.scheduling.help.slice_lists import SliceList, unstarted_slices
from digenrl.scheduling.state import SchedulerState, open_step

NEVER = 1 << 62
# With more groups than this in a step, scores are expected on a raster: each single one hardly matters then.
EXACT_SCORES_UP_TO = 256
SCORE_RASTER_PER_SLICE = 8


class Meter:
    """Counts the work of looking ahead, over all forks, in nodes: instants played, or as much work as one."""

    __slots__ = ("nodes",)

    def __init__(self) -> None:
        self.nodes = 0


class Facts:
    """What does not change while looking ahead; shared by all forks of a forecast."""

    __slots__ = (
        "batch", "budget", "by_sample", "class_ns", "classes", "commit_ns", "copied_entries", "earliest_finish",
        "fresh_groups", "full_list", "helper", "helper_ns", "helpers", "next_list", "next_stale", "next_step",
        "publish_ns", "score_ns", "score_raster_ns", "score_unit", "slice_size", "slices_per_step", "steps",
        "switch_in_ns", "switch_out_ns", "unit_ns", "units", "whole_step_ns",
    )  # fmt: skip

    def __init__(self, state: SchedulerState, classes: tuple[LaneOffer, ...]) -> None:
        terms, costs = state.terms, state.costs
        self.classes = classes  # what a lane of each class of generator lanes offers, quickest first
        self.class_ns = class_ns = tuple(offer.slice_ns for offer in classes)
        self.helpers = len(state.helpers)
        helpers = [state.lanes[index].offer for index in state.helpers]
        self.helper = max(helpers, key=lambda offer: offer.slice_ns, default=LaneOffer("", NEVER))
        self.helper_ns = self.helper.slice_ns
        self.slices_per_step = terms.slices_per_step
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
        self.whole_step_ns = terms.prompts * costs.train_ns(terms.samples_per_prompt)
        self.commit_ns, self.publish_ns = costs.commit_ns, costs.publish_ns
        self.switch_in_ns, self.switch_out_ns = costs.switch_in_ns, costs.switch_out_ns
        self.score_unit = terms.score_unit  # so many samples are scored together
        self.score_ns = costs.score_batch_ns(self.score_unit) if terms.scorers else 0  # for so many
        self.score_raster_ns = 1
        if terms.prompts > EXACT_SCORES_UP_TO and class_ns:
            self.score_raster_ns = max(1, class_ns[0] // SCORE_RASTER_PER_SLICE)
        self.earliest_finish = terms.dispatch == "earliest_finish"
