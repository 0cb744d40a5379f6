"""The weights after two batches do not depend in any bit on the order in which groups arrive."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from scored_groups import Rollout, differences, relative_difference, scored_groups, state_of, toy, trainer_of

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.recipes.training import EmaSettings, TrainerSettings
from digenrl.training.gradients.job_sums import JobSums
from digenrl.training.gradients.ordered_sums import OrderedSums
from digenrl.training.gradients.sums import GradientSums

GROUPS = 4
IN_ORDER = (0, 1, 2, 3)


@cache
def algorithm_and_batches(name, lora, updates, updates_of):
    options = {"updates_per_batch": updates, "updates_of": updates_of, "zero_spread_groups": "left_out"}
    algorithm = build_algorithm(name, options if updates_of == "samples" else {"updates_per_batch": updates})
    model = toy(torch.float32, lora)
    rewards = [
        [(0.3, 1.7, -2.1, 0.9), (1, 1, 1, 1), (0.1, 0.2, 3.3, 0.4), (5.1, 0.7, 0.6, 0.55)][p] for p in range(4)
    ]
    rollouts = [Rollout(groups=GROUPS, steps=3, step=batch, version=batch) for batch in range(2)]
    return algorithm, [scored_groups(model, algorithm, rollout, rewards) for rollout in rollouts]


def outcome(name, lora, updates, order, in_order=True, updates_of="groups"):
    """The state after two batches whose groups arrived in this order, and the metrics."""
    algorithm, batches = algorithm_and_batches(name, lora, updates, updates_of)
    settings = TrainerSettings(
        pack_size=3, learning_rate=0.02, ema=EmaSettings(every_updates=1), sum_in_order=in_order
    )
    trainer = trainer_of(toy(torch.float32, lora), algorithm, batches[0], settings)
    reports = []
    for batch in batches:
        for place in order:
            trainer.add_group(batch[place])
            while trainer.can_commit():
                reports.append(trainer.commit())
    assert trainer.batch == 2
    return state_of(trainer), reports


@pytest.mark.parametrize(
    ("name", "lora", "updates"),
    [("flow_grpo", True, 1), ("flow_grpo", False, 2), ("dance_grpo", True, 2), ("dance_grpo", False, 1)],
)
def test_the_order_of_groups_changes_no_bit(name, lora, updates):
    expected, reports = outcome(name, lora, updates, IN_ORDER)
    for order in [(3, 2, 1, 0), (2, 0, 3, 1), (1, 3, 0, 2), (0, 2, 1, 3)]:
        state, reported = outcome(name, lora, updates, order)
        assert differences(state, expected) == []
        assert reported == reports


@pytest.mark.parametrize("name", ["flow_grpo", "dance_grpo"])
def test_the_order_of_groups_changes_no_bit_of_updates_of_samples(name):
    expected, reports = outcome(name, True, 2, IN_ORDER, updates_of="samples")
    state, reported = outcome(name, True, 2, (2, 0, 3, 1), updates_of="samples")
    assert differences(state, expected) == [] and reported == reports
    by_groups, _ = outcome(name, True, 2, IN_ORDER)
    assert differences(by_groups, expected), "the updates have other samples"


def test_added_on_arrival_groups_change_only_the_last_bits():
    first, _ = outcome("dance_grpo", False, 1, IN_ORDER, in_order=False)
    other, _ = outcome("dance_grpo", False, 1, IN_ORDER[::-1], in_order=False)
    assert differences(first, other), "otherwise the test above could not fail"
    assert relative_difference(other.weights, first.weights) < 1e-3


def test_a_sum_waits_for_lower_places_and_holds_nothing_back_at_the_end():
    parts = {0: 1e8, 1: 1.0, 2: -1e8, 3: 0.5}

    def gradient(value):
        return JobSums(GradientSums(final={"w": torch.tensor([value])}))

    def sum_in(order):
        sums = OrderedSums({}, in_order=True)
        sums.reset(parts)
        for place in order:
            sums.add(place, gradient(parts[place]))
        return sums.gradient(1.0, JobSums())["w"].item()

    assert {sum_in(order) for order in itertools.permutations(parts)} == {0.5}, "1 is lost in fp32, in every order"
    early = OrderedSums({}, in_order=True)
    early.reset([0, 1])
    early.add(1, gradient(1.0))
    assert early.gradient(1.0, JobSums()) == {} and len(early.tensors()) == 1
