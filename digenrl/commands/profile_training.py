"""A role for profiles alone: a small batch of made-up samples is trained for real, and its commits are timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from digenrl.config.recipe import Recipe
from digenrl.models.trajectory import ScoredGroup
from digenrl.models.transfers import synchronize
from digenrl.records import SampleId
from digenrl.training.trainer import Trainer
from digenrl.worker import stages
from digenrl.worker.orders import EncodedPrompt, Order, Report
from digenrl.worker.roles import Generating
from digenrl.worker.stages import Blueprint


@dataclass(frozen=True, slots=True)
class PractiseStep(Order):
    """Make a batch, train it and take its optimizer steps. Completed by StepPractised.

    Samples are made `at_once` by so many.
    """

    prompt: EncodedPrompt
    at_once: int

    def reads(self) -> tuple[str, ...]:
        return (self.prompt.row,)


@dataclass(frozen=True, slots=True)
class StepPractised(Report):
    """The seconds of all commits of the batch, and the version that came of it, which is not laid out yet."""

    commit_seconds: float
    version: int


class Practising:
    """Takes whole optimizer steps with a trainer that others share. Every group has the same few samples."""

    def __init__(
        self, blueprint: Blueprint, device: torch.device, trainer: Trainer, generating: Generating
    ) -> None:
        self._blueprint, self._device = blueprint, device
        self._trainer, self._generating = trainer, generating
        self.handlers: Mapping[type[Order], Callable[[Any], Report]] = {PractiseStep: self.step}

    def step(self, order: PractiseStep) -> StepPractised:
        """Samples are made first: inside a batch, not every trainer has the version to generate with."""
        batch, shape = self._trainer.batch, self._blueprint.shape
        made = self._generating.make_and_forget(order.prompt, shape.group_size, order.at_once)
        seconds = 0.0
        for place in range(shape.groups):
            stages.train(self._trainer, _placed(made, batch, place), place)
            while self._trainer.batch == batch and self._trainer.can_commit():
                seconds += self._timed_commit()
        assert self._trainer.batch == batch + 1, "a whole batch was trained"
        return StepPractised(seconds, self._trainer.batch)

    def _timed_commit(self) -> float:
        synchronize(self._device)
        began = perf_counter()
        self._trainer.commit()
        synchronize(self._device)
        return perf_counter() - began


def small_batch(blueprint: Blueprint, samples: int, pack_size: int, checkpointed_blocks: int) -> Recipe:
    """The recipe with one group of so many samples for every update, packed as a trainer of the whole recipe did.

    All samples are trained, and groups are scaled one by one: a commit then trains nothing and can be timed.
    """
    recipe, algorithm = blueprint.recipe, blueprint.algorithm
    options = {key: value for key, value in recipe.algorithm.options.items() if key != "best_of_n"}
    if algorithm.scale_over == "batch":
        options["advantage"] = {**(options.get("advantage") or {}), "std_over": "group"}
    batch = {"prompts": algorithm.updates_per_batch, "samples_per_prompt": samples, "slice": samples}
    training: dict[str, Any] = {"pack_size": pack_size, "gradient_checkpointing": checkpointed_blocks}
    return recipe.model_copy(
        update={
            "batch": recipe.batch.model_copy(update=batch),
            "algorithm": recipe.algorithm.model_copy(update={"options": options}),
            "training": recipe.training.model_copy(update=training),
        }
    )


def _placed(group: ScoredGroup, batch: int, place: int) -> ScoredGroup:
    """The same samples as a group of the open batch."""
    trajectories = tuple(
        replace(each, sample=SampleId(batch, place, each.sample.index), version=batch)
        for each in group.trajectories
    )
    return replace(group, trajectories=trajectories)
