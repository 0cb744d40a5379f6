"""What one trainer has computed of an update, for another one that adds it: as a value, and as named tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from digenrl.training.sample_jobs import SampleJob
from digenrl.training.trainer_state import Tensors

UNSCALED, FINAL = "unscaled", "final"
JSON_TENSOR = "json"  # the bytes of everything that is not a tensor

TallyContent = Mapping[str, Sequence[float]]
"""What `Tally.as_json` returns."""


@dataclass(frozen=True, slots=True)
class GradientShare:
    """The gradient of some jobs of an update, in fixed point, and the metrics of each.

    `unscaled` and `final` are 64-bit integers, the two parts of `GradientSums`; gradients of several parameters
    are joined. Their absolute values are at most `bound`, as floats. `steps` are the trained steps of each sample;
    None if there are no jobs.
    """

    batch: int
    update: int
    job_samples: int
    steps: int | None
    bound: float
    tallies: Mapping[SampleJob, TallyContent]
    unscaled: Tensors
    final: Tensors

    @property
    def jobs(self) -> list[SampleJob]:
        """The jobs that it covers, in ascending order."""
        return sorted(self.tallies)


def without_tensors(share: GradientShare) -> dict[str, Any]:
    """Everything of a share that is not a tensor, as content that JSON can represent."""
    return {
        "batch": share.batch,
        "update": share.update,
        "job_samples": share.job_samples,
        "steps": share.steps,
        "bound": share.bound,
        "jobs": [{"place": job.place, "first": job.first, "tally": share.tallies[job]} for job in share.jobs],
    }


def share_from(content: Mapping[str, Any], unscaled: Tensors, final: Tensors) -> GradientShare:
    """The inverse of `without_tensors`, with the tensors."""
    return GradientShare(
        batch=content["batch"],
        update=content["update"],
        job_samples=content["job_samples"],
        steps=content["steps"],
        bound=content["bound"],
        tallies={SampleJob(each["place"], each["first"]): each["tally"] for each in content["jobs"]},
        unscaled=unscaled,
        final=final,
    )


def share_as_tensors(share: GradientShare) -> dict[str, Tensor]:
    """The whole share as tensors, named part/parameters, and one tensor with the bytes of everything else."""
    text = json.dumps(without_tensors(share)).encode()
    parts = ((UNSCALED, share.unscaled), (FINAL, share.final))
    tensors = {f"{part}/{name}": value for part, named in parts for name, value in named.items()}
    return tensors | {JSON_TENSOR: torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def share_of_tensors(tensors: Tensors) -> GradientShare:
    """The inverse of `share_as_tensors`; every bit is the same."""
    content = json.loads(tensors[JSON_TENSOR].cpu().numpy().tobytes())
    unscaled, final = (
        {name.removeprefix(f"{part}/"): value for name, value in tensors.items() if name.startswith(f"{part}/")}
        for part in (UNSCALED, FINAL)
    )
    return share_from(content, unscaled, final)
