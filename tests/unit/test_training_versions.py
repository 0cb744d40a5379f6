"""A trainer between versions: calibration, states of the last version, and weights to publish."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rank_cases import stages_of
from rounding import assert_same
from scored_groups import (
    Rollout,
    differences,
    nudge,
    same,
    scored_groups,
    state_of,
    toy,
    train,
    trainer_of,
)

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.reading import ConfigError
from digenrl.config.recipes.training import EmaSettings, TrainerSettings
from digenrl.models.model_weights import load_weights, weights_state
from digenrl.records import Save
from digenrl.training.checkpoint.checkpoints import read_checkpoint
from digenrl.training.offload.host_copies import HostMemory

SETTINGS = TrainerSettings(pack_size=4, learning_rate=0.02, ema=EmaSettings(decay=0.5, every_updates=1))
# Every pair of an algorithm, a number of updates and a kind of training, in half of the combinations.
NAME_UPDATES_LORA = pytest.mark.parametrize(
    ("name", "updates", "lora"),
    [
        ("flow_grpo", 1, True),
        ("flow_grpo", 2, False),
        ("diffusion_nft", 1, False),
        ("diffusion_nft", 2, True),
    ],
)
LORA_OR_FULL = pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])


def batch_of(model, algorithm, step=0, groups=4):
    return scored_groups(model, algorithm, Rollout(groups=groups, steps=3, step=step, version=step))


# --- Calibration ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flow_grpo", "mix_grpo", "flash_grpo", "diffusion_nft", "flow_dpo"])
def test_calibration_changes_nothing_that_follows(name):
    algorithm, outcomes = build_algorithm(name, {"kl_weight": 0.1} if name == "flow_grpo" else {}), []
    groups = scored_groups(toy(), algorithm, Rollout(groups=4, steps=5))
    (small,) = scored_groups(toy(), algorithm, Rollout(groups=1, group_size=2, steps=5, step=-1), [(1.0, 1.0)])
    for calibrates in (False, True):
        model = toy()
        trainer = trainer_of(model, algorithm, groups, SETTINGS)
        for group in groups:
            if calibrates:
                trainer.calibrate(small)
                trainer.calibrate(group)
            trainer.add_group(group)
            assert all(p.grad is None for p in model.transformer.parameters())
            while trainer.can_commit():
                trainer.commit()
        outcomes.append(state_of(trainer))
    assert outcomes[0].batch == 1
    assert differences(*outcomes) == []


def test_calibration_measures_the_pack_size():
    algorithm, model = build_algorithm("flow_grpo"), toy()
    groups = batch_of(model, algorithm)
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(pack_size="auto", largest_pack=7))
    assert trainer.plan is None
    trainer.calibrate(groups[1])  # whose rewards are all equal
    assert trainer.plan.pack_size == 7


def test_calibration_works_with_fewer_samples_than_the_algorithm_selects():
    algorithm = build_algorithm("dance_grpo", {"best_of_n": {"top": 2, "bottom": 2}})
    model = toy()
    groups = batch_of(model, algorithm)
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(largest_pack=5))
    trainer.calibrate(scored_groups(model, algorithm, Rollout(groups=1, group_size=2))[0])
    assert trainer.plan.pack_size == 5
    with pytest.raises(ValueError, match="got 1"):
        trainer.calibrate(scored_groups(model, algorithm, Rollout(groups=1, group_size=1))[0])


# --- States ---------------------------------------------------------------------------------------------------


@NAME_UPDATES_LORA
def test_the_state_at_the_last_version_does_not_change_inside_a_batch(name, updates, lora):
    algorithm = build_algorithm(name, {"updates_per_batch": updates})
    model = toy(lora=lora)
    first, second = batch_of(model, algorithm), batch_of(model, algorithm, step=1)
    trainer = trainer_of(model, algorithm, first, SETTINGS)
    train(trainer, first)
    expected = state_of(trainer)
    seen_updates = set()
    for group in second[:3] if updates == 1 else second:
        trainer.add_group(group)
        assert differences(trainer.state_at_last_version(), expected) == []
        if trainer.can_commit() and trainer.update + 1 < updates:
            trainer.commit()
            assert differences(trainer.state_at_last_version(), expected) == []
        seen_updates.add(trainer.update)
    assert seen_updates == set(range(updates))
    trainer.load_state(expected)
    assert differences(trainer.state_at_last_version(), expected) == []


@pytest.mark.parametrize("updates", [1, 2])
def test_loading_the_last_version_discards_the_open_batch(updates):
    algorithm = build_algorithm("flow_grpo", {"updates_per_batch": updates})
    outcomes = []
    for discards in (False, True):
        model = toy()
        groups = batch_of(model, algorithm)
        trainer = trainer_of(model, algorithm, groups, SETTINGS)
        if discards:
            for group in groups[::-1][: 4 if updates == 2 else 3]:
                trainer.add_group(group)
            if updates == 2:
                trainer.commit()
            trainer.load_state(trainer.state_at_last_version())
        train(trainer, groups)
        outcomes.append(state_of(trainer))
    assert outcomes[0].updates_done == updates
    assert differences(*outcomes) == []


def test_one_state_can_be_loaded_into_many_trainers():
    algorithm, model = build_algorithm("flow_grpo", {"updates_per_batch": 1}), toy()
    groups, more = batch_of(model, algorithm), batch_of(model, algorithm, step=1)
    trainer = trainer_of(model, algorithm, groups, SETTINGS)
    train(trainer, groups)
    state = state_of(trainer)
    outcomes = []
    for _ in range(2):
        other = trainer_of(toy(), algorithm, groups, SETTINGS)
        other.load_state(state)
        train(other, more)
        outcomes.append(state_of(other))
    assert differences(*outcomes) == []
    assert differences(trainer.state_at_last_version(), state) == []


def test_a_state_that_does_not_fit_changes_nothing():
    algorithm = build_algorithm("diffusion_nft")
    model = toy(lora=False)
    groups = batch_of(model, algorithm)
    trainer = trainer_of(model, algorithm, groups, SETTINGS)
    train(trainer, groups)
    before = state_of(trainer)
    name = next(iter(before.weights))
    incomplete = {key: value + 1 for key, value in before.weights.items() if key != name}
    for changed, match in [
        ({"weights": incomplete}, f"trained weights .*{name}"),
        ({"weights": {**before.weights, name: torch.zeros(3)}}, r"\(3,\)"),
        ({"reference": None}, "reference"),
        ({"average": None}, "average"),
        ({"optimizer": replace(before.optimizer, moments={"other": {}})}, "optimizer .* other"),
    ]:
        with pytest.raises(ValueError, match=match):
            trainer.load_state(replace(before, **changed))
        assert differences(trainer.state_at_last_version(), before) == []


@NAME_UPDATES_LORA
def test_a_version_kept_on_the_host_is_saved_and_published(name, updates, lora):
    algorithm, model = build_algorithm(name, {"updates_per_batch": updates, "kl_weight": 0.1}), toy(lora=lora)
    trainer = trainer_of(model, algorithm, batch_of(model, algorithm), SETTINGS)
    for step in range(4):  # from the third on, the old policy of diffusion_nft lags behind
        expected, version = state_of(trainer), trainer.policies.published()
        trainer.keep_version()
        for group in batch_of(model, algorithm, step):
            trainer.add_group(group)
        for _ in range(updates):
            assert differences(trainer.state_at_last_version(), expected) == []
            assert same(trainer.published(), version)
            trainer.commit()
        assert not same(trainer.published(), version)


def test_without_host_memory_no_version_is_kept_and_a_checkpoint_is_still_saved(tmp_path, monkeypatch):
    algorithm, model = build_algorithm("flow_grpo"), toy()
    trainer = trainer_of(model, algorithm, batch_of(model, algorithm), SETTINGS)
    train(trainer, batch_of(model, algorithm))
    expected, take, taken, returned = state_of(trainer), HostMemory.take, [], []

    def take_three(memory, like):
        if len(taken) == 3:
            raise ConfigError("no memory")
        taken.append(take(memory, like))
        return taken[-1]

    monkeypatch.setattr(HostMemory, "take", take_three)
    monkeypatch.setattr(HostMemory, "give_back", lambda memory, copy: returned.append(copy))
    with pytest.raises(ConfigError, match="no memory"):
        trainer.keep_version()
    assert returned == taken
    monkeypatch.setattr("digenrl.worker.stages.export_weights", lambda *_: None)
    saved = stages_of(model, trainer).save(Save(1, 0, 1, str(tmp_path), {}, keep=1))
    trainer.load_state(read_checkpoint(Path(saved.path)).trainer_state)
    assert differences(trainer.state_at_last_version(), expected) == []


# --- Published weights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "lora", "helps"),
    [
        ("flow_grpo", True, True),
        ("flow_grpo", False, False),
        ("diffusion_nft", True, False),
        ("diffusion_nft", False, True),
    ],
)
def test_inside_a_batch_the_last_version_is_published(name, lora, helps):
    algorithm = build_algorithm(name, {"updates_per_batch": 2})
    model = toy(lora=lora)
    groups = batch_of(model, algorithm)
    trainer = trainer_of(model, algorithm, groups, SETTINGS, helps=helps)
    version = {name: value.clone() for name, value in trainer.published().items()}
    average = {name: value.clone() for name, value in trainer.published_average().items()}
    for group in groups:
        trainer.add_group(group)
    trainer.commit()
    now = weights_state(model)
    assert same(trainer.published(), version)
    assert same(trainer.published_average(), average)
    assert not same(now, version)
    assert same(weights_state(model), now), "the trained weights do not change"
    if helps:
        with trainer.generating():
            assert same(weights_state(model), version)
    trainer.commit()
    assert not same(trainer.published(), version)
    assert not same(trainer.published_average(), average)


def test_a_trainer_that_helps_trains_like_one_that_does_not():
    algorithm = build_algorithm("flow_grpo", {"updates_per_batch": 2})
    outcomes = []
    for helps in (False, True):
        model = toy()
        groups = batch_of(model, algorithm)
        trainer = trainer_of(model, algorithm, groups, SETTINGS, helps=helps)
        train(trainer, groups)
        outcomes.append(state_of(trainer))
    assert differences(*outcomes) == []


def test_partly_trained_weights_never_generate():
    algorithm, model = build_algorithm("flow_grpo", {"updates_per_batch": 2}), toy()
    groups = batch_of(model, algorithm)
    trainer = trainer_of(model, algorithm, groups, SETTINGS)
    for group in groups:
        trainer.add_group(group)
    trainer.commit()
    with pytest.raises(RuntimeError, match="helps=True"), trainer.generating():
        pass


@LORA_OR_FULL
def test_a_generator_with_published_weights_generates_the_same_samples(lora):
    algorithm = build_algorithm("diffusion_nft", {"old_decay_growth": 0.25})
    model, generator = toy(lora=lora), toy(lora=lora)
    generator.transformer.requires_grad_(False)
    trainer = None
    for step in range(3):
        groups = batch_of(model, algorithm, step)
        trainer = trainer or trainer_of(model, algorithm, groups, SETTINGS)
        train(trainer, groups)
    load_weights(generator, trainer.published())
    with trainer.generating():
        expected = batch_of(model, algorithm, step=3)
    made = batch_of(generator, algorithm, step=3)
    for theirs, ours in zip(made, expected, strict=True):
        for left, right in zip(theirs.trajectories, ours.trajectories, strict=True):
            assert_same(left.final_L, right.final_L)


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
