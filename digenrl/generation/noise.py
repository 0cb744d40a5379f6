"""A sample's noise depends on its id and the run's seed alone: not on the lane, the slice or the order of work."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from digenrl.models.transfers import sent
from digenrl.records import SampleId

CPU = torch.device("cpu")
SHARED = -1  # stands for the index where a whole group shares a draw, and for the group where a whole step does


def draw_key(run_seed: int, sample: SampleId, purpose: str) -> int:
    """128 bits for one draw, equal on every machine; another purpose of the same sample is another draw."""
    name = f"{run_seed}/{sample.step}/{sample.group}/{sample.index}/{purpose}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "big")


def normal_noise(run_seed: int, sample: SampleId, purpose: str, shape: Sequence[int]) -> Tensor:
    """Standard normal, fp32, on the CPU."""
    return _drawn(run_seed, [sample], purpose, shape, CPU)[0]


def initial_noise(
    run_seed: int,
    samples: Sequence[SampleId],
    shape: Sequence[int],
    same_in_group: bool = False,
    device: torch.device = CPU,
) -> Tensor:
    """What the samples start from, (B, *shape); `same_in_group` gives all samples of a group the same."""
    owners = [SampleId(s.step, s.group, SHARED) for s in samples] if same_in_group else samples
    return _drawn(run_seed, owners, "initial", shape, device)


def step_noise(
    run_seed: int, samples: Sequence[SampleId], index: int, shape: Sequence[int], device: torch.device = CPU
) -> Tensor:
    """What the step of this index adds to each sample, (B, *shape); steps do not share a stream."""
    return _drawn(run_seed, samples, f"step {index}", shape, device)


def _drawn(
    run_seed: int, owners: Sequence[SampleId], purpose: str, shape: Sequence[int], device: torch.device
) -> Tensor:
    """Drawn on the CPU, so that it is the same everywhere; a card goes on working meanwhile.

    Philox takes the whole key. Torch's own CPU generator keeps 32 bits of its seed: a long run would repeat noise.
    """
    noise_B = torch.empty((len(owners), *shape), dtype=torch.float32, pin_memory=device.type == "cuda")
    for row, owner in zip(noise_B.numpy(), owners, strict=True):
        generator = numpy.random.Generator(numpy.random.Philox(key=draw_key(run_seed, owner, purpose)))
        generator.standard_normal(dtype=numpy.float32, out=row)
    return sent(noise_B, device)
