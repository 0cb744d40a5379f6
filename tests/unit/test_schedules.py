"""The sigmas of every family with its published scheduler configuration; no weights are read."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from diffusers import (
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    UniPCMultistepScheduler,
)

from digenrl.config.reading import ConfigError
from digenrl.models.contract import DiffusionModel, SampleSize
from digenrl.models.pipeline_model import schedule_of
from digenrl.models.registry import find_family

KNOWN = {
    "sd3": (SampleSize(512, 512), [1, 0.857692, 0.602151, 0.008929, 0]),
    "flux": (SampleSize(512, 512), [1, 0.849235, 0.652489, 0.384945, 0]),
    "flux2_klein": (SampleSize(512, 512), [1, 0.958085, 0.883982, 0.717496, 0]),
    "flux2_dev": (SampleSize(512, 512), [1, 0.958085, 0.883982, 0.717496, 0]),
    "hunyuan_video_1_5": (SampleSize(480, 480, frames=5), [1, 0.9375, 0.833333, 0.625, 0]),
    "z_image": (SampleSize(512, 512), [1, 0.947368, 0.857143, 0.666667, 0]),
    "qwen_image": (SampleSize(1024, 1024), [1, 0.766709, 0.455614, 0.02, 0]),
    "hunyuan_video": (SampleSize(480, 480, frames=53), [1, 0.954545, 0.875, 0.7, 0]),
    "wan": (SampleSize(480, 832, frames=53), [0.999999, 0.900120, 0.750375, 0.500999, 0]),
}

SHIFTED_BY_SIZE = {"flux", "flux2_klein", "flux2_dev", "qwen_image"}


@cache
def full_size(family: str) -> DiffusionModel:
    """Takes no memory: it is on the meta device."""
    return find_family(family).build_full(torch.bfloat16, "meta")


def levels(family: str, steps: int, size: SampleSize) -> list[float]:
    values: list[float] = full_size(family).schedule(steps, size).sigmas.tolist()
    return values


@pytest.mark.parametrize("family", KNOWN)
def test_four_steps_have_the_published_sigmas(family: str) -> None:
    size, expected = KNOWN[family]
    assert levels(family, 4, size) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("family", KNOWN)
def test_timesteps_are_a_thousand_times_the_sigmas_and_integers_only_for_wan(family: str) -> None:
    schedule = full_size(family).schedule(4, KNOWN[family][0])
    expected = schedule.sigmas[:-1] * 1000
    torch.testing.assert_close(schedule.timesteps, expected.floor() if family == "wan" else expected)


@pytest.mark.parametrize("family", KNOWN)
def test_only_some_families_shift_by_the_size_of_a_sample(family: str) -> None:
    size, known = KNOWN[family]
    larger = SampleSize(size.height, size.width + 256, size.frames)
    assert (levels(family, 4, larger) != levels(family, 4, size)) == (family in SHIFTED_BY_SIZE)
    assert known[0] == pytest.approx(levels(family, 4, larger)[0], abs=1e-6)


def test_the_shift_of_flux_at_1024_pixels_is_exp_of_1_15() -> None:
    shift = float(torch.tensor(1.15).exp())
    half = levels("flux", 2, SampleSize(1024, 1024))[1]
    assert half == pytest.approx(shift / (shift + 1), abs=1e-6)


@pytest.mark.parametrize("steps", [2, 10, 50])
@pytest.mark.parametrize("side", [512, 1328])
def test_the_last_noise_level_of_qwen_image_is_always_its_terminal_one(steps: int, side: int) -> None:
    assert levels("qwen_image", steps, SampleSize(side, side))[-2] == pytest.approx(0.02, abs=1e-6)


@pytest.mark.parametrize("family", KNOWN)
def test_a_single_step_goes_from_noise_to_data(family: str) -> None:
    assert levels(family, 1, KNOWN[family][0]) == pytest.approx([1, 0], abs=1e-5)


def test_the_levels_of_hunyuan_video_are_shifted_once_at_their_end_too() -> None:
    """`set_timesteps(N)` alone starts from an end that is shifted already."""
    family = find_family("hunyuan_video")
    twice = family.scheduler.build()
    twice.set_timesteps(4)
    once = levels("hunyuan_video", 4, KNOWN["hunyuan_video"][0])
    assert max(abs(a - b) for a, b in zip(once, twice.sigmas.tolist(), strict=True)) > 0.1


def test_another_shift_in_the_scheduler_of_wan_is_followed() -> None:
    model = find_family("wan").build_full(torch.bfloat16, "meta")
    published = model.pipeline.scheduler.config
    model.pipeline.scheduler = UniPCMultistepScheduler.from_config(published, flow_shift=5.0)
    middle = model.schedule(2, SampleSize(720, 1280, frames=81)).sigmas[1]
    unshifted = (1 + 1 / 1000) / 2
    assert float(middle) == pytest.approx(5 * unshifted / (1 + 4 * unshifted), abs=1e-6)


def test_a_given_shift_is_followed_by_other_schedulers_of_wan_or_refused() -> None:
    model = find_family("wan").build_full(torch.bfloat16, "meta")
    model.pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    even = torch.tensor([1, 0.75, 0.5, 0.25, 0])
    torch.testing.assert_close(model.shifted_schedule(4, 8.0).sigmas, 8 * even / (1 + 7 * even))
    model.pipeline.scheduler = EulerDiscreteScheduler()
    with pytest.raises(ConfigError, match=r"sample\.shift: .*EulerDiscreteScheduler has no `flow_shift`"):
        model.shifted_schedule(4, 8.0)


def test_a_given_shift_is_followed_by_a_solver_for_flows() -> None:
    model = find_family("sd3").build_full(torch.bfloat16, "meta")
    flows = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    model.pipeline.scheduler = UniPCMultistepScheduler(**flows)
    two, nine = (model.shifted_schedule(4, shift).sigmas for shift in (2.0, 9.0))
    assert (nine[1:-1] > two[1:-1]).all()


def test_the_levels_that_a_pipeline_of_qwen_image_2_1_sets_are_followed_or_interpolated() -> None:
    model = find_family("qwen_image_2_1").build_full(torch.bfloat16, "meta")
    own, size = [1.0, 0.95, 0.85, 0.4], SampleSize(512, 512)
    model.pipeline.register_to_config(sample_sigmas=own)
    model.pipeline.scheduler = FlowMatchEulerDiscreteScheduler()
    assert model.schedule(4, size).sigmas.tolist() == pytest.approx([*own, 0])
    assert model.schedule(8, size).sigmas[::2].tolist() == pytest.approx([*own, 0])
    assert model.step_arguments(4)["sigmas"] == own


def test_a_transformer_of_qwen_image_2_1_whose_text_depends_on_time_is_refused() -> None:
    family = find_family("qwen_image_2_1")
    pipeline = family.build_full(torch.bfloat16, "meta").pipeline
    pipeline.transformer.register_to_config(causal_condition=False)
    with pytest.raises(ConfigError, match="causal_condition"):
        family.model_class(pipeline)


@pytest.mark.parametrize(
    ("scheduler", "reason"),
    [
        (EulerDiscreteScheduler(), "EulerDiscreteScheduler has no noise levels of a flow"),
        (UniPCMultistepScheduler(), "UniPCMultistepScheduler has no noise levels of a flow"),
        (FlowMatchHeunDiscreteScheduler(), "FlowMatchHeunDiscreteScheduler has no noise levels of a flow"),
        (FlowMatchEulerDiscreteScheduler(invert_sigmas=True), "invert_sigmas"),
    ],
)
def test_schedulers_with_other_noise_levels_are_refused(scheduler: Any, reason: str) -> None:
    pipeline = find_family("sd3").build_full(torch.bfloat16, "meta").pipeline
    pipeline.scheduler = scheduler
    with pytest.raises(ConfigError, match=reason):
        find_family("sd3").model_class(pipeline)


def test_levels_that_do_not_decrease_are_refused() -> None:
    scheduler = FlowMatchHeunDiscreteScheduler()
    scheduler.set_timesteps(4)
    with pytest.raises(ConfigError, match="do not decrease from 1 to 0"):
        schedule_of(scheduler)


@pytest.mark.parametrize("family", KNOWN)
@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
def test_a_given_shift_replaces_the_schedulers_own(family: str, shift: float) -> None:
    found = full_size(family).shifted_schedule(4, shift).sigmas
    even = torch.tensor([1, 0.75, 0.5, 0.25, 0])
    tolerance = 2e-3 if family == "wan" else 1e-6  # UniPC spaces its levels in its own way
    assert torch.allclose(found, shift * even / (1 + (shift - 1) * even), atol=tolerance)
