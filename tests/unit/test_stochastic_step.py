"""The stochastic step against hand-computed values, torch's own normal density and the marginals of exact data."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from digenrl.models.contract import Schedule
from digenrl.models.stochastic_step import TRUNCATED_STD, StepTimes, stochastic_step
from digenrl.models.trajectory import NoiseKind, StepNoise

KINDS: tuple[NoiseKind, ...] = ("flow", "dance", "cps", "truncated_flow", "linear", "ddim")
SECOND_SIGMA = 0.9


def schedule_of(sigmas: list[float]) -> Schedule:
    return Schedule(torch.tensor(sigmas), torch.tensor(sigmas[:-1]) * 1000)


def times_of(sigma: list[float], next_sigma: list[float], index: list[int]) -> StepTimes:
    return StepTimes(
        torch.tensor(index),
        torch.tensor(sigma, dtype=torch.float64),
        torch.tensor(next_sigma, dtype=torch.float64),
        torch.tensor(sigma, dtype=torch.float64) * 1000,
        torch.full((len(sigma),), SECOND_SIGMA, dtype=torch.float64),
    )


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


EVEN = schedule_of([1.0, 0.8, 0.6, 0.4, 0.2, 0.0])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.float64, 6e-7)])
@pytest.mark.parametrize(
    "kind, level, sigma, next_sigma, index, mean, std, log_prob",
    [
        ("flow", 0.7, 0.8, 0.6, 3, 0.6305, 0.626099, -0.543332),
        ("dance", 0.3, 0.8, 0.6, 3, 0.887625, 0.134164, 1.085499),
        ("cps", 0.8, 0.8, 0.6, 3, 0.443951, 0.570634, -0.677289),
        ("flow", 0.7, 1.0, 0.9, 0, 0.705, 0.7, -0.601065),
        ("linear", 1.0, 0.8, 0.6, 3, 0.82872, 0.321994, 0.189782),
        ("ddim", 1.0, 0.8, 0.6, 3, 0.4875, 0.556215, -0.607339),
    ],
)
def test_scalar_steps_have_the_hand_computed_mean_std_and_log_prob(
    kind, level, sigma, next_sigma, index, mean, std, log_prob, dtype, tolerance
) -> None:
    ones = torch.ones(1, 2, 3, dtype=dtype)
    times = times_of([sigma], [next_sigma], [index])
    step = stochastic_step(ones, 0.5 * ones, times, StepNoise(kind, level), next_latents_BL=0.9 * ones)
    torch.testing.assert_close(step.mean_BL, mean * ones, atol=tolerance, rtol=0)
    assert step.std_B.item() == pytest.approx(std, abs=tolerance)
    assert step.log_prob_B.item() == pytest.approx(log_prob, abs=3 * tolerance)
    assert step.mean_BL.dtype == step.log_prob_B.dtype == dtype


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["level 0", "no z", "rows without noise"])
def test_zero_noise_is_bitwise_the_euler_step(kind: NoiseKind, way: str) -> None:
    x_BL, v_BL, z_BL = normal(5, 4, 3, seed=1), normal(5, 4, 3, seed=2), normal(5, 4, 3, seed=3)
    times = StepTimes.at(EVEN, [0, 1, 2, 3, 4])
    step = stochastic_step(
        x_BL,
        v_BL,
        times,
        StepNoise(kind, 0.0 if way == "level 0" else 0.5),
        z_BL=None if way == "no z" else z_BL,
        stochastic_B=torch.zeros(5, dtype=torch.bool) if way == "rows without noise" else None,
    )
    change_B = (times.next_sigma_B - times.sigma_B).view(5, 1, 1)
    assert torch.equal(step.next_latents_BL, x_BL + change_B * v_BL)
    assert torch.equal(step.std_B, torch.zeros(5))
    assert step.log_prob_B.isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_log_prob_is_that_of_torchs_normal(kind: NoiseKind) -> None:
    times = StepTimes.at(EVEN, [0, 1, 2, 3])
    x, v, next_x = (normal(4, 3, 5, 5, seed=seed, dtype=torch.float64) for seed in (1, 2, 3))
    step = stochastic_step(x, v, times, StepNoise(kind, 0.7), next_latents_BL=next_x)
    density = torch.distributions.Normal(step.mean_BL, step.std_B.view(4, 1, 1, 1))
    torch.testing.assert_close(step.log_prob_B, density.log_prob(next_x).mean(dim=(1, 2, 3)), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_scoring_a_sampled_step_again_gives_bitwise_its_log_prob(kind: NoiseKind, dtype: torch.dtype) -> None:
    times = StepTimes.at(EVEN, [0, 1, 2, 3])
    x, v, z = (normal(4, 3, 5, 5, seed=seed, dtype=dtype) for seed in (1, 2, 3))
    sampled = stochastic_step(x, v, times, StepNoise(kind, 0.7), z_BL=z)
    assert sampled.next_latents_BL.dtype == dtype
    scored = stochastic_step(x, v, times, StepNoise(kind, 0.7), next_latents_BL=sampled.next_latents_BL)
    assert torch.equal(scored.log_prob_B, sampled.log_prob_B)
    assert scored.log_prob_B.isfinite().all()
    # z has mean square near 1, so the log-prob is near its expectation: the sample really has the stated density.
    expected_B = -0.5 - scored.std_B.log() - math.log(2 * math.pi) / 2
    torch.testing.assert_close(scored.log_prob_B, expected_B, atol=0.35, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sigma_off_by_a_thousandth_changes_the_log_prob(kind: NoiseKind) -> None:
    times = StepTimes.at(EVEN, [1, 2, 3])
    x, v, z = (normal(3, 4, 4, 4, seed=seed) for seed in (1, 2, 3))
    sampled = stochastic_step(x, v, times, StepNoise(kind, 0.5), z_BL=z)
    shifted = replace(times, sigma_B=times.sigma_B + 1e-3)
    scored = stochastic_step(x, v, shifted, StepNoise(kind, 0.5), next_latents_BL=sampled.next_latents_BL)
    assert (scored.log_prob_B != sampled.log_prob_B).all()
    assert ((scored.log_prob_B - sampled.log_prob_B).exp() - 1).abs().max() > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_rows_at_different_steps_are_stepped_as_if_alone(kind: NoiseKind) -> None:
    x, v, z = (normal(5, 3, 4, seed=seed) for seed in (1, 2, 3))
    indices, stochastic_B = [3, 0, 4, 1, 1], torch.tensor([True, True, False, False, True])
    schedule, noise = EVEN, StepNoise(kind, 0.6)
    both = stochastic_step(x, v, StepTimes.at(schedule, indices), noise, z_BL=z, stochastic_B=stochastic_B)
    for row, index in enumerate(indices):
        alone = stochastic_step(
            x[row : row + 1],
            v[row : row + 1],
            StepTimes.of_rows([(schedule, index)]),
            noise,
            z_BL=z[row : row + 1],
            stochastic_B=stochastic_B[row : row + 1],
        )
        assert torch.equal(both.next_latents_BL[row], alone.next_latents_BL[0])
        torch.testing.assert_close(both.log_prob_B[row], alone.log_prob_B[0], equal_nan=True)
    assert (both.std_B == 0).tolist() == [False, False, True, True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_step_gets_no_noise_and_cannot_be_scored(kind: NoiseKind) -> None:
    schedule = EVEN
    x, v, z = (normal(1, 6, seed=seed) for seed in (1, 2, 3))
    last = StepTimes.at(schedule, [4])
    step = stochastic_step(x, v, last, StepNoise(kind, 0.7), z_BL=z)
    assert torch.equal(step.next_latents_BL, stochastic_step(x, v, last, StepNoise(kind, 0.0)).next_latents_BL)
    with pytest.raises(ValueError, match="step 4 of row 0 has no noise"):
        stochastic_step(x, v, last, StepNoise(kind, 0.7), next_latents_BL=x)


@pytest.mark.parametrize("kind", ["flow", "dance", "linear"])
def test_the_last_step_gets_noise_if_it_is_selected(kind: NoiseKind) -> None:
    x, v, z = (normal(1, 6, seed=seed, dtype=torch.float64) for seed in (1, 2, 3))
    last, noise = StepTimes.at(EVEN, [4]), StepNoise(kind, 0.7)
    step = stochastic_step(x, v, last, noise, z_BL=z, stochastic_B=torch.tensor([True]))
    diffusion = {"flow": 0.7 * math.sqrt(0.2 / 0.8), "dance": 0.7, "linear": 0.7 * 0.8 * 0.2}[kind]
    assert step.std_B.item() == pytest.approx(diffusion * math.sqrt(0.2))
    torch.testing.assert_close(step.next_latents_BL, step.mean_BL + step.std_B * z)


def test_linear_noise_rises_from_the_schedules_end_to_its_second_level() -> None:
    sigmas = [0.999999, 0.9, 0.7, 0.3, 0.0]
    x, v, z = (normal(4, 5, seed=seed, dtype=torch.float64) for seed in (1, 2, 3))
    times, every = StepTimes.at(schedule_of(sigmas), [0, 1, 2, 3]), torch.ones(4, dtype=torch.bool)
    step = stochastic_step(x, v, times, StepNoise("linear", 1.0), z_BL=z, stochastic_B=every)
    for row, (sigma, next_sigma) in enumerate(pairwise(sigmas)):
        lowest, highest, h = sigmas[-1], sigmas[1], sigma - next_sigma
        g = lowest + (highest - lowest) * sigma
        drift = v[row] + g**2 / (2 * sigma) * (x[row] + (1 - sigma) * v[row])
        torch.testing.assert_close(step.mean_BL[row], x[row] - h * drift, rtol=1e-6, atol=1e-6)
        assert step.std_B[row].item() == pytest.approx(g * math.sqrt(h), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_squared_error_is_a_log_prob_without_constants(kind: NoiseKind) -> None:
    times = StepTimes.at(EVEN, [0, 2, 3])
    x, v, z = (normal(3, 4, 5, seed=seed, dtype=torch.float64) for seed in (1, 2, 3))
    noise = StepNoise(kind, 0.7, "squared_error")
    sampled = stochastic_step(x, v, times, noise, z_BL=z)
    density = stochastic_step(x, v, times, StepNoise(kind, 0.7), z_BL=z)
    assert torch.equal(sampled.next_latents_BL, density.next_latents_BL), "samples are the same"
    expected_B = -(sampled.std_B.view(3, 1, 1) * z).square().mean(dim=(1, 2))
    torch.testing.assert_close(sampled.log_prob_B, expected_B, rtol=1e-12, atol=1e-14)
    euler = stochastic_step(x, v, times, noise, z_BL=z, stochastic_B=torch.tensor([True, False, True]))
    assert euler.log_prob_B.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("kind", ["flow", "truncated_flow"])
def test_step_0_is_recognized_by_its_index_even_if_sigma_starts_slightly_below_1(kind: NoiseKind) -> None:
    x, v = torch.ones(1, 4), torch.full((1, 4), 0.5)
    level = 0.4  # below the truncation, so that both kinds agree
    exact = stochastic_step(x, v, times_of([1.0], [0.9], [0]), StepNoise(kind, level), next_latents_BL=x)
    nearly = stochastic_step(x, v, times_of([0.999999], [0.9], [0]), StepNoise(kind, level), next_latents_BL=x)
    assert exact.std_B.item() == pytest.approx(level)
    torch.testing.assert_close(nearly.mean_BL, exact.mean_BL, atol=1e-5, rtol=0)
    torch.testing.assert_close(nearly.std_B, exact.std_B, atol=1e-5, rtol=0)


def test_truncation_binds_only_where_flow_noise_is_larger() -> None:
    x, v = normal(4, 8, seed=1), normal(4, 8, seed=2)
    times = StepTimes.at(EVEN, [0, 1, 2, 3])
    flow = stochastic_step(x, v, times, StepNoise("flow", 0.7), next_latents_BL=x)
    cut = stochastic_step(x, v, times, StepNoise("truncated_flow", 0.7), next_latents_BL=x)
    torch.testing.assert_close(cut.std_B, flow.std_B.clamp(max=TRUNCATED_STD))
    is_cut_B = flow.std_B > TRUNCATED_STD
    assert is_cut_B.tolist() == [True, True, False, False]
    assert torch.equal(cut.mean_BL[~is_cut_B], flow.mean_BL[~is_cut_B])
    assert not torch.allclose(cut.mean_BL[is_cut_B], flow.mean_BL[is_cut_B])


def test_the_gradient_flows_through_the_prediction_and_not_through_the_next_latents() -> None:
    x = normal(2, 6, seed=1, dtype=torch.float64).requires_grad_()
    next_x = normal(2, 6, seed=2, dtype=torch.float64).requires_grad_()
    v = normal(2, 6, seed=3, dtype=torch.float64).requires_grad_()
    times = StepTimes.at(EVEN, [1, 3])
    step = stochastic_step(x, v, times, StepNoise("flow", 0.7), next_latents_BL=next_x)
    step.log_prob_B.sum().backward()
    assert next_x.grad is None
    assert v.grad is not None

    def score(velocity: Tensor) -> Tensor:
        return stochastic_step(x, velocity, times, StepNoise("flow", 0.7), next_latents_BL=next_x).log_prob_B

    assert torch.autograd.gradcheck(score, (v.detach().requires_grad_(),))


def test_half_precision_latents_are_stepped_in_fp32_and_stored_rounded() -> None:
    x, v, z = (normal(3, 64, seed=seed, dtype=torch.bfloat16) for seed in (1, 2, 3))
    times = StepTimes.at(EVEN, [1, 2, 3])
    low = stochastic_step(x, v, times, StepNoise("dance", 0.3), z_BL=z)
    high = stochastic_step(x.float(), v.float(), times, StepNoise("dance", 0.3), z_BL=z.float())
    assert torch.equal(low.mean_BL, high.mean_BL)
    assert torch.equal(low.next_latents_BL, high.next_latents_BL.bfloat16())
    rounded = low.next_latents_BL.float()
    scored = stochastic_step(x.float(), v.float(), times, StepNoise("dance", 0.3), next_latents_BL=rounded)
    assert torch.equal(low.log_prob_B, scored.log_prob_B)


def denoised_std(kind: NoiseKind, level: float, steps: int, samples: int) -> float:
    """The std of exact Gaussian data, N(1.3, .6^2), after denoising by this kind with the exact velocity.

    The samples stand for quantiles: the first noise is a grid, and the rest is antithetic, so few samples suffice.
    """
    sigmas = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    schedule = Schedule(sigmas, sigmas[:-1] * 1000)
    data_mean, data_variance = 1.3, 0.36
    uniform = (torch.arange(samples, dtype=torch.float64) + 0.5) / samples
    x = torch.special.ndtri(uniform)[None]
    generator = torch.Generator().manual_seed(0)
    for index in range(steps):
        sigma = float(sigmas[index])
        slope = (sigma - (1 - sigma) * data_variance) / ((1 - sigma) ** 2 * data_variance + sigma**2)
        v = slope * (x - (1 - sigma) * data_mean) - data_mean
        z = torch.randn(1, samples, generator=generator, dtype=torch.float64)
        x = stochastic_step(x, v, StepTimes.at(schedule, [index]), StepNoise(kind, level), z_BL=z).next_latents_BL
    return float(x.std())


def exact_denoised_std(kind: NoiseKind, level: float, steps: int) -> float:
    """The same without sampling: the velocity is linear in x, so the variance can be followed step by step."""
    sigmas = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    schedule = Schedule(sigmas, sigmas[:-1] * 1000)
    variance = 1.0
    for index in range(steps):
        sigma = float(sigmas[index])
        slope = (sigma - (1 - sigma) * 0.36) / ((1 - sigma) ** 2 * 0.36 + sigma**2)
        one = torch.ones(1, 1, dtype=torch.float64)
        step = stochastic_step(one, slope * one, StepTimes.at(schedule, [index]), StepNoise(kind, level), z_BL=one)
        variance = variance * step.mean_BL.item() ** 2 + step.std_B.item() ** 2
    return math.sqrt(variance)


@pytest.mark.parametrize(
    "kind, level, steps, error",
    [("dance", 0.3, 100, -0.00727), ("dance", 0.3, 200, -0.00364), ("cps", 0.8, 400, -0.118)],
)
def test_denoising_exact_data_has_the_known_error_in_std(kind, level, steps, error) -> None:
    assert exact_denoised_std(kind, level, steps) - 0.6 == pytest.approx(error, abs=0.005 * abs(error) + 1e-5)


@pytest.mark.parametrize("steps", [100, 200, 400])
def test_flow_noise_keeps_the_marginals(steps: int) -> None:
    assert abs(exact_denoised_std("flow", 0.7, steps) - 0.6) < 0.002


@pytest.mark.parametrize("kind, level", [("dance", 0.3), ("flow", 0.7), ("cps", 0.8)])
def test_sampled_steps_have_the_std_that_their_means_and_stds_imply(kind: NoiseKind, level: float) -> None:
    assert denoised_std(kind, level, 100, 40_000) == pytest.approx(exact_denoised_std(kind, level, 100), abs=0.006)


@pytest.mark.parametrize(
    "noise, message",
    [
        (StepNoise("flwo", 0.7), "unknown noise kind 'flwo'; did you mean 'flow'"),  # type: ignore[arg-type]
        (StepNoise("flow", -0.1), "must be in .0, inf., got -0.1"),
        (StepNoise("flow", math.nan), "got nan"),
        (StepNoise("cps", 1.5), "level of cps noise must be in .0, 1.0., got 1.5"),
    ],
)
def test_invalid_noise_is_refused(noise: StepNoise, message: str) -> None:
    x = torch.ones(1, 2)
    with pytest.raises(ValueError, match=message):
        stochastic_step(x, x, StepTimes.at(EVEN, [1]), noise, z_BL=x)


@pytest.mark.parametrize("kind, sigma, next_sigma", [("flow", 1.0, 0.9), ("dance", 0.5, 0.6), ("flow", 0.5, 0.6)])
def test_a_step_without_finite_noise_is_refused_instead_of_giving_nan(kind, sigma, next_sigma) -> None:
    x = torch.ones(1, 2)
    with pytest.raises(ValueError, match=f"{kind} noise is not finite"):
        stochastic_step(x, x, times_of([sigma], [next_sigma], [2]), StepNoise(kind, 0.7), z_BL=x)
