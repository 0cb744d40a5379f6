"""The weights after two batches are the same to the last bit, whatever order groups and their slices come in."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from scored_groups import Rollout, scored_groups, toy, trainer_of

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.training import EmaSettings, TrainerSettings
from digenrl.training.gradients import GradientSums
from digenrl.training.metrics import Tally
from digenrl.training.ordered_sums import OrderedSums
from digenrl.training.packing.packed import PassResult

GROUPS = 4
WHOLE = tuple((place, range(4)) for place in range(GROUPS))
IN_HALVES = tuple((place, range(first, first + 2)) for place in range(GROUPS) for first in (0, 2))


@cache
def algorithm_and_batches(name, lora, updates):
    algorithm = build_algorithm(name, {"updates_per_batch": updates})
    model = toy(torch.float32, lora)
    rewards = [
        [(0.3, 1.7, -2.1, 0.9), (1, 1, 1, 1), (0.1, 0.2, 3.3, 0.4), (5.1, 0.7, 0.6, 0.55)][p] for p in range(4)
    ]
    rollouts = [Rollout(groups=GROUPS, steps=3, step=batch, version=batch) for batch in range(2)]
    return algorithm, [scored_groups(model, algorithm, rollout, rewards) for rollout in rollouts]


def outcome(name, lora, updates, order, in_order=True):
    """All bits of a trainer after two batches whose pieces came in this order, and of what it reported."""
    algorithm, batches = algorithm_and_batches(name, lora, updates)
    settings = TrainerSettings(
        pack_size=3, learning_rate=0.02, ema=EmaSettings(every_updates=1), sum_in_order=in_order
    )
    trainer = trainer_of(toy(torch.float32, lora), algorithm, batches[0], settings)
    reports = []
    for batch in batches:
        for place, samples in order:
            trainer.add_group(batch[place], samples=samples)
            while trainer.can_commit():
                reports.append(trainer.commit())
    assert trainer.batch == 2
    state = trainer.state()
    tensors = [*state["policies"]["current"].values(), *state["ema"].values()]
    tensors += [value for moments in state["optimizer"]["moments"].values() for value in moments.values()]
    return torch.cat([value.flatten() for value in tensors]), reports


@pytest.mark.parametrize("name", ["flow_grpo", "dance_grpo"])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("updates", [1, 2])
def test_groups_may_come_in_any_order_and_not_a_bit_is_different(name, lora, updates):
    expected, reports = outcome(name, lora, updates, WHOLE)
    for order in [(3, 2, 1, 0), (2, 0, 3, 1), (1, 3, 0, 2), (0, 2, 1, 3)]:
        bits, reported = outcome(name, lora, updates, [WHOLE[place] for place in order])
        assert torch.equal(bits, expected)
        assert reported == reports


@pytest.mark.parametrize("updates", [1, 2])
def test_slices_of_groups_may_come_in_any_order_too(updates):
    expected, reports = outcome("flow_grpo", True, updates, IN_HALVES)
    for order in [IN_HALVES[::-1], IN_HALVES[1::2] + IN_HALVES[::2], IN_HALVES[3:] + IN_HALVES[:3]]:
        bits, reported = outcome("flow_grpo", True, updates, order)
        assert torch.equal(bits, expected)
        assert reported == reports


def test_added_as_they_come_groups_differ_in_the_last_bits_alone():
    first, _ = outcome("dance_grpo", False, 1, WHOLE, in_order=False)
    other, _ = outcome("dance_grpo", False, 1, WHOLE[::-1], in_order=False)
    assert not torch.equal(first, other), "or the tests above could not fail"
    torch.testing.assert_close(first, other, rtol=1e-2, atol=1e-3)


def test_a_sum_of_parts_waits_for_earlier_places_and_holds_nothing_back_at_the_end():
    parts = {(0, 2): 1e8, (1,): 1.0, (3, 4): -1e8, (5,): 0.5}

    def sum_in(order):
        sums = OrderedSums(range(6), in_order=True)
        for places in order:
            value = torch.tensor([parts[places]])
            sums.add(places, PassResult(GradientSums(final={"w": value.clone()}), Tally()))
        return sums.total.sums.final["w"].item()

    results = {sum_in(order) for order in itertools.permutations(parts)}
    assert results == {((1e8 + 0) + 0 - 1e8) + 0.5}, "in fp32 the 1 is lost between the large ones, in every order"
    early = OrderedSums(range(2), in_order=True)
    early.add([1], PassResult(GradientSums(final={"w": torch.ones(1)}), Tally()))
    assert early.total.sums.final == {}
