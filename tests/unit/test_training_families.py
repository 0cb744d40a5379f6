"""Packed training of every kind of transformer, at tiny size, gives the serial reference's gradient."""

from __future__ import annotations

import pytest
import torch
from family_cases import ONE_PER_TRANSFORMER
from scored_groups import (
    Rollout,
    lively,
    nudge,
    relative_difference,
    scored_groups,
    serial_gradient,
    serial_of,
    trainer_of,
)
from tiny_pipelines import tiny_model

from digenrl.config.recipes.training import TrainerSettings
from digenrl.models.adapters.lora import add_lora
from digenrl.models.registry import FAMILIES
from digenrl.testing.tiny_models import tiny_size

CASES = [
    *((family, "flow_grpo") for family in ONE_PER_TRANSFORMER),
    *((family, "diffusion_nft") for family in ("sd3", "wan")),  # at noise levels of its own
    ("sd3", "dance_grpo"),
]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_packed_training_equals_training_term_by_term(family, name):
    entry = FAMILIES[family]
    model = tiny_model(family, torch.float64)
    add_lora(model, rank=2, alpha=4, seed=3)
    nudge(model, 0.05, seed=4)
    algorithm, size = lively(name), 4 if name == "dance_grpo" else 2  # which chooses the best of some
    rollout = Rollout(
        groups=2,
        group_size=size,
        steps=3,
        slice_size=2,
        guidance=entry.default_guidance if name == "flow_grpo" else 1.0,  # two branches cost twice as much
        size=tiny_size(entry.name),
    )
    rewards = [(0.0, 1.0, 3.0, 2.0)[:size], (5.0, 2.0, 1.0, 4.0)[:size]]
    groups = scored_groups(model, algorithm, rollout, rewards)
    serial = serial_of(model, algorithm)
    settings = TrainerSettings(pack_size=3, gradient_checkpointing=True)
    trainer = trainer_of(model, algorithm, groups, settings)
    nudge(model, 0.005, seed=9)
    model.transformer.disable_gradient_checkpointing()
    expected = serial_gradient(serial, groups)
    model.transformer.enable_gradient_checkpointing()
    for group in reversed(groups):
        trainer.add_group(group)
    assert relative_difference(trainer.gradient(), expected) < 1e-6
