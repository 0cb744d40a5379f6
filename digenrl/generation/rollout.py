"""Denoises a slice, several samples of one prompt, as one batch, and keeps what training needs.

Shape legend as in `digenrl.models.contract`; K = kept steps of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from digenrl.generation.noise import initial_noise, step_noise
from digenrl.generation.windows import check_plan
from digenrl.models.contract import Conditioning, DiffusionModel, SampleSize
from digenrl.models.pairs import Needs
from digenrl.models.stochastic_step import StepResult, StepTimes, stochastic_step
from digenrl.models.trajectory import RolloutPlan, Trajectory
from digenrl.records import SampleId, Slice


@dataclass(frozen=True, slots=True)
class GeneratedSlice:
    """The samples of one slice, in the order of their indices: the trajectories, and the latents to decode."""

    slice: Slice
    size: SampleSize
    trajectories: tuple[Trajectory, ...]
    final_BL: Tensor


@torch.no_grad()  # not inference_mode: tensors that a model caches in a rollout are used again in training
def generate_slice(
    model: DiffusionModel,
    conditioning: Conditioning,
    plans: Sequence[RolloutPlan],
    slice_: Slice,
    *,
    run_seed: int,
    version: int,
    needs: Needs,
    same_noise_in_group: bool = False,
    autocast: Literal["off", "bf16"] = "off",
) -> GeneratedSlice:
    """Denoises the slice from one row of conditioning, its prompt's, with one plan per sample.

    A sample does not depend on the slice it is generated in, but for the rounding of another batch
    size. Plans differ in their steps alone. `version` is the model's weights'. With `autocast` as the trainer has
    it, replaying a step in a batch of the same size gives its log-probability to the last bit.
    """
    samples = tuple(slice_.samples())
    if len(conditioning) != 1:
        raise ValueError(f"a slice has one prompt, so one row of conditioning; got {len(conditioning)}")
    kept = _KeptSteps(plans, needs)
    final_BL = _denoised(
        model,
        conditioning.to(model.device).repeated(slice_.size),
        plans,
        samples,
        run_seed=run_seed,
        same_noise_in_group=same_noise_in_group,
        autocast=autocast,
        watch=kept.add,
    )
    trajectories = tuple(
        kept.trajectory(row, sample, version, final_L=final_BL[row]) for row, sample in enumerate(samples)
    )
    return GeneratedSlice(slice_, plans[0].size, trajectories, final_BL)


@torch.no_grad()
def generate_pixels(
    model: DiffusionModel,
    conditioning: Conditioning,
    plans: Sequence[RolloutPlan],
    samples: Sequence[SampleId],
    *,
    run_seed: int,
    autocast: Literal["off", "bf16"] = "off",
    rows_at_once: int | None = None,
) -> Tensor:
    """Pixels of samples that nobody trains on, one row of conditioning each: (B, frames, 3, height, width)."""
    final_BL = _denoised(
        model, conditioning.to(model.device), plans, samples, run_seed=run_seed, autocast=autocast
    )
    return _decoded(model, final_BL, plans[0].size, rows_at_once)


@torch.no_grad()
def decode_slice(model: DiffusionModel, generated: GeneratedSlice, rows_at_once: int | None = None) -> Tensor:
    """Pixels in [0, 1], (B, frames, 3, height, width), on the CPU; fewer rows at once take less memory."""
    return _decoded(model, generated.final_BL, generated.size, rows_at_once)


def _decoded(model: DiffusionModel, final_BL: Tensor, size: SampleSize, rows_at_once: int | None) -> Tensor:
    chunks = torch.split(final_BL, rows_at_once or len(final_BL))
    return torch.cat([model.decode(chunk, size).cpu() for chunk in chunks])


def _denoised(
    model: DiffusionModel,
    conditioning: Conditioning,
    plans: Sequence[RolloutPlan],
    samples: Sequence[SampleId],
    *,
    run_seed: int,
    same_noise_in_group: bool = False,
    autocast: Literal["off", "bf16"] = "off",
    watch: Callable[[int, Tensor, StepResult], None] | None = None,
) -> Tensor:
    """The final latents of samples, one row of conditioning each; `watch` sees every step and its beginning."""
    plan = _common_plan(plans, samples)
    noise_B = initial_noise(run_seed, samples, model.noise_shape(plan.size), same_noise_in_group)
    latents_BL = model.initial_latents(noise_B.to(model.device), plan.size)
    for index in range(plan.schedule.steps):
        times = StepTimes.at(plan.schedule, [index] * len(samples))
        timesteps_B = times.timestep_B.to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast == "bf16"):
            velocity_BL = model.velocity(latents_BL, timesteps_B, conditioning, plan.guidance, plan.size)
        stochastic_B = torch.tensor([index in each.stochastic_steps for each in plans])
        z_BL = step_noise(run_seed, samples, index, latents_BL.shape[1:]) if stochastic_B.any() else None
        step = stochastic_step(latents_BL, velocity_BL, times, plan.noise, z_BL=z_BL, stochastic_B=stochastic_B)
        if watch is not None:
            watch(index, latents_BL, step)
        latents_BL = step.next_latents_BL
    return latents_BL


def _common_plan(plans: Sequence[RolloutPlan], samples: Sequence[SampleId]) -> RolloutPlan:
    """What the plans of a batch agree on; they may differ in their steps."""
    assert len(plans) == len(samples), f"{len(plans)} plans for {len(samples)} samples"
    plan = plans[0]
    for other in plans:
        check_plan(other)
        assert torch.equal(other.schedule.sigmas, plan.schedule.sigmas), (
            "the plans of a batch share their schedule"
        )
        shared = (other.size, other.noise, other.guidance) == (plan.size, plan.noise, plan.guidance)
        assert shared, "the plans of a batch share size, noise and guidance"
    return plan


class _KeptSteps:
    """Collects, step by step, what the plans of a slice keep."""

    def __init__(self, plans: Sequence[RolloutPlan], needs: Needs) -> None:
        self._plans = plans
        self._needs = needs
        self._wanted = {index for plan in plans for index in plan.kept_steps}
        self._latents_BL: dict[int, Tensor] = {}  # by the step that starts from them
        self._log_prob_B: dict[int, Tensor] = {}
        self._mean_BL: dict[int, Tensor] = {}

    def add(self, index: int, latents_BL: Tensor, step: StepResult) -> None:
        """Remembers the step if any sample keeps it."""
        if index not in self._wanted:
            return
        self._latents_BL[index] = latents_BL
        self._latents_BL[index + 1] = step.next_latents_BL
        self._log_prob_B[index] = step.log_prob_B
        if self._needs.step_means:
            self._mean_BL[index] = step.mean_BL

    def trajectory(self, row: int, sample: SampleId, version: int, final_L: Tensor) -> Trajectory:
        """What one sample keeps, in its own storage, so that it travels without its neighbours."""
        plan = self._plans[row]
        latents_KL, next_latents_KL = self._latents(row, plan.kept_steps, final_L)
        means = [self._mean_BL[index][row] for index in plan.kept_steps] if self._needs.step_means else None
        no_log_prob = torch.empty((), dtype=torch.float32, device=final_L.device)
        return Trajectory(
            sample=sample,
            version=version,
            plan=plan,
            latents_KL=latents_KL,
            next_latents_KL=next_latents_KL,
            log_prob_K=_stacked([self._log_prob_B[index][row] for index in plan.kept_steps], no_log_prob),
            mean_KL=None if means is None else _stacked(means, final_L),
            final_L=final_L.clone() if self._needs.final_latents else None,
        )

    def _latents(self, row: int, kept_steps: tuple[int, ...], like_L: Tensor) -> tuple[Tensor, Tensor]:
        """What the kept steps started from and arrived at; of steps in a row each latent is stored once."""

        def stored(indices: Iterable[int]) -> Tensor:
            return _stacked([self._latents_BL[index][row] for index in indices], like_L)

        if kept_steps and kept_steps == tuple(range(kept_steps[0], kept_steps[-1] + 1)):
            stored_ML = stored(range(kept_steps[0], kept_steps[-1] + 2))
            return stored_ML[:-1], stored_ML[1:]
        return stored(kept_steps), stored(index + 1 for index in kept_steps)


def _stacked(rows: list[Tensor], like: Tensor) -> Tensor:
    """The rows as one tensor; none at all as an empty one of rows like `like`."""
    if rows:
        return torch.stack(rows)
    return like.new_empty((0, *like.shape))
