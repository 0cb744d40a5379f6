"""The stochastic step: one function samples a step in the rollout and scores it again in training.

Every kind is linear in the latents and the prediction: x' = cx * x + cp * prediction + s * z with z ~ N(0, 1). The
three coefficients depend only on the row's place in the schedule. They are computed on the CPU in fp64, so they
are the same on every device. The latents are processed in fp32, or in fp64 if they are fp64.

Shape legend as in `digenrl.models.contract`. sigma' is the next sigma, h = sigma - sigma' > 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from digenrl.config.reading import nearest
from digenrl.models.contract import Schedule
from digenrl.models.trajectory import LogProb, NoiseKind, StepNoise
from digenrl.models.transfers import to_device, to_device_like

TRUNCATED_STD = 0.45  # the largest std of one truncated step


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The place of each row in its schedule, on the CPU; rows may be at different steps.

    `timestep_B` is the model's input, `second_sigma_B` the sigma at which step 1 of the row's schedule starts.
    """

    index_B: Tensor
    sigma_B: Tensor
    next_sigma_B: Tensor
    timestep_B: Tensor
    second_sigma_B: Tensor

    @classmethod
    def at(cls, schedule: Schedule, index_B: Sequence[int] | Tensor) -> StepTimes:
        """Rows of the same schedule."""
        index_B = torch.as_tensor(index_B, dtype=torch.int64, device="cpu")
        sigmas = schedule.sigmas
        second_sigma_B = sigmas[1].expand(len(index_B))
        return cls(index_B, sigmas[index_B], sigmas[index_B + 1], schedule.timesteps[index_B], second_sigma_B)

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[Schedule, int]]) -> StepTimes:
        """Rows with a schedule each."""
        each = [cls.at(schedule, [index]) for schedule, index in rows]
        return cls(*(torch.cat([getattr(row, field.name) for row in each]) for field in fields(cls)))

    def double(self) -> StepTimes:
        """The same with sigmas in fp64."""
        sigmas = {name: getattr(self, name).double() for name in ("sigma_B", "next_sigma_B", "second_sigma_B")}
        return replace(self, **sigmas)

    @property
    def step_size_B(self) -> Tensor:
        """h = sigma - sigma'."""
        return self.sigma_B - self.next_sigma_B

    def noise_time_B(self, kind: NoiseKind) -> Tensor:
        """t in std^2 = g^2 t: h for diffusions, 1 for kinds whose std does not come from a diffusion g."""
        return torch.ones_like(self.sigma_B) if kind in ("cps", "ddim") else self.step_size_B

    def __len__(self) -> int:
        return len(self.index_B)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one step, per row.

    `next_latents_BL` has the dtype of the latents that the step started from; `log_prob_B` is of exactly these
    rounded latents, averaged over a row's elements. Rows without noise have none: their `std_B` is 0 and their
    `log_prob_B` is NaN.
    """

    next_latents_BL: Tensor
    mean_BL: Tensor
    std_B: Tensor
    log_prob_B: Tensor


def stochastic_step(
    latents_BL: Tensor,
    prediction_BL: Tensor,
    times: StepTimes,
    noise: StepNoise,
    *,
    next_latents_BL: Tensor | None = None,
    z_BL: Tensor | None = None,
    stochastic_B: Tensor | None = None,
) -> StepResult:
    """One step of every row from its latents and the model's prediction, the velocity.

    Given `next_latents_BL` it scores them; given `z_BL`, standard normal noise, it samples; given neither it takes
    the Euler step. A sampled step scored again from equal latents and prediction has bitwise the same log-prob.
    `stochastic_B` (on the CPU) selects the rows that get noise: by default all but those at the last step of their
    schedule. The gradient flows through the prediction and the mean, never through the next latents.
    """
    assert next_latents_BL is None or z_BL is None, "either score the next latents or sample with z, not both"
    assert len(times) == len(latents_BL), f"{len(times)} places in the schedule for {len(latents_BL)} rows"
    if next_latents_BL is None and z_BL is None:
        stochastic_B = torch.zeros(len(times), dtype=torch.bool)
    coefficients = _coefficients(times, noise, stochastic_B)
    if next_latents_BL is not None and not bool(coefficients.std_B.all()):
        row = int(coefficients.std_B.argmin())
        raise ValueError(
            f"step {int(times.index_B[row])} of row {row} has no noise, so its log-prob is undefined; "
            "train only stochastic steps, and never the last"
        )
    dtype = torch.promote_types(torch.promote_types(latents_BL.dtype, prediction_BL.dtype), torch.float32)
    ours = coefficients
    numbers = torch.stack([ours.latents_B, ours.prediction_B, ours.std_B, *_scoring(ours.std_B, noise.log_prob)])
    # One asynchronous copy for all five.
    latents_B, prediction_B, std_B, offset_B, precision_B = to_device(numbers, latents_BL.device, dtype)

    def shaped(value_B: Tensor) -> Tensor:
        return value_B.view(-1, *[1] * (latents_BL.dim() - 1))

    mean_BL = shaped(latents_B) * latents_BL.to(dtype)
    mean_BL = mean_BL + shaped(prediction_B) * prediction_BL.to(dtype)
    if next_latents_BL is None:
        next_BL = mean_BL if z_BL is None else mean_BL + shaped(std_B) * to_device_like(z_BL, mean_BL)
        next_latents_BL = next_BL.to(latents_BL.dtype)
    next_latents_BL = next_latents_BL.detach()
    distance_B = (next_latents_BL.to(mean_BL) - mean_BL).square().flatten(1).mean(1)
    return StepResult(
        next_latents_BL=next_latents_BL,
        mean_BL=mean_BL,
        std_B=std_B,
        log_prob_B=-distance_B * precision_B - offset_B,
    )


def _scoring(std_B: Tensor, log_prob: LogProb) -> tuple[Tensor, Tensor]:
    """ln(std sqrt(2 pi)) and 1 / (2 std^2) or, for a squared error, 0 and 1; NaN where std is 0.

    The log-prob of a row is -distance times the second, minus the first, where the distance is the mean of
    (next - mean)^2 over the row's elements.
    """
    std_B = torch.where(std_B > 0, std_B, torch.nan)
    if log_prob == "squared_error":
        return 0 * std_B, std_B / std_B
    return std_B.log() + math.log(2 * math.pi) / 2, 0.5 / std_B.square()


@dataclass(frozen=True, slots=True)
class _Coefficients:
    """x' = latents_B * x + prediction_B * prediction + std_B * z, in fp64 on the CPU."""

    latents_B: Tensor
    prediction_B: Tensor
    std_B: Tensor


def _coefficients(times: StepTimes, noise: StepNoise, stochastic_B: Tensor | None) -> _Coefficients:
    """The coefficients of every row; rows without noise are deterministic."""
    known: list[str] = [*_KINDS]
    if noise.kind not in _KINDS:
        raise ValueError(f"unknown noise kind '{noise.kind}'; {nearest(noise.kind, known)}")
    highest = 1.0 if noise.kind in ("cps", "ddim") else math.inf
    if not 0 <= noise.level <= highest or math.isinf(noise.level):
        raise ValueError(f"the level of {noise.kind} noise must be in [0, {highest}], got {noise.level}")
    times = times.double()
    has_noise_B = times.next_sigma_B > 0 if stochastic_B is None else stochastic_B
    of_kind = _KINDS[noise.kind](times, noise.level)
    without = _dance(times, 0.0)
    # Without noise every kind is the Euler step. Using one formula for it makes it bitwise the same.
    has_noise_B = has_noise_B & (of_kind.std_B != 0)
    chosen = _Coefficients(
        latents_B=torch.where(has_noise_B, of_kind.latents_B, without.latents_B),
        prediction_B=torch.where(has_noise_B, of_kind.prediction_B, without.prediction_B),
        std_B=torch.where(has_noise_B, of_kind.std_B, 0.0),
    )
    if not bool((chosen.latents_B + chosen.prediction_B + chosen.std_B).isfinite().all()):
        places = f"{times.sigma_B.tolist()} to {times.next_sigma_B.tolist()}"
        raise ValueError(
            f"{noise.kind} noise is not finite from sigma {places}; sigma must decrease, and be 1 at step 0 only"
        )
    return chosen


def _diffused(times: StepTimes, diffusion_B: Tensor) -> _Coefficients:
    """The SDE of diffusion g with the flow's marginals: mu = x - h [v + g^2 / (2 sigma) noise^], s = g sqrt(h).

    noise^ = x + (1 - sigma) v is the noise that the velocity implies.
    """
    sigma_B, size_B = times.sigma_B, times.step_size_B
    pull_B = size_B * diffusion_B.square() / (2 * sigma_B)
    return _Coefficients(
        latents_B=1 - pull_B,
        prediction_B=-size_B - pull_B * (1 - sigma_B),
        std_B=diffusion_B * size_B.sqrt(),
    )


def _flow_diffusion(times: StepTimes, level: float) -> Tensor:
    """Flow-GRPO's g = a sqrt(sigma / (1 - sigma)), with sigma_1 in the denominator of step 0.

    Step 0 is recognized by its index: some schedules start slightly below 1, where 1 - sigma is tiny but not zero.
    """
    denominator_B = 1 - torch.where(times.index_B == 0, times.next_sigma_B, times.sigma_B)
    return level * (times.sigma_B / denominator_B).sqrt()


def _flow(times: StepTimes, level: float) -> _Coefficients:
    return _diffused(times, _flow_diffusion(times, level))


def _truncated_flow(times: StepTimes, level: float) -> _Coefficients:
    """Flow with g <- min(g, .45 / sqrt(h))."""
    largest_B = TRUNCATED_STD / times.step_size_B.sqrt()
    return _diffused(times, torch.minimum(_flow_diffusion(times, level), largest_B))


def _dance(times: StepTimes, level: float) -> _Coefficients:
    """DanceGRPO's constant g = eta."""
    return _diffused(times, torch.full_like(times.sigma_B, level))


def _linear(times: StepTimes, level: float) -> _Coefficients:
    """g = a sigma_1 sigma; a = 1 is the noise of Flow-GRPO for Wan.

    There g rises linearly from the schedule's last sigma, which is 0, at sigma = 0 to sigma_1 at sigma = 1.
    """
    return _diffused(times, level * times.second_sigma_B * times.sigma_B)


def _interpolated(times: StepTimes, kept_B: Tensor, std_B: Tensor) -> _Coefficients:
    """mu = (1 - sigma') x0^ + kept noise^, where x0^ and noise^ are those that the velocity implies."""
    sigma_B, next_sigma_B = times.sigma_B, times.next_sigma_B
    return _Coefficients(
        latents_B=(1 - next_sigma_B) + kept_B,
        prediction_B=kept_B * (1 - sigma_B) - (1 - next_sigma_B) * sigma_B,
        std_B=std_B,
    )


def _cps(times: StepTimes, level: float) -> _Coefficients:
    """Coefficient-preserving: mu = (1 - sigma') x0^ + sigma' cos(a pi/2) noise^, s = sigma' sin(a pi/2)."""
    kept_B = times.next_sigma_B * math.cos(level * math.pi / 2)
    return _interpolated(times, kept_B, times.next_sigma_B * math.sin(level * math.pi / 2))


def _ddim(times: StepTimes, level: float) -> _Coefficients:
    """DDIM with eta: mu = (1 - sigma') x0^ + sqrt(sigma'^2 - s^2) noise^.

    s is DDIM's for latents scaled to variance 1, sqrt(abar) x0 + sqrt(1 - abar) noise with
    abar = (1 - sigma)^2 / ((1 - sigma)^2 + sigma^2), and scaled back.
    """
    sigma_B, next_sigma_B = times.sigma_B, times.next_sigma_B
    signal_B, next_signal_B = (
        (1 - each_B).square() / ((1 - each_B).square() + each_B.square()) for each_B in (sigma_B, next_sigma_B)
    )
    share_B = (1 - signal_B / next_signal_B) / (1 - signal_B)
    variance_B = (level * next_sigma_B).square() * share_B
    return _interpolated(times, (next_sigma_B.square() - variance_B).sqrt(), variance_B.sqrt())


_KINDS: dict[NoiseKind, Callable[[StepTimes, float], _Coefficients]] = {
    "flow": _flow,
    "dance": _dance,
    "cps": _cps,
    "truncated_flow": _truncated_flow,
    "linear": _linear,
    "ddim": _ddim,
}
