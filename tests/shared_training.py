"""Trainers that share the updates of a toy: who trains what, and the result, for tests of shared gradients."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from scored_groups import DRAW_NOISE, Rollout, lively, scored_groups, state_of, toy
from toy_model import ToyModel

from digenrl.config.recipes.training import EmaSettings, TrainerSettings
from digenrl.models.model_weights import load_weights
from digenrl.models.trajectory import ScoredGroup
from digenrl.training.gradients.share import share_as_tensors, share_of_tensors
from digenrl.training.metrics import UpdateMetrics
from digenrl.training.open_batch import BatchShape
from digenrl.training.trainer import Trainer
from digenrl.training.trainer_state import TrainerState
from digenrl.training.update_split import updates_of_places

STEPS = 2
SETTINGS = TrainerSettings(pack_size=3, learning_rate=0.02, job_samples=2, ema=EmaSettings(every_updates=1))
NARROW = {"mix_grpo": {"kind": "sliding", "width": 2, "training_steps_per_shift": 1}}  # of three steps
REWARDS = ((0.3, 1.7, -2.1, 0.9), (1.0, 1.0, 1.0, 1.0), (0.1, 0.2, 3.3, 0.4))
MORE_REWARDS = (*REWARDS, (2.0, -1.0, 0.5, 0.6), (0.9, 0.8, -2.2, 1.1))  # enough for several updates


@dataclass(frozen=True)
class SharedCase:
    """An algorithm with settings that reach every branch of its loss, and a model that trains adapters or all."""

    algorithm: str
    lora: bool = True
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    settings: TrainerSettings = field(default=SETTINGS, hash=False)
    rewards: tuple[tuple[float, ...], ...] = REWARDS
    stale_groups: int = 0

    @property
    def updates(self) -> int:
        """The updates of a batch."""
        return lively(self.algorithm, self.options).updates_per_batch

    @property
    def updates_samples(self) -> bool:
        """Whether each update trains some samples of every group."""
        return lively(self.algorithm, self.options).updates_of == "samples"

    def places(self, update: int) -> list[int]:
        """The places that an update trains."""
        if self.updates_samples:
            return list(range(len(self.rewards)))
        owners = updates_of_places(len(self.rewards), self.updates, self.stale_groups)
        return [place for place, owner in enumerate(owners) if owner == update]

    def jobs(self, update: int = 0) -> list[tuple[int, int]]:
        """The jobs of an update, as place and first sample."""
        firsts = range(0, len(self.rewards[0]), self.job_samples)
        return [(place, first) for place in self.places(update) for first in firsts]

    @property
    def job_samples(self) -> int:
        """The samples of a job."""
        chosen = self.settings.job_samples
        return len(self.rewards[0]) if chosen == "auto" else chosen

    def batches(self) -> list[list[ScoredGroup]]:
        """The groups of all steps."""
        return _batches(self)

    def model(self) -> ToyModel:
        """The model before training."""
        return toy(torch.float32, self.lora)

    def trainer(self, model: ToyModel, settings: TrainerSettings | None = None, **more: Any) -> Trainer:
        """A trainer of the model."""
        shape = BatchShape(len(self.rewards), len(self.rewards[0]), self.stale_groups)
        algorithm = lively(self.algorithm, self.options)
        return Trainer(model, algorithm, settings or self.settings, shape, DRAW_NOISE, **more)


@cache
def _batches(case: SharedCase) -> list[list[ScoredGroup]]:
    model, algorithm = case.model(), lively(case.algorithm, case.options)
    window, batches = NARROW.get(case.algorithm), []
    for step in range(STEPS):
        rollout = Rollout(groups=len(case.rewards), steps=3, step=step, version=step)
        groups = scored_groups(model, algorithm, rollout, case.rewards, window)
        older = replace(rollout, groups=case.stale_groups, version=max(0, step - 1))
        batches.append(scored_groups(model, algorithm, older, case.rewards, window) + groups[case.stale_groups :])
    return batches


@dataclass
class Assistant:
    """A model with its own weights, and a trainer that never commits."""

    case: SharedCase
    version: int = 0
    weights: dict[str, torch.Tensor] | None = None
    trained: dict[str, torch.Tensor] | None = None

    def __post_init__(self) -> None:
        self.model = self.case.model()
        self.trainer = self.case.trainer(self.model, shares_gradients=True, commits=False)
        if self.weights is not None:
            self.start(self.version, self.weights, self.trained)

    def start(
        self, version: int, weights: dict[str, torch.Tensor], trained: dict[str, torch.Tensor] | None = None
    ) -> None:
        """Loads a published version and opens its batch, with the trained weights if the version lags."""
        load_weights(self.model, weights)
        self.trainer.start_version(version)
        if self.trainer.version_lags:
            self.trainer.start_update(0, trained)


def trained_alone(
    case: SharedCase, settings: TrainerSettings | None = None, **more: Any
) -> tuple[TrainerState, list[UpdateMetrics]]:
    """The state after all steps, and the metrics, of one trainer that adds whole groups."""
    trainer = case.trainer(case.model(), settings, **more)
    metrics = []
    for groups in case.batches():
        for group in groups:
            trainer.add_group(group)
        metrics += [trainer.commit() for _ in range(case.updates)]
    return state_of(trainer), metrics


def trained_together(
    case: SharedCase, trainers: int, seed: int, *, one_dies: bool = False
) -> tuple[TrainerState, list[UpdateMetrics]]:
    """The same of several trainers. Jobs are dealt at random, and shares are added in a random order.

    If one dies, its jobs are trained again by the others, and a new one replaces it.
    """
    team = Team(case, trainers, seed)
    metrics = [team.train_update(one_dies=one_dies) for _ in range(STEPS * case.updates)]
    return state_of(team.committer), metrics


class Team:
    """A trainer that commits, and others that train some of its jobs."""

    def __init__(self, case: SharedCase, trainers: int, seed: int) -> None:
        self.case, self._dice = case, random.Random(seed)
        self.committer = case.trainer(case.model(), shares_gradients=True)
        self.assistants = [Assistant(case) for _ in range(trainers - 1)]

    @property
    def groups(self) -> list[ScoredGroup]:
        """The open batch."""
        return self.case.batches()[self.committer.batch]

    def train_update(self, *, one_dies: bool = False) -> UpdateMetrics:
        """Trains and commits the open update, and gives the new weights to all."""
        committer, groups, dice = self.committer, self.groups, self._dice
        hands = self._dealt()
        for assistant, hand in zip(self.assistants, hands[1:], strict=True):
            self.train(assistant.trainer, hand)
        if one_dies:
            self.assistants[0] = self._newcomer()
            self.train(self.assistants[0].trainer, hands[1][::2])
            hands[0] += hands[1][1::2]
        self.train(committer, hands[0][::2])
        for assistant in dice.sample(self.assistants, len(self.assistants)):
            share = assistant.trainer.take_share()
            committer.add_share(share_of_tensors(share_as_tensors(share)))
        self.train(committer, hands[0][1::2])
        for place, group in enumerate(groups):
            committer.add_rewards(place, group.index, group.rewards)
        for place in committer.places_to_replay():
            committer.hold_group(groups[place])
        metrics = committer.commit()
        self._give_weights()
        return metrics

    def train(self, trainer: Trainer, jobs: Sequence[tuple[int, int]]) -> None:
        """Trains jobs of the open batch."""
        for place, first in jobs:
            trainer.add_samples(self.groups[place].part(first, self.case.job_samples))

    def _give_weights(self) -> None:
        committer = self.committer
        for assistant in self.assistants:
            if committer.update:
                assistant.trainer.start_update(committer.update, committer.trained_weights())
            else:
                assistant.start(committer.batch, committer.published(), committer.trained_at_version())

    def _newcomer(self) -> Assistant:
        committer = self.committer
        made = Assistant(self.case, committer.batch, committer.published(), committer.trained_at_version())
        if committer.update:
            made.trainer.start_update(committer.update, committer.trained_weights())
        return made

    def _dealt(self) -> list[list[tuple[int, int]]]:
        """The jobs of the open update, dealt to all trainers."""
        jobs, hands = self.case.jobs(self.committer.update), len(self.assistants) + 1
        self._dice.shuffle(jobs)
        return [jobs[hand::hands] for hand in range(hands)]


def whole_groups(settings: TrainerSettings = SETTINGS) -> TrainerSettings:
    """The settings with one job per group."""
    return settings.model_copy(update={"job_samples": "auto"})


def without_first_sample(group: ScoredGroup) -> ScoredGroup:
    """A group of one sample less."""
    trajectories = tuple(
        replace(each, sample=replace(each.sample, index=each.sample.index - 1)) for each in group.trajectories[1:]
    )
    return ScoredGroup(group.conditioning, trajectories, group.rewards[1:])
