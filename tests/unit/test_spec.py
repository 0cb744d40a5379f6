"""A SPEC is read exactly, and a wrong one is refused with the key that is wrong."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from digenrl.config.reading import ConfigError, parse_model, read_mapping
from digenrl.config.spec import Spec

SMALL: dict[str, Any] = {
    "steps": 4,
    "prompts": 2,
    "samples_per_prompt": 4,
    "slice": 2,
    "generators": [{"seconds": {2: 1.5}}],
    "trainer": {"seconds_per_sample": 0.1},
}


def test_evaluation_and_checkpoints_are_absent_by_default() -> None:
    spec = parse_model(Spec, SMALL)
    assert spec.evaluation is None and spec.checkpoint is None


def test_evaluation_and_checkpoints_are_read_with_exact_times() -> None:
    evaluation = {"every": 2, "chunks": 3, "chunk": 0.1}
    spec = parse_model(Spec, {**SMALL, "evaluation": evaluation, "checkpoint": {"every": 4, "seconds": 0.3}})
    assert spec.evaluation is not None and spec.checkpoint is not None
    assert (spec.evaluation.every, spec.evaluation.chunks) == (2, 3)
    assert (spec.evaluation.chunk, spec.evaluation.score) == (Decimal("0.1"), 0)
    assert (spec.checkpoint.every, spec.checkpoint.seconds) == (4, Decimal("0.3"))
    assert spec.with_rules(help="none") == spec


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"evaluation": {"every": 0, "chunks": 1, "chunk": 1}}, "evaluation.every"),
        ({"evaluation": {"every": 1, "chunks": 0, "chunk": 1}}, "evaluation.chunks"),
        ({"evaluation": {"every": 1, "chunks": 1, "chunk": 0}}, "evaluation.chunk"),
        ({"evaluation": {"every": 1, "chunks": 1, "chunk": 1, "score": -1}}, "evaluation.score"),
        ({"evaluation": {"every": 1, "chunk": 1}}, "evaluation.chunks"),
        ({"checkpoint": {"every": 1, "seconds": -1}}, "checkpoint.seconds"),
        ({"checkpoint": {"every": 1}}, "checkpoint.seconds"),
        ({"checkpoint": {"every": True, "seconds": 1}}, "checkpoint.every"),
        ({"generators": [{"seconds": {True: 1}}]}, "generators[0].seconds"),
        ({"reward": {"lanes": 10**30}}, "reward.lanes"),
        (
            {"trainer": {"seconds_per_sample": 1, "helper": {"lanes": 10**7, "seconds": {1: 1}}}},
            "trainer.helper.lanes",
        ),
        ({"evaluation": {"every": 1, "chunks": 10**30, "chunk": 1}}, "evaluation.chunks"),
    ],
)
def test_a_wrong_value_names_its_key(changes: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_model(Spec, {**SMALL, **changes})
    assert error.value.where.startswith(where)


@pytest.mark.parametrize(("name", "text"), [("a.yaml", "a: 1\nb: {c: 1, c: 2}\n"), ("a.json", '{"c": 1, "c": 2}')])
def test_a_key_that_is_given_twice_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=r"'c'.* twice"):
        read_mapping(tmp_path / name)


def test_a_merged_key_may_be_given_again(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: &a {b: 1, c: 2}\nd: {<<: *a, b: 3}\n")
    assert read_mapping(tmp_path / "a.yaml")["d"] == {"b": 3, "c": 2}
