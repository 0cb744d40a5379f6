"""Adapters on a frozen base that is sharded over ranks: weights, metrics, states and exports as on one card."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rank_cases import train
from rank_processes import on_ranks
from scored_groups import Rollout, relative_difference, toy
from test_training_rank_checkpoints import CASE, assert_same_bits, on, resumed, saved, tensors_of
from test_training_several_ranks import CASES, assert_close_metrics, trained

from digenrl.models.adapters.lora import adapter_parameters
from digenrl.models.model_weights import weights_state
from digenrl.models.parallel.shards import local_shard
from digenrl.training.checkpoint.checkpoints import read_checkpoint

SHARDED = {name: replace(case, shard_base=True) for name, case in CASES.items()}
EVERYTHING = replace(  # as many terms on every rank, and an update without any: its only group has equal rewards
    SHARDED["a scale of the batch, a reference, two updates, an average"],
    rollout=Rollout(groups=2, group_size=4, steps=3),
)
COPIES = replace(EVERYTHING, shard_base=False)


def all_trained(ranks, cases):
    return [trained(ranks, case) for case in cases]


def test_ranks_with_a_sharded_base_train_to_the_weights_and_metrics_of_one(tmp_path):
    others = {"pairs of samples", "a scale of the batch, a reference, two updates, an average"}
    cases = [case for name, case in SHARDED.items() if name not in others]
    first, second = on_ranks(2, tmp_path, all_trained, cases)
    for case, ours, theirs in zip(cases, first, second, strict=True):
        weights, _, metrics = trained(None, case)
        assert relative_difference(ours[0], weights) < 1e-6
        assert relative_difference(weights, weights_state(toy(torch.float32))) > 1e-3, "they changed at all"
        assert_close_metrics(ours[2], metrics)
        assert_same_bits(theirs[0], ours[0])
        assert theirs[2] == ours[2], "both ranks report the same"


def test_four_ranks_with_a_sharded_base_compute_the_bits_of_four_with_copies(tmp_path):
    floats = replace(EVERYTHING, settings=EVERYTHING.settings.model_copy(update={"sum_in_order": False}))
    weights, *_ = trained(None, EVERYTHING)
    for sharded, copies, summed_as_floats in on_ranks(4, tmp_path, all_trained, [EVERYTHING, COPIES, floats]):
        for part in (0, 1):  # the weights and their average
            assert_same_bits(sharded[part], copies[part])
        assert sharded[2] == copies[2]
        assert relative_difference(sharded[0], weights) < 1e-6
        assert relative_difference(summed_as_floats[0], weights) < 1e-6


def shares_held(ranks, case):
    """The shares of the base and of the adapters that this rank holds, before and after training."""
    whole = toy(torch.float32).transformer
    model, trainer, batches = case.trainer_and_batches(ranks)
    shares = []
    for groups in batches:
        held = {name: local_shard(value) for name, value in model.transformer.named_parameters()}
        for adapters in (False, True):
            elements = [
                sum(value.numel() for name, value in tensors.items() if (".lora_" in name) is adapters)
                for tensors in (held, dict(whole.named_parameters()))
            ]
            shares.append(elements[0] / elements[1])
        train(trainer, groups)
    trained_names = {name for name, value in model.transformer.named_parameters() if value.requires_grad}
    return shares, len(trained_names) == len(adapter_parameters(model))


def test_every_rank_holds_its_share_of_the_base_and_all_adapters(tmp_path):
    for shares, only_adapters in on_ranks(2, tmp_path, shares_held, EVERYTHING):
        assert shares == [pytest.approx(0.5, abs=0.05), 1, pytest.approx(0.5, abs=0.05), 1]
        assert only_adapters


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_checkpoints_do_not_depend_on_how_the_base_is_held(tmp_path, before, after):
    case = replace(CASE, shard_base=True)
    through = on(before, tmp_path, saved, case, tmp_path / "run")
    path = through[0][0]
    others = on(after, tmp_path, resumed, case, path)
    expected = tensors_of(through[0][1])
    assert_same_bits(tensors_of(others[0][1]), expected)
    assert_same_bits(tensors_of(read_checkpoint(path).trainer_state), expected)
    assert relative_difference(others[0][2], through[0][2]) < 1e-6
