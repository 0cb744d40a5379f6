"""Real rollouts of small models with given rewards, for the tests of the trainer.

The rollout's policy and the trained one differ by a small perturbation, unless a test wants them equal.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from serial_reference import Gradients, SerialReference, batch_advantages
from source_pictures import encoded
from torch import Tensor
from toy_model import TOY_SIZE, ToyModel

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.recipes.training import TrainerSettings
from digenrl.config.recipes.windows import read_window
from digenrl.generation.noise import normal_noise
from digenrl.generation.rollout import RolloutSettings, generate_slice
from digenrl.generation.windows import plan_rollouts
from digenrl.models.adapters.lora import add_lora
from digenrl.models.contract import DiffusionModel, SampleSize
from digenrl.models.objective import Objective
from digenrl.models.trajectory import ScoredGroup, StepNoise, Trajectory
from digenrl.records import Slice
from digenrl.training.checkpoint.state_tensors import state_as_tensors, state_of_tensors
from digenrl.training.open_batch import BatchShape
from digenrl.training.optimizer import make_optimizer
from digenrl.training.packing.noise_levels import DrawNoise
from digenrl.training.policy_weights import PolicyWeights
from digenrl.training.trainer import Trainer
from digenrl.training.trainer_state import TrainerState

RUN_SEED = 11
FLOW_NOISE = StepNoise("flow", 0.7)
DRAW_NOISE: DrawNoise = partial(normal_noise, RUN_SEED)

# Settings with which small perturbations of a toy clip some ratios, and some advantages exceed the clamp.
LIVELY: dict[str, dict[str, Any]] = {
    "flow_grpo": {"clip": 1e-4, "kl_weight": 0.1, "updates_per_batch": 1, "advantage": {"clamp": 1.2}},
    "flow_grpo_fast": {"clip": 1e-4, "updates_per_batch": 1, "kl_weight": 0.1, "kl_form": "exact"},
    "dance_grpo": {"clip": 1e-4, "best_of_n": {"top": 2, "bottom": 1}},
    "mix_grpo": {"clip": 1e-4, "updates_per_batch": 1, "advantage": {"clamp": 1.2}},
    "grpo_guard": {
        "clip": 1e-4,
        "updates_per_batch": 1,
        "kl_weight": 0.1,
        "advantage": {"std_over": "batch", "clamp": 1.2},
    },
    "flow_dppo": {"kl_threshold": 1e-7, "updates_per_batch": 1, "kl_weight": 0.1, "advantage": {"clamp": 1.2}},
    "flash_grpo": {"clip": 1e-4, "mean_weight": 1.5, "kl_weight": 0.1, "advantage": {"clamp": 1.2}},
    "diffusion_nft": {"beta": 0.7, "kl_weight": 0.1, "advantage": {"clamp": 1.2}},
    "awm": {
        "clip": 1e-3,
        "kl_weight": 0.1,
        "old_decay_growth": 0.25,
        "old_kl_weight": 0.5,
        "advantage": {"clamp": 1.2},
    },
    "flow_dpo": {},
}


@dataclass(frozen=True)
class Rollout:
    """How samples are generated."""

    groups: int = 3
    group_size: int = 4
    steps: int = 5
    slice_size: int = 4
    guidance: float = 1.0
    noise: StepNoise = FLOW_NOISE
    size: SampleSize = TOY_SIZE
    step: int = 0
    version: int = 0


def lively(name: str, options: Mapping[str, Any] | None = None) -> Objective:
    """The algorithm with settings that reach every branch of its loss, and some `options`."""
    return build_algorithm(name, {**LIVELY[name], **(options or {})})


def toy(dtype: torch.dtype = torch.float64, lora: bool = True) -> ToyModel:
    """A toy model; adapters are not zero, so that the reference is another policy."""
    model = ToyModel(seed=1, dtype=dtype)
    if lora:
        add_lora(model, rank=2, alpha=4, seed=3)
        nudge(model, 0.2, seed=4)
    return model


@torch.no_grad()
def nudge(model: DiffusionModel, size: float, seed: int) -> None:
    """Adds noise to all trained weights."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.transformer.parameters():
        if parameter.requires_grad:
            parameter += size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def trajectories_of(
    model: DiffusionModel,
    algorithm: Objective,
    rollout: Rollout,
    group: int,
    window: Mapping[str, Any] | None = None,
) -> tuple[Trajectory, ...]:
    """One group's samples, generated slice by slice."""
    schedule = model.schedule(rollout.steps, rollout.size)
    chosen = algorithm.settings.window if window is None else read_window(window)
    trajectories: list[Trajectory] = []
    for first in range(0, rollout.group_size, rollout.slice_size):
        size = min(rollout.slice_size, rollout.group_size - first)
        slice_ = Slice(rollout.step, group, first, size)
        plans = plan_rollouts(
            chosen,
            slice_.samples(),
            schedule=schedule,
            size=rollout.size,
            noise=rollout.noise,
            guidance=rollout.guidance,
            run_seed=RUN_SEED,
            training_schedule=model.schedule(100, rollout.size),
        )
        made = generate_slice(
            model,
            encoded(model, [f"prompt {group}"], rollout.size),
            plans,
            slice_,
            RolloutSettings(RUN_SEED, algorithm.needs, algorithm.settings.same_initial_noise),
            version=rollout.version,
        )
        trajectories += made.trajectories
    return tuple(trajectories)


def scored_groups(
    model: DiffusionModel,
    algorithm: Objective,
    rollout: Rollout = Rollout(),  # noqa: B008  it is frozen
    rewards: Sequence[Sequence[float]] | None = None,
    window: Mapping[str, Any] | None = None,
) -> list[ScoredGroup]:
    """A batch of groups; unless given, rewards are random, except that those of group 1 are all equal."""
    dice = random.Random(5)
    drawn = [
        tuple(0.25 if group == 1 else dice.gauss(0, 1 + group) for _ in range(rollout.group_size))
        for group in range(rollout.groups)
    ]
    return [
        ScoredGroup(
            conditioning=encoded(model, [f"prompt {group}"], rollout.size),
            trajectories=trajectories_of(model, algorithm, rollout, group, window),
            rewards=tuple((rewards or drawn)[group]),
        )
        for group in range(rollout.groups)
    ]


def trainer_of(
    model: DiffusionModel,
    algorithm: Objective,
    groups: Sequence[ScoredGroup],
    settings: TrainerSettings | None = None,
    **more: Any,
) -> Trainer:
    """A trainer for batches of this shape."""
    shape = BatchShape(groups=len(groups), group_size=len(groups[0].rewards))
    return Trainer(model, algorithm, settings or TrainerSettings(pack_size=1), shape, DRAW_NOISE, **more)


def train(trainer: Trainer, groups: Sequence[ScoredGroup]) -> None:
    """Adds groups, and takes every update that is complete."""
    for group in groups:
        trainer.add_group(group)
        while trainer.can_commit():
            trainer.commit()


def trained_batches(
    model: DiffusionModel, algorithm: Objective, settings: TrainerSettings, batches: int
) -> Iterator[Trainer]:
    """A trainer after each of its first batches, which have one update each."""
    trainer = None
    for batch in range(batches):
        groups = scored_groups(model, algorithm, Rollout(step=batch, version=batch))
        trainer = trainer or trainer_of(model, algorithm, groups, settings)
        for group in groups:
            trainer.add_group(group)
        trainer.commit()
        yield trainer


def serial_of(
    model: DiffusionModel, algorithm: Objective, settings: TrainerSettings | None = None
) -> SerialReference:
    """The serial reference; its old policy and reference are the model's current weights."""
    settings = settings or TrainerSettings()
    needs = algorithm.needs
    policies = PolicyWeights(model, keep_old=needs.old_policy, keep_reference=needs.reference)
    optimizer = make_optimizer(policies.parameters, settings)
    return SerialReference(model, algorithm, policies, optimizer, DRAW_NOISE, settings.gradient_norm)


def serial_gradient(serial: SerialReference, groups: Sequence[ScoredGroup]) -> Gradients:
    """The gradient of a batch that is one update; weights do not change."""
    return serial.gradient(groups, batch_advantages(serial.objective, [group.rewards for group in groups]))


def relative_difference(left: Gradients, right: Gradients) -> float:
    """The norm of the difference, relative to the norm of the right one."""
    assert left.keys() == right.keys(), (sorted(left), sorted(right))
    flat = [torch.cat([part[name].flatten() for name in right]) for part in (left, right)]
    assert flat[1].norm() > 0, "a gradient of zero shows nothing"
    return float(((flat[0] - flat[1]).norm() / flat[1].norm()).detach())


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """Whether tensors of the same names have the same bits."""
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


def state_of(trainer: Trainer) -> TrainerState:
    """A copy of the state at the last version that stays valid."""
    tensors = state_as_tensors(trainer.state_at_last_version())
    return state_of_tensors({name: value.clone() for name, value in tensors.items()})


def differences(left: TrainerState, right: TrainerState) -> list[str]:
    """The names of the parts in which two states differ, in any bit."""
    ours, theirs = state_as_tensors(left), state_as_tensors(right)
    assert len(ours) > 1, "states have tensors"
    return [
        name
        for name in sorted(ours.keys() | theirs.keys())
        if name not in ours or name not in theirs or not torch.equal(ours[name], theirs[name])
    ]
