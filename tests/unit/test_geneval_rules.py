"""GenEval's rules against the verdicts of the authors' code on the same detections.

geneval_cases.jsonl has one case per kind of task and outcome, found by random search. A detection is class,
confidence, box and color. The verdicts are those of the functions that geneval_rules.py names.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from doc_pages import ROOT
from pydantic import ValidationError

from digenrl.config.rewards.geneval_tasks import Task
from digenrl.rewards.parts.geneval_rules import Box, Detection, judge, relations

CASES = [json.loads(line) for line in (ROOT / "tests" / "geneval_cases.jsonl").read_text().splitlines()]
# Values of the authors' `relative_position`.
POSITIONS: list[tuple[Box, Box, set[str]]] = [
    ((42, 50, 71, 62), (15, 10, 36, 27), {"below", "right of"}),
    ((35, 4, 47, 29), (1, 35, 27, 55), {"above", "right of"}),
    ((45, 10, 67, 21), (23, 4, 44, 29), {"right of"}),
    ((17, 21, 34, 43), (52, 56, 56, 71), {"above", "left of"}),
    ((19, 3, 43, 22), (26, 26, 52, 41), {"above"}),
    ((24, 44, 48, 49), (57, 23, 80, 48), {"left of"}),
    ((22, 39, 34, 59), (46, 54, 67, 71), {"left of"}),
    ((1, 54, 22, 84), (31, 14, 36, 31), {"below"}),
    ((43, 60, 72, 74), (38, 58, 64, 72), set()),
    ((55, 32, 73, 53), (60, 33, 72, 53), set()),
    ((0, 46, 23, 71), (37, 6, 57, 21), {"below", "left of"}),
    ((10, 10, 20, 20), (10, 10, 20, 20), set()),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_verdict_is_that_of_the_authors_code(case: dict[str, Any]) -> None:
    colors = {tuple(box): color for _, _, box, color in case["detections"]}
    detections = [Detection(label, confidence, tuple(box)) for label, confidence, box, _ in case["detections"]]
    verdict = judge(
        Task.model_validate(case["task"]), detections, lambda label, found: [colors[each.box] for each in found]
    )
    assert (verdict.correct, verdict.strict) == (case["correct"], case["strict"])
    assert verdict.score == pytest.approx(case["score"], abs=1e-6)


def test_the_cases_have_every_kind_of_task_and_both_verdicts() -> None:
    tags = {"single_object", "two_object", "counting", "colors", "position", "color_attr"}
    assert {(case["task"]["tag"], case["correct"]) for case in CASES} == {
        (tag, ok) for tag in tags for ok in (0, 1)
    }


@pytest.mark.parametrize(("one", "other", "expected"), POSITIONS)
def test_positions_are_those_of_the_authors_code(one: Box, other: Box, expected: set[str]) -> None:
    assert relations(one, other) == expected


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ({}, "include"),
        ({"include": [{"class": "cat"}]}, "count"),
        ({"include": [{"class": "cat", "count": 1, "color": "mauve"}]}, "mauve"),
        ({"include": [{"class": "cat", "count": 1, "position": ["above", 0]}]}, "earlier"),
        ({"include": [{"class": "cat", "count": 1, "position": ["near", 0]}]}, "position"),
    ],
)
def test_a_task_that_cannot_be_judged_is_refused(content: dict[str, Any], where: str) -> None:
    with pytest.raises(ValidationError, match=where):
        Task.model_validate(content)
