"""Trainers that share the updates of a toy: who trains what, and the result, for tests of shared gradients."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from scored_groups import Rollout, lively, scored_groups, state_of, toy, trainer_of
from toy_model import ToyModel

from digenrl.config.training import EmaSettings, TrainerSettings
from digenrl.models.model_weights import load_weights
from digenrl.models.trajectory import ScoredGroup
from digenrl.training.gradient_share import share_as_tensors, share_of_tensors
from digenrl.training.metrics import UpdateMetrics
from digenrl.training.trainer import Trainer
from digenrl.training.trainer_state import TrainerState

STEPS = 3
SETTINGS = TrainerSettings(pack_size=3, learning_rate=0.02, job_samples=2, ema=EmaSettings(every_updates=1))
NARROW = {"mix_grpo": {"kind": "sliding", "width": 2, "training_steps_per_shift": 1}}  # of three steps
REWARDS = ((0.3, 1.7, -2.1, 0.9), (1.0, 1.0, 1.0, 1.0), (0.1, 0.2, 3.3, 0.4))


@dataclass(frozen=True)
class SharedCase:
    """An algorithm with settings that reach every branch of its loss, and a model that trains adapters or all."""

    algorithm: str
    lora: bool = True
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def batches(self) -> list[list[ScoredGroup]]:
        """The groups of all steps."""
        return _batches(self)

    def model(self) -> ToyModel:
        """The model before training."""
        return toy(torch.float32, self.lora)

    def trainer(self, model: ToyModel, settings: TrainerSettings = SETTINGS, **more: Any) -> Trainer:
        """A trainer of the model."""
        return trainer_of(model, lively(self.algorithm, self.options), self.batches()[0], settings, **more)


@cache
def _batches(case: SharedCase) -> list[list[ScoredGroup]]:
    model, algorithm = case.model(), lively(case.algorithm, case.options)
    rollouts = [Rollout(steps=3, step=step, version=step) for step in range(STEPS)]
    window = NARROW.get(case.algorithm)
    return [scored_groups(model, algorithm, rollout, REWARDS, window) for rollout in rollouts]


@dataclass
class Assistant:
    """A model with its own weights, and a trainer that never commits."""

    case: SharedCase
    version: int = 0
    weights: dict[str, torch.Tensor] | None = None

    def __post_init__(self) -> None:
        self.model = self.case.model()
        self.trainer = self.case.trainer(self.model, shares_gradients=True, commits=False)
        if self.weights is not None:
            self.start(self.version, self.weights)

    def start(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        """Loads a published version and opens its batch."""
        load_weights(self.model, weights)
        self.trainer.start_version(version)


def trained_alone(
    case: SharedCase, settings: TrainerSettings = SETTINGS, **more: Any
) -> tuple[TrainerState, list[UpdateMetrics]]:
    """The state after all steps, and the metrics, of one trainer that adds whole groups."""
    trainer = case.trainer(case.model(), settings, **more)
    metrics = []
    for groups in case.batches():
        for group in groups:
            trainer.add_group(group)
        metrics.append(trainer.commit())
    return state_of(trainer), metrics


def trained_together(
    case: SharedCase, trainers: int, seed: int, *, one_dies: bool = False
) -> tuple[TrainerState, list[UpdateMetrics]]:
    """The same of several trainers. Jobs are dealt at random, and shares are added in a random order.

    If one dies, its jobs are trained again by the others, and a new one replaces it.
    """
    dice = random.Random(seed)
    committer = case.trainer(case.model(), shares_gradients=True)
    assistants = [Assistant(case) for _ in range(trainers - 1)]
    metrics = []
    for step, groups in enumerate(case.batches()):
        hands = _dealt(groups, trainers, dice)
        for assistant, hand in zip(assistants, hands[1:], strict=True):
            _train(assistant.trainer, groups, hand)
        if one_dies:
            assistants[0] = Assistant(case, step, committer.published())
            _train(assistants[0].trainer, groups, hands[1][::2])
            hands[0] += hands[1][1::2]
        _train(committer, groups, hands[0][::2])
        for assistant in dice.sample(assistants, len(assistants)):
            share = assistant.trainer.take_share()
            committer.add_share(share_of_tensors(share_as_tensors(share)))
        _train(committer, groups, hands[0][1::2])
        for place, group in enumerate(groups):
            committer.add_rewards(place, group.index, group.rewards)
        for place in committer.places_to_replay():
            committer.hold_group(groups[place])
        metrics.append(committer.commit())
        for assistant in assistants:
            assistant.start(committer.batch, committer.published())
    return state_of(committer), metrics


def _dealt(groups: Sequence[ScoredGroup], hands: int, dice: random.Random) -> list[list[tuple[int, int]]]:
    """All jobs, as place and first sample, dealt to so many trainers."""
    firsts = range(0, len(groups[0].rewards), SETTINGS.job_samples)
    jobs = [(place, first) for place in range(len(groups)) for first in firsts]
    dice.shuffle(jobs)
    return [jobs[hand::hands] for hand in range(hands)]


def _train(trainer: Trainer, groups: Sequence[ScoredGroup], jobs: Sequence[tuple[int, int]]) -> None:
    for place, first in jobs:
        trainer.add_samples(groups[place].part(first, SETTINGS.job_samples))


def without_first_sample(group: ScoredGroup) -> ScoredGroup:
    """A group of one sample less."""
    trajectories = tuple(
        replace(each, sample=replace(each.sample, index=each.sample.index - 1)) for each in group.trajectories[1:]
    )
    return ScoredGroup(group.conditioning, trajectories, group.rewards[1:])
