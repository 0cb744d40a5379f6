"""Trainers on several ranks, in real processes: weights and metrics as on one, and steps on all ranks or none."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from rank_cases import LORA_OR_SHARDED, STEADY, Case, assert_close_metrics, train
from rank_processes import on_ranks
from scored_groups import (
    Rollout,
    differences,
    lively,
    relative_difference,
    scored_groups,
    serial_gradient,
    serial_of,
    state_of,
    toy,
    trainer_of,
)
from shared_training import Assistant, SharedCase

from digenrl.algorithms.registry import ALGORITHMS, build_algorithm
from digenrl.config.reading import ConfigError
from digenrl.config.recipes.training import EmaSettings, TrainerSettings
from digenrl.host_memory import loading_in_turn
from digenrl.models.model_weights import weights_state
from digenrl.models.parallel.shards import gather_to_first_rank, local_shard
from digenrl.training.checkpoint.state_tensors import state_as_tensors, state_of_tensors
from digenrl.training.ranks.rank import Rank
from digenrl.training.ranks.rank_group import PeersLostError, RanksError, join_ranks
from digenrl.training.ranks.sharding import shard_model

NARROW = {"flow_grpo_fast": {"kind": "fast", "width": 2}}  # the default of three steps is too wide for five


def trained(ranks, case):
    """The last version's weights, the moving average, and the metrics of all updates."""
    _, trainer, batches = case.trainer_and_batches(ranks)
    metrics = [each for groups in batches for each in train(trainer, groups)]
    average = {} if case.settings.ema is None else trainer.published_average()
    return trainer.published(), average, metrics


CASES = {
    "a scale of the batch, a reference, two updates, an average": Case(
        "flow_grpo",
        {"clip": 1e-4, "kl_weight": 0.1, "updates_per_batch": 2, "advantage": {"clamp": 1.2}},
        STEADY.model_copy(update={"ema": EmaSettings(decay=0.5, every_updates=2)}),
        Rollout(groups=4, group_size=3, steps=3),
    ),
    "an old policy that follows slowly and a reference": Case(
        "diffusion_nft",
        {"kl_weight": 0.1, "old_decay_growth": 0.25, "updates_per_batch": 2},
        rollout=Rollout(groups=2, group_size=3, steps=3),
        batches=3,
    ),
    "recomputed log-probs": Case(
        "mix_grpo",
        {"updates_per_batch": 2},
        STEADY.model_copy(update={"old_log_probs": "recomputed", "gradient_checkpointing": True}),
    ),
    "pairs of samples": Case("flow_dpo", rollout=Rollout(groups=2, group_size=5)),
    "fewer terms than ranks": Case("flow_dpo", rollout=Rollout(groups=2, group_size=2, steps=2)),
}


@pytest.mark.parametrize(("number", "name"), list(enumerate(CASES)))
def test_two_or_three_ranks_train_to_the_weights_and_metrics_of_one(tmp_path, number, name):
    lora = number % 2 == 1  # replicated, otherwise sharded
    case = replace(CASES[name], lora=lora)
    weights, average, metrics = trained(None, case)
    several = on_ranks(3 if average else 2, tmp_path, trained, case)
    assert relative_difference(several[0][0], weights) < 1e-6
    assert relative_difference(weights, weights_state(toy(torch.float32, lora))) > 1e-3, "they changed at all"
    if average:
        assert relative_difference(several[0][1], average) < 1e-6
    assert several[0][2] == several[1][2], "all ranks report the same"
    assert_close_metrics(several[0][2], metrics)
    assert several[1][0].keys() == (several[0][0].keys() if lora else set()), "rank 0 publishes sharded weights"


def test_ranks_can_load_and_shard_their_models_one_after_the_other(tmp_path):
    shares = on_ranks(2, tmp_path, sharded_in_turn)
    assert sum(shares) == pytest.approx(1) and max(shares) < 0.75


def sharded_in_turn(ranks):
    """The share of the weights that this rank holds. A collective inside of the lock would never end."""
    ranks.mesh("cpu")
    with loading_in_turn("cuda"):
        model = toy(torch.float32, lora=False)
        total = sum(value.numel() for value in model.transformer.parameters())
        shard_model(model, ranks)
    return sum(local_shard(value).numel() for value in model.transformer.parameters()) / total


# --- Gradients ------------------------------------------------------------------------------------------------


def model_and_batch(name, lora):
    """An algorithm, a toy and its batch."""
    algorithm, model = lively(name), toy(torch.float64, lora)
    groups = scored_groups(model, algorithm, Rollout(), window=NARROW.get(name))
    return algorithm, model, groups


def gradients_of_all(ranks, lora):
    found = {}
    for number, name in enumerate(ALGORITHMS):
        algorithm, model, groups = model_and_batch(name, lora)
        if not lora:
            shard_model(model, ranks)
        trainer = trainer_of(model, algorithm, groups, TrainerSettings(pack_size=4), ranks=ranks)
        with pytest.MonkeyPatch.context() as patch:  # summed over ranks by the last pack, or by every one
            patch.setattr("digenrl.training.packing.packed_passes.LARGEST_WHOLE_GRADIENT", number % 2)
            for group in groups:
                trainer.add_group(group)
            gradient = trainer.gradient()
        found[name] = gradient if lora else gather_to_first_rank(trainer.policies.model_parameters, gradient)
    return found


@LORA_OR_SHARDED
def test_the_gradient_of_two_ranks_is_the_serial_one_for_every_algorithm(tmp_path, lora):
    first, second = on_ranks(2, tmp_path, gradients_of_all, lora)
    for name in ALGORITHMS:
        algorithm, model, groups = model_and_batch(name, lora)
        expected = serial_gradient(serial_of(model, algorithm), groups)
        assert relative_difference(first[name], expected) < 1e-6, name
        if lora:
            assert all(torch.equal(first[name][key], second[name][key]) for key in expected), "in every bit"


def in_another_order(ranks):
    """States after two batches whose groups arrived in two orders; and after one for which another has trained."""
    case, states = SharedCase("flow_grpo"), []
    assistant = Assistant(case)
    assistant.trainer.add_group(case.batches()[0][2])
    share = assistant.trainer.take_share()
    for order, shared in (((0, 1, 2), ()), ((2, 0, 1), ()), ((0, 1), (2,))):
        trainer = case.trainer(case.model(), ranks=ranks, shares_gradients=True)
        groups = case.batches()[0]
        for place in order:
            trainer.add_group(groups[place])
        for place in shared:
            trainer.add_share(share)
            trainer.add_rewards(place, place, groups[place].rewards)
            trainer.hold_group(groups[place])
        trainer.commit()
        states.append(state_of(trainer))
    return differences(states[1], states[0]), relative_difference(states[2].weights, states[0].weights)


def test_the_order_of_groups_changes_no_bit_on_several_ranks_and_shares_are_added_once(tmp_path):
    for changed, difference in on_ranks(2, tmp_path, in_another_order):
        assert changed == []
        assert difference < 1e-5, "of what the ranks share in other packs, the rounding differs"


def out_of_range_on_one(ranks):
    """One rank has the only terms that are not finite; all of them skip the step."""
    _, trainer, (groups, *_) = Case("dance_grpo").trainer_and_batches(ranks)
    for place, group in enumerate(groups):
        spoiled = group.trajectories[0].log_prob_K.clone()
        spoiled[: 1 - place] = math.nan  # one term of the first group
        first = replace(group.trajectories[0], log_prob_K=spoiled)
        trainer.add_group(replace(group, trajectories=(first, *group.trajectories[1:])))
    before = state_of(trainer).weights
    skipped = trainer.commit().skipped
    after = state_of(trainer)
    unchanged = all(torch.equal(value, after.weights[name]) for name, value in before.items())
    return skipped, after.updates_done, unchanged


def test_all_ranks_skip_a_step_whose_gradient_is_not_finite_on_one(tmp_path):
    assert on_ranks(2, tmp_path, out_of_range_on_one) == [(1, 0, True)] * 2


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


def test_gradients_of_adapters_are_summed_once_per_update(tmp_path):
    case = Case("dance_grpo", batches=1)
    assert on_ranks(2, tmp_path, counted_all_reduces, case) == [(0, 1), (0, 1)]


def counted_reduce_scatters(ranks, case, memory):
    _, trainer, (groups, *_) = case.trainer_and_batches(ranks)
    with pytest.MonkeyPatch.context() as patch:
        own = memory if ranks.rank.is_first else 2**40
        patch.setattr("digenrl.training.packing.packed_passes.usable_bytes", lambda device: own)
        calls = calls_of(patch, "reduce_scatter_single")
        trainer.add_group(groups[0])
        return len(calls)


@pytest.mark.parametrize(
    ("algorithm", "options", "memory", "expected"),
    [
        ("dance_grpo", {}, 2**40, 1),  # 2 packs: the last one sums all
        ("dance_grpo", {}, 2**10, 2),  # a rank has no room for the gradient of all weights
        ("flow_grpo", {"kl_weight": 0.1}, 2**40, 6),  # 3 packs; the gradient that awaits the scale is kept apart
    ],
)
def test_sharded_gradients_are_summed_by_the_last_pack_if_they_fit_and_two_parts_would_not_mix(
    tmp_path, algorithm, options, memory, expected
):
    case = Case(algorithm, options, lora=False, batches=1)
    parts = 2  # the block and the rest are sharded separately
    assert on_ranks(2, tmp_path, counted_reduce_scatters, case, memory) == [parts * expected] * 2


def reserved_for_packs(ranks, whole):
    """The values per weight that are reserved when packs of a sharded model are measured."""
    settings = STEADY.model_copy(update={"pack_size": "auto"})
    case = Case("dance_grpo", settings=settings, rollout=Rollout(groups=2), lora=False, batches=1)
    _, trainer, (groups,) = case.trainer_and_batches(ranks)
    own, all_of_them = (
        sum(value.nbytes for value in values.values())
        for values in (trainer.policies.parameters, trainer.policies.model_parameters)
    )
    with pytest.MonkeyPatch.context() as patch:
        memory = 2**40 if whole else 2**10
        patch.setattr("digenrl.training.packing.packed_passes.usable_bytes", lambda device: memory)
        reserved = []

        def measure(*_, reserved_bytes, **__):
            reserved.append(reserved_bytes)
            return 2

        patch.setattr("digenrl.training.packing.pack_planner.measure_largest_pack", measure)
        trainer.add_group(groups[0])
    return reserved == [
        3 * own + (all_of_them if whole else own)
    ]  # two moments, earlier groups, packs of this one


@pytest.mark.parametrize("whole", [True, False])
def test_the_packs_of_sharded_ranks_leave_room_for_gradients_and_moments(tmp_path, whole):
    assert on_ranks(2, tmp_path, reserved_for_packs, whole) == [True, True]


def measured_pack(ranks, lora):
    """Rank 0 measures that packs of 5 terms fit, rank 1 packs of 2."""
    case = Case("dance_grpo", settings=STEADY.model_copy(update={"pack_size": "auto"}), lora=lora, batches=1)
    _, trainer, (groups,) = case.trainer_and_batches(ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "digenrl.training.packing.pack_planner.measure_largest_pack",
            lambda *_, **__: 2 + 3 * (1 - ranks.rank.index),
        )
        trainer.add_group(groups[0])
    return trainer.plan.pack_size


@LORA_OR_SHARDED
def test_all_ranks_use_the_smallest_pack_that_any_measured(tmp_path, lora):
    assert on_ranks(2, tmp_path, measured_pack, lora) == [2, 2]


def calibrated(ranks, lora):
    case = Case("flow_grpo", settings=STEADY.model_copy(update={"pack_size": "auto"}), lora=lora, batches=1)
    _, trainer, (groups,) = case.trainer_and_batches(ranks)
    before = state_of(trainer)
    trainer.calibrate(groups[0])
    changed = [name for name in differences(before, state_of(trainer)) if name != "json"]
    train(trainer, groups)
    return changed, trainer.plan.pack_size


@LORA_OR_SHARDED
def test_ranks_calibrate_together(tmp_path, lora):
    assert on_ranks(2, tmp_path, calibrated, lora) == [([], 64), ([], 64)]


# --- Steps on all ranks or none -------------------------------------------------------------------------------


def given_different_groups(ranks, lora):
    _, trainer, (groups, *_) = Case("dance_grpo", lora=lora).trainer_and_batches(ranks)
    before = state_of(trainer)
    if ranks.rank.index == 1:
        groups = [*groups[:-1], replace(groups[-1], rewards=(*groups[-1].rewards[:-1], 3.0))]
    for group in groups:
        trainer.add_group(group)
    with pytest.raises(RanksError, match="disagree about the groups") as caught:
        trainer.commit()
    return str(caught.value), differences(trainer.state_at_last_version(), before)


@LORA_OR_SHARDED
def test_ranks_with_different_groups_take_no_step(tmp_path, lora):
    first, second = on_ranks(2, tmp_path, given_different_groups, lora)
    assert first == second
    message, changed = first
    assert "the weights are unchanged" in message and changed == []


def given_fewer_terms(ranks, lora):
    _, trainer, (groups, *_) = Case("dance_grpo", lora=lora, shard_base=lora).trainer_and_batches(ranks)
    with pytest.raises(RanksError, match="disagree about the number of terms"):
        trainer.add_group(replace(groups[0], rewards=(1.0,) * 4) if ranks.rank.index else groups[0])
    train(trainer, groups)
    return trainer.state_at_last_version().updates_done


@pytest.mark.parametrize("lora", [True, False], ids=["sharded base", "sharded weights"])
def test_sharded_ranks_that_would_deadlock_raise_and_can_continue(tmp_path, lora):
    assert on_ranks(2, tmp_path, given_fewer_terms, lora) == [1, 1]


def off_by_a_little(ranks):
    _, trainer, (groups, *_) = Case("dance_grpo").trainer_and_batches(ranks)
    for group in groups:
        trainer.add_group(group)
    real = ranks.sum_tensors

    def wrong_on_one(tensors):
        real(tensors)
        for value in tensors.values():
            value += value // 10_000 * ranks.rank.index

    ranks.sum_tensors = wrong_on_one
    with pytest.raises(RanksError, match="disagree about the gradient norm"):
        trainer.commit()
    return trainer.state_at_last_version().updates_done


def test_ranks_with_different_gradients_take_no_step(tmp_path):
    assert on_ranks(2, tmp_path, off_by_a_little) == [0, 0]


def left_alone(ranks):
    _, trainer, (groups, *_) = Case("dance_grpo").trainer_and_batches(ranks)
    for group in groups:
        trainer.add_group(group)
    if ranks.rank.index == 1:
        return None
    with pytest.raises(PeersLostError, match=r"rank 0 of 2 lost the others .* gradients"):
        trainer.commit()
    return trainer.state_at_last_version().updates_done


def test_a_rank_whose_peer_has_died_raises_and_takes_no_step(tmp_path):
    assert on_ranks(2, tmp_path, left_alone) == [0, None]


def out_of_memory(ranks, lora):
    model, trainer, (groups, *_) = Case("dance_grpo", lora=lora, shard_base=lora).trainer_and_batches(ranks)

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "velocity", full)
        with pytest.raises(ConfigError, match=r"3 terms on rank . of 2.*training.pack_size") as raised:
            trainer.add_group(groups[0])
        assert ("sum_in_order" in str(raised.value)) == (not lora), "adapters are added as integers"
    with pytest.raises(RuntimeError, match="failed"):
        trainer.add_group(groups[0])


@pytest.mark.parametrize("lora", [True, False], ids=["sharded base", "sharded weights"])
def test_sharded_ranks_that_run_out_of_memory_say_what_to_do(tmp_path, lora):
    on_ranks(2, tmp_path, out_of_memory, lora)


def refused(ranks):
    model = toy(torch.float32, lora=False)
    algorithm = build_algorithm("dance_grpo")
    groups = scored_groups(model, algorithm, Rollout(groups=1))
    shard_model(model, ranks)
    with pytest.raises(ValueError, match="cannot generate"):
        trainer_of(model, algorithm, groups, ranks=ranks, helps=True)
    with pytest.raises(ValueError, match="needs ranks"):
        trainer_of(model, algorithm, groups)
    adapted = toy(torch.float32)
    shard_model(adapted, ranks)
    with pytest.raises(ValueError, match="cannot generate"):
        trainer_of(adapted, algorithm, groups, ranks=ranks, helps=True)


def test_impossible_settings_of_sharded_trainers_are_refused(tmp_path):
    on_ranks(1, tmp_path, refused)


# --- The group itself -----------------------------------------------------------------------------------------


def conversation(ranks, place):
    index = ranks.rank.index
    with pytest.raises(RuntimeError, match="already in a group"):
        join_ranks(f"file://{place}/other", ranks.rank, torch.device("cpu"))
    facts = ranks.gather({"rank": index, "text": "é" * (1 + 5 * index), "bad": math.inf})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("digenrl.training.ranks.rank_group.BUCKET_BYTES", 100)
        calls = calls_of(patch, "all_reduce")
        values = {str(n): torch.full((n,), 0.1 * (index + 1), dtype=torch.float32) for n in (3, 20, 7, 30)}
        values["double"] = torch.full((2, 2), 1.0, dtype=torch.float64)
        ranks.sum_tensors(values)
    ranks.close()
    with pytest.raises(RanksError, match="has left its group"):
        ranks.gather(None)
    again = join_ranks(f"file://{place}/again", ranks.rank, torch.device("cpu"), 20)
    gathered_again = again.gather(index)
    again.close()
    return facts, len(calls), values, gathered_again


def test_ranks_exchange_values_sum_tensors_in_buckets_and_join_again(tmp_path):
    first, second, third = on_ranks(3, tmp_path, conversation, tmp_path)
    assert first[0] == [{"rank": n, "text": "é" * (1 + 5 * n), "bad": math.inf} for n in range(3)]
    assert first[1] == 4, "12 + 80 bytes, 28, 120, and another dtype"
    assert all(torch.equal(first[2][n], other[2][n]) for n in first[2] for other in (second, third))
    assert first[2]["20"].tolist() == pytest.approx([0.6] * 20)
    assert first[2]["double"].tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert first[3] == third[3] == [0, 1, 2]


def test_ranks_that_cannot_connect_raise(tmp_path):
    with pytest.raises(RanksError, match=r"rank 0 of 2 .* file://.* 0.5 s"):
        join_ranks(f"file://{tmp_path}/alone", Rank(0, 2), torch.device("cpu"), timeout_s=0.5)


# --- States ---------------------------------------------------------------------------------------------------


def continued(ranks, case):
    """One trainer trains both batches; another one continues from its state, sent as tensors, after the first."""
    _, through, batches = case.trainer_and_batches(ranks)
    train(through, batches[0])
    state = state_of_tensors(state_as_tensors(state_of(through)))
    _, other, _ = case.trainer_and_batches(ranks)
    other.load_state(state)
    for trainer in (through, other):
        train(trainer, batches[1])
    return differences(through.state_at_last_version(), other.state_at_last_version())


@LORA_OR_SHARDED
def test_a_state_sent_as_tensors_continues_with_the_same_bits(tmp_path, lora):
    case = replace(CASES["an old policy that follows slowly and a reference"], lora=lora, batches=2)
    assert on_ranks(2, tmp_path, continued, case) == [[], []]
    assert continued(None, case) == []


def given_other_shards(ranks, case):
    _, trainer, _ = case.trainer_and_batches(ranks)
    state = state_of(trainer)
    other = replace(state, shard=replace(state.shard, rank=Rank(ranks.rank.index, 3)))
    with pytest.raises(ValueError, match=f"rank {ranks.rank.index} of 3"):
        trainer.load_state(other)
    _, whole, _ = case.trainer_and_batches(None)
    with pytest.raises(ValueError, match="whole weights"):
        whole.load_state(state)
    trainer.load_state(whole.state_at_last_version())


def test_shards_of_a_state_are_refused_by_other_ranks(tmp_path):
    on_ranks(2, tmp_path, given_other_shards, Case("dance_grpo", lora=False))


def inside_a_batch(ranks, case):
    """The last version's weights before and after an update of the next batch is committed."""
    _, trainer, batches = case.trainer_and_batches(ranks)
    before = trainer.published()
    for group in batches[0]:
        trainer.add_group(group)
    trainer.commit()
    return before, trainer.published()


def test_sharded_ranks_publish_the_last_version_inside_a_batch(tmp_path):
    case = Case("mix_grpo", {"updates_per_batch": 2}, lora=False)
    (before, inside), (none, none_too) = on_ranks(2, tmp_path, inside_a_batch, case)
    assert all(torch.equal(inside[name], value) for name, value in before.items())
    assert len(before) == len(inside) == len(list(toy(lora=False).transformer.parameters()))
    assert none == none_too == {}
