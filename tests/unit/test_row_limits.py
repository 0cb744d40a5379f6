"""When memory runs out during generation, batches are halved, and later batches start with the smaller size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from live_runs import TINY
from torch import Tensor
from toy_model import TOY_SIZE, ToyModel

from digenrl.config.algorithms import Needs
from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.recipes.recipe import Recipe
from digenrl.config.recipes.windows import AllSteps
from digenrl.exchange.folder import ExchangeFolder
from digenrl.exchange.tensors import TensorExchange
from digenrl.generation.rollout import GeneratedSlice, RolloutSettings, decode_slice, generate_slice
from digenrl.generation.row_limits import RowLimit
from digenrl.generation.windows import plan_rollouts
from digenrl.models.contract import DiffusionModel
from digenrl.models.trajectory import StepNoise
from digenrl.records import Calibrate, Encode, Evaluate, Generate, HeldOutChunk, PromptRow, Slice
from digenrl.testing.tiny_models import make_tiny_pipeline
from digenrl.worker.blueprint import load_model, load_text_encoders, read_blueprint
from digenrl.worker.calibration import StageCalibration
from digenrl.worker.stages import Stages, WorkerParts

GROUP = Slice(step=0, group=0, first=0, size=5)


def limit_rows(model: DiffusionModel, **fits: int) -> dict[str, list[int]]:
    """Makes these methods run out of memory above a number of rows; returns the sizes of all calls."""
    asked: dict[str, list[int]] = {name: [] for name in fits}

    def limited(name: str, method: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(latents_BL: Tensor, *others: Any) -> Tensor:
            asked[name].append(len(latents_BL))
            if len(latents_BL) > fits[name]:
                raise torch.OutOfMemoryError("no room")
            return method(latents_BL, *others)

        return call

    for name in fits:
        setattr(model, name, limited(name, getattr(model, name)))
    return asked


def generate(model: ToyModel, piece: Slice = GROUP, limit: RowLimit | None = None) -> GeneratedSlice:
    plans = plan_rollouts(
        AllSteps(),
        tuple(piece.samples()),
        schedule=model.schedule(3, TOY_SIZE),
        size=TOY_SIZE,
        noise=StepNoise("flow", 0.7),
        guidance=1.0,
        run_seed=1,
    )
    row = model.encode(["a cat"])
    settings = RolloutSettings(run_seed=1, needs=Needs(step_means=True, final_latents=True))
    return generate_slice(model, row, plans, piece, settings, version=0, limit=limit)


def test_a_slice_that_does_not_fit_is_generated_in_halves_with_the_same_samples() -> None:
    whole = generate(ToyModel())
    model, limit = ToyModel(), RowLimit()
    asked = limit_rows(model, velocity=2)
    halved = generate(model, limit=limit)
    assert asked["velocity"] == [5, 3, *[2] * 6, *[1] * 3]
    assert [t.sample for t in halved.trajectories] == [t.sample for t in whole.trajectories]
    torch.testing.assert_close(halved.final_BL, whole.final_BL)
    for one, other in zip(halved.trajectories, whole.trajectories, strict=True):
        torch.testing.assert_close(one.latents_KL, other.latents_KL)
        torch.testing.assert_close(one.log_prob_K, other.log_prob_K)
    asked["velocity"].clear()
    generate(model, Slice(0, 1, 0, 4), limit)
    assert asked["velocity"] == [2] * 6  # the limit is remembered


def test_decoding_that_does_not_fit_is_repeated_without_the_denoising() -> None:
    model, limit = ToyModel(), RowLimit(4)
    expected = decode_slice(model, generate(model))
    asked = limit_rows(model, velocity=9, decode=2)
    pixels = decode_slice(model, generate(model), limit)
    assert (asked["velocity"], asked["decode"]) == ([5] * 3, [3, 2, 2, 1])
    assert torch.equal(pixels, expected)


def test_parts_are_even_so_that_they_have_few_sizes() -> None:
    parts = RowLimit(4).run(6, lambda rows: list(range(8))[rows])
    assert parts == [[0, 1, 2], [3, 4, 5]]


def test_a_single_sample_that_does_not_fit_is_a_config_error() -> None:
    model = ToyModel()
    limit_rows(model, velocity=0)
    with pytest.raises(ConfigError, match=r"denoising.*sample\.height"):
        generate(model)


def test_a_worker_remembers_from_its_calibration_what_fits(tmp_path: Path) -> None:
    make_tiny_pipeline("sd3", tmp_path / "model")
    evaluation = {"prompts": {"path": "held_out.txt"}, "denoising_steps": 2, "batch": 3}
    model_settings = {"family": "sd3", "source": str(tmp_path / "model"), "guidance": 1.0}
    blueprint = read_blueprint(parse_model(Recipe, {**TINY, "model": model_settings, "evaluation": evaluation}))
    (tmp_path / "exchange").mkdir()
    exchange, prompt = TensorExchange(ExchangeFolder(tmp_path / "exchange")), PromptRow("prompt-0", "a cat", {})
    model, encoder = load_model(blueprint, "cpu"), load_text_encoders(blueprint, "cpu")
    asked = limit_rows(model, velocity=2, decode=2)
    stages = Stages(WorkerParts(blueprint, exchange, encoder, model))
    stages.encode(Encode(0, 0, step=0, groups=(0,), prompts=(prompt,)))
    job = Calibrate(1, 0, "generate", prompt, sizes=(4,), held_out=(3,))
    calibrated = StageCalibration(stages).calibrate(job)
    assert calibrated.seconds.keys() == {4} and calibrated.peak_bytes == {4: 0}
    assert {max(rows) for rows in asked.values()} == {4}
    for rows in asked.values():
        rows.clear()
    stages.generate(Generate(2, 0, Slice(0, 0, 0, 4), lane=0, version=0, prompt=prompt))
    chunk = HeldOutChunk(version=0, index=0)
    stages.evaluate(Evaluate(3, 0, chunk, lane=0, prompts=(prompt,) * 3))
    assert {max(rows) for rows in asked.values()} == {2}
    asked["decode"].clear()
    StageCalibration(stages).sample_group(prompt, samples=2, at_once=2)
    assert not asked["decode"], "ranks that replay these samples may have their VAE on another device"


def test_several_ranks_that_run_out_of_memory_together_do_not_try_again() -> None:
    model = ToyModel()
    asked = limit_rows(model, velocity=3)
    with pytest.raises(ConfigError, match=r"5 samples on several cards.* batch\.slice"):
        generate(model, limit=RowLimit(doing="denoising", several_ranks=True))
    assert asked == {"velocity": [5]}
