"""What the driver knows about samples, prompts, costs and step metrics."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from handmade_runs import recipe

from digenrl.chaos.workers import UPDATE
from digenrl.config.reading import ConfigError
from digenrl.driver.calibration import check_room
from digenrl.driver.cost_tracker import REMEMBERED, CostTracker, expected_ns, timed_offer
from digenrl.driver.prompt_store import PromptStore
from digenrl.driver.reward_sum import normalization_of
from digenrl.driver.sample_store import SampleStore
from digenrl.driver.step_summary import step_summary
from digenrl.prompts.sampler import PromptSampler
from digenrl.prompts.sources import Prompt
from digenrl.records import HELD_OUT_STEP, LaneOffer, PromptRow, SampleId, Scores, Slice, SliceArtifact
from digenrl.scheduling import Costs

NEGLIGIBLE_EPS = {"advantage": {"eps": 1e-12}}
PROMPT = PromptRow("prompt-0", "a cat", {})


def artifact(step: int = 0, group: int = 0, first: int = 0, job_id: int = 0) -> SliceArtifact:
    return SliceArtifact(Slice(step, group, first, 2), f"slice-{job_id}", step)


def scores(*values: float) -> Scores:
    return Scores(values, {"half": tuple(value / 2 for value in values)})


def whole_group(store: SampleStore, step: int, group: int, job_id: int = 0) -> None:
    """Two slices, the second one first."""
    for first in (2, 0):
        piece = artifact(step, group, first, job_id + first)
        assert store.add_slice(piece)
        store.add_scores(piece.slice, scores(first, first + 1), piece)


# --- SampleStore -------------------------------------------------------------------------------------------------


def test_a_part_of_a_group_names_its_slices_and_all_rewards() -> None:
    store = SampleStore()
    whole_group(store, step=0, group=1)
    part = store.group_artifact(Slice(0, 1, 2, 2), PROMPT, group_size=4)
    assert part is not None
    assert [(each.slice.first, each.slice.size) for each in part.slices] == [(2, 2)]
    assert len(part.rewards) == 4
    assert store.complete_groups(0, group_size=4) == (1,) and store.complete_groups(1, group_size=4) == ()


def test_a_group_comes_out_in_the_order_of_its_samples() -> None:
    store = SampleStore()
    whole_group(store, step=0, group=1)
    group = store.group_artifact(Slice(0, 1, 0, 4), PROMPT, group_size=4)
    assert group is not None
    assert [each.slice.first for each in group.slices] == [0, 2]
    assert group.rewards == (0, 1, 2, 3)
    assert group.place == 1


def test_a_group_may_be_trained_with_rewards_that_are_normalized_each() -> None:
    chosen = {"reward_sum": "normalized", "algorithm": {"name": "flow_grpo", "options": NEGLIGIBLE_EPS}}
    rewards = [{"name": "ocr", "weight": 2}, {"name": "jpeg_compressibility", "label": "size"}]
    store = SampleStore(normalization_of(recipe(rewards=rewards, **chosen)))
    for first in (2, 0):
        piece = artifact(first=first, job_id=first)
        store.add_slice(piece)
        both = {"ocr": ((0.0, 1.0), (2.0, 1.0))[first // 2], "ocr/exact": (9.0, 9.0), "size": (float(first), 2.0)}
        store.add_scores(piece.slice, Scores((first, first + 0.5), both), piece)
    group = store.group_artifact(Slice(0, 0, 0, 4), PROMPT, group_size=4)
    # ocr 0, 1, 2, 1: deviations over a std of sqrt(1/2); size 0, 2, 2, 2: deviations over a std of sqrt(3/4)
    unit, other = math.sqrt(2), 0.5 / math.sqrt(3 / 4)
    assert group is not None
    assert group.rewards == pytest.approx((-2 * unit - 3 * other, other, 2 * unit + other, other))
    raw, parts, _ = store.close_step(0)
    assert list(raw.values()) == [0, 0.5, 2, 2.5], "metrics show the sum of raw scores"
    assert parts["ocr"] == [0.0, 1.0, 2.0, 1.0], "and each raw score"
    assert normalization_of(recipe()) is None


def test_samples_are_found_in_the_slice_that_they_were_made_in() -> None:
    store = SampleStore()
    store.add_slice(artifact(first=0, job_id=5))
    store.add_slice(artifact(first=2, job_id=6))
    assert store.artifact_of(Slice(0, 0, 3, 1)) == artifact(first=2, job_id=6)
    assert store.artifact_of(Slice(0, 0, 4, 1)) is None
    assert store.artifact_of(Slice(0, 1, 0, 1)) is None


def test_a_slice_is_scored_when_its_last_sample_is() -> None:
    store = SampleStore()
    store.add_slice(artifact())
    store.add_scores(Slice(0, 0, 0, 1), scores(1), artifact())
    assert not store.all_scored(artifact())
    store.add_scores(Slice(0, 0, 1, 1), scores(1), artifact())
    assert store.all_scored(artifact())


def test_a_replacement_takes_the_place_of_the_first_in_line() -> None:
    store = SampleStore()
    whole_group(store, step=0, group=1)
    gone = store.replace(0, group=1, replaced_by=3)
    assert sorted(each.name for each in gone) == ["slice-0", "slice-2"]
    assert store.replace(0, group=3, replaced_by=4) == ()
    whole_group(store, step=0, group=4, job_id=10)
    group = store.group_artifact(Slice(0, 4, 0, 4), PROMPT, group_size=4)
    assert group is not None and group.place == 1


def test_late_slices_and_scores_of_a_group_in_quarantine_are_not_wanted() -> None:
    store = SampleStore()
    store.add_slice(artifact())
    store.replace(0, group=0, replaced_by=2)
    assert not store.add_slice(artifact(first=2))
    store.add_scores(Slice(0, 0, 0, 2), scores(1, 2), artifact())
    assert store.all_scored(artifact())
    assert store.artifact_of(Slice(0, 0, 0, 2)) is None
    assert store.close_step(0) == ({}, {}, ())


def test_a_slice_that_comes_after_its_step_was_closed_is_not_wanted_and_not_kept() -> None:
    store = SampleStore()
    store.replace(3, group=0, replaced_by=2)
    store.close_step(3)
    assert not store.add_slice(artifact(step=3))
    assert store.artifact_of(Slice(3, 0, 0, 2)) is None
    assert store.add_slice(artifact(step=4))


def test_closing_a_step_gives_its_rewards_and_leaves_the_next_alone() -> None:
    store = SampleStore()
    whole_group(store, step=0, group=1)
    whole_group(store, step=0, group=0)
    whole_group(store, step=1, group=0)
    rewards, parts, slices = store.close_step(0)
    assert list(rewards) == [SampleId(0, group, index) for group in (0, 1) for index in range(4)]
    assert parts == {"half": [0, 0.5, 1, 1.5] * 2}
    assert len(slices) == 4
    assert store.close_step(0) == ({}, {}, ())
    assert len(store.close_step(1)[0]) == 4


def test_a_lost_slice_is_forgotten_with_its_scores_unless_it_was_generated_again() -> None:
    store = SampleStore()
    whole_group(store, step=0, group=1)
    assert store.remove_slice(artifact(0, 1, 2, 2))
    assert store.group_artifact(Slice(0, 1, 0, 4), PROMPT, group_size=4) is None
    assert store.add_slice(artifact(0, 1, 2, 9))
    assert not store.remove_slice(artifact(0, 1, 2, 2)), "another artifact has taken its place"
    store.add_scores(Slice(0, 1, 2, 2), scores(2, 3), artifact(0, 1, 2, 9))
    assert store.group_artifact(Slice(0, 1, 0, 4), PROMPT, group_size=4) is not None


def test_a_late_score_of_a_lost_picture_is_not_taken_for_that_of_the_picture_that_replaced_it() -> None:
    store = SampleStore()
    lost, again = artifact(job_id=1), artifact(job_id=2)
    store.add_slice(lost)
    store.remove_slice(lost)
    store.add_slice(again)
    store.add_scores(again.slice, scores(1, 2), again)
    store.add_scores(lost.slice, scores(8, 9), lost)
    assert list(store.close_step(0)[0].values()) == [1, 2]


# --- PromptStore -------------------------------------------------------------------------------------------------


class Store:
    """A prompt store over some prompts, two a step, and the rows it dropped."""

    def __init__(self, kept: int = 1024, prompts: int = 10) -> None:
        self.dropped: list[str] = []
        sampler = PromptSampler([Prompt(index, f"text {index}") for index in range(prompts)], 2, seed=0)
        self.store = PromptStore(sampler, self.dropped.append, [Prompt(0, "held out")], kept)

    def encode(self, step: int) -> list[str]:
        missing = self.store.missing(step, self.store.groups(step))
        self.store.add_encoded(missing)
        return [prompt.row for prompt in missing]

    def rows(self, step: int) -> list[str]:
        return [self.store.row(step, group).row for group in range(2)]


def test_each_prompt_is_encoded_once() -> None:
    store, encoded = Store(prompts=3), []
    for step in range(6):
        encoded += store.encode(step)
        store.store.close_step(step)
    assert sorted(encoded) == ["prompt-0", "prompt-1", "prompt-2"]
    assert not store.dropped


def test_a_prompt_is_missing_until_it_is_encoded_and_again_when_it_is_lost() -> None:
    store = Store().store
    prompt = store.row(0, 0)
    assert store.missing(0, (0, 0)) == store.missing(0, (0,)) == (prompt,)
    assert not store.is_encoded(prompt)
    store.add_encoded([prompt])
    assert store.is_encoded(prompt) and not store.missing(0, (0,))
    store.forget(prompt.row)
    assert store.missing(0, (0,)) == (prompt,)


def test_rows_of_open_steps_and_held_out_prompts_are_never_dropped_and_the_oldest_of_others_go_first() -> None:
    store = Store(kept=4)
    (held_out,) = store.encode(HELD_OUT_STEP)
    for step in range(4):
        store.encode(step)
    for step in range(4):
        store.store.close_step(step)
        if step < 2:
            assert sorted(store.dropped) == sorted(row for each in range(step + 1) for row in store.rows(each))
    assert held_out not in store.dropped and len(store.dropped) == 5


def test_a_dropped_row_is_encoded_again_when_it_is_needed() -> None:
    store = Store(kept=1)
    store.encode(0)
    store.store.close_step(0)
    (row,) = store.dropped
    assert row in [prompt.row for prompt in store.store.missing(0, (0, 1))]


def test_a_replacements_row_is_kept_with_its_step() -> None:
    store = Store(kept=0)
    replacement = store.store.row(1, 2)
    assert replacement.row not in store.rows(1)
    store.encode(0)
    store.store.add_encoded(store.store.missing(1, (2,)))
    store.store.close_step(0)
    assert replacement.row not in store.dropped
    store.store.close_step(1)
    assert replacement.row in store.dropped


# --- Numbers -----------------------------------------------------------------------------------------------------


def test_the_numbers_of_a_step_are_means_over_samples_and_updates() -> None:
    rewards = {SampleId(4, 0, index): value for index, value in enumerate([1.0, 2.0, 3.0, 6.0])}
    other = {"gradient_norm": 3.0, "ratio_max": 1.2, "pack_size": 2, "kl": 0.5, "memory_retries": 3}
    measures = [{"measures": {"kl": 0.5, "ratio": 1.0, "away": away}} for away in (1.0, 2.0)]
    updates = [UPDATE | measures[0], UPDATE | other | measures[1]]
    numbers = step_summary(
        4, rewards, {"b": [1.0, 3.0], "a": [2.0, 2.0]}, updates, publish_bytes=77, publish_s=0.5
    )
    assert numbers.step == 4
    assert numbers.values == {
        "reward_mean": 3.0,
        "reward_std": math.sqrt(3.5),
        "reward/a": 2.0,
        "reward/b": 2.0,
        "updates": 2,
        "publish_bytes": 77,
        "publish_s": 0.5,
        "gradient_norm": 2.0,
        "ratio_mean": 1.0,
        "ratio_max": 1.5,
        "clip_fraction": 0.25,
        "kl": 0.5,
        "log_prob_mismatch": 0.0,
        "measure/away": 1.5,
        "memory_retries": 3,
        "zero_spread_groups": 2,
        "pack_size": 2,
    }


def test_what_an_algorithm_has_not_is_absent() -> None:
    bare = {**UPDATE, "ratio_mean": None, "ratio_max": None, "clip_fraction": None, "log_prob_mismatch": None}
    numbers = step_summary(0, {SampleId(0, 0, 0): 1.0}, {}, [bare], publish_bytes=0)
    absent = {"ratio_mean", "ratio_max", "clip_fraction", "kl", "log_prob_mismatch", "memory_retries"}
    assert not absent & numbers.values.keys()
    assert numbers.values["reward_std"] == 0


@pytest.mark.parametrize(
    ("second", "without_spread", "warned"), [(1e9 + 1, 2, True), (1e9, 2, False), (1e9 + 1, 1, False)]
)
def test_rewards_that_differ_but_count_as_equal_are_a_warning(
    second: float, without_spread: int, warned: bool
) -> None:
    rewards = {SampleId(0, group, index): 1e9 for group in range(2) for index in range(2)}
    updates = [UPDATE | {"zero_spread_groups": without_spread}]
    summary = step_summary(0, rewards | {SampleId(0, 1, 1): second}, {}, updates, publish_bytes=0)
    assert ("millionth" in summary.warning) == warned


def test_the_weight_of_stale_samples_is_averaged_over_updates() -> None:
    updates = [{**UPDATE, "stale_weight": weight} for weight in (1.0, 0.5)]
    numbers = step_summary(0, {SampleId(0, 0, 0): 1.0}, {}, updates, publish_bytes=0)
    assert numbers.values["stale_weight"] == 0.75


def test_costs_follow_the_run_and_a_hiccup_does_not_move_them() -> None:
    offers = {0: LaneOffer("a", 100), 1: LaneOffer("b", 200)}
    tracker = CostTracker(offers, Costs(train_sample_ns=Fraction(7), commit_ns=5, score_ns=3))
    assert tracker.measured(9, {0, 1}).train_sample_ns == 7
    for _ in range(REMEMBERED):
        tracker.add_slices(0, 1, 300)
        tracker.add("train_sample", 10)
    tracker.add_slices(0, 1, 10**9)
    tracker.add_lane(2, LaneOffer("c", 450))
    costs = tracker.measured(9, {0, 1, 2})
    assert (costs.at_ns, costs.train_sample_ns, costs.commit_ns, costs.score_ns) == (9, 10, 5, 3)
    assert costs.lane_slice_ns == ((0, 300), (1, 200), (2, 450))
    assert tracker.offer(0, "a again") == LaneOffer("a again", 300)


def test_the_times_of_lost_lanes_are_not_reported_but_kept_for_their_replacements() -> None:
    offers = {lane: LaneOffer(f"lane-{lane}", 100 + lane, train_sample_ns=Fraction(5)) for lane in range(3)}
    tracker = CostTracker(offers, Costs(train_sample_ns=Fraction(7)))
    tracker.add_publication("near", (0, 1), 10)
    tracker.add_publication("far", (2,), 20)
    costs = tracker.measured(0, {2, 0})
    assert costs.lane_slice_ns == ((0, 100), (2, 102))
    assert costs.lane_train_ns == ((0, 5), (2, 5))
    assert costs.lane_publish_ns == ((0, 10), (2, 20))
    assert tracker.offer(1, "lane-1 again").slice_ns == 101


def test_a_lane_that_takes_several_slices_at_once_is_timed_by_all_of_them() -> None:
    offer = timed_offer("big", {2: 1.0, 8: 2.5}, slice_size=2, own_size=8)
    assert (offer.slices_at_once, offer.slice_ns) == (4, 2_500_000_000)
    assert [offer.expected_ns(slices) for slices in (1, 2, 3, 4)] == [1e9, 1.5e9, 2e9, 2.5e9]
    tracker = CostTracker({0: offer}, Costs(train_sample_ns=Fraction(7)))
    tracker.add_slices(0, slices=1, ns=2_000_000_000)  # a rest of a group, twice as slow as expected
    assert tracker.measured(0, {0}).lane_slice_ns == ((0, 5_000_000_000),)


def test_a_lane_timed_with_one_size_is_expected_in_proportion() -> None:
    assert timed_offer("a", {4: 2.0}, slice_size=4, own_size=4) == LaneOffer("a", 2_000_000_000)
    assert expected_ns({4: 2.0}, 2) == 1_000_000_000


def test_a_cost_is_never_nothing() -> None:
    tracker = CostTracker({0: LaneOffer("a", 100)}, Costs(train_sample_ns=Fraction(7)))
    tracker.add("publish", 0)
    assert tracker.measured(0, {0}).publish_ns == 1
    with pytest.raises(KeyError):
        tracker.add("coffee", 1)


def test_publishing_is_measured_per_pool_if_there_are_several() -> None:
    tracker = CostTracker({0: LaneOffer("a", 100), 1: LaneOffer("b", 100)}, Costs(train_sample_ns=Fraction(7)))
    tracker.add_publication("near", (0,), 10)
    assert tracker.measured(0, range(3)).lane_publish_ns == ()
    tracker.add_publication("far", (1, 2), 500)
    tracker.add_publication("far", (1,), 700)
    assert tracker.measured(0, range(3)).lane_publish_ns == ((0, 10), (1, 600), (2, 600))


class SmallStore:
    """An exchange with little room."""

    def __init__(self, free: int, holds_weights: bool) -> None:
        self._free, self.holds_weights = free, holds_weights

    def drop(self, name: str) -> None: ...

    def free_bytes(self) -> int:
        return self._free

    def where(self) -> str:
        return "a drawer"


def test_two_versions_and_the_trainers_state_have_to_fit_where_they_are_held() -> None:
    gb = 10**9
    check_room(SmallStore(10 * gb, holds_weights=True), weights_bytes=2 * gb, state_bytes=3 * gb)
    with pytest.raises(ConfigError, match=r"a drawer has 9.0 GB free.* 4.0 GB.* 6.0 GB"):
        check_room(SmallStore(9 * gb, holds_weights=True), weights_bytes=2 * gb, state_bytes=3 * gb)
    check_room(SmallStore(9 * gb, holds_weights=False), weights_bytes=2 * gb, state_bytes=3 * gb)
    with pytest.raises(ConfigError, match=r"checkpoint\.in_memory=false"):
        check_room(SmallStore(5 * gb, holds_weights=False), weights_bytes=2 * gb, state_bytes=3 * gb)
