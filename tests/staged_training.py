"""Batches of training, in one process and in stages."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rank_cases import STEADY, resume, train
from scored_groups import LIVELY, Rollout, scored_groups, trainer_of
from staged_models import deep_model, train_adapters
from torch import Tensor

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.recipes.training import TrainerSettings
from digenrl.models.parallel.staged_blocks import keep_blocks
from digenrl.models.trajectory import ScoredGroup
from digenrl.stages.codec_choice import LinkCodecs
from digenrl.stages.links import LinkSettings
from digenrl.testing.tiny_models import TINY_MODELS
from digenrl.training.checkpoint.checkpoints import save_checkpoint
from digenrl.training.ranks.rank_group import RankGroup
from digenrl.training.trainer import Trainer

REWARDS = [(0.0, 1.0, 3.0), (5.0, 2.0, 2.5)]


@dataclass(frozen=True)
class StagedCase:
    """Batches of two groups of three samples, with an algorithm."""

    algorithm: str
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    codecs: LinkCodecs = LinkCodecs()  # noqa: RUF009  it is frozen
    batches: int = 1
    full: bool = False  # all weights are trained, not adapters
    rates: tuple[float | None, ...] = ()  # bytes per second of links that are slow


Batches = list[list[ScoredGroup]]


def trainer_and_batches(
    ranks: RankGroup | None, case: StagedCase, bounds: tuple[int, ...] = ()
) -> tuple[Trainer, Batches]:
    """A trainer of the whole model, or of a stage, and groups to train on."""
    model = deep_model("sd3")
    if not case.full:
        train_adapters(model)
    algorithm = build_algorithm(case.algorithm, LIVELY[case.algorithm] | case.options)
    rollout = Rollout(groups=2, group_size=3, steps=3, guidance=2.0, size=TINY_MODELS["sd3"].size)
    batches = [
        scored_groups(model, algorithm, replace(rollout, step=step, version=step), REWARDS)
        for step in range(case.batches)
    ]
    if ranks is not None:
        links = [LinkSettings(case.codecs, bytes_per_s=rate) for rate in case.rates]
        ranks.pipeline(links or LinkSettings(case.codecs))
        keep_blocks(model, bounds[ranks.rank.index], bounds[ranks.rank.index + 1])
    settings = TrainerSettings(**(STEADY.model_dump() | case.settings))
    return trainer_of(model, algorithm, batches[0], settings, ranks=ranks), batches


def trained(
    ranks: RankGroup | None, case: StagedCase, bounds: tuple[int, ...] = ()
) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The weights and metrics after all batches."""
    trainer, batches = trainer_and_batches(ranks, case, bounds)
    metrics = [each for groups in batches for each in train(trainer, groups)]
    return trainer.published(), metrics


def all_trained(ranks: RankGroup | None, cases: list[StagedCase], bounds: tuple[int, ...]) -> list[Any]:
    return [trained(ranks, case, bounds) for case in cases]


@dataclass
class FullTraining:
    """What one rank, or the only process, has after some batches of full fine-tuning."""

    gradient: dict[str, Tensor]  # of the first update
    metrics: list[dict[str, Any]]
    published: dict[str, Tensor]
    average: dict[str, Tensor]
    optimizer_names: set[str]


def train_fully(ranks: RankGroup | None, case: StagedCase, bounds: tuple[int, ...], folder: Path) -> FullTraining:
    """Trains all batches, and saves a checkpoint before the last one."""
    trainer, batches = trainer_and_batches(ranks, case, bounds)
    for group in batches[0]:
        trainer.add_group(group)
    gradient = {name: value.clone() for name, value in trainer.gradient().items()}
    metrics = [asdict(trainer.commit())]
    for groups in batches[1:-1]:
        metrics += train(trainer, groups)
    save_checkpoint(folder, case.batches - 1, trainer.state_at_last_version(), {}, ranks=ranks)
    return _after_last_batch(trainer, batches[-1], gradient, metrics)


def resume_fully(ranks: RankGroup | None, case: StagedCase, bounds: tuple[int, ...], path: Path) -> FullTraining:
    """Trains the last batch, from a checkpoint."""
    trainer, batches = trainer_and_batches(ranks, case, bounds)
    resume(trainer, path)
    return _after_last_batch(trainer, batches[-1], {}, [])


def _after_last_batch(
    trainer: Trainer, groups: list[ScoredGroup], gradient: dict[str, Tensor], metrics: list[dict[str, Any]]
) -> FullTraining:
    metrics = metrics + train(trainer, groups)
    moments = set(trainer.state_at_last_version().optimizer.moments)
    return FullTraining(gradient, metrics, trainer.published(), trainer.published_average(), moments)
