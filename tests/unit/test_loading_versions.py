"""Which versions a generator loads: the first that it is sent, then newer ones only."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_runs import TINY

from digenrl.config.reading import parse_model
from digenrl.config.recipes.recipe import Recipe
from digenrl.exchange.folder import ExchangeFolder
from digenrl.exchange.tensors import TensorExchange
from digenrl.models.model_weights import load_weights, weights_state
from digenrl.records import Publish
from digenrl.testing.tiny_models import make_tiny_pipeline
from digenrl.worker.blueprint import load_model, read_blueprint
from digenrl.worker.stages import Stages, WorkerParts


def test_a_generator_loads_the_first_version_and_then_newer_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_pipeline("sd3", tmp_path / "model")
    settings = {"family": "sd3", "source": str(tmp_path / "model"), "guidance": 1.0}
    blueprint = read_blueprint(parse_model(Recipe, {**TINY, "model": settings}))
    (tmp_path / "exchange").mkdir()
    exchange = TensorExchange(ExchangeFolder(tmp_path / "exchange"))
    model = load_model(blueprint, "cpu")
    loaded: list[int] = []

    def recorded(*arguments: object) -> None:
        loaded.append(version)
        load_weights(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("digenrl.worker.stages.load_weights", recorded)
    stages = Stages(WorkerParts(blueprint, exchange, model=model))
    for job_id, version in enumerate((0, 0, 2, 1, 2, 3)):
        reference = exchange.put_weights(f"weights-{version}", weights_state(model))
        assert stages.publish(Publish(job_id, 0, version, (0,), reference)).job.version == version
    assert loaded == [0, 2, 3] and stages.version == 3
