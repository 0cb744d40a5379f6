"""Memory that runs out while samples are made: they are made in halves, and the next ones at once as small."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from digenrl.worker.orders import EncodedPrompt, EncodePrompts, EvaluatePrompts, MakeSlice, RehearseMaking
from digenrl.worker.roles import Encoding, Generating
from live_runs import TINY
from torch import Tensor
from toy_model import TOY_SIZE, ToyModel

from digenrl.config.algorithms import Needs
from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.recipe import Recipe
from digenrl.config.windows import AllSteps
from digenrl.exchange.folder import ExchangeFolder, WeightsReference
from digenrl.exchange.tensors import TensorExchange
from digenrl.generation.rollout import GeneratedSlice, RolloutSettings, decode_slice, generate_slice
from digenrl.generation.row_limits import RowLimit
from digenrl.generation.windows import plan_rollouts
from digenrl.models.contract import DiffusionModel
from digenrl.models.trajectory import StepNoise
from digenrl.records import Lease, Slice
from digenrl.testing.tiny_models import make_tiny_pipeline
from digenrl.worker.blueprint import load_model, load_text_encoders, read_blueprint

GROUP = Slice(step=0, group=0, first=0, size=5)


def short_of_memory(model: DiffusionModel, **fits: int) -> dict[str, list[int]]:
    """The methods of these names have room for so many rows; returns how many each was asked for."""
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


def made(model: ToyModel, piece: Slice = GROUP, limit: RowLimit | None = None) -> GeneratedSlice:
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


def test_a_slice_that_does_not_fit_is_made_in_halves_with_the_same_samples() -> None:
    whole = made(ToyModel())
    model, limit = ToyModel(), RowLimit()
    asked = short_of_memory(model, velocity=2)
    halved = made(model, limit=limit)
    assert asked["velocity"] == [5, 3, *[2] * 6, *[1] * 3]
    assert [t.sample for t in halved.trajectories] == [t.sample for t in whole.trajectories]
    torch.testing.assert_close(halved.final_BL, whole.final_BL)
    for one, other in zip(halved.trajectories, whole.trajectories, strict=True):
        torch.testing.assert_close(one.latents_KL, other.latents_KL)
        torch.testing.assert_close(one.log_prob_K, other.log_prob_K)
    asked["velocity"].clear()
    made(model, Slice(0, 1, 0, 4), limit)
    assert asked["velocity"] == [2] * 6  # what was found out is remembered


def test_decoding_that_does_not_fit_is_repeated_without_the_denoising() -> None:
    model, limit = ToyModel(), RowLimit(4)
    expected = decode_slice(model, made(model))
    asked = short_of_memory(model, velocity=9, decode=2)
    pixels = decode_slice(model, made(model), limit)
    assert (asked["velocity"], asked["decode"]) == ([5] * 3, [3, 2, 2, 1])
    assert torch.equal(pixels, expected)


def test_parts_are_even_so_that_they_have_few_sizes() -> None:
    parts = RowLimit(4).run(6, lambda rows: list(range(8))[rows])
    assert parts == [[0, 1, 2], [3, 4, 5]]


def test_one_sample_that_does_not_fit_is_the_users_to_make_smaller() -> None:
    model = ToyModel()
    short_of_memory(model, velocity=0)
    with pytest.raises(ConfigError, match=r"denoising a single sample; lower sample\.height.*model\.dtype"):
        made(model)


@pytest.fixture(scope="module")
def generating(tmp_path_factory: pytest.TempPathFactory) -> tuple[Generating, EncodedPrompt, dict[str, list[int]]]:
    """A generator of a tiny model with room for two rows, and a prompt that is encoded."""
    root = tmp_path_factory.mktemp("short")
    make_tiny_pipeline("sd3", root / "model")
    evaluation = {"prompts": {"path": "held_out.txt"}, "denoising_steps": 2, "batch": 3}
    model_settings = {"family": "sd3", "source": str(root / "model"), "guidance": 1.0}
    blueprint = read_blueprint(parse_model(Recipe, {**TINY, "model": model_settings, "evaluation": evaluation}))
    (root / "exchange").mkdir()
    exchange, prompt = TensorExchange(ExchangeFolder(root / "exchange")), EncodedPrompt("prompt-0", "a cat", {})
    Encoding(load_text_encoders(blueprint, "cpu"), exchange, None).encode(EncodePrompts((prompt,)))
    model = load_model(blueprint, "cpu")
    return Generating(blueprint, model, exchange), prompt, short_of_memory(model, velocity=2, decode=2)


def test_a_generator_remembers_what_fits_from_its_rehearsal_on(
    generating: tuple[Generating, EncodedPrompt, dict[str, list[int]]], tmp_path: Path
) -> None:
    role, prompt, asked = generating
    report = role.calibrate(RehearseMaking(prompt, sizes=(4,), held_out=(3,)))
    assert report.seconds.keys() == {4} and report.peak_bytes == {4: 0}
    assert {max(rows) for rows in asked.values()} == {4}
    for rows in asked.values():
        rows.clear()
    assert role.make_slice(MakeSlice(Lease(Slice(0, 0, 0, 4), 0, 0, 0, 0), prompt)).made.slice.size == 4
    order = EvaluatePrompts(0, (prompt,) * 3, 0, WeightsReference("", 0, 0), "held-out", str(tmp_path), shown=0)
    role.evaluate(order)
    assert {max(rows) for rows in asked.values()} == {2}
