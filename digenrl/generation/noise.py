"""A sample's noise depends on its id and the run's seed alone: not on the lane, the slice or the order of work."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from digenrl.records import SampleId

SHARED = -1  # stands for the index where a whole group shares a draw, and for the group where a whole step does


def draw_key(run_seed: int, sample: SampleId, purpose: str) -> int:
    """128 bits for one draw, equal on every machine; another purpose of the same sample is another draw."""
    name = f"{run_seed}/{sample.step}/{sample.group}/{sample.index}/{purpose}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "big")


def normal_noise(run_seed: int, sample: SampleId, purpose: str, shape: Sequence[int]) -> Tensor:
    """Standard normal, fp32, on the CPU.

    Philox takes the whole key. Torch's own CPU generator keeps 32 bits of its seed: a long run would repeat noise.
    """
    generator = numpy.random.Generator(numpy.random.Philox(key=draw_key(run_seed, sample, purpose)))
    return torch.from_numpy(generator.standard_normal(tuple(shape), dtype=numpy.float32))


def initial_noise(
    run_seed: int, samples: Sequence[SampleId], shape: Sequence[int], same_in_group: bool = False
) -> Tensor:
    """What the samples start from, (B, *shape); `same_in_group` gives all samples of a group the same."""
    owners = [SampleId(s.step, s.group, SHARED) for s in samples] if same_in_group else samples
    return torch.stack([normal_noise(run_seed, owner, "initial", shape) for owner in owners])


def step_noise(run_seed: int, samples: Sequence[SampleId], index: int, shape: Sequence[int]) -> Tensor:
    """What the step of this index adds to each sample, (B, *shape); steps do not share a stream."""
    return torch.stack([normal_noise(run_seed, sample, f"step {index}", shape) for sample in samples])
