"""The noise levels to which final latents are noised: which, how many, and as drawn as they should be."""

from __future__ import annotations

import pytest
import torch
from scored_groups import DRAW_NOISE, Rollout, trajectories_of
from toy_model import ToyModel

from digenrl.algorithms.registry import build_algorithm
from digenrl.training.packing.noise_levels import noise_level

STEPS = 10


@pytest.fixture(scope="module")
def trajectories():
    rollout = Rollout(groups=1, group_size=8, steps=STEPS, slice_size=8)
    return trajectories_of(ToyModel(), build_algorithm("diffusion_nft"), rollout, group=0)


def levels_of(trajectory, name, options):
    algorithm = build_algorithm(name, options)
    numbers = algorithm.trained_steps(trajectory.plan)
    return [noise_level(trajectory, number, algorithm.levels, DRAW_NOISE) for number in numbers]


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


def test_logit_normal_levels_have_the_quartiles_of_the_distribution(trajectories):
    shares = []
    for trajectory in trajectories:
        for number in range(250):
            schedule, index = noise_level(trajectory, number, "logit_normal", DRAW_NOISE)
            assert schedule is trajectory.plan.training_schedule
            shares.append(index / schedule.steps)
    expected = torch.sigmoid(torch.special.ndtri(torch.tensor([0.25, 0.5, 0.75])))
    found = torch.tensor(shares).quantile(torch.tensor([0.25, 0.5, 0.75]))
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0)
