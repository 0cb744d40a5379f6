"""Conditioning, images of prompts and trajectories as named tensors, and back, to the last bit.

What can be computed from ids alone (plans, schedules) does not travel. Shape legend: B = samples of a slice, K =
kept steps, L = one sample's latents; C = 3 colors, H and W = height and width of an image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy
import torch
from PIL import Image
from torch import Tensor

from digenrl.models.contract import Conditioning
from digenrl.models.trajectory import RolloutPlan, Trajectory, split_chain
from digenrl.records import SampleId

ABSENT = "absent."  # before the name of a text argument that is None
SOURCE = "source."  # before the number of a source image
PAIR = "pair."  # before the number of an image of a pair


def conditioning_tensors(conditioning: Conditioning) -> dict[str, Tensor]:
    """One row of conditioning, by side and name."""
    tensors: dict[str, Tensor] = {}
    for side, values in (("positive", conditioning.positive), ("negative", conditioning.negative or {})):
        for name, value in values.items():
            key = f"{side}.{name}"
            tensors.update({key: value} if value is not None else {ABSENT + key: torch.zeros(0)})
    return tensors | {f"images.{name}": value for name, value in conditioning.images.items()}


def conditioning_of(tensors: Mapping[str, Tensor]) -> Conditioning:
    """The inverse of `conditioning_tensors`. Images are left out."""
    sides: dict[str, dict[str, Tensor | None]] = {"positive": {}, "negative": {}}
    images: dict[str, Tensor] = {}
    for key, value in tensors.items():
        side, _, name = key.removeprefix(ABSENT).partition(".")
        if side == "images":
            images[name] = value
        elif not key.startswith((SOURCE, PAIR)):
            sides[side][name] = None if key.startswith(ABSENT) else value
    return Conditioning(sides["positive"], sides["negative"] or None, images)


def image_tensors(images: Sequence[Image.Image], kind: str) -> dict[str, Tensor]:
    """The images of a prompt that are of this kind, SOURCE or PAIR: (3, H, W) as uint8."""
    return {
        f"{kind}{index}": torch.from_numpy(numpy.array(image)).permute(2, 0, 1).contiguous()
        for index, image in enumerate(images)
    }


def images_of(tensors: Mapping[str, Tensor], kind: str) -> tuple[Tensor, ...]:
    """The images of this kind in order, each (3, H, W) in [0, 1], fp32."""
    count = sum(name.startswith(kind) for name in tensors)
    return tuple(tensors[f"{kind}{index}"].float() / 255 for index in range(count))


def trajectory_tensors(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """The trajectories of a slice; consecutive steps are stored as a chain."""
    columns: dict[str, list[Tensor]] = {"log_prob": [t.log_prob_K for t in trajectories]}
    if all(t.plan.keeps_consecutive_steps for t in trajectories):
        columns["chain"] = [t.chain() for t in trajectories]
    else:
        columns["latents"] = [t.latents_KL for t in trajectories]
        columns["next_latents"] = [t.next_latents_KL for t in trajectories]
    columns["mean"] = [t.mean_KL for t in trajectories if t.mean_KL is not None]
    columns["final"] = [t.final_L for t in trajectories if t.final_L is not None]
    return {name: torch.stack(rows) for name, rows in columns.items() if rows}


def trajectories_of(
    tensors: Mapping[str, Tensor], samples: Sequence[SampleId], plans: Sequence[RolloutPlan], version: int
) -> tuple[Trajectory, ...]:
    """The inverse of `trajectory_tensors`."""

    def trajectory(row: int) -> Trajectory:
        if "chain" in tensors:
            latents_KL, next_latents_KL = split_chain(tensors["chain"][row])
        else:
            latents_KL, next_latents_KL = tensors["latents"][row], tensors["next_latents"][row]
        return Trajectory(
            sample=samples[row],
            version=version,
            plan=plans[row],
            latents_KL=latents_KL,
            next_latents_KL=next_latents_KL,
            log_prob_K=tensors["log_prob"][row],
            mean_KL=tensors["mean"][row] if "mean" in tensors else None,
            final_L=tensors["final"][row] if "final" in tensors else None,
        )

    return tuple(trajectory(row) for row in range(len(samples)))
