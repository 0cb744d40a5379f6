"""How large packs are and how many blocks are computed again, chosen together from measured memory and time.

Computing a block again in the backward saves its activations and costs its forward once more. Larger packs use a
card better, up to a point, and need more memory. Both are measured on one small pack and one large pack.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import ceil, hypot, sqrt
from typing import Protocol

import torch

from digenrl.training.packing.pack_size import MemoryLine

FIRST_TRY = 16  # terms: few models gain from larger packs
WORTH_IT = 0.98  # another pack than the one that was timed has to be so much faster
PRACTICALLY_EQUAL = 1.01


@dataclass(frozen=True, slots=True)
class Packing:
    """Terms of one pass, and how many blocks, the first ones, keep no activations.

    `planned_bytes` is what a pass is expected to take beyond what was there before it; 0 where nobody measured.
    `foreseen_bytes` is what was expected from one term alone, before any pack was tried.
    """

    pack_size: int
    checkpointed: int
    planned_bytes: int = 0
    foreseen_bytes: int = 0

    def beside(self, taken: int) -> Packing:
        """With the bytes that are there before a pass, if any were measured."""
        if not self.planned_bytes:
            return self
        return replace(self, planned_bytes=self.planned_bytes + taken, foreseen_bytes=self.foreseen_bytes + taken)

    @classmethod
    def for_all(cls, ranks: Iterable[Packing]) -> Packing:
        """Which every one of these ranks has room for."""
        packs, counts, planned, foreseen = zip(*map(astuple, ranks), strict=True)
        return cls(min(packs), max(counts), max(planned), max(foreseen))


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """What a pass takes: what every block that keeps its own saves by doing so, by kind, and the `rest`.

    A block that is computed again needs the room of one that keeps, but only when most others' is free already.
    Some of it is needed once for a pass of any size, such as weights in another type; one term alone does not tell
    how much, and is taken for the price of every term.
    """

    rest: MemoryLine
    saved: Mapping[Hashable, MemoryLine]
    kinds: Sequence[Hashable]

    def peak(self, pack_size: int, checkpointed: int) -> float:
        """Bytes at the fullest moment."""
        return self.rest.at(pack_size) + self._kept(pack_size, checkpointed)

    def fewest_checkpointed(self, pack_size: int, budget: float) -> int | None:
        """Of the blocks, so that a pass fits; None where none of it helps."""
        counts = range(len(self.kinds) + 1)
        return next((count for count in counts if self.peak(pack_size, count) <= budget), None)

    def with_pack(
        self, pack_size: int, checkpointed: int, peak: float, saved: Mapping[Hashable, float]
    ) -> MemoryModel:
        """So that it also tells what was measured of a pack: its peak and, of some kinds, what a block saves."""
        if pack_size == 1:
            off = peak - self.peak(1, checkpointed)
            return replace(self, rest=replace(self.rest, per_term=self.rest.per_term + off))
        lines = {
            kind: MemoryLine.through((1, line.at(1)), (pack_size, saved[kind])) if kind in saved else line
            for kind, line in self.saved.items()
        }
        better = replace(self, saved=lines)
        rest = peak - better._kept(pack_size, checkpointed)
        return replace(better, rest=MemoryLine.through((1, self.rest.at(1)), (pack_size, rest)))

    def _kept(self, pack_size: int, checkpointed: int) -> float:
        by_kind = {kind: line.at(pack_size) for kind, line in self.saved.items()}
        kept = sum(by_kind[kind] for kind in self.kinds[checkpointed:])
        return max(kept, max(by_kind.values(), default=0.0))


@dataclass(frozen=True, slots=True)
class PassTime:
    """Seconds of a pass whose blocks are all treated alike: the host's launches and the card's work overlap."""

    host_s: float
    term_s: float

    @classmethod
    def through(cls, alone_s: float, pack_size: int, packed_s: float) -> PassTime:
        """From a pass of one term and one of a pack."""
        if pack_size == 1:
            return cls(0.0, packed_s)
        term = sqrt(max(0.0, packed_s**2 - alone_s**2) / (pack_size**2 - 1))
        term = min(max(term, packed_s / pack_size / 10), packed_s / pack_size)
        return cls(sqrt(max(0.0, packed_s**2 - (pack_size * term) ** 2)), term)

    def seconds(self, pack_size: int) -> float:
        return hypot(self.host_s, pack_size * self.term_s)

    def times(self, factor: float) -> PassTime:
        """Of a pass that takes so many times as long."""
        return PassTime(factor * self.host_s, factor * self.term_s)


@dataclass(frozen=True, slots=True)
class TimeModel:
    """Seconds of a pass between two that were measured: with few blocks computed again, and with all of them."""

    few: PassTime
    few_share: float
    all_again: PassTime

    def seconds(self, pack_size: int, share: float) -> float:
        """`share` of the blocks is computed again."""
        few_s, all_s = self.few.seconds(pack_size), self.all_again.seconds(pack_size)
        if self.few_share == 1:
            return all_s
        return few_s + (all_s - few_s) * (share - self.few_share) / (1 - self.few_share)


@dataclass(frozen=True, slots=True)
class _Trial:
    """What came of a pack that was run; none of more than `most` terms is to be run."""

    pack_size: int
    time: TimeModel
    memory: MemoryModel
    most: int


class Gauge(Protocol):
    """Runs passes that leave no trace, and measures them. A pack that does not fit raises OutOfMemoryError."""

    @property
    def kinds(self) -> Sequence[Hashable]:
        """Of the repeated blocks, in order."""

    def checkpoint(self, chosen: Collection[int]) -> None:
        """From now on these blocks are computed again."""

    def warm_up(self, pack_size: int) -> None:
        """Whatever happens only once for a pack of this size."""

    def measure(self, pack_size: int) -> tuple[int, list[int]]:
        """Peak bytes of a pass, beyond what was there before, and by how much memory grew in each block."""

    def seconds(self, pack_size: int) -> float:
        """Of a pass that is warm."""


def choose_packing(
    gauge: Gauge,
    *,
    budget: float,
    fixed_bytes: float,
    terms: int,
    most: int,
    pack_size: int | None = None,
    checkpointed: int | None = None,
) -> Packing:
    """The packing with which `terms` terms take least time, of packs up to `most`, within a budget of bytes.

    `fixed_bytes` are taken by a pass of any size. What is given is kept: a pack size, a number of blocks. Not even
    one term fitting raises OutOfMemoryError.
    """
    blocks = len(gauge.kinds)
    otherwise = blocks if checkpointed is None else checkpointed
    memory = _measured_memory(gauge, fixed_bytes)
    if memory is None:
        gauge.checkpoint(range(otherwise))
        gauge.warm_up(1)
        return Packing(pack_size or 1, otherwise)

    packs = [pack_size] if pack_size is not None else range(1, min(most, terms) + 1)
    fitting = _fitting(memory, packs, budget, checkpointed)
    if pack_size is not None or not fitting:
        pack = pack_size or 1
        return _told(pack, fitting.get(pack, otherwise), foreseen=memory, planned=memory)
    trial = _tried_out(gauge, memory, fitting, terms, len(packs))
    if trial is None:
        return Packing(1, otherwise)
    fitting = _fitting(trial.memory, packs[: trial.most], budget, checkpointed) or {1: otherwise}

    def seconds(pack: int) -> float:
        return ceil(terms / pack) * trial.time.seconds(pack, fitting[pack] / max(1, blocks))

    least = min(seconds(pack) for pack in fitting)
    best = min(pack for pack in fitting if seconds(pack) <= least * PRACTICALLY_EQUAL)
    tried = trial.pack_size
    if tried in fitting and seconds(best) > seconds(tried) * WORTH_IT:
        best = tried
    return _told(best, fitting[best], foreseen=memory, planned=trial.memory)


def _fitting(memory: MemoryModel, packs: Iterable[int], budget: float, checkpointed: int | None) -> dict[int, int]:
    """The packs that fit, each with the fewest blocks computed again, or with so many as are given."""
    fitting: dict[int, int] = {}
    for pack in packs:
        count = memory.fewest_checkpointed(pack, budget) if checkpointed is None else checkpointed
        if count is not None and memory.peak(pack, count) <= budget:
            fitting[pack] = count
    return fitting


def _told(pack_size: int, checkpointed: int, *, foreseen: MemoryModel, planned: MemoryModel) -> Packing:
    before, after = (round(memory.peak(pack_size, checkpointed)) for memory in (foreseen, planned))
    return Packing(pack_size, checkpointed, planned_bytes=after, foreseen_bytes=before)


def _first_try(fitting: dict[int, int], terms: int) -> int:
    """The largest pack that needs no more blocks computed again than one term does, as even as terms allow."""
    largest = max(pack for pack in fitting if pack <= FIRST_TRY and fitting[pack] == fitting[min(fitting)])
    return ceil(terms / ceil(terms / largest))


def _tried_out(gauge: Gauge, memory: MemoryModel, fitting: dict[int, int], terms: int, most: int) -> _Trial | None:
    """A pack is run and timed, or a smaller one if it takes more than was foreseen; None where none does."""
    while most:
        fitting = {pack: count for pack, count in fitting.items() if pack <= most}
        tried = _first_try(fitting, terms)
        larger = max(pack for pack in fitting if pack <= FIRST_TRY) if tried == 1 else tried
        try:
            time, corrected = _measured_time(gauge, memory, tried, fitting[tried], larger)
            return _Trial(tried, time, corrected, most)
        except torch.OutOfMemoryError:
            most = larger // 2
    return None


def _measured_memory(gauge: Gauge, fixed_bytes: float) -> MemoryModel | None:
    """From one term, with one block of every kind keeping its activations; None where not even that fits."""
    kinds = gauge.kinds
    keeping = {kind: index for index, kind in enumerate(kinds)}  # the last of each
    gauge.checkpoint([index for index in range(len(kinds)) if index not in keeping.values()])
    try:
        gauge.warm_up(1)
        peak, grown = gauge.measure(1)
    except torch.OutOfMemoryError:
        return None
    left = {kind: grown[index] for index, kind in enumerate(kinds) if index not in keeping.values()}
    saved = {kind: max(0, grown[index] - left.get(kind, 0)) for kind, index in keeping.items()}
    rest = MemoryLine(fixed_bytes, peak - fixed_bytes - sum(saved.values()))
    return MemoryModel(rest, {kind: MemoryLine(0.0, bytes_) for kind, bytes_ in saved.items()}, kinds)


def _measured_time(
    gauge: Gauge, memory: MemoryModel, pack_size: int, checkpointed: int, larger: int
) -> tuple[TimeModel, MemoryModel]:
    """From passes of one term and of a pack, with few and with all blocks computed again; so is its memory.

    Where the pack is one term, which tells nothing about packs, a `larger` one is timed with all blocks.
    """
    blocks = len(gauge.kinds)
    gauge.checkpoint(range(checkpointed))
    gauge.warm_up(pack_size)
    peak, grown = gauge.measure(pack_size)
    packed_s, few_alone_s = gauge.seconds(pack_size), gauge.seconds(1)
    again = few = PassTime.through(few_alone_s, pack_size, packed_s)
    saved: dict[Hashable, float] = {}
    if checkpointed < blocks:
        gauge.checkpoint(range(blocks))
        if larger > pack_size:
            gauge.warm_up(larger)
        else:
            _, left = gauge.measure(pack_size)
            keeping = range(checkpointed, blocks)
            saved = {gauge.kinds[index]: max(0, grown[index] - left[index]) for index in keeping}
        packed_s, alone_s = gauge.seconds(larger), gauge.seconds(1)
        again = PassTime.through(alone_s, larger, packed_s)
        few = again.times(few_alone_s / alone_s) if larger > pack_size else few
    time = TimeModel(few, checkpointed / max(1, blocks), again)
    return time, memory.with_pack(pack_size, checkpointed, peak, saved)
