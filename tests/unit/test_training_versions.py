"""A trainer between versions: rehearsals, batches given up, states of the last version, weights to publish."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from digenrl.worker.orders import SaveCheckpoint
from digenrl.worker.saving import Saving
from scored_groups import Rollout, nudge, scored_groups, toy, trainer_of

from digenrl.algorithms.registry import ALGORITHMS, build_algorithm
from digenrl.config.reading import ConfigError
from digenrl.config.training import EmaSettings, TrainerSettings
from digenrl.models.model_weights import load_weights, weights_state
from digenrl.training.checkpoint.checkpoints import read_checkpoint

SETTINGS = TrainerSettings(pack_size=4, learning_rate=0.02, ema=EmaSettings(decay=0.5, every_updates=1))
LORA_OR_FULL = pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])


def batch_of(model, algorithm, step=0, groups=4):
    return scored_groups(model, algorithm, Rollout(groups=groups, steps=3, step=step, version=step))


def train(trainer, groups):
    for group in groups:
        trainer.add_group(group)
        while trainer.can_commit():
            trainer.commit()


def flat(tree):
    """Every tensor and number of a state, by its path."""
    found = {}
    for key, value in tree.items():
        found |= (
            {f"{key}/{k}": v for k, v in flat(value).items()} if isinstance(value, dict) else {str(key): value}
        )
    return found


def same_state(left, right):
    left, right = flat(left), flat(right)
    return left.keys() == right.keys() and all(
        torch.equal(value, right[key]) if isinstance(value, torch.Tensor) else value == right[key]
        for key, value in left.items()
    )


# --- Rehearsals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_a_rehearsal_leaves_no_trace_in_what_follows(name):
    algorithm = build_algorithm(name, {"kl_weight": 0.1} if name == "flow_grpo" else {})
    window = {"kind": "fast", "width": 2} if name == "flow_grpo_fast" else None
    outcomes = []
    for rehearses in (False, True):
        model = toy()
        groups = scored_groups(model, algorithm, Rollout(groups=4, steps=5), window=window)
        small = scored_groups(
            model, algorithm, Rollout(groups=1, group_size=2, steps=5, step=-1), [(1.0, 1.0)], window=window
        )[0]
        trainer = trainer_of(model, algorithm, groups, SETTINGS)
        for group in groups:
            if rehearses:
                trainer.calibrate(small)
                trainer.calibrate(group)
            trainer.add_group(group)
            assert all(p.grad is None for p in model.transformer.parameters())
            while trainer.can_commit():
                trainer.commit()
        outcomes.append(trainer.state())
    assert outcomes[0]["batch"] == 1
    assert same_state(*outcomes)


def test_a_rehearsal_finds_the_pack_size():
    algorithm, model = build_algorithm("flow_grpo"), toy()
    groups = batch_of(model, algorithm)
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(pack_size="auto", largest_pack=7))
    assert trainer.pack_size is None
    trainer.calibrate(groups[1])  # whose rewards are all alike
    assert trainer.pack_size == 7


def test_a_selection_of_more_samples_than_a_rehearsal_has_does_not_stop_it():
    algorithm = build_algorithm("dance_grpo", {"best_of_n": {"top": 2, "bottom": 2}})
    model = toy()
    groups = batch_of(model, algorithm)
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(largest_pack=5))
    trainer.calibrate(scored_groups(model, algorithm, Rollout(groups=1, group_size=2))[0])
    assert trainer.pack_size == 5
    with pytest.raises(ValueError, match="at least 2 samples, got 1"):
        trainer.calibrate(scored_groups(model, algorithm, Rollout(groups=1, group_size=1))[0])


# --- Batches that are given up --------------------------------------------------------------------------------


@LORA_OR_FULL
@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("name", ["flow_grpo", "diffusion_nft"])
def test_the_state_at_the_last_version_is_the_same_wherever_the_batch_stands(name, updates, lora):
    algorithm = build_algorithm(name, {"updates_per_batch": updates})
    model = toy(lora=lora)
    first, second = batch_of(model, algorithm), batch_of(model, algorithm, step=1)
    trainer = trainer_of(model, algorithm, first, SETTINGS, keep_last_version=True)
    train(trainer, first)
    expected = trainer.state()
    seen_updates = set()
    for group in second[:3] if updates == 1 else second:
        trainer.add_group(group)
        assert same_state(trainer.state_at_last_version(), expected)
        if trainer.can_commit() and trainer.update + 1 < updates:
            trainer.commit()
            assert same_state(trainer.state_at_last_version(), expected)
        seen_updates.add(trainer.update)
    assert seen_updates == set(range(updates))
    with pytest.raises(RuntimeError, match="batch 1 is open"):
        trainer.state()
    trainer.abandon_batch()
    assert same_state(trainer.state(), expected)


@pytest.mark.parametrize("updates", [1, 2])
def test_a_batch_can_be_trained_anew_after_it_was_abandoned(updates):
    algorithm = build_algorithm("flow_grpo", {"updates_per_batch": updates})
    outcomes = []
    for abandons in (False, True):
        model = toy()
        groups = batch_of(model, algorithm)
        trainer = trainer_of(model, algorithm, groups, SETTINGS, keep_last_version=True)
        if abandons:
            other = [copy.copy(group) for group in groups[::-1]]
            for group in other[: 4 if updates == 2 else 3]:
                trainer.add_group(group)
            if updates == 2:
                trainer.commit()
            trainer.abandon_batch()
        train(trainer, groups)
        outcomes.append(trainer.state())
    assert outcomes[0]["updates_done"] == updates
    assert same_state(*outcomes)


def test_committed_updates_are_not_taken_back_unless_the_state_before_is_kept():
    algorithm, model = build_algorithm("flow_grpo", {"updates_per_batch": 2}), toy()
    groups = batch_of(model, algorithm)
    trainer = trainer_of(model, algorithm, groups, SETTINGS)
    for group in groups:
        trainer.add_group(group)
    trainer.commit()
    for give_up in (trainer.state_at_last_version, trainer.abandon_batch):
        with pytest.raises(RuntimeError, match="keep_last_version=True"):
            give_up()
    trainer.commit()
    assert trainer.state()["batch"] == 1


def test_one_state_can_be_loaded_into_many_trainers():
    algorithm, model = build_algorithm("flow_grpo", {"updates_per_batch": 1}), toy()
    groups, more = batch_of(model, algorithm), batch_of(model, algorithm, step=1)
    trainer = trainer_of(model, algorithm, groups, SETTINGS)
    train(trainer, groups)
    state = trainer.state()
    outcomes = []
    for _ in range(2):
        other = trainer_of(toy(), algorithm, groups, SETTINGS)
        other.load_state(state)
        train(other, more)
        outcomes.append(other.state())
    assert same_state(*outcomes)
    assert same_state(trainer.state(), state)


def test_a_state_that_does_not_fit_changes_nothing():
    algorithm = build_algorithm("diffusion_nft")
    model = toy(lora=False)
    groups = batch_of(model, algorithm)
    trainer = trainer_of(model, algorithm, groups, SETTINGS)
    train(trainer, groups)
    before = trainer.state()
    name = next(iter(before["policies"]["current"]))
    lacking = {key: value + 1 for key, value in before["policies"]["current"].items() if key != name}
    wrong_shape = before["policies"]["current"] | {name: torch.zeros(3)}
    for part, match in [
        (
            {"policies": before["policies"] | {"current": lacking}},
            f"trained weights does not fit: 1 missing.*{name}",
        ),
        ({"policies": before["policies"] | {"current": wrong_shape}}, r"is \(3,\), expected"),
        ({"policies": before["policies"] | {"reference": None}}, "the reference does not fit"),
        ({"ema": None}, "moving average does not fit"),
        ({"optimizer": before["optimizer"] | {"moments": {"other": {}}}}, "other is not trained here"),
    ]:
        with pytest.raises(ValueError, match=match):
            trainer.load_state(before | part)
        assert same_state(trainer.state(), before)


@LORA_OR_FULL
@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("name", ["flow_grpo", "diffusion_nft"])
def test_a_version_kept_on_the_host_is_what_is_saved_and_published(name, updates, lora):
    algorithm, model = build_algorithm(name, {"updates_per_batch": updates, "kl_weight": 0.1}), toy(lora=lora)
    trainer = trainer_of(model, algorithm, batch_of(model, algorithm), SETTINGS)
    for step in range(4):  # from the third on the old policy of diffusion_nft lags behind
        expected, version = trainer.state(), trainer.policies.published()
        trainer.keep_version()
        for group in batch_of(model, algorithm, step):
            trainer.add_group(group)
        for _ in range(updates):
            assert same_state(trainer.state_at_last_version(), expected)
            assert same_state(trainer.published(), version)
            trainer.commit()
        assert not same_state(trainer.published(), version)


def test_without_room_on_the_host_nothing_is_kept_and_a_run_is_saved_all_the_same(tmp_path, monkeypatch):
    algorithm, model = build_algorithm("flow_grpo"), toy()
    trainer = trainer_of(model, algorithm, batch_of(model, algorithm), SETTINGS, keep_last_version=True)
    train(trainer, batch_of(model, algorithm))
    expected, memory = trainer.state(), trainer._host.memory
    take, taken, given = memory.take, [], []

    def take_three(like):
        if len(taken) == 3:
            raise ConfigError("no room")
        taken.append(take(like))
        return taken[-1]

    monkeypatch.setattr(memory, "take", take_three)
    monkeypatch.setattr(memory, "give", given.append)
    with pytest.raises(ConfigError, match="no room"):
        trainer.keep_version()
    assert given == taken
    monkeypatch.setattr("digenrl.worker.saving.export_weights", lambda *_: None)
    saved = Saving(model, trainer).save(SaveCheckpoint(str(tmp_path), step=1, keep=1, facts={}))
    trainer.load_state(read_checkpoint(Path(saved.path)).trainer_state)
    assert same_state(trainer.state(), expected)


# --- What generators are given --------------------------------------------------------------------------------


@LORA_OR_FULL
@pytest.mark.parametrize("name", ["flow_grpo", "diffusion_nft"])
@pytest.mark.parametrize("kept", ["helps", "keep_last_version"])
def test_inside_a_batch_the_last_version_is_what_is_published(name, lora, kept):
    algorithm = build_algorithm(name, {"updates_per_batch": 2})
    model = toy(lora=lora)
    groups = batch_of(model, algorithm)
    trainer = trainer_of(model, algorithm, groups, SETTINGS, **{kept: True})
    version = trainer.published()
    for group in groups:
        trainer.add_group(group)
    trainer.commit()
    now = weights_state(model)
    assert all(torch.equal(trainer.published()[name], version[name]) for name in version)
    assert not all(torch.equal(now[name], version[name]) for name in version)
    assert all(torch.equal(weights_state(model)[name], now[name]) for name in now), "the trained weights stay"
    if kept == "helps":
        with trainer.policies.generating():
            assert all(torch.equal(weights_state(model)[name], version[name]) for name in version)
    trainer.commit()
    assert not all(torch.equal(trainer.published()[name], version[name]) for name in version)


def test_a_trainer_that_helps_trains_as_one_that_does_not():
    algorithm = build_algorithm("flow_grpo", {"updates_per_batch": 2})
    outcomes = []
    for helps in (False, True):
        model = toy()
        groups = batch_of(model, algorithm)
        trainer = trainer_of(model, algorithm, groups, SETTINGS, helps=helps)
        train(trainer, groups)
        outcomes.append(trainer.state())
    assert same_state(*outcomes)


def test_half_trained_weights_are_never_generated_with():
    algorithm, model = build_algorithm("flow_grpo", {"updates_per_batch": 2}), toy()
    groups = batch_of(model, algorithm)
    trainer = trainer_of(model, algorithm, groups, SETTINGS)
    for group in groups:
        trainer.add_group(group)
    trainer.commit()
    for use in (trainer.policies.generating, trainer.policies.published):
        with pytest.raises(RuntimeError, match="helps=True"):
            use()


@LORA_OR_FULL
def test_a_generator_takes_over_what_is_published_and_makes_the_same_samples(lora):
    algorithm = build_algorithm("diffusion_nft", {"old_decay_growth": 0.25})
    model, generator = toy(lora=lora), toy(lora=lora)
    generator.transformer.requires_grad_(False)
    trainer = None
    for step in range(3):
        groups = batch_of(model, algorithm, step)
        trainer = trainer or trainer_of(model, algorithm, groups, SETTINGS)
        train(trainer, groups)
    load_weights(generator, trainer.published())
    with trainer.policies.generating():
        expected = batch_of(model, algorithm, step=3)
    made = batch_of(generator, algorithm, step=3)
    for theirs, ours in zip(made, expected, strict=True):
        for left, right in zip(theirs.trajectories, ours.trajectories, strict=True):
            assert torch.equal(left.final_L, right.final_L)


@LORA_OR_FULL
def test_published_weights_that_do_not_fit_change_nothing(lora):
    model = toy(lora=lora)
    before = weights_state(model)
    name = next(iter(before))
    shifted = {key: value + 1 for key, value in before.items()}
    nudge(model, 0.1, seed=1)
    load_weights(model, before)
    for state, match in [
        (
            {key: value for key, value in shifted.items() if key != name},
            f"1 tensors missing.*{name}",
        ),
        (shifted | {"more": torch.zeros(1)}, "1 unexpected.*more"),
        (shifted | {name: torch.zeros(3)}, r"is \(3,\), expected"),
        (weights_state(toy(lora=not lora)), "missing"),
    ]:
        with pytest.raises(ValueError, match=match):
            load_weights(model, state)
        assert all(torch.equal(value, before[key]) for key, value in weights_state(model).items())
