"""A trainer that generates in between: what training holds leaves and comes back, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from fake_workers import fake_recipe
from late_copies import LateCopies
from scored_groups import Rollout, scored_groups, toy, trainer_of

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.reading import ConfigError
from digenrl.config.training import EmaSettings, TrainerSettings
from digenrl.driver.calibration import Calibration, terms_of
from digenrl.records import LaneOffer
from digenrl.simulation.prediction import predict
from digenrl.training.offload.host_copies import HostCopies, HostMemory
from digenrl.training.offload.offloader import Offload

SETTINGS = TrainerSettings(pack_size=4, learning_rate=0.02, ema=EmaSettings(decay=0.5, every_updates=1))
CPU = torch.device("cpu")
KINDS = {  # with a frozen reference; with trained weights beside those that generate; with both
    "flow_grpo": {"updates_per_batch": 1, "kl_weight": 0.1},
    "mix_grpo": {"updates_per_batch": 2},
    "diffusion_nft": {"updates_per_batch": 2, "kl_weight": 0.1},
}


class Trainers:
    """Two trainers of the same model and batches: one generates in between, the other one does nothing else."""

    def __init__(self, name):
        self.algorithm = build_algorithm(name, KINDS[name])
        self.models = toy(torch.float32, lora=False), toy(torch.float32, lora=False)
        self.still = self.trainer(self.models[0], offload=False)
        self.copies = LateCopies()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("digenrl.training.offload.host_copies.copies_beside", lambda device: self.copies)
            self.switched = self.trainer(self.models[1], offload=True)

    def trainer(self, model, offload):
        more = {"helps": True, "keep_last_version": True, "offload": offload}
        return trainer_of(model, self.algorithm, self.batch(0), SETTINGS, **more)

    def batch(self, step):
        rollout = Rollout(groups=4, steps=5, step=step, version=step)
        return scored_groups(self.models[0], self.algorithm, rollout)

    def generated(self):
        """What both would generate with."""
        found = []
        for trainer, model in zip((self.still, self.switched), self.models, strict=True):
            with trainer.policies.generating():
                found.append({name: p.detach().clone() for name, p in model.transformer.named_parameters()})
        return found


def differences(left, right, path=""):
    """Where two states are not the same to the last bit."""
    if isinstance(left, dict) and isinstance(right, dict):
        keys = left.keys() | right.keys()
        return [each for key in keys for each in differences(left.get(key), right.get(key), f"{path}/{key}")]
    equal = torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
    return [] if equal else [path]


@pytest.mark.parametrize("name", list(KINDS))
def test_switching_between_groups_changes_no_bit_of_weights_optimizer_and_averages(name):
    trainers = Trainers(name)
    still, switched = trainers.still, trainers.switched
    for step in range(3):
        groups = trainers.batch(step)
        for turn, index in enumerate((1, 3, 0, 2)):  # group 1 waits for group 0, with a gradient of its own
            switched.switching.leave()
            assert differences(*trainers.generated()) == []
            assert differences(still.state_at_last_version(), switched.state_at_last_version()) == []
            if turn % 2:  # else it is not told, and comes back by itself
                switched.switching.come_back()
            for trainer in (still, switched):
                trainer.add_group(groups[index], samples=(0, 1))
            switched.switching.leave()
            for trainer in (still, switched):
                trainer.add_group(groups[index], samples=(2, 3))
                while trainer.can_commit():
                    switched.switching.leave()
                    trainer.commit()
        assert still.batch == step + 1
        assert differences(still.state(), switched.state()) == []
    moved = [value for value in flat(still.state()["optimizer"]["moments"]) if value.dim()]
    assert all(bool(value.isfinite().all()) for value in moved) and any(bool(value.any()) for value in moved)


def flat(tree):
    return [leaf for value in tree.values() for leaf in (flat(value) if isinstance(value, dict) else [value])]


def test_everything_that_generating_does_not_need_leaves_the_card():
    trainers = Trainers("diffusion_nft")
    trainer, groups = trainers.switched, trainers.batch(0)
    for group in groups:
        trainer.add_group(group)
        while trainer.can_commit():
            trainer.commit()
    trainer.add_group(trainers.batch(1)[0])
    trainer.switching.leave()
    parameter_bytes = sum(p.nbytes for p in trainer.policies.parameters.values())
    # trained weights, reference, moving average, two moments, two sums of gradients
    assert trainer.switching.bytes_away == 7 * parameter_bytes
    trainer.switching.come_back()
    assert trainer.switching.bytes_away == 0


def test_what_has_not_changed_leaves_without_another_copy():
    kept, changing = torch.ones(3), torch.ones(5)
    copies = LateCopies()
    offload = Offload(
        {"kept": lambda: {"a": kept}, "changing": lambda: {"a": changing}}, CPU, HostCopies(CPU, copies)
    )
    offload.leave()
    offload.need("kept", "changing")
    offload.need("changing", changes=True)
    changing += 1
    asked = len(copies.asked)
    offload.leave()
    assert [len(target) for target, _ in copies.asked[asked:]] == [5]
    offload.come_back()
    offload.settle()
    assert kept.tolist() == [1] * 3 and changing.tolist() == [2] * 5


def test_what_was_let_go_of_while_it_was_away_does_not_come_back_in_place_of_another():
    held = {"a": torch.ones(3), "b": torch.ones(3), "c": torch.ones(3)}
    copies = LateCopies()
    offload = Offload({"part": lambda: held}, CPU, HostCopies(CPU, copies))
    offload.leave()
    held["a"] = torch.full((5,), 2.0)
    del held["b"]
    offload.leave()
    assert offload.bytes_away == (5 + 3) * 4
    del held["c"]
    asked = len(copies.asked)
    offload.come_back()
    assert [len(target) for target, _ in copies.asked[asked:]] == [5]
    offload.settle()
    assert held["a"].tolist() == [2] * 5 and offload.bytes_away == 0


def uncut(memory):
    """What is left of the chunks that were taken; what was given back does not count."""
    return sum(each.nbytes for each in memory._left)


def test_host_memory_is_taken_once():
    trainers = Trainers("flow_grpo")
    trainer = trainers.switched
    memory = trainer._host.memory
    trainer.calibrate(trainers.batch(0)[0])
    with trainer.switching.as_in_a_step():
        trainer.switching.leave()
    untouched = uncut(memory)
    for step in range(2):
        for group in trainers.batch(step):
            trainer.switching.leave()
            trainer.add_group(group)
        trainer.commit()
        trainer.switching.leave()
    assert uncut(memory) == untouched


def test_what_a_batch_began_with_is_copied_beside_its_first_group_into_memory_taken_once():
    trainers = Trainers("diffusion_nft")
    trainer, copies = trainers.switched, trainers.copies
    trainer.calibrate(trainers.batch(0)[0])
    with trainer.switching.as_in_a_step():
        trainer.switching.leave()
    memory = trainer._host.memory
    untouched = uncut(memory)
    for step in range(3):
        groups, before = trainers.batch(step), trainer.state()
        trainer.switching.leave()
        trainer.switching.come_back()
        trainer.add_group(groups[0])
        assert len(copies.asked) > copies.made, "nobody has waited"
        for group in groups[1:]:
            trainer.add_group(group)
        trainer.commit()
        assert differences(trainer.state_at_last_version(), before) == []
        trainer.commit()
    numbers_of_steps = len(before["optimizer"]["moments"])  # are not reserved
    assert untouched - uncut(memory) <= 512 * numbers_of_steps


@pytest.mark.parametrize("name", list(KINDS))
def test_a_trainer_that_helps_in_the_middle_of_a_batch_takes_no_memory_after_its_rehearsal(name):
    trainers = Trainers(name)
    trainer = trainers.switched
    if trainer.keeps_last_version:
        trainer.keep_version()  # as the first version is, when it is laid out
    trainer.calibrate(trainers.batch(0)[0])
    for _ in range(2):
        with trainer.switching.as_in_a_step():
            trainer.switching.leave()
            trainer.reserve_version()
    untouched = uncut(trainer._host.memory)
    for step in range(3):
        for group in trainers.batch(step):
            trainer.switching.leave()
            trainer.add_group(group)
            trainer.switching.leave()
            while trainer.can_commit():
                trainer.commit()
                trainer.switching.leave()
        if trainer.keeps_last_version:
            trainer.keep_version()
    numbers_of_steps = len(trainer.optimizer.state)  # are not reserved
    assert untouched - uncut(trainer._host.memory) <= 512 * numbers_of_steps


@pytest.mark.parametrize("name", list(KINDS))
def test_what_is_kept_on_the_host_leaves_the_card_without_another_copy_until_it_changes(name):
    trainers = Trainers(name)
    trainer, copies = trainers.switched, trainers.copies
    for step in range(2):
        for group in trainers.batch(step):
            trainer.add_group(group)
        while trainer.batch == step:
            trainer.commit()
    trainer.keep_version()
    asked, expected = len(copies.asked), trainer.state()
    reference = len(trainer.policies.reference_values)  # never changes, and is no part of what is kept
    trainer.switching.leave()
    assert len(copies.asked) - asked == reference
    trainer.switching.come_back()
    for group in trainers.batch(2):
        trainer.add_group(group)
    trainer._last_version.leave()
    trainer.switching.need("moments", changes=True)
    asked = len(copies.asked)
    trainer.switching.leave()
    assert len(copies.asked) - asked >= 2 * len(trainer.policies.parameters)
    assert differences(trainer.state_at_last_version(), expected) == []


def test_memory_that_the_machine_does_not_have_is_not_asked_for(monkeypatch):
    monkeypatch.setattr("digenrl.training.offload.host_copies.free_host_bytes", lambda: 2**30)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: pytest.fail("it was asked for"))
    with pytest.raises(
        ConfigError, match=r"0.3 GB more .* takes 0.0 GB .*, and 1.1 GB are left; .*in_memory: false"
    ):
        HostMemory(pin=True).take(torch.zeros(3))


def test_a_batch_given_up_while_it_is_away_leaves_no_trace():
    trainers = Trainers("diffusion_nft")
    still, switched = trainers.still, trainers.switched
    groups = trainers.batch(0)
    for group in groups:
        switched.add_group(group)
    switched.commit()
    switched.switching.leave()
    switched.abandon_batch()
    switched.switching.leave()
    for trainer in (still, switched):
        for group in groups:
            trainer.add_group(group)
            while trainer.can_commit():
                trainer.commit()
    assert differences(still.state(), switched.state()) == []


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
def test_by_itself_it_moves_where_all_weights_are_trained_on_a_cuda_card(training, device, moves):
    assert TrainerSettings(**training).offloads(device) is moves


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"training": {"offload": True, "lora": {}}}, r"adapters are trained, which .* stay on the card"),
        ({"training": {"offload": True}, "lanes": {"ranks": 2}}, r"lanes.ranks = 2 share the weights"),
        ({"training": {"offload": "sometimes"}}, r"offload"),
    ],
)
def test_what_cannot_move_is_refused(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        fake_recipe(**changes)


def test_the_scheduler_counts_on_the_rehearsed_switches_and_so_does_the_prediction_of_a_colocated_run():
    recipe = fake_recipe(mode="colocated")
    terms = terms_of(recipe, 2, steps=3, scorers=0)
    free = Calibration(({2: 0.5},), train_sample=0.1, score_sample=0, publish=0, pack_size=1)
    dear = Calibration(
        ({2: 0.5},), train_sample=0.1, score_sample=0, publish=0, pack_size=1, switch_in=2.0, switch_out=3.0
    )
    assert (dear.costs().switch_in_ns, dear.costs().switch_out_ns) == (2_000_000_000, 3_000_000_000)
    lanes = (LaneOffer("lane", 500_000_000),)
    ends = [predict(terms, each.costs(), lanes, steps=3).trace.end_ns for each in (free, dear)]
    assert ends[1] - ends[0] == (2 * 2 + 3 * 3) * 1_000_000_000
