"""Denoises a slice, several samples of one prompt, as one batch, and keeps what training needs.

Shape legend as in `digenrl.models.contract`; K = kept steps of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from digenrl.config.algorithms import Needs
from digenrl.generation.noise import initial_noise, step_noise
from digenrl.generation.row_limits import RowLimit
from digenrl.generation.windows import check_plan
from digenrl.models.contract import Conditioning, DiffusionModel, SampleSize
from digenrl.models.stochastic_step import StepResult, StepTimes, stochastic_step
from digenrl.models.trajectory import RolloutPlan, Trajectory
from digenrl.models.transfers import leaving, sent, wait_for
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
    limit: RowLimit | None = None,
) -> GeneratedSlice:
    """Denoises the slice from one row of conditioning, its prompt's, with one plan per sample.

    A sample does not depend on the slice it is generated in, but for the rounding of another batch
    size. Plans differ in their steps alone. `version` is the model's weights'. With `autocast` as the trainer has
    it, replaying a step in a batch of the same size gives its log-probability to the last bit. A slice that does
    not fit in memory is made in parts, as `limit` remembers.
    """
    samples = tuple(slice_.samples())
    assert len(plans) == len(samples), f"{len(plans)} plans for {len(samples)} samples"
    if len(conditioning) != 1:
        raise ValueError(f"a slice has one prompt, so one row of conditioning; got {len(conditioning)}")
    row = model.compact(conditioning).to(model.device)

    def generated(rows: slice) -> tuple[list[Trajectory], Tensor]:
        kept = _KeptSteps(plans[rows], needs)
        final_BL = _denoised(
            model,
            row.repeated(rows.stop - rows.start),
            plans[rows],
            samples[rows],
            run_seed=run_seed,
            same_noise_in_group=same_noise_in_group,
            autocast=autocast,
            watch=kept.add,
        )
        made = [kept.trajectory(at, sample, version, final_BL[at]) for at, sample in enumerate(samples[rows])]
        return made, final_BL

    parts = (limit or RowLimit(doing="denoising")).run(len(samples), generated)
    trajectories = tuple(trajectory for made, _ in parts for trajectory in made)
    return GeneratedSlice(slice_, plans[0].size, trajectories, _joined([final_BL for _, final_BL in parts]))


@torch.no_grad()
def generate_pixels(
    model: DiffusionModel,
    conditioning: Conditioning,
    plans: Sequence[RolloutPlan],
    samples: Sequence[SampleId],
    *,
    run_seed: int,
    autocast: Literal["off", "bf16"] = "off",
    limit: RowLimit | None = None,
    decoding: RowLimit | None = None,
) -> Tensor:
    """Pixels of samples that nobody trains on, one row of conditioning each: (B, frames, 3, height, width).

    As many are denoised at once as `limit` says, and as many decoded as `decoding` says.
    """
    conditioning = conditioning.to(model.device)

    def denoised(rows: slice) -> Tensor:
        return _denoised(
            model, conditioning.rows(rows), plans[rows], samples[rows], run_seed=run_seed, autocast=autocast
        )

    parts = (limit or RowLimit(doing="denoising")).run(len(samples), denoised)
    return _decoded(model, _joined(parts), plans[0].size, decoding)


@torch.no_grad()
def decode_slice(model: DiffusionModel, generated: GeneratedSlice, limit: RowLimit | None = None) -> Tensor:
    """Pixels in [0, 1], (B, frames, 3, height, width), on the CPU; fewer rows at once take less memory."""
    return _decoded(model, generated.final_BL, generated.size, limit)


def _decoded(model: DiffusionModel, final_BL: Tensor, size: SampleSize, limit: RowLimit | None) -> Tensor:
    """Pixels leave the card while the next rows are decoded.

    In one order of elements, whatever the decoder's: rewards that add them up are the same to the last bit however
    pixels come to them.
    """
    parts = (limit or RowLimit(doing="decoding")).run(
        len(final_BL), lambda rows: leaving(model.decode(final_BL[rows], size).contiguous())
    )
    wait_for(model.device)
    return _joined(parts)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


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
    shape, device = model.noise_shape(plan.size), model.device
    latents_BL = model.initial_latents(
        initial_noise(run_seed, samples, shape, same_noise_in_group, device), plan.size
    )
    for index in range(plan.schedule.steps):
        times = StepTimes.at(plan.schedule, [index] * len(samples))
        timesteps_B = sent(times.timestep_B, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast == "bf16"):
            velocity_BL = model.rollout_velocity(latents_BL, timesteps_B, conditioning, plan.guidance, plan.size)
        stochastic_B = torch.tensor([index in each.stochastic_steps for each in plans])
        z_BL = None
        if stochastic_B.any():  # drawn while the card is at the velocity
            z_BL = step_noise(run_seed, samples, index, latents_BL.shape[1:], device)
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
