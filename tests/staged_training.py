"""Batches of training, in one process and in stages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from rank_cases import STEADY, train
from scored_groups import LIVELY, Rollout, scored_groups, trainer_of
from staged_models import deep_model, train_adapters
from torch import Tensor

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.training import TrainerSettings
from digenrl.models.staged_blocks import keep_blocks
from digenrl.stages.codec_choice import LinkCodecs
from digenrl.stages.links import LinkSettings
from digenrl.testing.tiny_models import TINY_MODELS
from digenrl.training.ranks.rank_group import RankGroup

REWARDS = [(0.0, 1.0, 3.0), (5.0, 2.0, 2.5)]


@dataclass(frozen=True)
class StagedCase:
    """Batches of two groups of three samples, with an algorithm."""

    algorithm: str
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    codecs: LinkCodecs = LinkCodecs()  # noqa: RUF009  it is frozen
    batches: int = 1


def trained(
    ranks: RankGroup | None, case: StagedCase, bounds: tuple[int, ...] = ()
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The weights and metrics after all batches."""
    model = deep_model("sd3")
    train_adapters(model)
    algorithm = build_algorithm(case.algorithm, LIVELY[case.algorithm] | case.options)
    rollout = Rollout(groups=2, group_size=3, steps=3, guidance=2.0, size=TINY_MODELS["sd3"].size)
    batches = [
        scored_groups(model, algorithm, replace(rollout, step=step, version=step), REWARDS)
        for step in range(case.batches)
    ]
    if ranks is not None:
        ranks.pipeline(LinkSettings(case.codecs))
        keep_blocks(model, bounds[ranks.rank.index], bounds[ranks.rank.index + 1])
    settings = TrainerSettings(**(STEADY.model_dump() | case.settings))
    trainer = trainer_of(model, algorithm, batches[0], settings, ranks=ranks)
    metrics = [each for groups in batches for each in train(trainer, groups)]
    return trainer.published(), metrics


def all_trained(ranks: RankGroup, cases: list[StagedCase], bounds: tuple[int, ...]) -> list[Any]:
    return [trained(ranks, case, bounds) for case in cases]
