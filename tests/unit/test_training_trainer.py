"""The trainer: complete updates, refusals that change nothing, running out of memory, and metrics."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scored_groups import (
    DRAW_NOISE,
    Rollout,
    differences,
    lively,
    nudge,
    relative_difference,
    scored_groups,
    serial_gradient,
    serial_of,
    state_of,
    toy,
    train,
    trained_batches,
    trainer_of,
)
from toy_model import ToyModel

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.recipes.training import EmaSettings, TrainerSettings
from digenrl.models.adapters.lora import add_lora
from digenrl.training.open_batch import BatchShape
from digenrl.training.trainer import Trainer


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.transformer.named_parameters() if p.requires_grad}


def same_weights(left, right):
    return all(torch.equal(left[name], right[name]) for name in right)


def with_rewards(group, rewards):
    return replace(group, rewards=tuple(rewards))


def with_log_probs_off_by(shift, group):
    moved = tuple(replace(t, log_prob_K=t.log_prob_K + shift) for t in group.trajectories)
    return replace(group, trajectories=moved)


# --- Whole updates --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "updates_of"), [("flow_grpo", "groups"), ("mix_grpo", "samples"), ("diffusion_nft", "samples")]
)
def test_two_batches_of_two_updates_end_with_the_serial_weights(name, updates_of):
    algorithm = build_algorithm(name, {"updates_per_batch": 2, "updates_of": updates_of})
    settings = TrainerSettings(pack_size=4, learning_rate=1e-2, gradient_norm=1e-3, adam_eps=1e-3)
    packed, serial_model = toy(), toy()
    serial = serial_of(serial_model, algorithm, settings)
    trainer = None
    for batch in range(2):
        rollout = Rollout(groups=4, steps=5, step=batch, version=batch)
        with serial.policies.generating():
            groups = scored_groups(serial_model, algorithm, rollout)
        trainer = trainer or trainer_of(packed, algorithm, groups, settings)
        serial.train_batch(groups)
        train(trainer, [groups[index] for index in (3, 1, 2, 0)])
        assert (trainer.batch, trainer.update) == (batch + 1, 0)
        assert relative_difference(weights_of(packed), weights_of(serial_model)) < 1e-9
    assert relative_difference(weights_of(packed), weights_of(toy())) > 1e-3, "the weights moved at all"


def test_a_group_of_a_later_update_waits_for_the_updates_before():
    algorithm = build_algorithm("mix_grpo", {"updates_per_batch": 2})
    model = toy()
    groups = scored_groups(model, algorithm, Rollout(groups=4))
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(pack_size=4, learning_rate=1e-2))
    trainer.add_group(groups[2])
    trainer.add_group(groups[3])
    assert not trainer.can_commit()
    with pytest.raises(RuntimeError, match=r"\[0, 1\] are missing"):
        trainer.commit()
    trainer.add_group(groups[0])
    trainer.add_group(groups[1])
    first, second = trainer.commit(), trainer.commit()
    assert (first.update, second.update) == (0, 1)
    assert first.ratio_max == pytest.approx(1, abs=1e-7), "nothing was trained yet"
    assert abs(second.ratio_mean - 1) > 1e-6, "the first update moved the policy"


def test_a_batch_wide_scale_waits_for_all_rewards_of_the_batch():
    algorithm = build_algorithm("flow_grpo", {"updates_per_batch": 2})
    model = toy()
    groups = scored_groups(model, algorithm, Rollout(groups=4))
    trainer = trainer_of(model, algorithm, groups)
    for index in (0, 1, 2):
        trainer.add_group(groups[index])
    assert not trainer.can_commit()
    trainer.add_group(groups[3])
    assert trainer.can_commit()


def test_updates_of_samples_train_a_part_of_every_group_once_all_have_arrived():
    algorithm = build_algorithm("mix_grpo", {"updates_per_batch": 2, "updates_of": "samples"})
    model = toy()
    groups = scored_groups(model, algorithm, Rollout(groups=3, group_size=5))
    trainer = trainer_of(model, algorithm, groups)
    for group in groups:
        assert not trainer.can_commit()
        trainer.add_group(group)
    metrics = [trainer.commit(), trainer.commit()]
    # Group 1 has equal rewards and counts. Of 3 * 5 samples the updates train 3 + 2 + 3 and 2 + 3 + 2.
    steps = len(groups[0].trajectories[0].plan.kept_steps)
    assert [each.terms for each in metrics] == [8 * steps, 7 * steps]
    assert (
        metrics[0].reward_mean
        == metrics[1].reward_mean
        == pytest.approx(sum(sum(group.rewards) for group in groups) / 15)
    )
    assert [each.zero_spread_groups for each in metrics] == [0, 1], "once per batch"
    assert trainer.batch == 1


@pytest.mark.parametrize("stale_groups", [0, 2])
def test_stale_groups_are_spread_over_the_updates_of_a_batch(stale_groups):
    """The mismatch is that of an update's fresh samples; None says that all of them are stale."""
    algorithm = build_algorithm("dance_grpo", {"updates_per_batch": 2})
    model = toy()
    stale, fresh = (scored_groups(model, algorithm, Rollout(groups=4, version=version)) for version in (-1, 0))
    shape = BatchShape(groups=4, group_size=4, stale_groups=stale_groups)
    trainer = Trainer(model, algorithm, TrainerSettings(pack_size=3), shape, DRAW_NOISE)
    for group in (*stale[:2], *fresh[2:]):
        trainer.add_group(with_rewards(group, (0.0, 1.0, 2.0, 3.0)))
    assert (trainer.commit().log_prob_mismatch is None) == (stale_groups == 0)


@pytest.mark.parametrize(("warmup", "decay"), [(False, 0.75), (True, 0.25)])
def test_the_moving_average_follows_every_few_updates(warmup, decay):
    algorithm = lively("dance_grpo")
    model = toy()
    ema = EmaSettings(decay=0.75, every_updates=2, warmup=warmup)
    settings = TrainerSettings(pack_size=8, learning_rate=0.1, ema=ema)
    start, seen = weights_of(model), []
    for trainer in trained_batches(model, algorithm, settings, 3):
        seen.append(weights_of(model))
        average = trainer.state_at_last_version().average
    expected = {name: decay * start[name] + (1 - decay) * seen[1][name] for name in start}
    assert relative_difference(average, expected) < 1e-12


def test_the_learning_rate_grows_linearly_from_zero():
    algorithm = lively("dance_grpo")
    model = toy()
    settings = TrainerSettings(pack_size=8, learning_rate=0.1, learning_rate_warmup=2)
    rates, weights = [], [weights_of(model)]
    for trainer in trained_batches(model, algorithm, settings, 4):
        rates.append(state_of(trainer).optimizer.scalars["lr"])
        weights.append(weights_of(model))
    assert rates == [0.0, 0.05, 0.1, 0.1]
    assert same_weights(weights[0], weights[1]) and not same_weights(weights[1], weights[2])


@pytest.mark.parametrize(("epsilon", "said"), [(1e-15, 0), (1e3, 1)])
def test_gradients_that_adams_epsilon_hides_are_said_once(epsilon, said, caplog):
    algorithm, settings = lively("dance_grpo"), TrainerSettings(pack_size=8, adam_eps=epsilon)
    for _ in trained_batches(toy(), algorithm, settings, 2):
        pass
    assert ["adam_eps" in record.getMessage() for record in caplog.records] == [True] * said


def test_a_policy_that_follows_slowly_is_the_one_to_generate_with():
    algorithm = build_algorithm("diffusion_nft", {"old_decay_growth": 0.25, "old_decay_start": 1})
    model = toy()
    settings = TrainerSettings(pack_size=8, learning_rate=0.1)
    generated_with = [weights_of(model)]
    trained = []
    for trainer in trained_batches(model, algorithm, settings, 2):
        trained.append(weights_of(model))
        with trainer.generating():
            generated_with.append(weights_of(model))
    assert same_weights(generated_with[1], trained[0])
    followed = {name: 0.25 * trained[0][name] + 0.75 * trained[1][name] for name in trained[0]}
    assert relative_difference(generated_with[2], followed) < 1e-12
    assert same_weights(weights_of(model), trained[1])


@pytest.mark.parametrize("lora", [True, False])
def test_a_saved_and_loaded_trainer_continues_with_the_same_bits(lora):
    algorithm = build_algorithm("diffusion_nft", {"old_decay_growth": 0.25, "updates_per_batch": 2})
    ema = EmaSettings(decay=0.5, every_updates=1, warmup=True)
    settings = TrainerSettings(pack_size=8, learning_rate=0.01, learning_rate_warmup=4, ema=ema)
    model = toy(lora=lora)
    batches = [scored_groups(model, algorithm, Rollout(steps=4, step=step, version=step)) for step in range(2)]

    def train(trainer, groups):
        for group in groups:
            trainer.add_group(group)
        while trainer.can_commit():
            trainer.commit()

    first = trainer_of(model, algorithm, batches[0], settings)
    train(first, batches[0])
    state = state_of(first)
    train(first, batches[1])
    other = toy(lora=lora)
    nudge(other, 0.3, seed=77)
    second = trainer_of(other, algorithm, batches[0], settings)
    second.load_state(state)
    train(second, batches[1])
    assert second.batch == 2
    assert same_weights(weights_of(other), weights_of(model))
    assert differences(state_of(second), state_of(first)) == []
    assert state_of(first).average and state_of(first).old_policy


def test_a_state_does_not_choose_the_kernels_of_an_optimizer_step():
    algorithm = build_algorithm("flow_grpo", {"updates_per_batch": 1})
    model = toy()
    groups = scored_groups(model, algorithm, Rollout(steps=4))
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(pack_size=8, learning_rate=0.01))
    for group in groups:
        trainer.add_group(group)
    trainer.commit()
    state = state_of(trainer)
    scalars = {**state.optimizer.scalars, "fused": None, "foreach": True, "lr": 0.5}
    trainer.load_state(replace(state, optimizer=replace(state.optimizer, scalars=scalars)))
    loaded = state_of(trainer).optimizer.scalars
    assert (loaded["fused"], loaded["foreach"], loaded["lr"]) == (True, None, 0.5)


# --- On policy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in ("flow_grpo", "dance_grpo", "mix_grpo", "grpo_guard")),
        ("flow_grpo", torch.float64),
    ],
)
def test_on_policy_and_with_equal_shapes_every_ratio_is_exactly_1(name, dtype):
    algorithm = build_algorithm(name, {"updates_per_batch": 1})
    model = toy(dtype)
    groups = scored_groups(model, algorithm, Rollout(slice_size=1))
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(pack_size=1))
    for group in groups:
        trainer.add_group(group)
    metrics = trainer.commit()
    assert metrics.ratio_mean == 1
    assert metrics.ratio_max == 1
    assert metrics.clip_fraction == 0
    assert metrics.log_prob_mismatch == 0


def test_a_sigma_that_is_off_by_a_thousandth_shows_in_the_mismatch():
    algorithm = build_algorithm("flow_grpo", {"updates_per_batch": 1})
    model = toy(torch.float32)
    groups = scored_groups(model, algorithm, Rollout(slice_size=1))

    def shifted(trajectory):
        schedule = trajectory.plan.schedule
        moved = replace(schedule, sigmas=schedule.sigmas - 1e-3 * (schedule.sigmas > 0))
        return replace(trajectory, plan=replace(trajectory.plan, schedule=moved))

    groups = [replace(g, trajectories=tuple(map(shifted, g.trajectories))) for g in groups]
    trainer = trainer_of(model, algorithm, groups)
    for group in groups:
        trainer.add_group(group)
    metrics = trainer.commit()
    assert metrics.log_prob_mismatch > 1e-5
    assert metrics.clip_fraction > 0


def test_recomputed_log_probs_make_the_ratio_1_for_any_shape():
    algorithm = build_algorithm("flow_grpo", {"updates_per_batch": 1})
    model = toy(torch.float32)
    groups = scored_groups(model, algorithm, Rollout(slice_size=4))
    groups = [with_log_probs_off_by(0.01, group) for group in groups]
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(pack_size=3, old_log_probs="recomputed"))
    for group in groups:
        trainer.add_group(group)
    metrics = trainer.commit()
    assert (metrics.ratio_mean, metrics.ratio_max, metrics.clip_fraction) == (1, 1, 0)
    assert metrics.log_prob_mismatch == pytest.approx(0.01, rel=1e-3)


def test_log_probs_recomputed_in_a_second_update_are_those_from_before_the_first():
    algorithm = build_algorithm("flow_grpo", {"updates_per_batch": 2})
    metrics = {}
    for source in ("rollout", "recomputed"):
        model = toy()
        groups = scored_groups(model, algorithm, Rollout(groups=4))
        if source == "recomputed":
            groups = [with_log_probs_off_by(0.01, group) for group in groups]
        settings = TrainerSettings(pack_size=3, old_log_probs=source, learning_rate=1e-2)
        trainer = trainer_of(model, algorithm, groups, settings)
        for group in groups:
            trainer.add_group(group)
        trainer.commit()
        metrics[source] = trainer.commit()
    assert abs(metrics["rollout"].ratio_mean - 1) > 1e-7
    assert metrics["recomputed"].ratio_mean == pytest.approx(metrics["rollout"].ratio_mean, rel=1e-12)
    assert metrics["recomputed"].gradient_norm == pytest.approx(metrics["rollout"].gradient_norm, rel=1e-9)


def test_a_stale_sample_keeps_the_log_probs_of_the_policy_that_generated_it():
    algorithm = build_algorithm("flow_grpo", {"updates_per_batch": 1})
    model = toy()
    groups = scored_groups(model, algorithm, Rollout(step=0, version=-1))
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(pack_size=3, old_log_probs="recomputed"))
    nudge(model, 0.01, seed=2)
    for group in groups:
        trainer.add_group(group)
    metrics = trainer.commit()
    assert metrics.ratio_max != 1
    assert metrics.log_prob_mismatch is None, "only samples of the same weights are compared"


# --- Refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_leaves_the_trainer_unchanged(bad):
    algorithm = lively("flow_grpo")
    model = toy()
    groups = scored_groups(model, algorithm)
    expected = serial_gradient(serial_of(model, algorithm), groups)
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(pack_size=4))
    before = weights_of(model)
    trainer.add_group(groups[0])
    with pytest.raises(ValueError, match="reward of sample 2"):
        trainer.add_group(with_rewards(groups[2], [0.0, 1.0, bad, 2.0]))
    assert same_weights(weights_of(model), before)
    assert all(p.grad is None for p in model.transformer.parameters())
    trainer.add_group(groups[2])
    trainer.add_group(groups[1])
    assert relative_difference(trainer.gradient(), expected) < 1e-6


def test_a_forward_that_fails_in_the_middle_of_a_group_leaves_nothing_behind():
    algorithm = lively("flow_grpo")
    model = toy()
    groups = scored_groups(model, algorithm)
    expected = serial_gradient(serial_of(model, algorithm), groups)
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(pack_size=4))
    real, calls = model.velocity, 0

    def failing(*arguments):
        nonlocal calls
        calls += 1
        if calls == 6:
            raise RuntimeError("device lost")
        return real(*arguments)

    model.velocity = failing
    with pytest.raises(RuntimeError, match="device lost"):
        trainer.add_group(groups[0])
    model.velocity = real
    for group in groups:
        trainer.add_group(group)
    assert relative_difference(trainer.gradient(), expected) < 1e-6


def test_no_group_is_trained_twice_at_another_place_or_in_another_step():
    algorithm = lively("mix_grpo")
    model = toy()
    groups = scored_groups(model, algorithm)
    trainer = trainer_of(model, algorithm, groups)
    trainer.add_group(groups[0])
    with pytest.raises(ValueError, match="place 0"):
        trainer.add_group(groups[0])
    foreign = scored_groups(model, algorithm, Rollout(step=1))[0]
    with pytest.raises(ValueError, match=r"step 1 .*open batch"):
        trainer.add_group(foreign)
    with pytest.raises(ValueError, match="place 7"):
        trainer.add_group(groups[1], place=7)


@pytest.mark.parametrize("sum_in_order", [True, False])
def test_a_step_whose_gradient_is_not_finite_is_skipped_and_too_many_in_a_row_are_an_error(sum_in_order):
    algorithm = lively("mix_grpo")
    model = toy()
    groups = scored_groups(model, algorithm)
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(skipped_steps=1, sum_in_order=sum_in_order))

    def commit(spoils):
        step = trainer.batch
        rollout = Rollout(step=step, version=step)
        for index, group in enumerate(scored_groups(model, algorithm, rollout)):
            latents = group.trajectories[0].latents_KL.clone()
            latents[0, 0, 0, 0] = math.nan if spoils and index == 0 else latents[0, 0, 0, 0]
            first = replace(group.trajectories[0], latents_KL=latents)
            trainer.add_group(replace(group, trajectories=(first, *group.trajectories[1:])))
        metrics = trainer.commit()
        assert trainer.batch == step + 1
        return metrics.skipped

    before = weights_of(model)
    assert commit(spoils=True) == 1
    assert trainer.batch == 1 and same_weights(weights_of(model), before)
    assert commit(spoils=False) == 0
    assert not same_weights(weights_of(model), before)
    before = weights_of(model)
    assert commit(spoils=True) == 1
    with pytest.raises(FloatingPointError, match="the weights are unchanged"):
        commit(spoils=True)
    assert same_weights(weights_of(model), before)
    assert trainer.state_at_last_version().updates_done == 1


def test_impossible_settings_are_refused_when_a_trainer_is_made():
    model, flow = toy(), build_algorithm("flow_grpo")
    settings = TrainerSettings()
    with pytest.raises(ValueError, match="group_size"):
        Trainer(model, flow, settings, BatchShape(groups=2, group_size=1), DRAW_NOISE)
    with pytest.raises(ValueError, match=r"updates_per_batch: 2"):
        Trainer(model, flow, settings, BatchShape(groups=1, group_size=4), DRAW_NOISE)
    decoupled = build_algorithm("flow_grpo", {"stale": "decoupled"})
    with pytest.raises(ValueError, match="old_log_probs"):
        Trainer(model, decoupled, settings, BatchShape(groups=2, group_size=4), DRAW_NOISE)
    coarse = ToyModel(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"torch.bfloat16.*autocast: bf16"):
        Trainer(coarse, flow, settings, BatchShape(groups=2, group_size=4), DRAW_NOISE)
    frozen = toy()
    frozen.transformer.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        Trainer(frozen, flow, settings, BatchShape(groups=2, group_size=4), DRAW_NOISE)
    with pytest.raises(ValueError, match="pack_size"):
        TrainerSettings(pack_size=0)


# --- Memory ---------------------------------------------------------------------------------------------------


class SmallDevice(ToyModel):
    """A toy on a device with memory for a few rows of a forward with gradient."""

    rows_that_fit = 3
    largest_seen = 0

    def velocity(self, latents_BL, *arguments):
        if torch.is_grad_enabled() and len(latents_BL) > self.rows_that_fit:
            raise torch.OutOfMemoryError("no room")
        self.largest_seen = max(self.largest_seen, len(latents_BL))
        return super().velocity(latents_BL, *arguments)


def small_device():
    model = SmallDevice(seed=1, dtype=torch.float64)
    add_lora(model, rank=2, alpha=4, seed=3)
    nudge(model, 0.2, seed=4)
    return model


@pytest.mark.parametrize(
    ("name", "pack_size"),
    [*((name, 64) for name in ("flow_grpo", "dance_grpo", "diffusion_nft", "flow_dpo")), ("flow_dpo", "auto")],
)
def test_a_pack_that_does_not_fit_is_halved_and_gives_the_same_gradient(name, pack_size):
    algorithm, model = lively(name), small_device()
    groups = scored_groups(model, algorithm)
    expected = serial_gradient(serial_of(model, algorithm), groups)
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(pack_size=pack_size))
    for group in groups:
        trainer.add_group(group)
    assert relative_difference(trainer.gradient(), expected) < 1e-6
    assert trainer.commit().pack_size <= model.rows_that_fit // algorithm.rows_per_term


def test_running_out_of_memory_in_the_backward_adds_nothing_partially():
    algorithm, model = lively("flow_grpo"), toy()
    groups = scored_groups(model, algorithm)
    expected = serial_gradient(serial_of(model, algorithm), groups)
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(pack_size=8))
    last = next(p for p in model.transformer.parameters() if p.requires_grad)
    raised = []

    def out_of_memory_once(gradient):
        if len(raised) < 2:
            raised.append(True)
            raise torch.OutOfMemoryError("no room")
        return gradient

    last.register_hook(out_of_memory_once)
    for group in groups:
        trainer.add_group(group)
    assert len(raised) == 2
    assert relative_difference(trainer.gradient(), expected) < 1e-6


def test_a_single_term_that_does_not_fit_is_an_error():
    algorithm, model = lively("flow_grpo"), small_device()
    groups = scored_groups(model, algorithm)
    model.rows_that_fit = 0
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(pack_size=8))
    with pytest.raises(torch.OutOfMemoryError):
        trainer.add_group(groups[0])


def test_the_automatic_pack_size_is_measured_and_gives_the_same_gradient():
    algorithm, model = lively("flow_grpo"), toy()
    groups = scored_groups(model, algorithm)
    expected = serial_gradient(serial_of(model, algorithm), groups)
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(pack_size="auto", largest_pack=9))
    for group in groups:
        trainer.add_group(group)
    assert relative_difference(trainer.gradient(), expected) < 1e-6
    assert trainer.commit().pack_size == 9, "a toy always fits, so the limit applies"


def test_bf16_autocast_keeps_adapters_and_gradients_in_fp32():
    algorithm, model = lively("flow_grpo"), toy(torch.float32)
    groups = scored_groups(model, algorithm, Rollout(groups=2, steps=3))
    expected = serial_gradient(serial_of(model, algorithm), groups)
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(pack_size=4, autocast="bf16"))
    for group in groups:
        trainer.add_group(group)
    gradient = trainer.gradient()
    assert {value.dtype for value in gradient.values()} == {torch.float32}
    assert 1e-6 < relative_difference(gradient, expected) < 0.5, "rounded, but of the same direction"
    trainer.commit()
    assert {p.dtype for p in trainer.policies.parameters.values()} == {torch.float32}


# --- Metrics --------------------------------------------------------------------------------------------------


def test_an_update_reports_rewards_terms_and_gradient_norm():
    algorithm, model = lively("flow_grpo"), toy()
    rewards = [(0.0, 1.0, 2.0, 3.0), (5.0, 5.0, 5.0, 5.0), (1.0, 0.0, 0.0, 1.0)]
    groups = scored_groups(model, algorithm, rewards=rewards)
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(pack_size=4))
    for group in groups:
        trainer.add_group(group)
    gradient = trainer.gradient()
    metrics = trainer.commit()
    assert metrics.reward_mean == pytest.approx(28 / 12)
    assert metrics.zero_spread_groups == 1
    assert metrics.terms == 3 * 4 * 4
    flat = torch.cat([value.flatten() for value in gradient.values()])
    assert metrics.gradient_norm == pytest.approx(float(flat.norm()))
    assert metrics.kl > 0
