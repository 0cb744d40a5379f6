"""Chooses the pack size and the number of checkpointed blocks together, from measured memory and time.

Checkpointing a block saves its activations and costs a second forward of it. Larger packs use a GPU better, up to
a point, and need more memory. Both are measured on one small and one large pack. A plan that was not measured is
run before it is used.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import ceil, hypot, sqrt

import torch

from digenrl.training.packing.pack_size import MemoryLine
from digenrl.training.packing.pass_profiler import PassProfiler

LARGEST_TRIAL = 16  # terms: few models gain from larger packs
REQUIRED_GAIN = 0.98  # relative time at which another pack is preferred to the one that was timed
NEGLIGIBLE_LOSS = 1.01
CHECKED_PLANS = 3  # plans that are run; if none of them fits, the first trial's is used


@dataclass(frozen=True, slots=True)
class PackPlan:
    """The terms of one pass, and how many blocks, counted from the first, are checkpointed.

    `planned_bytes` is the expected memory of a pass; 0 if nothing was measured. `first_estimate_bytes` is what was
    expected from measuring a single term, before a pack was tried.
    """

    pack_size: int
    checkpointed: int
    planned_bytes: int = 0
    first_estimate_bytes: int = 0

    def plus(self, allocated: int) -> PackPlan:
        """Adds the bytes that are allocated before a pass, if memory was measured."""
        if not self.planned_bytes:
            return self
        return replace(
            self,
            planned_bytes=self.planned_bytes + allocated,
            first_estimate_bytes=self.first_estimate_bytes + allocated,
        )

    @classmethod
    def for_all(cls, plans: Iterable[PackPlan]) -> PackPlan:
        """The plan that fits on every rank."""
        sizes, counts, planned, estimates = zip(*map(astuple, plans), strict=True)
        return cls(min(sizes), max(counts), max(planned), max(estimates))


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """The memory of a pass: the activations that each kind of block keeps unless checkpointed, and the rest.

    A checkpointed block needs the memory of one that is not, but only after most others have freed theirs. Some
    memory is needed once per pass, such as weights in another dtype; measuring one term cannot tell it apart from
    memory per term, and counts it as such.
    """

    rest: MemoryLine
    activations: Mapping[Hashable, MemoryLine]
    kinds: Sequence[Hashable]

    def peak(self, pack_size: int, checkpointed: int) -> float:
        return self.rest.at(pack_size) + self._kept(pack_size, checkpointed)

    def fewest_checkpointed(self, pack_size: int, budget: float) -> int | None:
        """The smallest number of checkpointed blocks with which a pass fits; None if it never does."""
        counts = range(len(self.kinds) + 1)
        return next((count for count in counts if self.peak(pack_size, count) <= budget), None)

    def corrected(
        self, pack_size: int, checkpointed: int, peak: float, activations: Mapping[Hashable, float]
    ) -> MemoryModel:
        """A model that also agrees with a measured pack: its peak and, for some kinds, a block's activations."""
        if pack_size == 1:
            error = peak - self.peak(1, checkpointed)
            return replace(self, rest=replace(self.rest, per_term=self.rest.per_term + error))
        lines = {
            kind: MemoryLine.through((1, line.at(1)), (pack_size, activations[kind]))
            if kind in activations
            else line
            for kind, line in self.activations.items()
        }
        better = replace(self, activations=lines)
        rest = peak - better._kept(pack_size, checkpointed)
        return replace(better, rest=MemoryLine.through((1, self.rest.at(1)), (pack_size, rest)))

    def _kept(self, pack_size: int, checkpointed: int) -> float:
        by_kind = {kind: line.at(pack_size) for kind, line in self.activations.items()}
        kept = sum(by_kind[kind] for kind in self.kinds[checkpointed:])
        return max(kept, max(by_kind.values(), default=0.0))


@dataclass(frozen=True, slots=True)
class PassTime:
    """The duration of a pass: the host's kernel launches overlap with the GPU's work."""

    host_s: float
    term_s: float

    @classmethod
    def through(cls, single_s: float, pack_size: int, packed_s: float) -> PassTime:
        """Fitted to a pass of one term and one of a pack."""
        if pack_size == 1:
            return cls(0.0, packed_s)
        term = sqrt(max(0.0, packed_s**2 - single_s**2) / (pack_size**2 - 1))
        term = min(max(term, packed_s / pack_size / 10), packed_s / pack_size)
        return cls(sqrt(max(0.0, packed_s**2 - (pack_size * term) ** 2)), term)

    def seconds(self, pack_size: int) -> float:
        return hypot(self.host_s, pack_size * self.term_s)

    def times(self, factor: float) -> PassTime:
        """The same, slower by a factor."""
        return PassTime(factor * self.host_s, factor * self.term_s)


@dataclass(frozen=True, slots=True)
class TimeModel:
    """Interpolates between two measured passes: with a share of the blocks checkpointed, and with all of them."""

    partial: PassTime
    partial_share: float
    full: PassTime

    def seconds(self, pack_size: int, share: float) -> float:
        """The duration of a pass with this share of the blocks checkpointed."""
        partial_s, full_s = self.partial.seconds(pack_size), self.full.seconds(pack_size)
        if self.partial_share == 1:
            return full_s
        return partial_s + (full_s - partial_s) * (share - self.partial_share) / (1 - self.partial_share)


@dataclass(frozen=True, slots=True)
class _Trial:
    """The models fitted to a pack that was run; larger packs than `largest` do not fit."""

    pack_size: int
    checkpointed: int
    time: TimeModel
    memory: MemoryModel
    largest: int


def choose_plan(
    profiler: PassProfiler,
    *,
    budget: float,
    fixed_bytes: float,
    terms: int,
    largest_pack: int,
    pack_size: int | None = None,
    checkpointed: int | None = None,
) -> PackPlan:
    """The plan with which `terms` terms take least time within a budget of bytes.

    `fixed_bytes` are needed by a pass of any size. A given pack size or number of checkpointed blocks is kept.
    Raises OutOfMemoryError if not even one term fits.
    """
    blocks = len(profiler.kinds)
    default_count = blocks if checkpointed is None else checkpointed
    memory = _measure_memory(profiler, fixed_bytes)
    if memory is None:
        profiler.checkpoint(range(default_count))
        profiler.warm_up(1)
        return PackPlan(pack_size or 1, default_count)

    packs = [pack_size] if pack_size is not None else range(1, min(largest_pack, terms) + 1)
    fitting = _fitting(memory, packs, budget, checkpointed)
    if pack_size is not None or not fitting:
        pack = pack_size or 1
        return _plan(pack, fitting.get(pack, default_count), estimate=memory, final=memory)
    trial = _try_pack(profiler, memory, fitting, terms, len(packs))
    if trial is None:
        return PackPlan(1, default_count)
    model, largest = trial.memory, trial.largest
    for _ in range(CHECKED_PLANS):
        fitting = _fitting(model, packs[:largest], budget, checkpointed) or {1: default_count}
        best = _fastest(fitting, trial, terms, blocks)
        if (best, fitting[best]) == (trial.pack_size, trial.checkpointed):
            return _plan(best, fitting[best], estimate=memory, final=model)
        peak = _checked_peak(profiler, best, fitting[best])
        if peak is None:
            largest = max(1, best - 1)
            continue
        model = model.corrected(best, fitting[best], peak, {})
        if peak <= budget:
            return _plan(best, fitting[best], estimate=memory, final=model)
    tried_peak = trial.memory.peak(trial.pack_size, trial.checkpointed)
    count = trial.checkpointed if tried_peak <= budget else default_count
    return _plan(trial.pack_size, count, estimate=memory, final=trial.memory)


def _fastest(fitting: Mapping[int, int], trial: _Trial, terms: int, blocks: int) -> int:
    """The pack size with which all terms take least time; the trial's if the gain is small."""

    def seconds(pack: int) -> float:
        return ceil(terms / pack) * trial.time.seconds(pack, fitting[pack] / max(1, blocks))

    least = min(seconds(pack) for pack in fitting)
    best = min(pack for pack in fitting if seconds(pack) <= least * NEGLIGIBLE_LOSS)
    tried = trial.pack_size
    return tried if tried in fitting and seconds(best) > seconds(tried) * REQUIRED_GAIN else best


def _checked_peak(profiler: PassProfiler, pack_size: int, checkpointed: int) -> int | None:
    """The peak memory of a plan; None if it does not fit on the device."""
    profiler.checkpoint(range(checkpointed))
    try:
        profiler.warm_up(pack_size)
        return profiler.measure(pack_size)[0]
    except torch.OutOfMemoryError:
        return None


def _fitting(memory: MemoryModel, packs: Iterable[int], budget: float, checkpointed: int | None) -> dict[int, int]:
    """The packs that fit, each with the given or else the smallest number of checkpointed blocks."""
    fitting: dict[int, int] = {}
    for pack in packs:
        count = memory.fewest_checkpointed(pack, budget) if checkpointed is None else checkpointed
        if count is not None and memory.peak(pack, count) <= budget:
            fitting[pack] = count
    return fitting


def _plan(pack_size: int, checkpointed: int, *, estimate: MemoryModel, final: MemoryModel) -> PackPlan:
    first, planned = (round(memory.peak(pack_size, checkpointed)) for memory in (estimate, final))
    return PackPlan(pack_size, checkpointed, planned_bytes=planned, first_estimate_bytes=first)


def _first_trial(fitting: dict[int, int], terms: int) -> int:
    """The largest pack that needs no more checkpointed blocks than one term does, evened out over the terms."""
    largest = max(pack for pack in fitting if pack <= LARGEST_TRIAL and fitting[pack] == fitting[min(fitting)])
    return ceil(terms / ceil(terms / largest))


def _try_pack(
    profiler: PassProfiler, memory: MemoryModel, fitting: dict[int, int], terms: int, largest: int
) -> _Trial | None:
    """Runs and times a pack, or a smaller one if it needs more memory than estimated; None if none fits."""
    while largest:
        fitting = {pack: count for pack, count in fitting.items() if pack <= largest}
        tried = _first_trial(fitting, terms)
        larger = max(pack for pack in fitting if pack <= LARGEST_TRIAL) if tried == 1 else tried
        try:
            time, corrected = _measure_time(profiler, memory, tried, fitting[tried], larger)
            return _Trial(tried, fitting[tried], time, corrected, largest)
        except torch.OutOfMemoryError:
            largest = larger // 2
    return None


def _measure_memory(profiler: PassProfiler, fixed_bytes: float) -> MemoryModel | None:
    """From one term, with one block of each kind not checkpointed; None if not even that fits."""
    kinds = profiler.kinds
    keeping = {kind: index for index, kind in enumerate(kinds)}  # the last block of each kind
    profiler.checkpoint([index for index in range(len(kinds)) if index not in keeping.values()])
    try:
        profiler.warm_up(1)
        peak, growth = profiler.measure(1)
    except torch.OutOfMemoryError:
        return None
    checkpointed = {kind: growth[index] for index, kind in enumerate(kinds) if index not in keeping.values()}
    saved = {kind: max(0, growth[index] - checkpointed.get(kind, 0)) for kind, index in keeping.items()}
    rest = MemoryLine(fixed_bytes, peak - fixed_bytes - sum(saved.values()))
    return MemoryModel(rest, {kind: MemoryLine(0.0, bytes_) for kind, bytes_ in saved.items()}, kinds)


def _measure_time(
    profiler: PassProfiler, memory: MemoryModel, pack_size: int, checkpointed: int, larger: int
) -> tuple[TimeModel, MemoryModel]:
    """Measures time and memory of one term and of a pack, with some and with all blocks checkpointed.

    A pack of one term says nothing about packs: a `larger` one is then timed with all blocks checkpointed.
    """
    blocks = len(profiler.kinds)
    profiler.checkpoint(range(checkpointed))
    profiler.warm_up(pack_size)
    peak, growth = profiler.measure(pack_size)
    packed_s, partial_single_s = profiler.seconds(pack_size), profiler.seconds(1)
    full = partial = PassTime.through(partial_single_s, pack_size, packed_s)
    saved: dict[Hashable, float] = {}
    if checkpointed < blocks:
        profiler.checkpoint(range(blocks))
        if larger > pack_size:
            profiler.warm_up(larger)
        else:
            _, left = profiler.measure(pack_size)
            keeping = range(checkpointed, blocks)
            saved = {profiler.kinds[index]: max(0, growth[index] - left[index]) for index in keeping}
        packed_s, single_s = profiler.seconds(larger), profiler.seconds(1)
        full = PassTime.through(single_s, larger, packed_s)
        partial = full.times(partial_single_s / single_s) if larger > pack_size else partial
    time = TimeModel(partial, checkpointed / max(1, blocks), full)
    return time, memory.corrected(pack_size, checkpointed, peak, saved)
