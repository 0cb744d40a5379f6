"""A trainer that generates in between: what only training needs is offloaded and loaded, and no bit changes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from late_copier import LateCopier
from scored_groups import Rollout, differences, scored_groups, state_of, toy, trainer_of
from shared_training import MORE_REWARDS, STEPS, SharedCase
from shared_training import SETTINGS as SHARED

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.reading import ConfigError
from digenrl.config.recipes.files import read_recipe
from digenrl.config.recipes.training import EmaSettings, TrainerSettings
from digenrl.driver.calibration import Calibration, terms_of
from digenrl.records import LaneOffer
from digenrl.simulation.prediction import predict
from digenrl.training.gradients.share import share_as_tensors
from digenrl.training.offload.host_copies import HostCopies, HostMemory
from digenrl.training.offload.offloader import Offloader

SETTINGS = TrainerSettings(pack_size=4, learning_rate=0.02, ema=EmaSettings(decay=0.5, every_updates=1))
CPU = torch.device("cpu")
KINDS = {  # with a frozen reference; with trained weights that do not generate; with both
    "flow_grpo": {"updates_per_batch": 1, "kl_weight": 0.1},
    "mix_grpo": {"updates_per_batch": 2},
    "diffusion_nft": {"updates_per_batch": 2, "kl_weight": 0.1},
}


class Trainers:
    """Two trainers of the same model and batches: one generates in between, the other one only trains."""

    def __init__(self, name):
        self.algorithm = build_algorithm(name, KINDS[name])
        self.models = toy(torch.float32, lora=False), toy(torch.float32, lora=False)
        self.still = self.trainer(self.models[0], offload=False)
        self.copier = LateCopier()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("digenrl.training.offload.host_copies.make_copier", lambda device: self.copier)
            self.switched = self.trainer(self.models[1], offload=True)

    def trainer(self, model, offload):
        settings = SETTINGS.model_copy(update={"offload": offload})
        return trainer_of(model, self.algorithm, self.batch(0), settings, helps=True)

    def batch(self, step):
        rollout = Rollout(groups=4, steps=5, step=step, version=step)
        return scored_groups(self.models[0], self.algorithm, rollout)

    def assert_generate_with_the_same_weights(self):
        found = []
        for trainer, model in zip((self.still, self.switched), self.models, strict=True):
            with trainer.generating():
                found.append({name: p.detach().clone() for name, p in model.transformer.named_parameters()})
        assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.parametrize("name", list(KINDS))
def test_switching_between_groups_changes_no_bit_of_the_state(name):
    trainers = Trainers(name)
    still, switched = trainers.still, trainers.switched
    for step in range(3):
        groups = trainers.batch(step)
        for turn, index in enumerate((1, 3, 0, 2)):  # the gradient of group 1 is held back until group 0 arrives
            trainers.assert_generate_with_the_same_weights()
            assert differences(still.state_at_last_version(), switched.state_at_last_version()) == []
            if turn % 2:  # else the next replay loads what it needs
                switched.switching.load()
            for trainer in (still, switched):
                trainer.add_group(groups[index])
                while trainer.can_commit():
                    switched.switching.offload()
                    trainer.commit()
        assert still.batch == step + 1
        assert differences(still.state_at_last_version(), switched.state_at_last_version()) == []
    moments = [value for each in state_of(switched).optimizer.moments.values() for value in each.values()]
    assert all(bool(value.isfinite().all()) for value in moments) and any(bool(value.any()) for value in moments)


def test_switching_between_jobs_changes_no_bit_of_a_share():
    case, shares = SharedCase("flow_grpo", lora=False), []
    for offload in (False, True):
        settings, model = SHARED.model_copy(update={"offload": offload}), case.model()
        trainer = case.trainer(model, settings, helps=True, shares_gradients=True, commits=False)
        with trainer.switching.full_size():
            trainer.switching.offload()
            moved = trainer.switching.offloaded_bytes
        for step, groups in enumerate(case.batches()):
            for group in groups:
                for first in (0, 2):
                    trainer.switching.offload()
                    trainer.add_samples(group.part(first, 2))
            trainer.switching.offload()
            shares.append(share_as_tensors(trainer.take_share()))
            with torch.no_grad():
                for parameter in model.transformer.parameters():
                    parameter += 0.01 * (step + 1)
            trainer.start_version(step + 1)
    for left, right in zip(shares[:STEPS], shares[STEPS:], strict=True):
        assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    # the reference, and two sums of eight bytes; no moments and no average
    assert moved == 5 * sum(parameter.nbytes for parameter in model.transformer.parameters())


def generated_and_shared(case, offload):
    """The weights that a trainer that never commits generates with, and its shares. It switches after each job."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("digenrl.training.offload.host_copies.make_copier", lambda device: LateCopier())
        settings, model = SHARED.model_copy(update={"offload": offload}), case.model()
        trainer = case.trainer(model, settings, helps=True, shares_gradients=True, commits=False)
    first, found = trainer.published(), []
    for turn, (step, update) in enumerate(itertools.product(range(2), range(case.updates))):
        weights = {name: value + 0.01 * turn for name, value in first.items()}
        if update:
            trainer.start_update(update, weights)
        else:
            trainer.start_version(step, weights=weights)
            version = weights
        for place, sample in case.jobs(update):
            trainer.add_samples(case.batches()[step][place].part(sample, 2))
            with trainer.generating():
                found.append({name: p.detach().clone() for name, p in model.transformer.named_parameters()})
            assert all(torch.equal(value, version[name]) for name, value in found[-1].items())
        found.append(share_as_tensors(trainer.take_share()))
        trainer.switching.offload()
    return found


def test_switching_inside_a_batch_changes_no_bit_of_a_share_and_generates_with_the_version():
    case = SharedCase("flow_grpo", lora=False, options={"updates_per_batch": 2}, rewards=MORE_REWARDS)
    for left, right in zip(generated_and_shared(case, False), generated_and_shared(case, True), strict=True):
        assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_everything_that_generation_does_not_need_is_offloaded():
    trainers = Trainers("diffusion_nft")
    trainer, groups = trainers.switched, trainers.batch(0)
    for group in groups:
        trainer.add_group(group)
        while trainer.can_commit():
            trainer.commit()
    trainer.add_group(trainers.batch(1)[0])
    with trainer.generating():
        offloaded_bytes = trainer.switching.offloaded_bytes
    parameter_bytes = sum(p.nbytes for p in trainer.policies.parameters.values())
    # trained weights, reference, moving average, two moments, two gradient sums
    assert offloaded_bytes == 7 * parameter_bytes
    trainer.switching.load()
    assert trainer.switching.offloaded_bytes == 0


def test_what_has_not_changed_is_not_copied_again():
    kept, changing = torch.ones(3), torch.ones(5)
    copier = LateCopier()
    parts = {"kept": lambda: {"a": kept}, "changing": lambda: {"a": changing}}
    offloader = Offloader(parts, CPU, HostCopies(CPU, copier))
    offloader.offload()
    offloader.require("kept", "changing")
    offloader.require("changing", changes=True)
    changing += 1
    before = len(copier.requested)
    offloader.offload()
    assert [len(target) for target, _ in copier.requested[before:]] == [5]
    offloader.load()
    offloader.synchronize()
    assert kept.tolist() == [1] * 3 and changing.tolist() == [2] * 5


def test_a_tensor_dropped_while_offloaded_is_not_loaded_in_place_of_another():
    held = {"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(3)}
    copier = LateCopier()
    offloader = Offloader({"part": lambda: held}, CPU, HostCopies(CPU, copier))
    offloader.offload()
    held["a"] = torch.full((5,), 2.0)
    del held["b"]
    offloader.offload()
    assert offloader.offloaded_bytes == (5 + 3) * 4
    del held["c"]
    before = len(copier.requested)
    offloader.load()
    assert [len(target) for target, _ in copier.requested[before:]] == [5]
    offloader.synchronize()
    assert held["a"].tolist() == [2] * 5 and offloader.offloaded_bytes == 0


@pytest.fixture
def small_chunks(monkeypatch):
    """Makes `host_bytes` grow with every tensor for which there is no free host memory."""
    monkeypatch.setattr("digenrl.training.offload.host_copies.CHUNK_BYTES", 512)


@pytest.mark.usefixtures("small_chunks")
def test_host_memory_is_allocated_once():
    trainers = Trainers("flow_grpo")
    trainer = trainers.switched
    trainer.calibrate(trainers.batch(0)[0])
    with trainer.switching.full_size():
        trainer.switching.offload()
    after_calibration = trainer.switching.host_bytes
    for step in range(2):
        for group in trainers.batch(step):
            trainer.switching.offload()
            trainer.add_group(group)
        trainer.commit()
        trainer.switching.offload()
    assert trainer.switching.host_bytes == after_calibration


@pytest.mark.usefixtures("small_chunks")
def test_the_last_version_is_copied_during_the_first_replays_into_memory_allocated_once():
    trainers = Trainers("diffusion_nft")
    trainer, copier = trainers.switched, trainers.copier
    trainer.calibrate(trainers.batch(0)[0])
    with trainer.switching.full_size():
        trainer.switching.offload()
    after_calibration = trainer.switching.host_bytes
    for step in range(3):
        groups, before = trainers.batch(step), state_of(trainer)
        trainer.switching.offload()
        trainer.switching.load()
        trainer.add_group(groups[0])
        assert len(copier.requested) > copier.made, "the copy is still under way"
        for group in groups[1:]:
            trainer.add_group(group)
        trainer.commit()
        assert differences(trainer.state_at_last_version(), before) == []
        trainer.commit()
    step_counters = len(before.optimizer.moments)  # are not reserved
    assert trainer.switching.host_bytes - after_calibration <= 512 * step_counters


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("name", list(KINDS))
def test_a_trainer_that_helps_inside_a_batch_allocates_nothing_after_calibration(name):
    trainers = Trainers(name)
    trainer = trainers.switched
    trainer.published()  # as at the start of a run
    trainer.calibrate(trainers.batch(0)[0])
    for _ in range(2):
        with trainer.switching.full_size():
            trainer.switching.offload()
            trainer.reserve_version()
    after_calibration = trainer.switching.host_bytes
    for step in range(3):
        for group in trainers.batch(step):
            trainer.switching.offload()
            trainer.add_group(group)
            trainer.switching.offload()
            while trainer.can_commit():
                trainer.commit()
                trainer.switching.offload()
        trainer.published()
    step_counters = len(trainer.policies.parameters)  # are not reserved
    assert trainer.switching.host_bytes - after_calibration <= 512 * step_counters


@pytest.mark.parametrize("name", list(KINDS))
def test_a_kept_version_is_offloaded_without_another_copy_until_it_changes(name):
    trainers = Trainers(name)
    trainer, copier = trainers.switched, trainers.copier
    for step in range(2):
        for group in trainers.batch(step):
            trainer.add_group(group)
        while trainer.batch == step:
            trainer.commit()
    trainer.keep_version()
    requested, expected = len(copier.requested), state_of(trainer)
    reference = len(trainer.policies.reference_values)  # never changes, and is not part of what is kept
    trainer.switching.offload()
    assert len(copier.requested) - requested == reference
    trainer.switching.load()
    for group in trainers.batch(2):
        trainer.add_group(group)
    trainer._last_version.before_change()
    with trainer.switching.stepping():
        pass
    requested = len(copier.requested)
    trainer.switching.offload()
    assert len(copier.requested) - requested >= 2 * len(trainer.policies.parameters)
    assert differences(trainer.state_at_last_version(), expected) == []


def test_host_memory_beyond_what_is_free_is_not_requested(monkeypatch):
    monkeypatch.setattr("digenrl.training.offload.host_copies.free_host_bytes", lambda: 2**30)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("it was requested"))
    with pytest.raises(ConfigError, match=r"0.3 GB .* 0.0 GB, .* 1.1 GB .*in_memory: false"):
        HostMemory(pin=True).take(torch.zeros(3))


def test_a_state_loaded_while_everything_is_offloaded_discards_the_open_batch():
    trainers = Trainers("diffusion_nft")
    still, switched = trainers.still, trainers.switched
    groups = trainers.batch(0)
    for group in groups:
        switched.add_group(group)
    switched.commit()
    switched.switching.offload()
    switched.load_state(switched.state_at_last_version())
    switched.switching.offload()
    for trainer in (still, switched):
        for group in groups:
            trainer.add_group(group)
            while trainer.can_commit():
                trainer.commit()
    assert differences(still.state_at_last_version(), switched.state_at_last_version()) == []


@pytest.mark.parametrize(
    ("training", "device", "moves"),
    [
        ({}, "cuda:0", True),
        ({}, "cuda", True),
        ({}, "cpu", False),
        ({"offload": False}, "cuda:0", False),
        ({"offload": True}, "cpu", True),
        ({"lora": {}}, "cuda:0", False),
    ],
    ids=str,
)
def test_offloading_is_the_default_for_full_fine_tuning_on_a_gpu(training, device, moves):
    assert TrainerSettings(**training).offloads(device) is moves


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["training.offload=true", "training.lora={}"], "offload"),
        (["training.offload=true", "training.lora=null", "lanes.ranks=2"], r"lanes\.ranks"),
        (["training.offload=sometimes"], "offload"),
    ],
)
def test_impossible_offload_settings_are_refused(overrides, key):
    with pytest.raises(ConfigError, match=key):
        read_recipe("demo", overrides)


def test_calibrated_switches_are_part_of_the_costs_and_of_the_prediction_of_a_colocated_run():
    terms = terms_of(read_recipe("demo", ["mode=colocated", "batch.slice=2"]), 2, scorers=0)
    free = Calibration(({2: 0.5},), train_sample=0.1, score_sample=0, publish=0, pack_size=1)
    switching = replace(free, switch_in=2.0, switch_out=3.0)
    assert (switching.costs().switch_in_ns, switching.costs().switch_out_ns) == (2_000_000_000, 3_000_000_000)
    lanes = (LaneOffer("lane", 500_000_000),)
    ends = [predict(terms, each.costs(), lanes, steps=3).trace.end_ns for each in (free, switching)]
    assert ends[1] - ends[0] == (2 * 2 + 3 * 3) * 1_000_000_000
