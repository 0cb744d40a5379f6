"""Models with random weights need no download. The published size is replaced by a tiny one here."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from live_runs import lines_of
from rich.console import Console

from digenrl.commands.train import start_run
from digenrl.config.reading import ConfigError
from digenrl.config.recipes.files import read_recipe
from digenrl.driver.calibration import calibrate_remaining_sizes
from digenrl.models.family import Component, FullSize
from digenrl.models.loading.random_text_encoder import RandomTextEncoder
from digenrl.models.passes.compiled import compile_blocks
from digenrl.models.registry import FAMILIES
from digenrl.run_folder.folder import Status
from digenrl.testing.tiny_image_models import tiny_vae
from digenrl.worker.blueprint import load_model, load_text_encoders, read_blueprint

SIZE = FullSize(
    billions=0.0,
    transformer=Component(
        FAMILIES["sd3"].full_size().transformer.cls,
        {
            "sample_size": 8,
            "num_layers": 3,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": 24,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 12,
            "pos_embed_max_size": 16,
        },
    ),
    text_shapes={"encoder_hidden_states": (9, 24), "pooled_projections": (12,)},
)


@pytest.fixture(autouse=True)
def tiny_published_model(monkeypatch: pytest.MonkeyPatch) -> None:
    vae = Component(tiny_vae, {"published": FAMILIES["sd3"].vae})
    family = replace(FAMILIES["sd3"], sizes={"tiny": SIZE, "tinier": SIZE}, vae=vae)
    monkeypatch.setitem(FAMILIES, "sd3", family)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # a run sets it for its workers


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "prompts.txt").write_text("a cat\na dog\n")
    content: dict[str, Any] = {
        "steps": 2,
        "mode": "colocated",
        "model": {"family": "sd3", "source": "random", "guidance": 2.0},
        "prompts": {"path": "prompts.txt"},
        "rewards": "jpeg_compressibility",
        "sample": {"height": 32, "width": 32, "denoising_steps": 3},
        "batch": {"prompts": 2, "samples_per_prompt": 2, "slice": 2},
        "algorithm": {"name": "flow_grpo", "options": {"updates_per_batch": 1, "kl_weight": 0}},
        "training": {"pack_size": 3, "lora": {"rank": 2, "alpha": 4}},
        "lanes": {"device": "cpu", "threads": 1},
        "logging": {"tensorboard": False},
    }
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(content))
    return path


def train(recipe: Path, *overrides: str) -> list[dict[str, Any]]:
    """Trains in this process; returns the metrics of all steps."""
    out = recipe.parent / "run"
    assert start_run(str(recipe), overrides, out, Console(file=io.StringIO()), True) is Status.FINISHED
    return lines_of(out / "metrics.jsonl")


class Graphs:
    """A backend of `torch.compile` that counts graphs, in total and until the end of calibration."""

    def __init__(self) -> None:
        self.compiled = self.calibrated = 0

    def __call__(self, graph: Any, _inputs: list[Any]) -> Any:
        self.compiled += 1
        return graph.forward

    def calibrate_remaining_sizes(self, *arguments: Any) -> Any:
        calibration = calibrate_remaining_sizes(*arguments)
        self.calibrated = self.compiled
        return calibration


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    counted = Graphs()
    monkeypatch.setattr("digenrl.worker.blueprint.compile_blocks", partial(compile_blocks, backend=counted))
    monkeypatch.setattr("digenrl.runs.training.calibrate_remaining_sizes", counted.calibrate_remaining_sizes)
    torch._dynamo.reset()
    yield counted
    torch._dynamo.reset()


def test_a_run_compiles_nothing_after_calibration(recipe: Path, graphs: Graphs) -> None:
    steps = train(recipe, "model.compile=true")
    assert [step["step"] for step in steps] == [0, 1]
    assert all(step["gradient_norm"] > 0 and step["log_prob_mismatch"] < 1e-4 for step in steps)
    assert graphs.compiled == graphs.calibrated > 0


def test_on_a_cpu_nothing_is_compiled_by_default(recipe: Path, graphs: Graphs) -> None:
    (step,) = train(recipe, "steps=1", "model.base=nf4")
    assert step["pack_size"] == 3 and step["gradient_norm"] > 0
    assert graphs.compiled == 0


def test_the_seed_determines_the_weights_and_a_prompt_its_encoding(recipe: Path) -> None:
    def read(*overrides: str) -> Any:
        return read_blueprint(read_recipe(str(recipe), overrides))

    def weights(*overrides: str) -> dict[str, torch.Tensor]:
        return dict(load_model(read(*overrides), "cpu").transformer.state_dict())

    torch.manual_seed(1)
    once, again, other, named = weights(), weights(), weights("seed=1"), weights("model.source=random:tinier")
    assert all(torch.equal(again[name], value) and torch.equal(named[name], value) for name, value in once.items())
    assert not all(torch.equal(other[name], value) for name, value in once.items())

    texts = load_text_encoders(read(), "cpu")
    assert isinstance(texts, RandomTextEncoder)
    both, alone = texts.encode(["a cat", "a dog"]), texts.encode(["a dog"])
    for name, shape in SIZE.text_shapes.items():
        positive, negative = both.positive[name], both.negative[name]
        assert positive.shape == negative.shape == (2, *shape)
        assert torch.equal(positive[1], alone.positive[name][0]) and not torch.equal(positive[0], positive[1])
        assert torch.equal(negative[0], negative[1])


def test_an_unknown_size_is_reported_with_the_known_ones(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"'70b'.*tiny, tinier"):
        read_blueprint(read_recipe(str(recipe), ["model.source=random:70b"]))
    with pytest.raises(ConfigError, match=r"model\.text_tokens: 513 .*512.*sd3"):
        read_blueprint(read_recipe(str(recipe), ["model.text_tokens=513"]))


def test_a_recipe_sets_the_type_of_the_vae(recipe: Path) -> None:
    def vae_dtype(*overrides: str) -> torch.dtype:
        model = load_model(read_blueprint(read_recipe(str(recipe), ["model.dtype=bfloat16", *overrides])), "cpu")
        assert model.dtype == torch.bfloat16
        return model.vae.dtype  # type: ignore[attr-defined]

    assert vae_dtype() == torch.float32
    assert vae_dtype("model.vae_dtype=bfloat16") == torch.bfloat16


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.compile=sometimes", "model.compile.*'auto'.*'sometimes'"),
        ("model.vae_dtype=float16", "model.vae_dtype.*'float32'.*'float16'"),
        ("model.text_tokens=0", "model.text_tokens.*0"),
        ("training.gradient_checkpointing=most", "training.gradient_checkpointing.*'auto'.*'most'"),
        ("training.gradient_checkpointing=-1", "training.gradient_checkpointing.*-1"),
        ("training.gradient_checkpointing=1.5", r"training.gradient_checkpointing.*1\.5"),
    ],
)
def test_a_wrong_setting_is_reported_in_one_line(recipe: Path, override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        read_recipe(str(recipe), [override])
    assert "\n" not in str(caught.value)


def test_checkpointing_more_blocks_than_the_model_has_is_refused(recipe: Path) -> None:
    assert train(recipe, "training.gradient_checkpointing=2")
    with pytest.raises(ConfigError, match=r"gradient_checkpointing.*3 blocks"):
        start_run(
            str(recipe),
            ["training.gradient_checkpointing=4"],
            recipe.parent / "other",
            Console(file=io.StringIO()),
            True,
        )
