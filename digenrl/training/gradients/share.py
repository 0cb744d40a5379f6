"""What one trainer has computed of an update, for another one that adds it: as a value, and as named tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from digenrl.training.checkpoint.state_tensors import JSON_TENSOR, json_of, json_tensor
from digenrl.training.sample_jobs import SampleJob
from digenrl.training.trainer_state import Tensors

UNSCALED, FINAL = "unscaled", "final"

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


def share_as_tensors(share: GradientShare) -> dict[str, Tensor]:
    """The whole share as tensors, named part/parameters, and one tensor with the bytes of everything else."""
    content = {
        "batch": share.batch,
        "update": share.update,
        "job_samples": share.job_samples,
        "steps": share.steps,
        "bound": share.bound,
        "jobs": [{"place": job.place, "first": job.first, "tally": share.tallies[job]} for job in share.jobs],
    }

    parts = ((UNSCALED, share.unscaled), (FINAL, share.final))
    tensors = {f"{part}/{name}": value for part, named in parts for name, value in named.items()}
    return tensors | {JSON_TENSOR: json_tensor(content)}


def share_of_tensors(tensors: Tensors) -> GradientShare:
    """The inverse of `share_as_tensors`; every bit is the same."""
    content = json_of(tensors[JSON_TENSOR])
    tallies = {SampleJob(each["place"], each["first"]): each["tally"] for each in content.pop("jobs")}
    unscaled, final = (
        {name.removeprefix(f"{part}/"): value for name, value in tensors.items() if name.startswith(f"{part}/")}
        for part in (UNSCALED, FINAL)
    )
    return GradientShare(**content, tallies=tallies, unscaled=unscaled, final=final)
