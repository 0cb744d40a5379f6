"""Denoises samples in batches, decodes them, and keeps what training needs.

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
from digenrl.models.trajectory import RolloutPlan, Trajectory, split_chain
from digenrl.models.transfers import copy_to_host, synchronize, to_device
from digenrl.records import SampleId, Slice

NOTHING_MORE = Needs()


@dataclass(frozen=True, slots=True)
class RolloutSettings:
    """Settings that all rollouts of a run share.

    `needs` says what is kept for training besides latents and log-probs. With the trainer's `autocast`, replaying
    a step in a batch of the same size gives bitwise the same log-prob.
    """

    run_seed: int
    needs: Needs = NOTHING_MORE
    same_noise_in_group: bool = False
    autocast: Literal["off", "bf16"] = "off"


@dataclass(frozen=True, slots=True)
class GeneratedSlice:
    """The samples of one slice in the order of their indices: their trajectories, and their latents to decode."""

    size: SampleSize
    trajectories: tuple[Trajectory, ...]
    final_BL: Tensor


@torch.no_grad()  # not inference_mode: tensors that a model caches in a rollout are reused in training
def generate_slice(
    model: DiffusionModel,
    conditioning: Conditioning,
    plans: Sequence[RolloutPlan],
    slice_: Slice,
    settings: RolloutSettings,
    *,
    version: int,
    limit: RowLimit | None = None,
) -> GeneratedSlice:
    """Generates a slice from one row of conditioning, its prompt's, with one plan per sample.

    The plans may differ in their steps only. `version` is that of the model's weights. A sample does not depend on
    its slice, except for the rounding of another batch size. A slice that does not fit in memory is generated in
    parts, whose size `limit` remembers.
    """
    samples = tuple(slice_.samples())
    assert len(plans) == len(samples), f"{len(plans)} plans for {len(samples)} samples"
    if len(conditioning) != 1:
        raise ValueError(f"a slice has one prompt, so one row of conditioning; got {len(conditioning)}")
    row = model.compact(conditioning).to(model.device)

    def generate(rows: slice) -> tuple[list[Trajectory], Tensor]:
        kept = _KeptSteps(plans[rows], settings.needs)
        repeated = row.repeated(rows.stop - rows.start)
        final_BL = _denoise(model, repeated, plans[rows], samples[rows], settings, on_step=kept.add)
        trajectories = [
            kept.trajectory(at, sample, version, final_BL[at]) for at, sample in enumerate(samples[rows])
        ]
        return trajectories, final_BL

    parts = (limit or RowLimit(doing="denoising")).run(len(samples), generate)
    trajectories = tuple(trajectory for part, _ in parts for trajectory in part)
    return GeneratedSlice(plans[0].size, trajectories, _concatenated([final_BL for _, final_BL in parts]))


@torch.no_grad()
def encode_slice(
    model: DiffusionModel, pixels_BFCHW: Tensor, plans: Sequence[RolloutPlan], slice_: Slice, *, version: int
) -> GeneratedSlice:
    """Given images as the samples of a slice, whose final latents are kept. No step of theirs can be trained.

    They are encoded one at a time: the last bits of a row depend on its batch, and slices may be cut anywhere.
    """
    assert not any(plan.kept_steps for plan in plans), "given images have no denoising steps"
    kept = _KeptSteps(plans, Needs(final_latents=True))
    final_BL = torch.cat([model.encode_pixels(pixels_FCHW[None]) for pixels_FCHW in pixels_BFCHW])
    trajectories = tuple(
        kept.trajectory(row, sample, version, final_BL[row]) for row, sample in enumerate(slice_.samples())
    )
    return GeneratedSlice(plans[0].size, trajectories, final_BL)


@torch.no_grad()
def generate_pixels(
    model: DiffusionModel,
    conditioning: Conditioning,
    plans: Sequence[RolloutPlan],
    samples: Sequence[SampleId],
    settings: RolloutSettings,
    *,
    denoising: RowLimit | None = None,
    decoding: RowLimit | None = None,
) -> Tensor:
    """Pixels of samples that are not trained on, one row of conditioning each: (B, frames, 3, height, width).

    `denoising` and `decoding` limit the number of rows processed at once.
    """

    def denoise(rows: slice) -> Tensor:
        own = model.compact(conditioning.rows(rows)).to(model.device)
        return _denoise(model, own, plans[rows], samples[rows], settings)

    parts = (denoising or RowLimit(doing="denoising")).run(len(samples), denoise)
    return _decode(model, _concatenated(parts), plans[0].size, decoding)


@torch.no_grad()
def decode_slice(model: DiffusionModel, generated: GeneratedSlice, limit: RowLimit | None = None) -> Tensor:
    """Pixels in [0, 1], (B, frames, 3, height, width), on the CPU; `limit` is for the rows decoded at once."""
    return _decode(model, generated.final_BL, generated.size, limit)


def _decode(model: DiffusionModel, final_BL: Tensor, size: SampleSize, limit: RowLimit | None) -> Tensor:
    # Pixels are copied to the host while the next rows are decoded. They are made contiguous, whatever layout the
    # decoder returns: rewards that sum over pixels are then bitwise the same however pixels are transferred.
    def decode(rows: slice) -> Tensor:
        pixels_BFCHW = model.decode(final_BL[rows], size).contiguous()
        model.check_shape("decode", pixels_BFCHW, (len(final_BL[rows]), size.frames, 3, size.height, size.width))
        return copy_to_host(pixels_BFCHW)

    parts = (limit or RowLimit(doing="decoding")).run(
        len(final_BL),
        decode,
        save_memory=model.decode_in_tiles,
    )
    synchronize(model.device)
    return _concatenated(parts)


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _denoise(
    model: DiffusionModel,
    conditioning: Conditioning,
    plans: Sequence[RolloutPlan],
    samples: Sequence[SampleId],
    settings: RolloutSettings,
    on_step: Callable[[int, Tensor, StepResult], None] | None = None,
) -> Tensor:
    """The final latents, one row of conditioning per sample.

    `on_step` is called after every step with its index, the latents that it started from, and its result.
    """
    plan = _common_plan(plans, samples)
    seed, shape, device = settings.run_seed, model.noise_shape(plan.size), model.device
    noise_B = initial_noise(seed, samples, shape, settings.same_noise_in_group, device)
    latents_BL = model.initial_latents(noise_B, plan.size) * plan.schedule.noise_scale
    for index in range(plan.schedule.steps):
        times = StepTimes.at(plan.schedule, [index] * len(samples))
        timesteps_B = to_device(times.timestep_B, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.autocast == "bf16"):
            velocity_BL = model.rollout_velocity(latents_BL, timesteps_B, conditioning, plan.guidance, plan.size)
        model.check_shape("velocity", velocity_BL, latents_BL.shape)
        stochastic_B = torch.tensor([index in each.stochastic_steps for each in plans])
        z_BL = None
        if stochastic_B.any():  # drawn while the GPU computes the velocity
            z_BL = step_noise(seed, samples, index, latents_BL.shape[1:], device)
        step = stochastic_step(latents_BL, velocity_BL, times, plan.noise, z_BL=z_BL, stochastic_B=stochastic_B)
        if on_step is not None:
            on_step(index, latents_BL, step)
        latents_BL = step.next_latents_BL
    return latents_BL


def _common_plan(plans: Sequence[RolloutPlan], samples: Sequence[SampleId]) -> RolloutPlan:
    """The first plan, after checking that all plans of a batch differ in their steps only."""
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
    """Collects the steps that the plans of a batch keep."""

    def __init__(self, plans: Sequence[RolloutPlan], needs: Needs) -> None:
        self._plans = plans
        self._needs = needs
        self._wanted = {index for plan in plans for index in plan.kept_steps}
        self._latents_BL: dict[int, Tensor] = {}  # by the step that starts from them
        self._log_prob_B: dict[int, Tensor] = {}
        self._mean_BL: dict[int, Tensor] = {}

    def add(self, index: int, latents_BL: Tensor, step: StepResult) -> None:
        """Stores the step if any sample keeps it."""
        if index not in self._wanted:
            return
        self._latents_BL[index] = latents_BL
        self._latents_BL[index + 1] = step.next_latents_BL
        self._log_prob_B[index] = step.log_prob_B
        if self._needs.step_means:
            self._mean_BL[index] = step.mean_BL

    def trajectory(self, row: int, sample: SampleId, version: int, final_L: Tensor) -> Trajectory:
        """The trajectory of one row, in separate storage, so that it can be sent without the rest of the batch."""
        plan = self._plans[row]
        latents_KL, next_latents_KL = self._latents(row, plan, final_L)
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

    def _latents(self, row: int, plan: RolloutPlan, like_L: Tensor) -> tuple[Tensor, Tensor]:
        """The latents that the kept steps started from, and those at which they arrived."""

        def stored(indices: Iterable[int]) -> Tensor:
            return _stacked([self._latents_BL[index][row] for index in indices], like_L)

        if plan.keeps_consecutive_steps:
            return split_chain(stored([*plan.kept_steps, plan.kept_steps[-1] + 1]))
        return stored(plan.kept_steps), stored(index + 1 for index in plan.kept_steps)


def _stacked(rows: list[Tensor], like: Tensor) -> Tensor:
    """The rows as one tensor, which is empty with the shape and dtype of `like` rows if there are none."""
    if rows:
        return torch.stack(rows)
    return like.new_empty((0, *like.shape))
