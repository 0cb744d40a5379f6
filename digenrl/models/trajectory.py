"""Records of a rollout: how samples are denoised, and what is kept of them for training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from digenrl.models.contract import Conditioning, SampleSize, Schedule
from digenrl.records import SampleId

NoiseKind = Literal["flow", "dance", "cps", "truncated_flow", "linear", "ddim"]
LogProb = Literal["normal", "squared_error"]


@dataclass(frozen=True, slots=True)
class StepNoise:
    """The noise of a stochastic step: its kind, its level (a or eta), and how a step is scored.

    A log-prob is the mean over elements of ln N(x'; mean, s^2) or, as a `squared_error`, of -(x' - mean)^2.
    """

    kind: NoiseKind
    level: float
    log_prob: LogProb = "normal"


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """How a sample is denoised: which steps are stochastic, and which of those are kept for training.

    Steps not in `stochastic_steps` are Euler steps. `kept_steps` is a subset and never includes the last step.
    `training_schedule` has the levels from which an algorithm draws, if not from those of the rollout.
    """

    schedule: Schedule
    size: SampleSize
    noise: StepNoise
    guidance: float
    stochastic_steps: tuple[int, ...]
    kept_steps: tuple[int, ...]
    training_schedule: Schedule | None = None

    @property
    def keeps_consecutive_steps(self) -> bool:
        """Whether each kept step starts from the latent at which the previous one arrived.

        Such a trajectory has K + 1 different latents, a chain in which each is stored once.
        """
        kept = self.kept_steps
        return bool(kept) and kept == tuple(range(kept[0], kept[-1] + 1))


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The kept steps of one sample. K = kept steps, L = the sample's latents.

    `latents_KL[k]` is the latent that step `plan.kept_steps[k]` started from and `next_latents_KL[k]` the one it
    arrived at, exactly as the rollout used them. `log_prob_K` is of the generating policy, in fp32 (fp64 for an
    fp64 model). `mean_KL` is its step mean and `final_L` the denoised latent, if the algorithm asks for them.
    """

    sample: SampleId
    version: int
    plan: RolloutPlan
    latents_KL: Tensor
    next_latents_KL: Tensor
    log_prob_K: Tensor
    mean_KL: Tensor | None = None
    final_L: Tensor | None = None

    def chain(self) -> Tensor:
        """All latents of consecutive kept steps, (K + 1, *L)."""
        assert self.plan.keeps_consecutive_steps, "the kept steps are not consecutive"
        return torch.cat([self.latents_KL, self.next_latents_KL[-1:]])


def split_chain(chain: Tensor) -> tuple[Tensor, Tensor]:
    """`latents_KL` and `next_latents_KL` of a chain, sharing its storage."""
    return chain[:-1], chain[1:]


@dataclass(frozen=True, slots=True)
class ScoredSamples:
    """Consecutive samples of one prompt's group, with the rewards of all samples of the group.

    Both are in the order of sample indices. `conditioning` has one row, the prompt's.
    """

    conditioning: Conditioning
    trajectories: tuple[Trajectory, ...]
    rewards: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.conditioning) == 1, f"one conditioning row per prompt, got {len(self.conditioning)}"
        assert self.trajectories, "at least one sample"
        indices = [t.sample.index for t in self.trajectories]
        assert indices == list(range(indices[0], indices[0] + len(indices))), "in index order"
        assert indices[0] >= 0 and indices[-1] < len(self.rewards), "one reward per sample of the group"
        assert len({(t.sample.step, t.sample.group) for t in self.trajectories}) == 1, "samples of one group"

    @property
    def step(self) -> int:
        """The training step that the group belongs to."""
        return self.trajectories[0].sample.step

    @property
    def index(self) -> int:
        """The group's number in its step."""
        return self.trajectories[0].sample.group

    @property
    def first(self) -> int:
        """The index of the first of these samples."""
        return self.trajectories[0].sample.index


@dataclass(frozen=True, slots=True)
class ScoredGroup(ScoredSamples):
    """All samples of one prompt with their rewards."""

    def __post_init__(self) -> None:
        ScoredSamples.__post_init__(self)
        assert len(self.trajectories) == len(self.rewards), "one reward per trajectory"

    def part(self, first: int, size: int) -> ScoredSamples:
        """Some samples of the group, with all rewards."""
        return ScoredSamples(self.conditioning, self.trajectories[first : first + size], self.rewards)
