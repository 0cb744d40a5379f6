"""On-policy, generating and training in the same precision gives a ratio of exactly 1; another does not."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from scored_groups import DRAW_NOISE, RUN_SEED
from toy_model import TOY_SIZE, ToyModel

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.recipes.training import TrainerSettings
from digenrl.config.recipes.windows import read_window
from digenrl.generation.rollout import RolloutSettings, generate_slice
from digenrl.generation.windows import plan_rollouts
from digenrl.models.adapters.lora import add_lora
from digenrl.models.trajectory import ScoredGroup, StepNoise
from digenrl.records import Slice
from digenrl.training.metrics import UpdateMetrics
from digenrl.training.open_batch import BatchShape
from digenrl.training.trainer import Trainer

Precision = Literal["off", "bf16"]
REWARDS = (0.0, 1.0, 2.0, 3.0)


def trained(
    generating: Precision, training: Precision, old_log_probs: Literal["rollout", "recomputed"]
) -> UpdateMetrics:
    """The metrics of one on-policy update in packs of a rollout's size."""
    model = ToyModel(seed=1, dtype=torch.float32)
    add_lora(model, rank=4, alpha=4, seed=0)
    algorithm = build_algorithm("flow_grpo", {"updates_per_batch": 1, "kl_weight": 0})
    slice_, conditioning = Slice(0, 0, 0, len(REWARDS)), model.encode(["a red door"])
    plans = plan_rollouts(
        read_window({"kind": "all"}),
        slice_.samples(),
        schedule=model.schedule(5, TOY_SIZE),
        size=TOY_SIZE,
        noise=StepNoise("flow", 0.7),
        guidance=1.0,
        run_seed=RUN_SEED,
    )
    made = generate_slice(
        model,
        conditioning,
        plans,
        slice_,
        RolloutSettings(RUN_SEED, algorithm.needs, autocast=generating),
        version=0,
    )
    settings = TrainerSettings(pack_size=len(REWARDS), autocast=training, old_log_probs=old_log_probs)
    trainer = Trainer(model, algorithm, settings, BatchShape(1, len(REWARDS)), DRAW_NOISE)
    trainer.add_group(ScoredGroup(conditioning, made.trajectories, REWARDS))
    return trainer.commit()


@pytest.mark.parametrize("precision", ["off", "bf16"])
def test_the_same_precision_gives_a_ratio_of_exactly_one(precision: Precision) -> None:
    metrics = trained(precision, precision, "rollout")
    assert (metrics.ratio_mean, metrics.ratio_max, metrics.clip_fraction) == (1.0, 1.0, 0.0)
    assert metrics.log_prob_mismatch == 0.0


def test_another_precision_shows_as_a_mismatch() -> None:
    metrics = trained("off", "bf16", "rollout")
    assert metrics.log_prob_mismatch is not None
    assert metrics.log_prob_mismatch > 0


def test_recomputed_log_probs_give_a_ratio_of_one_whatever_the_rollout_ran_in() -> None:
    metrics = trained("off", "bf16", "recomputed")
    assert (metrics.ratio_mean, metrics.ratio_max) == (1.0, 1.0)
