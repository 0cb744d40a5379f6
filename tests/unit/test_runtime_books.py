"""What a runtime keeps about samples, prompts, costs and numbers: ids in, ids out, nothing kept for good."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from digenrl.worker.orders import EncodedPrompt, EncodePrompts, MadeSlice, Scores
from fake_crew import UPDATE

from digenrl.config.reading import ConfigError
from digenrl.driver.calibration import check_room
from digenrl.driver.cost_tracker import REMEMBERED, CostTracker, expected_ns, timed_offer
from digenrl.driver.prompt_store import PromptStore
from digenrl.driver.sample_store import SampleStore
from digenrl.driver.step_summary import step_summary
from digenrl.prompts.sampler import PromptSampler
from digenrl.prompts.sources import Prompt
from digenrl.records import LaneOffer, SampleId, Slice
from digenrl.scheduling import Costs

PROMPT = EncodedPrompt("prompt-0", "a cat", {})


def made(step: int = 0, group: int = 0, first: int = 0, epoch: int = 0) -> MadeSlice:
    return MadeSlice(Slice(step, group, first, 2), f"slice-{epoch}", step)


def scores(*values: float) -> Scores:
    return Scores(values, {"half": tuple(value / 2 for value in values)})


def whole_group(ledger: SampleStore, step: int, group: int, epoch: int = 0) -> None:
    """Two slices, the second one first."""
    for first in (2, 0):
        assert ledger.add_made(made(step, group, first, epoch + first))
        ledger.add_scores(Slice(step, group, first, 2), scores(first, first + 1))


# --- SampleStore -------------------------------------------------------------------------------------------------


def test_a_group_comes_out_in_the_order_of_its_samples() -> None:
    ledger = SampleStore()
    whole_group(ledger, step=0, group=1)
    group = ledger.learnable(Slice(0, 1, 0, 4), PROMPT)
    assert [each.slice.first for each in group.slices] == [0, 2]
    assert group.rewards == (0, 1, 2, 3)
    assert group.place == 1


def test_samples_are_found_in_the_slice_that_they_were_made_in() -> None:
    ledger = SampleStore()
    ledger.add_made(made(first=0, epoch=5))
    ledger.add_made(made(first=2, epoch=6))
    assert ledger.slice_of(Slice(0, 0, 3, 1)) == made(first=2, epoch=6)
    assert ledger.slice_of(Slice(0, 0, 4, 1)) is None
    assert ledger.slice_of(Slice(0, 1, 0, 1)) is None


def test_a_slice_is_scored_when_its_last_sample_is() -> None:
    ledger = SampleStore()
    ledger.add_made(made())
    ledger.add_scores(Slice(0, 0, 0, 1), scores(1))
    assert not ledger.all_scored(made())
    ledger.add_scores(Slice(0, 0, 1, 1), scores(1))
    assert ledger.all_scored(made())


def test_a_replacement_takes_the_place_of_the_first_in_line() -> None:
    ledger = SampleStore()
    whole_group(ledger, step=0, group=1)
    gone = ledger.replace(0, group=1, replaced_by=3)
    assert sorted(each.name for each in gone) == ["slice-0", "slice-2"]
    assert ledger.replace(0, group=3, replaced_by=4) == ()
    whole_group(ledger, step=0, group=4, epoch=10)
    assert ledger.learnable(Slice(0, 4, 0, 4), PROMPT).place == 1


def test_late_slices_and_scores_of_a_group_in_quarantine_are_not_wanted() -> None:
    ledger = SampleStore()
    ledger.add_made(made())
    ledger.replace(0, group=0, replaced_by=2)
    assert not ledger.add_made(made(first=2))
    ledger.add_scores(Slice(0, 0, 0, 2), scores(1, 2))
    assert ledger.all_scored(made())
    assert ledger.slice_of(Slice(0, 0, 0, 2)) is None
    assert ledger.close_step(0) == ({}, {}, ())


def test_a_slice_that_comes_after_its_step_was_closed_is_not_wanted_and_not_kept() -> None:
    ledger = SampleStore()
    ledger.replace(3, group=0, replaced_by=2)
    ledger.close_step(3)
    assert not ledger.add_made(made(step=3))
    assert ledger.slice_of(Slice(3, 0, 0, 2)) is None
    assert ledger.add_made(made(step=4))


def test_closing_a_step_gives_its_rewards_and_leaves_the_next_alone() -> None:
    ledger = SampleStore()
    whole_group(ledger, step=0, group=1)
    whole_group(ledger, step=0, group=0)
    whole_group(ledger, step=1, group=0)
    rewards, parts, slices = ledger.close_step(0)
    assert list(rewards) == [SampleId(0, group, index) for group in (0, 1) for index in range(4)]
    assert parts == {"half": [0, 0.5, 1, 1.5] * 2}
    assert len(slices) == 4
    assert ledger.close_step(0) == ({}, {}, ())
    assert len(ledger.close_step(1)[0]) == 4


# --- Prompt desk -------------------------------------------------------------------------------------------------


class Desk:
    """A desk over ten prompts, two a step, and what it asked for."""

    def __init__(self, kept: int = 1024, prompts: int = 10) -> None:
        self.sent: list[str] = []
        self.dropped: list[str] = []
        sampler = PromptSampler([Prompt(index, f"text {index}") for index in range(prompts)], 2, seed=0)
        self.desk = PromptStore(sampler, self._send, self.dropped.append, kept)

    def _send(self, order: EncodePrompts) -> None:
        self.sent += [prompt.row for prompt in order.prompts]

    def rows(self, step: int) -> list[str]:
        return [self.desk.prompt(step, group).row for group in range(2)]


def test_each_prompt_is_encoded_once() -> None:
    desk = Desk(prompts=3)
    for step in range(6):
        desk.desk.open_step(step)
        desk.desk.mark_encoded(desk.rows(step))
        desk.desk.close_step(step)
    assert sorted(desk.sent) == ["prompt-0", "prompt-1", "prompt-2"]
    assert not desk.dropped


def test_a_prompt_is_encoded_when_its_row_is_there_and_asked_for_once_until_then() -> None:
    desk = Desk()
    prompt = desk.desk.prompt(0, 0)
    desk.desk.ask_for(0, [prompt, prompt])
    desk.desk.ask_for(0, [prompt])
    assert desk.sent == [prompt.row]
    assert not desk.desk.is_encoded(prompt)
    assert not desk.desk.all_encoded()
    desk.desk.mark_encoded([prompt.row])
    assert desk.desk.is_encoded(prompt)
    assert desk.desk.all_encoded()


def test_rows_of_open_steps_are_never_dropped_and_the_oldest_of_others_go_first() -> None:
    desk = Desk(kept=4)
    for step in range(4):
        desk.desk.open_step(step)
        desk.desk.mark_encoded(desk.rows(step))
    desk.desk.close_step(0)
    assert sorted(desk.dropped) == sorted(desk.rows(0)), "four are kept, and two steps more are open"
    desk.desk.close_step(1)
    assert sorted(desk.dropped) == sorted(desk.rows(0) + desk.rows(1))
    desk.desk.close_step(2)
    desk.desk.close_step(3)
    assert len(desk.dropped) == 4


def test_a_dropped_row_is_encoded_again_when_it_is_needed() -> None:
    desk = Desk(kept=1)
    desk.desk.open_step(0)
    desk.desk.mark_encoded(desk.rows(0))
    desk.desk.close_step(0)
    (row,) = desk.dropped
    group = desk.rows(0).index(row)
    desk.desk.ask_for(5, [desk.desk.prompt(0, group)])
    assert desk.sent.count(row) == 2


def test_a_row_that_is_still_being_encoded_is_not_dropped() -> None:
    desk = Desk(kept=0)
    desk.desk.open_step(0)
    desk.desk.close_step(0)
    assert not desk.dropped


def test_a_replacements_row_stays_with_its_step() -> None:
    desk = Desk(kept=0)
    replacement = desk.desk.prompt(1, 2)
    assert replacement.row not in desk.rows(1)
    desk.desk.open_step(0)
    desk.desk.ask_for(1, [replacement])
    desk.desk.mark_encoded([*desk.rows(0), replacement.row])
    desk.desk.close_step(0)
    assert replacement.row not in desk.dropped
    desk.desk.close_step(1)
    assert replacement.row in desk.dropped


# --- Numbers -----------------------------------------------------------------------------------------------------


def test_the_numbers_of_a_step_are_means_over_samples_and_updates() -> None:
    rewards = {SampleId(4, 0, index): value for index, value in enumerate([1.0, 2.0, 3.0, 6.0])}
    other = {"gradient_norm": 3.0, "ratio_max": 1.2, "pack_size": 2, "kl": 0.5, "memory_retries": 3}
    updates = [UPDATE, UPDATE | other]
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


def test_costs_follow_the_run_and_a_hiccup_does_not_move_them() -> None:
    offers = {0: LaneOffer("a", 100), 1: LaneOffer("b", 200)}
    profile = CostTracker(offers, Costs(train_sample_ns=Fraction(7), commit_ns=5, score_ns=3))
    assert profile.costs(9).train_sample_ns == 7
    for _ in range(REMEMBERED):
        profile.add_take(0, 1, 300)
        profile.add("train_sample", 10)
    profile.add_take(0, 1, 10**9)
    profile.add_lane(2, LaneOffer("c", 450))
    costs = profile.costs(9)
    assert (costs.at_ns, costs.train_sample_ns, costs.commit_ns, costs.score_ns) == (9, 10, 5, 3)
    assert costs.lane_slice_ns == ((0, 300), (1, 200), (2, 450))
    assert profile.offer(0, "a again") == LaneOffer("a again", 300)


def test_a_lane_that_takes_several_slices_at_once_is_timed_by_all_of_them() -> None:
    offer = timed_offer("big", {2: 1.0, 8: 2.5}, slice_size=2, own_size=8)
    assert (offer.slices_at_once, offer.slice_ns) == (4, 2_500_000_000)
    assert [offer.expected_ns(slices) for slices in (1, 2, 3, 4)] == [1e9, 1.5e9, 2e9, 2.5e9]
    profile = CostTracker({0: offer}, Costs(train_sample_ns=Fraction(7)))
    profile.add_take(0, slices=1, ns=2_000_000_000)  # a rest of a group, twice as slow as expected
    assert profile.costs(0).lane_slice_ns == ((0, 5_000_000_000),)


def test_a_lane_timed_with_one_size_is_expected_in_proportion() -> None:
    assert timed_offer("a", {4: 2.0}, slice_size=4, own_size=4) == LaneOffer("a", 2_000_000_000)
    assert expected_ns({4: 2.0}, 2) == 1_000_000_000


def test_a_cost_is_never_nothing() -> None:
    profile = CostTracker({0: LaneOffer("a", 100)}, Costs(train_sample_ns=Fraction(7)))
    profile.add("publish", 0)
    assert profile.costs(0).publish_ns == 1
    with pytest.raises(KeyError):
        profile.add("coffee", 1)


class SmallShelf:
    """An exchange with little room."""

    def __init__(self, free: int, holds_weights: bool) -> None:
        self._free, self.holds_weights = free, holds_weights

    def drop(self, name: str) -> None: ...

    def free_bytes(self) -> int:
        return self._free

    def where(self) -> str:
        return "a drawer"


def test_two_versions_and_the_state_beside_them_have_to_fit_where_they_are_held() -> None:
    gb = 10**9
    check_room(SmallShelf(10 * gb, holds_weights=True), weights_bytes=2 * gb, kept_bytes=3 * gb)
    told = "a drawer has 9.0 GB free, and two versions of the weights take 4.0 GB, of the state .* 6.0 GB"
    with pytest.raises(ConfigError, match=told):
        check_room(SmallShelf(9 * gb, holds_weights=True), weights_bytes=2 * gb, kept_bytes=3 * gb)
    check_room(SmallShelf(9 * gb, holds_weights=False), weights_bytes=2 * gb, kept_bytes=3 * gb)
    with pytest.raises(ConfigError, match=r"checkpoint\.in_memory=false"):
        check_room(SmallShelf(5 * gb, holds_weights=False), weights_bytes=2 * gb, kept_bytes=3 * gb)
