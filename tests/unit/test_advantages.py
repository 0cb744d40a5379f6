"""Advantages compared with values computed by hand, their errors, and scaling by a batch-wide std at the end."""

from __future__ import annotations

import math
import statistics

import pytest
from serial_reference import batch_advantages

from digenrl.algorithms.advantages import normalized_sum
from digenrl.algorithms.registry import build_algorithm
from digenrl.config.reading import ConfigError


def test_a_group_std_divides_by_the_groups_own_spread():
    dance = build_algorithm("dance_grpo")
    # mean 2, deviations -1, 0, 1: a sample std (one degree of freedom less) of 1
    assert batch_advantages(dance, [[1.0, 2.0, 3.0]])[0] == pytest.approx((-1.0, 0.0, 1.0), abs=1e-7)


def test_a_batch_std_is_over_all_rewards_and_not_over_deviations():
    flow = build_algorithm("flow_grpo")
    rewards = [[0.0, 2.0], [10.0, 12.0]]
    std = math.sqrt((36 + 16 + 16 + 36) / 4)  # of 0, 2, 10, 12 around 6
    expected = [(-1 / (std + 1e-4), 1 / (std + 1e-4))] * 2
    assert batch_advantages(flow, rewards) == [pytest.approx(pair) for pair in expected]


def test_group_advantages_times_scale_are_the_advantages_of_the_whole_batch():
    flow = build_algorithm("flow_grpo", {"advantage": {"clamp": 100}})
    rewards = [[0.3, 0.1, 0.7], [2.0, 5.0, 1.0], [0.0, 0.0, 9.0]]
    scale = flow.scale(rewards)
    streamed = [tuple(value * scale for value in flow.group_advantages(group).values) for group in rewards]
    assert streamed == batch_advantages(flow, rewards)


def test_the_scale_does_not_depend_on_the_order_of_the_groups():
    flow = build_algorithm("flow_grpo")
    rewards = [[0.3, 0.1, 0.7], [2e8, 5.0, 1.0], [1e-9, 0.0, 9.0]]
    assert flow.scale(rewards) == flow.scale(rewards[::-1]) == flow.scale([rewards[1], rewards[0], rewards[2]])


def test_a_group_whose_rewards_differ_only_by_rounding_trains_no_sample():
    for name in ("flow_grpo", "dance_grpo", "diffusion_nft", "flow_dpo"):
        advantages = build_algorithm(name).group_advantages([0.1 + 0.2, 0.3, 0.3])
        assert advantages.chosen == ()
        assert advantages.values == (0.0, 0.0, 0.0)


def test_rewards_of_any_scale_have_a_spread():
    dance, rewards = build_algorithm("dance_grpo"), [0.1, 0.2, 0.3, 0.5]
    for scale in (1e-7, 1.0, 1e7):
        scaled = dance.group_advantages([scale * reward for reward in rewards])
        assert scaled.chosen == dance.group_advantages(rewards).chosen != ()
    assert dance.group_advantages([1e7, 1e7 + 1e-3]).chosen == (), "the scores of an fp32 model are this coarse"


def test_advantages_are_clamped_on_both_sides():
    flow = build_algorithm("flow_grpo", {"advantage": {"clamp": 0.5}})
    (advantages,) = batch_advantages(flow, [[0.0, 1.0, 2.0, -3.0]])
    assert max(advantages) == 0.5
    assert min(advantages) == -0.5


def test_with_a_group_std_up_to_26_samples_stay_within_the_clamp_of_5():
    mix = build_algorithm("mix_grpo", {"advantage": {"ddof": 0}})
    assert max(batch_advantages(mix, [[0.0] * 25 + [1.0]])[0]) == pytest.approx(5.0)
    assert max(batch_advantages(mix, [[0.0] * 24 + [1.0]])[0]) < 5


@pytest.mark.parametrize("name", ["flow_grpo", "dance_grpo", "diffusion_nft", "flow_dpo"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_a_number_raises_before_any_advantage(name, bad):
    algorithm = build_algorithm(name)
    with pytest.raises(ValueError, match="reward of sample 1 is"):
        algorithm.group_advantages([0.0, bad, 1.0])
    with pytest.raises(ValueError, match="reward of sample 2 is"):
        batch_advantages(algorithm, [[0.0, 1.0, 2.0], [0.0, 1.0, bad]])


def test_normalized_rewards_have_the_influence_of_their_weights_whatever_their_scale():
    # deviations -1, 1, 0, 0 with a std of sqrt(1/2); deviations -200, 0, 0, 200 with a std of sqrt(20000)
    scores = [[1.0, 3.0, 2.0, 2.0], [100.0, 300.0, 300.0, 500.0]]
    unit = math.sqrt(2)
    expected = (-unit - 0.5 * unit, unit, 0.0, 0.5 * unit)
    assert normalized_sum(scores, [1.0, 0.5], ddof=0, eps=1e-12) == pytest.approx(expected)
    larger = [scores[0], [1e3 * score - 7 for score in scores[1]]]
    assert normalized_sum(larger, [1.0, 0.5], ddof=0, eps=1e-12) == pytest.approx(expected)


def test_normalization_uses_eps_and_degrees_of_freedom_and_ignores_rewards_without_spread():
    scores = [[0.0, 2.0], [0.1 + 0.2, 0.3], [7.0, 7.0]]
    # deviations -1 and 1: a sample std of sqrt(2); the others differ by rounding alone
    expected = 3 / (math.sqrt(2) + 0.5)
    assert normalized_sum(scores, [3.0, 1e9, 1.0], ddof=1, eps=0.5) == pytest.approx((-expected, expected))
    with pytest.raises(ValueError, match="reward of sample 1"):
        normalized_sum([[0.0, math.nan]], [1.0], ddof=0, eps=1e-4)


def test_gdpo_is_normalized_rewards_divided_by_the_std_of_the_batch():
    # Two groups and two rewards by hand: normalized to -1 and 1 each (eps is negligible), then summed.
    first = normalized_sum([[0.0, 2.0], [5.0, 9.0]], [1.0, 1.0], ddof=0, eps=1e-12)  # -2, 2
    second = normalized_sum([[0.0, 2.0], [9.0, 5.0]], [1.0, 1.0], ddof=0, eps=1e-12)  # 0, 0
    flow = build_algorithm("flow_grpo", {"advantage": {"eps": 1e-12}})
    std = math.sqrt((4 + 4 + 0 + 0) / 4)
    advantages = batch_advantages(flow, [first, second])
    assert advantages == [pytest.approx((-2 / std, 2 / std)), pytest.approx((0.0, 0.0))]


def test_without_a_std_normalized_rewards_are_the_sum_of_each_rewards_advantages():
    # As MixGRPO adds them up: (r - mean) / (sample std + 1e-8) of each reward, times its weight, clamped once.
    scores, weights = [[0.0, 1.0, 5.0], [0.3, 0.1, 0.2]], [1.0, 0.5]
    expected = [0.0, 0.0, 0.0]
    for reward, weight in zip(scores, weights, strict=True):
        std = statistics.stdev(reward) + 1e-8
        deviations = [score - statistics.fmean(reward) for score in reward]
        expected = [sum_ + weight * each / std for sum_, each in zip(expected, deviations, strict=True)]
    mix = build_algorithm("mix_grpo", {"advantage": {"std_over": "none"}})
    advantages = mix.settings.advantage
    rewards = normalized_sum(scores, weights, advantages.ddof, advantages.eps)
    assert batch_advantages(mix, [rewards])[0] == pytest.approx(expected)
    assert mix.scale_over == "group", "groups do not wait for each other"
    clamped = build_algorithm("flow_grpo", {"advantage": {"std_over": "none", "clamp": 2}})
    assert batch_advantages(clamped, [[0.0, 1.0, 8.0]])[0] == (-2.0, -2.0, 2.0)


def test_a_group_of_one_is_an_error():
    with pytest.raises(ValueError, match="at least 2 rewards"):
        build_algorithm("flow_grpo").group_advantages([1.0])


def test_best_of_n_takes_top_and_bottom_with_the_advantages_of_the_whole_group():
    dance = build_algorithm("dance_grpo", {"best_of_n": {"top": 1, "bottom": 2}})
    rewards = [5.0, 1.0, 9.0, 0.0, 4.0]
    advantages = dance.group_advantages(rewards)
    assert advantages.chosen == (1, 2, 3)
    assert advantages.values == build_algorithm("dance_grpo").group_advantages(rewards).values


def test_best_of_n_breaks_ties_by_index_and_never_takes_a_sample_twice():
    dance = build_algorithm("dance_grpo", {"best_of_n": {"top": 2, "bottom": 2}})
    assert dance.group_advantages([1.0, 1.0, 1.0, 0.0]).chosen == (0, 1, 2, 3)
    assert dance.group_advantages([1.0, 0.0, 1.0, 1.0, 0.0, 1.0]).chosen == (0, 1, 2, 4)


def test_a_selection_larger_than_the_group_is_an_error():
    dance = build_algorithm("dance_grpo", {"best_of_n": {"top": 4, "bottom": 4}})
    with pytest.raises(ConfigError, match="best_of_n"):
        dance.group_advantages([float(i) for i in range(6)])


def test_flow_dpo_compares_the_best_sample_with_the_worst():
    advantages = build_algorithm("flow_dpo").group_advantages([0.2, 0.9, -3.0, 0.1])
    assert advantages.chosen == (1, 2)
    assert advantages.values == (0.0, 1.0, -1.0, 0.0)


def test_one_advantage_setting_keeps_the_other_defaults_of_the_algorithm():
    assert build_algorithm("flow_grpo", {"advantage": {"clamp": 3}}).scale_over == "batch"
    assert build_algorithm("dance_grpo", {"advantage": {"clamp": 3}}).settings.advantage.ddof == 1
