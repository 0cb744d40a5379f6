"""Where to cut a chain of blocks into stages, and how long a step of the pipeline takes. Needs no torch.

A cut of n blocks into k stages is given by k + 1 bounds from 0 to n: stage i has the blocks bounds[i] to
bounds[i + 1] - 1. Times are in seconds per micro-batch, rates in bytes per second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

Fits = Callable[[int, int, int], bool]


@dataclass(frozen=True, slots=True)
class Partition:
    """A cut into stages, with the times of each stage and each link for a micro-batch, and of a whole step."""

    bounds: tuple[int, ...]
    stage_s: tuple[float, ...]
    link_s: tuple[float, ...]
    step_s: float

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(last - first for first, last in pairwise(self.bounds))


def pipeline_seconds(stage_s: Sequence[float], link_s: Sequence[float], micro_batches: int) -> float:
    """An estimate of a step: the first micro-batch passes everything, the others follow at the slowest part.

    `stage_s` are the forward and backward of one micro-batch, `link_s` its transfer in one direction. Links carry
    both directions at once, and transfers overlap with computing. `simulate_pipeline` is more accurate.
    """
    slowest = max(*stage_s, *link_s, 0.0)
    return sum(stage_s) + 2 * sum(link_s) + (micro_batches - 1) * slowest


def cut_at(
    bounds: Sequence[int],
    block_s: Sequence[float],
    speeds: Sequence[float],
    boundary_bytes: float | Sequence[float],
    bytes_per_s: Sequence[float],
    micro_batches: int,
) -> Partition:
    """The times of a given cut; for the arguments see `best_partition`."""
    sizes = _boundary_sizes(boundary_bytes, len(block_s))
    stages = tuple(
        sum(block_s[first:last]) / speed for (first, last), speed in zip(pairwise(bounds), speeds, strict=True)
    )
    links = tuple(sizes[end] / rate for end, rate in zip(bounds[1:-1], bytes_per_s, strict=True))
    return Partition(tuple(bounds), stages, links, pipeline_seconds(stages, links, micro_batches))


def even_bounds(blocks: int, stages: int) -> tuple[int, ...]:
    """Bounds that give all stages the same number of blocks, or nearly: the first ones get one more."""
    return tuple(accumulate((blocks // stages + (i < blocks % stages) for i in range(stages)), initial=0))


def best_partition(
    block_s: Sequence[float],
    speeds: Sequence[float],
    boundary_bytes: float | Sequence[float],
    bytes_per_s: Sequence[float],
    micro_batches: int,
    fits: Fits | None = None,
) -> Partition:
    """The cut with the shortest step, for devices in this order. Every device gets at least one block.

    `block_s` are the blocks' forward and backward at speed 1. `boundary_bytes` cross each cut in one direction:
    the same everywhere, or one value after each block but the last. `fits(stage, first, end)` says whether a
    stage's memory holds these blocks. Raises ValueError if no cut fits.
    """
    blocks, stages = len(block_s), len(speeds)
    sizes, until = _boundary_sizes(boundary_bytes, blocks), list(accumulate(block_s, initial=0.0))
    if len(bytes_per_s) != stages - 1:
        raise ValueError(f"{stages} stages have {stages - 1} links, got the rates of {len(bytes_per_s)}")
    partial: dict[int, list[_Partial]] = {0: [_Partial(0.0, 0.0, (0,))]}
    for stage, speed in enumerate(speeds):
        is_last = stage == stages - 1
        reached: dict[int, list[_Partial]] = {}
        for first, begun in partial.items():
            for end in [blocks] if is_last else range(first + 1, blocks - (stages - 2 - stage)):
                if end <= first or (fits is not None and not fits(stage, first, end)):
                    continue
                computing = (until[end] - until[first]) / speed
                link = 0.0 if is_last else sizes[end] / bytes_per_s[stage]
                reached.setdefault(end, []).extend(each.extended(computing, link, end) for each in begun)
        partial = {end: _undominated(each) for end, each in reached.items()}
    if not partial:
        raise ValueError(
            f"{blocks} blocks cannot be cut into {stages} stages, each with a block, that fit in memory; "
            "use more or larger devices"
        )
    best = min(partial[blocks], key=lambda each: (each.total + (micro_batches - 1) * each.slowest, each.bounds))
    return cut_at(best.bounds, block_s, speeds, boundary_bytes, bytes_per_s, micro_batches)


@dataclass(frozen=True, slots=True)
class _Partial:
    """The first stages of a cut: the seconds of all their parts, and of the slowest."""

    total: float
    slowest: float
    bounds: tuple[int, ...]

    def extended(self, computing: float, link: float, end: int) -> _Partial:
        return _Partial(self.total + computing + 2 * link, max(self.slowest, computing, link), (*self.bounds, end))


def _undominated(cuts: list[_Partial]) -> list[_Partial]:
    """Without those that another one equals or beats in both respects."""
    kept: list[_Partial] = []
    slowest = math.inf
    for each in sorted(cuts, key=lambda each: (each.total, each.slowest, each.bounds)):
        if each.slowest < slowest:
            kept.append(each)
            slowest = each.slowest
    return kept


def _boundary_sizes(boundary_bytes: float | Sequence[float], blocks: int) -> list[float]:
    """The bytes that cross after each number of blocks, from 0 to all of them."""
    if not isinstance(boundary_bytes, Sequence):
        return [float(boundary_bytes)] * (blocks + 1)
    if len(boundary_bytes) != blocks - 1:
        raise ValueError(f"{blocks} blocks have {blocks - 1} boundaries, got {len(boundary_bytes)} sizes")
    return [0.0, *map(float, boundary_bytes), 0.0]
