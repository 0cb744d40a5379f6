"""Training cases for tests of several ranks: a few batches of a toy, the same on one rank and on many."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scored_groups import Rollout, scored_groups, toy, trainer_of

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.recipes.training import TrainerSettings
from digenrl.training.checkpoint.checkpoints import read_checkpoint
from digenrl.training.ranks.rank_group import RankGroup
from digenrl.training.ranks.sharding import shard_model
from digenrl.worker.stages import Stages, WorkerParts

STEADY = TrainerSettings(pack_size=3, learning_rate=1e-2, adam_eps=1e-3, gradient_norm=1e-2)
LORA_OR_SHARDED = pytest.mark.parametrize("lora", [True, False], ids=["replicated", "sharded"])


@dataclass(frozen=True)
class Case:
    """A few batches of one algorithm; groups are generated before training, the same on every rank."""

    algorithm: str
    options: dict[str, Any] = field(default_factory=dict)
    settings: TrainerSettings = STEADY
    rollout: Rollout = Rollout()  # noqa: RUF009  it is frozen
    batches: int = 2
    lora: bool = True
    shard_base: bool = False  # of adapters

    def trainer_and_batches(self, ranks: RankGroup | None):
        model = toy(torch.float32, self.lora)
        algorithm = build_algorithm(self.algorithm, self.options)
        batches = [
            scored_groups(model, algorithm, replace(self.rollout, step=step, version=step))
            for step in range(self.batches)
        ]
        if ranks is not None and (self.shard_base or not self.lora):
            shard_model(model, ranks)
        trainer = trainer_of(model, algorithm, batches[0], self.settings, ranks=ranks)
        return model, trainer, batches


def stages_of(model, trainer):
    """The stages of a worker that only trains and saves."""
    recipe = SimpleNamespace(sample=SimpleNamespace(decode_rows=None))
    return Stages(WorkerParts(SimpleNamespace(recipe=recipe), exchange=None, model=model, trainer=trainer))


def resume(trainer, path):
    trainer.load_state(read_checkpoint(path, trainer.shard, trainer.ranks).trainer_state)


def train(trainer, groups):
    metrics = []
    for group in groups:
        trainer.add_group(group)
        while trainer.can_commit():
            metrics.append(asdict(trainer.commit()))
    return metrics


def assert_close_metrics(several, one):
    for ours, expected in zip(several, one, strict=True):
        assert ours.keys() == expected.keys()
        for name, value in expected.items():
            close = None if value is None else pytest.approx(value, rel=1e-4, abs=1e-6)
            assert ours[name] == close, name
