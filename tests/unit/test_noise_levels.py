"""The noise levels to which final latents are noised: which, how many, and as drawn as they should be."""

from __future__ import annotations

import itertools

import pytest
import torch
from scored_groups import DRAW_NOISE, Rollout, trajectories_of
from toy_model import ToyModel

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.reading import ConfigError
from digenrl.training.packing.noise_levels import noise_level

STEPS = 10


@pytest.fixture(scope="module")
def trajectories():
    rollout = Rollout(groups=1, group_size=8, steps=STEPS, slice_size=8)
    return trajectories_of(ToyModel(), build_algorithm("diffusion_nft"), rollout, group=0)


def levels_of(trajectory, name, options):
    algorithm = build_algorithm(name, options)
    numbers = algorithm.trained_steps(trajectory.plan)
    return [noise_level(trajectory, number, algorithm, DRAW_NOISE) for number in numbers]


def test_the_first_levels_leave_out_the_last(trajectories):
    found = levels_of(trajectories[0], "diffusion_nft", {})
    assert found == [(trajectories[0].plan.schedule, index) for index in range(STEPS - 1)]


def test_random_levels_are_another_subset_for_every_sample_and_include_the_last(trajectories):
    subsets = [
        [index for _, index in levels_of(trajectory, "diffusion_nft", {"levels": "random"})]
        for trajectory in trajectories
    ]
    assert all(len(set(subset)) == STEPS - 1 for subset in subsets), "int(.99 N) different levels"
    assert len({tuple(sorted(subset)) for subset in subsets}) > 1
    assert any(STEPS - 1 in subset for subset in subsets)
    whole = levels_of(trajectories[0], "diffusion_nft", {"levels": "random", "trained_fraction": 1.0})
    assert sorted(index for _, index in whole) == list(range(STEPS))


def test_levels_are_drawn_from_the_first_part_of_the_schedule_only(trajectories):
    options = {"levels": "random", "trained_fraction": 0.5, "drawn_fraction": 0.6}
    found = {index for each in trajectories for _, index in levels_of(each, "awm", options)}
    assert found == set(range(6))


def test_stratified_levels_are_one_of_each_part_as_in_awm(trajectories):
    # AWM draws from [b_k, b_k+1), where the b are linspace(0, int(0.9 N), count + 1) rounded down: 0, 2, 4, 6, 9.
    options = {"levels": "stratified", "trained_fraction": 0.4, "drawn_fraction": 0.9}
    drawn = [[index for _, index in levels_of(each, "awm", options)] for each in trajectories]
    for part, (first, end) in enumerate(itertools.pairwise((0, 2, 4, 6, 9))):
        assert {levels[part] for levels in drawn} == set(range(first, end))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": "stratified", "drawn_fraction": 0.5}, "5 levels, and trained_fraction 0.99 asks for 9"),
        ({"levels": "first", "drawn_fraction": 0.5}, "nothing is drawn"),
    ],
)
def test_levels_that_cannot_be_drawn_are_an_error(trajectories, options, message):
    with pytest.raises(ConfigError, match=message):
        levels_of(trajectories[0], "awm", options)


def test_logit_normal_levels_have_the_quartiles_of_the_distribution(trajectories):
    drawn, shares = build_algorithm("flow_dpo", {"levels": "logit_normal"}), []
    for trajectory in trajectories:
        for number in range(250):
            schedule, index = noise_level(trajectory, number, drawn, DRAW_NOISE)
            assert schedule is trajectory.plan.training_schedule
            shares.append(index / schedule.steps)
    expected = torch.sigmoid(torch.special.ndtri(torch.tensor([0.25, 0.5, 0.75])))
    found = torch.tensor(shares).quantile(torch.tensor([0.25, 0.5, 0.75]))
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0)
