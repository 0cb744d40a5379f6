"""What a rollout leaves behind for training, and nothing more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from digenrl.models.contract import SampleSize, Schedule
from digenrl.records import SampleId

NoiseKind = Literal["flow", "dance", "cps", "truncated_flow", "ddim"]


@dataclass(frozen=True, slots=True)
class StepNoise:
    """How a stochastic step draws its noise: the kind, and its level (a or eta)."""

    kind: NoiseKind
    level: float


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """How samples are denoised: which steps are stochastic, and which of those are kept for training.

    Steps not in `stochastic_steps` are Euler steps, and so is always the last. `kept_steps` is a subset of them.
    """

    schedule: Schedule
    size: SampleSize
    noise: StepNoise
    guidance: float
    stochastic_steps: tuple[int, ...]
    kept_steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sample's way through the steps that will be trained. K = kept steps.

    `latents_KL[k]` is the latent that step `plan.kept_steps[k]` started from and `next_latents_KL[k]` the one it
    arrived at, exactly as the rollout used them (consecutive steps share storage). `log_prob_K` is of the policy
    that generated, in fp32 (fp64 for an fp64 model). `mean_KL` is its step mean and `final_L` the denoised latent,
    where an algorithm asked for them.
    """

    sample: SampleId
    version: int
    plan: RolloutPlan
    latents_KL: Tensor
    next_latents_KL: Tensor
    log_prob_K: Tensor
    mean_KL: Tensor | None = None
    final_L: Tensor | None = None
