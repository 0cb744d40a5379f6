"""Which versions a generator loads: the first that it is told to, then newer ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from digenrl.worker.orders import LoadWeights
from digenrl.worker.roles import Generating
from live_runs import TINY

from digenrl.config.reading import parse_model
from digenrl.config.recipe import Recipe
from digenrl.exchange.folder import ExchangeFolder
from digenrl.exchange.tensors import TensorExchange
from digenrl.models.model_weights import load_weights, weights_state
from digenrl.testing.tiny_models import make_tiny_pipeline
from digenrl.worker.blueprint import load_model, read_blueprint


def test_the_first_order_to_load_is_carried_out_and_then_those_of_newer_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny_pipeline("sd3", tmp_path / "model")
    settings = {"family": "sd3", "source": str(tmp_path / "model"), "guidance": 1.0}
    blueprint = read_blueprint(parse_model(Recipe, {**TINY, "model": settings}))
    (tmp_path / "exchange").mkdir()
    exchange = TensorExchange(ExchangeFolder(tmp_path / "exchange"))
    model = load_model(blueprint, "cpu")
    loaded: list[int] = []

    def noted(*arguments: object) -> None:
        loaded.append(version)
        load_weights(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("digenrl.worker.roles.load_weights", noted)
    generating = Generating(blueprint, model, exchange)
    for version in (0, 0, 2, 1, 2, 3):
        reference = exchange.put_weights(f"weights-{version}", weights_state(model))
        assert generating.load_weights(LoadWeights(version, reference)).version == version
    assert loaded == [0, 2, 3] and generating.version == 3
