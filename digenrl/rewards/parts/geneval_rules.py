"""GenEval's rules: whether detected objects are those that a prompt asks for. Needs no torch.

`correct` is the verdict of `evaluate` in evaluation/evaluate_images.py of https://github.com/djghosh13/geneval;
`strict` and `score` are those of `evaluate_reward` in reward_server/gen_eval.py of
https://github.com/yifan123/reward-server, the reward that Flow-GRPO trains with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from digenrl.config.rewards.geneval_tasks import Relation, Task

LEAST_CONFIDENCE = 0.3
LEAST_CONFIDENCE_TO_COUNT = 0.9  # for the tag "counting"
MOST_OBJECTS = 16  # of one class
CLEARANCE = 0.1  # share of both objects' sizes by which their centers must be apart

Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels


@dataclass(frozen=True, slots=True)
class Detection:
    """One object. `mask`, if the detector has one, is an image of the size of the sample, white on the object."""

    label: str
    confidence: float
    box: Box
    mask: Any = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """`correct`: at least the objects are there; `strict`: exactly these; `score`: the share that is right.

    `score` is at most 1, and negative if there are more than twice as many objects as wanted.
    """

    correct: bool
    strict: bool
    score: float


Objects = Mapping[str, Sequence[Detection]]
ColorsOf = Callable[[str, Sequence[Detection]], Sequence[str]]  # class and objects of it -> their colors


def judge(task: Task, detections: Sequence[Detection], colors_of: ColorsOf) -> Verdict:
    objects = _kept(detections, counting=task.tag == "counting")
    strict, score = _exactly(task, objects, colors_of)
    return Verdict(_at_least(task, objects, colors_of), strict, score)


def relations(one: Box, other: Box) -> set[Relation]:
    """Where the first box is relative to the second; empty if they are too close to tell."""
    offset = [(one[axis] + one[axis + 2] - other[axis] - other[axis + 2]) / 2 for axis in (0, 1)]
    sizes = [one[axis + 2] - one[axis] + other[axis + 2] - other[axis] for axis in (0, 1)]
    clear = [max(abs(far) - CLEARANCE * size, 0.0) for far, size in zip(offset, sizes, strict=True)]
    if max(clear) < 1e-3:
        return set()
    across, down = (math.copysign(far, to) / math.hypot(*offset) for far, to in zip(clear, offset, strict=True))
    named: tuple[tuple[Relation, bool], ...] = (
        ("left of", across < -0.5),
        ("right of", across > 0.5),
        ("above", down < -0.5),
        ("below", down > 0.5),
    )
    return {name for name, holds in named if holds}


def _kept(detections: Sequence[Detection], counting: bool) -> dict[str, list[Detection]]:
    """Objects by class, the most confident first."""
    least = LEAST_CONFIDENCE_TO_COUNT if counting else LEAST_CONFIDENCE
    objects: dict[str, list[Detection]] = {}
    for each in sorted(detections, key=lambda each: each.confidence, reverse=True):
        if each.confidence > least:
            objects.setdefault(each.label, []).append(each)
    return {label: found[:MOST_OBJECTS] for label, found in objects.items()}


def _at_least(task: Task, objects: Objects, colors_of: ColorsOf) -> bool:
    """GenEval: only the most confident objects count, as many as are wanted."""
    groups: list[Sequence[Detection] | None] = []
    for wanted in task.include:
        found = objects.get(wanted.label, ())[: wanted.count]
        fits = len(found) == wanted.count
        if fits and wanted.color is not None:
            fits = list(colors_of(wanted.label, found)).count(wanted.color) == wanted.count
        if fits and wanted.position is not None:
            fits = _placed(wanted.position, found, groups)
        groups.append(found if fits else None)
    others = any(len(objects.get(other.label, ())) >= other.count for other in task.exclude)
    return None not in groups and not others


def _exactly(task: Task, objects: Objects, colors_of: ColorsOf) -> tuple[bool, float]:
    """Flow-GRPO: every object counts, and each check adds a share to the score.

    As in the authors' code, a wrong position adds both 0 and 1, unless the object that it refers to is missing.
    """
    groups: list[Sequence[Detection] | None] = []
    shares: list[float] = []
    for wanted in task.include:
        found = objects.get(wanted.label, ())
        shares.append(_share(wanted.count, len(found)))
        fits = len(found) == wanted.count
        if not fits and (wanted.color is not None or wanted.position is not None):
            shares.append(0.0)
        if fits and wanted.color is not None:
            of_color = list(colors_of(wanted.label, found)).count(wanted.color)
            shares.append(_share(wanted.count, of_color))
            fits = of_color == wanted.count
        if fits and wanted.position is not None:
            fits = _placed(wanted.position, found, groups)
            there = groups[wanted.position[1]] is not None
            shares += [1.0] if fits else [0.0, 1.0] if there else [0.0]
        groups.append(found if fits else None)
    return None not in groups, sum(shares) / len(shares)


def _share(wanted: int, found: int) -> float:
    return 1 - abs(wanted - found) / wanted


def _placed(
    position: tuple[Relation, int], found: Sequence[Detection], groups: Sequence[Sequence[Detection] | None]
) -> bool:
    relation, index = position
    targets = groups[index]
    return targets is not None and all(
        relation in relations(each.box, target.box) for each in found for target in targets
    )
