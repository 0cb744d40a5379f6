"""The gradient equals the serial reference's for every algorithm, pack size, order of arrival and slicing.

The trained policy differs from the one that generated, so that ratios differ from 1 and some are clipped; one
group has equal rewards, and some advantages exceed the clamp.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from scored_groups import (
    LIVELY,
    Rollout,
    lively,
    nudge,
    relative_difference,
    scored_groups,
    serial_gradient,
    serial_of,
    toy,
    trainer_of,
)
from serial_reference import batch_advantages

from digenrl.algorithms.registry import ALGORITHMS, build_algorithm
from digenrl.config.recipes.training import TrainerSettings
from digenrl.models.trajectory import StepNoise

EVERY = pytest.mark.parametrize("name", list(ALGORITHMS))
NARROW = {"flow_grpo_fast": {"kind": "fast", "width": 2}}  # the default of three steps is too wide for five
TOLERANCE = 1e-6


class Case:
    """A model, its algorithm and a batch; the trainer's old policy is the one that generated."""

    def __init__(self, name: str, rollout: Rollout | None = None, lora: bool = True, **more: Any) -> None:
        self.algorithm = lively(name, **more)
        self.model = toy(lora=lora)
        self.groups = scored_groups(self.model, self.algorithm, rollout or Rollout(), window=NARROW.get(name))
        self.serial = serial_of(self.model, self.algorithm)
        self._old = {n: p.detach().clone() for n, p in self.serial.policies.parameters.items()}
        nudge(self.model, 0.01, seed=9)
        self.expected = serial_gradient(self.serial, self.groups)
        self._new = {n: p.detach().clone() for n, p in self.serial.policies.parameters.items()}

    def trainer(self, pack_size, **more):
        """Created with the old weights, which are then replaced by the new ones."""
        self._load(self._old)
        settings = TrainerSettings(pack_size=pack_size, gradient_checkpointing=more.pop("checkpointing", False))
        trainer = trainer_of(self.model, self.algorithm, self.groups, settings, **more)
        self._load(self._new)
        return trainer

    def _load(self, weights) -> None:
        with torch.no_grad():
            for name, parameter in self.serial.policies.parameters.items():
                parameter.copy_(weights[name])


@pytest.fixture(scope="module")
def cases():
    made: dict[str, Case] = {}
    return lambda name: made.setdefault(name, None) or made.update({name: Case(name)}) or made[name]


@EVERY
def test_packs_give_the_serial_gradient_whatever_the_order_of_arrival(cases, name):
    case = cases(name)
    trainer = case.trainer(pack_size=7)
    for index in (1, 2, 0):
        trainer.add_group(case.groups[index])
    assert relative_difference(trainer.gradient(), case.expected) < TOLERANCE


@pytest.mark.parametrize(("name", "slice_size"), [("mix_grpo", 1), ("diffusion_nft", 2)])
def test_slices_of_a_group_may_be_generated_separately(cases, name, slice_size):
    whole, sliced = cases(name), Case(name, Rollout(slice_size=slice_size))
    trainer = sliced.trainer(4)
    for group in sliced.groups:
        trainer.add_group(group)
    assert relative_difference(trainer.gradient(), whole.expected) < TOLERANCE


@pytest.mark.parametrize("name", ["flow_grpo", "diffusion_nft", "flow_dpo"])
def test_checkpointing_does_not_change_the_gradient(cases, name):
    case = cases(name)
    trainer = case.trainer(4, checkpointing=True)
    assert case.model.transformer.gradient_checkpointing
    for group in case.groups:
        trainer.add_group(group)
    assert relative_difference(trainer.gradient(), case.expected) < TOLERANCE


@pytest.mark.parametrize("name", ["flow_grpo", "diffusion_nft", "flow_dpo"])
def test_full_fine_tuning_keeps_a_frozen_copy_as_its_reference(name):
    case = Case(name, lora=False)
    trainer = case.trainer(4)
    for group in case.groups:
        trainer.add_group(group)
    assert len(case.expected) == len(list(case.model.transformer.parameters()))
    assert relative_difference(trainer.gradient(), case.expected) < TOLERANCE


def test_guidance_is_replayed_as_in_the_rollout():
    case = Case("flow_grpo", Rollout(guidance=3.0))
    trainer = case.trainer(4)
    for group in case.groups:
        trainer.add_group(group)
    assert relative_difference(trainer.gradient(), case.expected) < TOLERANCE


@pytest.mark.parametrize("name", ["diffusion_nft", "flow_dpo"])
def test_a_loss_against_data_trains_the_conditional_velocity_of_guided_samples(name):
    case = Case(name, Rollout(guidance=3.0))
    trainer = case.trainer(4)
    for group in case.groups:
        trainer.add_group(group)
    unguided = [
        replace(
            group, trajectories=tuple(replace(t, plan=replace(t.plan, guidance=1.0)) for t in group.trajectories)
        )
        for group in case.groups
    ]
    expected = serial_gradient(case.serial, unguided)
    assert relative_difference(trainer.gradient(), expected) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        ("diffusion_nft", "random"),
        ("diffusion_nft", "stratified"),
        ("flow_dpo", "stratified"),
        ("flow_dpo", "logit_normal"),
    ],
)
def test_drawn_levels_give_the_serial_gradient_for_any_pack(name, levels):
    case = Case(name, options={"levels": levels})
    for pack_size in (1, 7):
        trainer = case.trainer(pack_size)
        for group in case.groups:
            trainer.add_group(group)
        assert relative_difference(trainer.gradient(), case.expected) < TOLERANCE


def test_flow_grpos_kl_of_cps_noise_is_the_exact_one():
    gradients = {}
    for form in ("exact", "flow_grpo_image"):
        case = Case(
            "flow_grpo", Rollout(noise=StepNoise("cps", 0.8)), options={"kl_form": form, "kl_weight": 10.0}
        )
        trainer = case.trainer(4)
        for group in case.groups:
            trainer.add_group(group)
        gradients[form] = trainer.gradient()
    assert relative_difference(gradients["flow_grpo_image"], gradients["exact"]) < 1e-12


def test_the_cases_above_clip_ratios_and_exceed_the_clamp(cases):
    for name in ("flow_grpo", "dance_grpo", "mix_grpo", "grpo_guard", "flow_dppo", "flash_grpo"):
        case = cases(name)
        trainer = case.trainer(4)
        for group in case.groups:
            trainer.add_group(group)
        metrics = trainer.commit()
        assert 0.1 < metrics.clip_fraction < 0.9
        assert metrics.zero_spread_groups == 1
        if "clamp" in LIVELY[name].get("advantage", {}):
            advantages = batch_advantages(case.algorithm, [group.rewards for group in case.groups])
            assert any(abs(value) == 1.2 for group in advantages for value in group)


@pytest.mark.parametrize("name", ["flow_grpo", "grpo_guard", "diffusion_nft"])
def test_the_batchs_scale_and_the_clamp_are_applied_at_the_end(cases, name, monkeypatch):
    """Groups are trained without the scale. Samples that then exceed the clamp are replayed."""
    case = cases(name)
    trainer, velocity, replayed = case.trainer(4), case.model.velocity, []
    for group in case.groups:
        trainer.add_group(group)
    monkeypatch.setattr(case.model, "velocity", lambda *given: replayed.append(len(given[0])) or velocity(*given))
    assert relative_difference(trainer.gradient(), case.expected) < TOLERANCE
    assert replayed, "samples beyond the clamp"
    scale = case.algorithm.scale
    monkeypatch.setattr(case.algorithm, "scale", lambda rewards: 2 * scale(rewards))
    assert relative_difference(trainer.gradient(), case.expected) > 1e-3, "it depends on the scale"


def test_a_group_of_equal_rewards_has_no_gradient_but_counts_in_the_denominator():
    algorithm = build_algorithm("dance_grpo")
    model = toy()
    groups = scored_groups(model, algorithm)
    with_flat = serial_gradient(serial_of(model, algorithm), groups)
    without = serial_gradient(serial_of(model, algorithm), [groups[0], groups[2]])
    thirds = {name: value * 2 / 3 for name, value in without.items()}
    assert relative_difference(thirds, with_flat) < 1e-12


@pytest.mark.parametrize("name", ["flow_grpo", "dance_grpo", "diffusion_nft", "flow_dpo"])
def test_groups_of_equal_rewards_can_be_left_out_of_the_mean(cases, name):
    """Compared with `counted`: two of three groups have spread, so that their mean is half as much again."""
    case = Case(name, options={"zero_spread_groups": "left_out"})
    trainer = case.trainer(4)
    for group in reversed(case.groups):
        trainer.add_group(group)
    gradient = trainer.gradient()
    half_again = {key: 1.5 * value for key, value in cases(name).expected.items()}
    assert relative_difference(gradient, half_again) < TOLERANCE
    assert relative_difference(gradient, case.expected) < TOLERANCE
    counted = cases(name).trainer(4)
    for group in cases(name).groups:
        counted.add_group(group)
    assert trainer.commit().terms * 3 == counted.commit().terms * 2


def test_groups_of_equal_rewards_can_be_trained_on_what_does_not_depend_on_advantages(cases):
    """Of DiffusionNFT these are the terms with q = 1/2, and the KL."""
    case = Case("diffusion_nft", options={"zero_spread_groups": "trained"})
    trainer = case.trainer(4)
    for group in case.groups:
        trainer.add_group(group)
    assert relative_difference(trainer.gradient(), case.expected) < TOLERANCE
    assert relative_difference(trainer.gradient(), cases("diffusion_nft").expected) > 1e-3
    assert trainer.commit().zero_spread_groups == 1


def test_an_update_without_any_spread_has_no_gradient():
    algorithm = build_algorithm("dance_grpo", {"zero_spread_groups": "left_out"})
    model = toy()
    groups = scored_groups(model, algorithm, rewards=[[1.0] * 4] * 3)
    trainer = trainer_of(model, algorithm, groups)
    for group in groups:
        trainer.add_group(group)
    assert trainer.gradient() == {}
    assert trainer.commit().zero_spread_groups == 3
