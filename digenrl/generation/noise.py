"""Noise that depends only on a sample's id and the run's seed: not on worker, slice or order of work."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from digenrl.models.transfers import to_device
from digenrl.records import SampleId

CPU = torch.device("cpu")
SHARED = -1  # in place of the index for a draw shared by a group, and of the group for one shared by a step


def draw_key(run_seed: int, sample: SampleId, purpose: str) -> int:
    """A 128-bit key for one draw, the same on every machine; different purposes give independent draws."""
    name = f"{run_seed}/{sample.step}/{sample.group}/{sample.index}/{purpose}"
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest(), "big")


def normal_noise(run_seed: int, sample: SampleId, purpose: str, shape: Sequence[int]) -> Tensor:
    """Standard normal noise in fp32 on the CPU."""
    return _draw(run_seed, [sample], purpose, shape, CPU)[0]


def initial_noise(
    run_seed: int,
    samples: Sequence[SampleId],
    shape: Sequence[int],
    same_in_group: bool = False,
    device: torch.device = CPU,
) -> Tensor:
    """The noise that samples start from, (B, *shape); with `same_in_group`, all samples of a group share it."""
    owners = [SampleId(s.step, s.group, SHARED) for s in samples] if same_in_group else samples
    return _draw(run_seed, owners, "initial", shape, device)


def step_noise(
    run_seed: int, samples: Sequence[SampleId], index: int, shape: Sequence[int], device: torch.device = CPU
) -> Tensor:
    """The noise of one stochastic step, (B, *shape); steps have independent draws."""
    return _draw(run_seed, samples, f"step {index}", shape, device)


def _draw(
    run_seed: int, owners: Sequence[SampleId], purpose: str, shape: Sequence[int], device: torch.device
) -> Tensor:
    # On the CPU, so that it is the same everywhere; a GPU keeps working meanwhile. Philox uses the whole key;
    # torch's CPU generator keeps 32 bits of its seed, so that a long run would repeat noise.
    noise_B = torch.empty((len(owners), *shape), dtype=torch.float32, pin_memory=device.type == "cuda")
    for row, owner in zip(noise_B.numpy(), owners, strict=True):
        generator = numpy.random.Generator(numpy.random.Philox(key=draw_key(run_seed, owner, purpose)))
        generator.standard_normal(dtype=numpy.float32, out=row)
    return to_device(noise_B, device)
