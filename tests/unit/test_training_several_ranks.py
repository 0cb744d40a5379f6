"""Trainers of several ranks, in real processes: the weights and metrics of one, and steps of all or of none."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from rank_cases import STEADY, WAYS, Case, train
from rank_processes import on_ranks
from scored_groups import (
    Rollout,
    lively,
    relative_difference,
    scored_groups,
    serial_gradient,
    serial_of,
    toy,
    trainer_of,
)

from digenrl.algorithms.registry import ALGORITHMS, build_algorithm
from digenrl.config.reading import ConfigError
from digenrl.config.training import EmaSettings, TrainerSettings
from digenrl.models.model_weights import weights_state
from digenrl.models.shards import gather_to_first_rank
from digenrl.training.checkpoint.state_trees import state_as_tensors, state_of_tensors, tensors_in
from digenrl.training.ranks.rank_group import RanksError, join_ranks
from digenrl.training.ranks.sharding import shard_model

NARROW = {"flow_grpo_fast": {"kind": "fast", "width": 2}}  # three steps do not fit half of five


def trained(ranks, case):
    """The last version's weights, the average, and what every update told."""
    _, trainer, batches = case.trainer_and_batches(ranks)
    metrics = [told for groups in batches for told in train(trainer, groups)]
    average = {} if trainer.ema is None else trainer.ema.values
    if trainer.policies.sharded:
        average = gather_to_first_rank(trainer.policies.model_parameters, average)
    return trainer.published(), average, metrics


def assert_close_metrics(several, one):
    for ours, expected in zip(several, one, strict=True):
        assert ours.keys() == expected.keys()
        for name, value in expected.items():
            close = None if value is None else pytest.approx(value, rel=1e-4, abs=1e-6)
            assert ours[name] == close, name


CASES = {
    "a scale of the batch, a reference, two updates, an average": Case(
        "flow_grpo",
        {"clip": 1e-4, "kl_weight": 0.1, "updates_per_batch": 2, "advantage": {"clamp": 1.2}},
        STEADY.model_copy(update={"ema": EmaSettings(decay=0.5, every_updates=2)}),
        Rollout(groups=4),
    ),
    "an old policy that follows slowly and a reference": Case(
        "diffusion_nft", {"kl_weight": 0.1, "old_decay_growth": 0.25, "updates_per_batch": 2}, batches=3
    ),
    "recomputed log-probs": Case(
        "mix_grpo",
        {"updates_per_batch": 2},
        STEADY.model_copy(update={"old_log_probs": "recomputed", "gradient_checkpointing": True}),
    ),
    "couples": Case("flow_dpo", rollout=Rollout(groups=2, group_size=5)),
    "fewer terms than ranks": Case("flow_dpo", rollout=Rollout(groups=2, group_size=2, steps=2)),
}


@WAYS
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_two_ranks_train_to_the_weights_and_metrics_of_one(tmp_path, case, lora):
    case = replace(case, lora=lora)
    weights, average, metrics = trained(None, case)
    several = on_ranks(2, tmp_path, trained, case)
    assert relative_difference(several[0][0], weights) < 1e-6
    assert relative_difference(weights, weights_state(toy(torch.float32, lora))) > 1e-3, "they moved at all"
    if average:
        assert relative_difference(several[0][1], average) < 1e-6
    assert several[0][2] == several[1][2], "every rank tells the same"
    assert_close_metrics(several[0][2], metrics)
    assert several[1][0].keys() == (several[0][0].keys() if lora else set()), "of shards the first rank publishes"


@WAYS
def test_three_ranks_train_to_the_weights_of_one(tmp_path, lora):
    case = replace(CASES["a scale of the batch, a reference, two updates, an average"], lora=lora)
    weights, _, metrics = trained(None, case)
    several = on_ranks(3, tmp_path, trained, case)
    assert relative_difference(several[0][0], weights) < 1e-6
    assert_close_metrics(several[0][2], metrics)


# --- Gradients ------------------------------------------------------------------------------------------------


def nudged(name, lora):
    """A toy at weights other than those that generated, and its batch."""
    algorithm, model = lively(name), toy(torch.float64, lora)
    groups = scored_groups(model, algorithm, Rollout(), window=NARROW.get(name))
    return algorithm, model, groups


def gradients_of_all(ranks, lora):
    found = {}
    for name in ALGORITHMS:
        algorithm, model, groups = nudged(name, lora)
        if not lora:
            shard_model(model, ranks)
        trainer = trainer_of(model, algorithm, groups, TrainerSettings(pack_size=4), ranks=ranks)
        for group in groups:
            trainer.add_group(group)
        gradient = trainer.gradient()
        found[name] = gradient if lora else gather_to_first_rank(trainer.policies.model_parameters, gradient)
    return found


@WAYS
def test_the_gradient_of_two_ranks_is_the_serial_one_for_every_algorithm(tmp_path, lora):
    first, second = on_ranks(2, tmp_path, gradients_of_all, lora)
    for name in ALGORITHMS:
        algorithm, model, groups = nudged(name, lora)
        expected = serial_gradient(serial_of(model, algorithm), groups)
        assert relative_difference(first[name], expected) < 1e-6, name
        if lora:
            assert all(torch.equal(first[name][key], second[name][key]) for key in expected), "to the last bit"


def calls_of(monkeypatch, name):
    calls, real = [], getattr(dist, name)

    def counted(*arguments, **more):
        calls.append(name)
        return real(*arguments, **more)

    monkeypatch.setattr(dist, name, counted)
    return calls


def counted_all_reduces(ranks, case):
    _, trainer, (groups, *_) = case.trainer_and_batches(ranks)
    with pytest.MonkeyPatch.context() as patch:
        calls = calls_of(patch, "all_reduce")
        for group in groups:
            trainer.add_group(group)
        before = len(calls)
        trainer.commit()
        return before, len(calls)


def test_adapters_are_added_up_in_one_round_when_an_update_is_committed(tmp_path):
    case = Case("dance_grpo", batches=1)
    assert on_ranks(2, tmp_path, counted_all_reduces, case) == [(0, 1), (0, 1)]


def counted_reduce_scatters(ranks, case):
    _, trainer, (groups, *_) = case.trainer_and_batches(ranks)
    with pytest.MonkeyPatch.context() as patch:
        calls = calls_of(patch, "reduce_scatter_single")
        trainer.add_group(groups[0])
        return len(calls)


@pytest.mark.parametrize(
    ("algorithm", "options", "expected"),
    [
        ("dance_grpo", {}, 1),  # 10 pairs on each rank, in 4 packs of 3: the last adds all up
        ("flow_grpo", {"kl_weight": 0.1}, 6),  # 3 packs, and what waits for the batch's scale is kept apart
    ],
)
def test_shards_are_added_up_by_the_last_pack_of_a_group_unless_two_parts_would_mix(
    tmp_path, algorithm, options, expected
):
    case = Case(algorithm, options, lora=False, batches=1)
    parts = 2  # the block and the rest are sharded each by itself
    assert on_ranks(2, tmp_path, counted_reduce_scatters, case) == [parts * expected] * 2


def measured_pack(ranks, lora):
    """Each rank thinks of itself that packs of 2 + 3 * index fit."""
    case = Case("dance_grpo", settings=STEADY.model_copy(update={"pack_size": "auto"}), lora=lora, batches=1)
    _, trainer, (groups,) = case.trainer_and_batches(ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "digenrl.training.packing.packed.measure_largest_pack", lambda *_, **__: 2 + 3 * (1 - ranks.index)
        )
        trainer.add_group(groups[0])
    return trainer.pack_size


@WAYS
def test_all_ranks_take_the_smallest_pack_that_any_measured(tmp_path, lora):
    assert on_ranks(2, tmp_path, measured_pack, lora) == [2, 2]


def rehearsed(ranks, lora):
    case = Case("flow_grpo", settings=STEADY.model_copy(update={"pack_size": "auto"}), lora=lora, batches=1)
    _, trainer, (groups,) = case.trainer_and_batches(ranks)
    before = trainer.state()
    trainer.calibrate(groups[0])
    same = tensors_in(before).keys() == tensors_in(trainer.state()).keys()
    train(trainer, groups)
    return same, trainer.pack_size


@WAYS
def test_ranks_rehearse_together_and_measure_for_real(tmp_path, lora):
    assert on_ranks(2, tmp_path, rehearsed, lora) == [(True, 64), (True, 64)]


# --- All or none ----------------------------------------------------------------------------------------------


def handed_other_groups(ranks, lora):
    _, trainer, (groups, *_) = Case("dance_grpo", lora=lora).trainer_and_batches(ranks)
    before = trainer.state()
    if ranks.index == 1:
        groups = [*groups[:-1], replace(groups[-1], rewards=(*groups[-1].rewards[:-1], 3.0))]
    for group in groups:
        trainer.add_group(group)
    with pytest.raises(RanksError, match="ranks disagree about the groups of an update") as caught:
        trainer.commit()
    now = tensors_in(trainer.state_at_last_version())
    return str(caught.value), all(torch.equal(value, now[path]) for path, value in tensors_in(before).items())


@WAYS
def test_ranks_that_were_handed_other_groups_take_no_step(tmp_path, lora):
    (told, same), (told_too, same_too) = on_ranks(2, tmp_path, handed_other_groups, lora)
    assert same and same_too
    assert told == told_too
    assert "the weights are unchanged" in told


def handed_fewer_terms(ranks):
    _, trainer, (groups, *_) = Case("dance_grpo", lora=False).trainer_and_batches(ranks)
    with pytest.raises(RanksError, match="ranks disagree about the number of terms of a group"):
        trainer.add_group(replace(groups[0], rewards=(1.0,) * 4) if ranks.index else groups[0])
    train(trainer, groups)
    return trainer.updates_done


def test_shards_that_would_wait_for_each_other_say_so_and_can_go_on(tmp_path):
    assert on_ranks(2, tmp_path, handed_fewer_terms) == [1, 1]


def off_by_a_little(ranks):
    _, trainer, (groups, *_) = Case("dance_grpo").trainer_and_batches(ranks)
    for group in groups:
        trainer.add_group(group)
    real = ranks.sum_up

    def wrong_on_one(tensors):
        real(tensors)
        for value in tensors.values():
            value *= 1 + 1e-4 * ranks.index

    ranks.sum_up = wrong_on_one
    with pytest.raises(RanksError, match="ranks disagree about the gradient norm of an update"):
        trainer.commit()
    return trainer.updates_done


def test_ranks_that_hold_other_gradients_take_no_step(tmp_path):
    assert on_ranks(2, tmp_path, off_by_a_little) == [0, 0]


def left_alone(ranks):
    _, trainer, (groups, *_) = Case("dance_grpo").trainer_and_batches(ranks)
    for group in groups:
        trainer.add_group(group)
    if ranks.index == 1:
        return None
    with pytest.raises(RanksError, match="rank 0 of 2 lost the others while adding up gradients"):
        trainer.commit()
    return trainer.updates_done


def test_a_rank_whose_peer_is_gone_says_so_and_takes_no_step(tmp_path):
    assert on_ranks(2, tmp_path, left_alone) == [0, None]


def out_of_memory(ranks):
    _, trainer, (groups, *_) = Case("dance_grpo", lora=False).trainer_and_batches(ranks)

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer._passes._replay, "pairs", full)
        with pytest.raises(ConfigError, match=r"pack of 3 terms on rank . of 2.*lower training.pack_size"):
            trainer.add_group(groups[0])
    with pytest.raises(RuntimeError, match="make it anew"):
        trainer.add_group(groups[0])


def test_shards_cannot_halve_a_pack_and_say_what_to_do(tmp_path):
    on_ranks(2, tmp_path, out_of_memory)


def refused(ranks):
    model = toy(torch.float32, lora=False)
    algorithm = build_algorithm("dance_grpo")
    groups = scored_groups(model, algorithm, Rollout(groups=1))
    shard_model(model, ranks)
    with pytest.raises(ValueError, match="a sharded trainer cannot generate"):
        trainer_of(model, algorithm, groups, ranks=ranks, helps=True)
    with pytest.raises(ValueError, match="hand them over"):
        trainer_of(model, algorithm, groups)
    with pytest.raises(ValueError, match="which every rank holds whole"):
        shard_model(toy(torch.float32), ranks)


def test_what_shards_cannot_do_is_refused(tmp_path):
    on_ranks(1, tmp_path, refused)


# --- The group itself -----------------------------------------------------------------------------------------


def conversation(ranks, place):
    with pytest.raises(RuntimeError, match="in a group of ranks already"):
        join_ranks(f"file://{place}/other", ranks.index, ranks.count, torch.device("cpu"))
    facts = ranks.gather({"rank": ranks.index, "text": "é" * (1 + 5 * ranks.index), "bad": math.inf})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("digenrl.training.ranks.rank_group.BUCKET_BYTES", 100)
        calls = calls_of(patch, "all_reduce")
        values = {str(n): torch.full((n,), 0.1 * (ranks.index + 1), dtype=torch.float32) for n in (3, 20, 7, 30)}
        values["double"] = torch.full((2, 2), 1.0, dtype=torch.float64)
        ranks.sum_up(values)
    ranks.close()
    with pytest.raises(RanksError, match="has left its group"):
        ranks.barrier()
    again = join_ranks(f"file://{place}/again", ranks.index, ranks.count, torch.device("cpu"), 20)
    said = again.gather(ranks.index)
    again.close()
    return facts, len(calls), values, said


def test_ranks_tell_each_other_facts_add_up_in_buckets_and_join_again(tmp_path):
    first, second, third = on_ranks(3, tmp_path, conversation, tmp_path)
    assert first[0] == [{"rank": n, "text": "é" * (1 + 5 * n), "bad": math.inf} for n in range(3)]
    assert first[1] == 4, "12 + 80 bytes, 28, 120, and another type"
    assert all(torch.equal(first[2][n], other[2][n]) for n in first[2] for other in (second, third))
    assert first[2]["20"].tolist() == pytest.approx([0.6] * 20)
    assert first[2]["double"].tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert first[3] == third[3] == [0, 1, 2]


def test_ranks_that_do_not_meet_say_so(tmp_path):
    with pytest.raises(RanksError, match=r"rank 0 of 2 did not meet the others at file://.* within 0.5 s"):
        join_ranks(f"file://{tmp_path}/alone", 0, 2, torch.device("cpu"), timeout_s=0.5)


# --- States ---------------------------------------------------------------------------------------------------


def gone_on(ranks, case):
    """One trainer goes through; another takes its state over, as tensors alone, in the middle."""
    _, through, batches = case.trainer_and_batches(ranks)
    train(through, batches[0])
    carried = state_as_tensors(through.state())
    assert all("/" in path or path == "json" for path in carried)
    state = state_of_tensors({path: value.clone() for path, value in carried.items()})
    _, other, _ = case.trainer_and_batches(ranks)
    other.load_state(state)
    for trainer in (through, other):
        train(trainer, batches[1])
    here, there = tensors_in(through.state()), tensors_in(other.state())
    return here.keys() == there.keys() and all(torch.equal(value, there[path]) for path, value in here.items())


@WAYS
def test_a_state_goes_through_tensors_and_the_run_ends_with_the_same_bits(tmp_path, lora):
    case = replace(CASES["an old policy that follows slowly and a reference"], lora=lora, batches=2)
    assert on_ranks(2, tmp_path, gone_on, case) == [True, True]
    assert gone_on(None, case)


def test_a_state_as_tensors_keeps_what_json_holds():
    state = {"a": {"b": torch.arange(3), "c": {}, "d": [1, 0.1, None, math.inf]}, "e": None, "f": {"g": "é"}}
    back = state_of_tensors(state_as_tensors(state))
    assert torch.equal(back["a"].pop("b"), state["a"].pop("b"))
    assert back == state


def taken_from_others(ranks, case):
    _, trainer, _ = case.trainer_and_batches(ranks)
    state = trainer.state()
    other = state | {"shard": state["shard"] | {"count": 3}}
    with pytest.raises(ValueError, match=f"the parts of rank {ranks.index} of 3, and this trainer is rank"):
        trainer.load_state(other)
    _, whole, _ = case.trainer_and_batches(None)
    with pytest.raises(ValueError, match="and this trainer holds whole weights"):
        whole.load_state(state)
    trainer.load_state(whole.state())


def test_parts_of_a_state_are_refused_by_whoever_they_do_not_fit(tmp_path):
    on_ranks(2, tmp_path, taken_from_others, Case("dance_grpo", lora=False))


def inside_a_batch(ranks, case):
    """Weights of the last version, asked for when an update of the next batch is committed already."""
    _, trainer, batches = case.trainer_and_batches(ranks)
    before = trainer.published()
    for group in batches[0]:
        trainer.add_group(group)
    trainer.commit()
    return before, trainer.published()


def test_shards_publish_the_last_version_inside_a_batch_too(tmp_path):
    case = Case("mix_grpo", {"updates_per_batch": 2}, lora=False)
    (before, inside), (none, none_too) = on_ranks(2, tmp_path, inside_a_batch, case)
    assert all(torch.equal(inside[name], value) for name, value in before.items())
    assert len(before) == len(inside) == len(list(toy(lora=False).transformer.parameters()))
    assert none == none_too == {}
