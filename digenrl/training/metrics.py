"""The metrics of an update, from per-term values that the loss names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from digenrl.models.objective import PairBatch, StepPairs
from digenrl.models.transfers import to_host


@dataclass(frozen=True, slots=True)
class MaskedValues:
    """Values of which only those count where `mask` is true."""

    values: Tensor
    mask: Tensor


Measures = Mapping[str, Tensor | MaskedValues]


class Tally:
    """Counts, sums and maxima by name. Counts and maxima do not depend on the order of merging.

    Tensors are read only when a result is requested: until then a GPU may still be computing them.
    """

    def __init__(self) -> None:
        self._count: dict[str, int] = {}
        self._sum: dict[str, float] = {}
        self._largest: dict[str, float] = {}
        self._unread: list[Measures | Tally] = []

    def add(self, measures: Measures) -> None:
        """Adds one value per term, by name; the tensors must not change afterwards."""
        self._unread.append(measures)

    def merge(self, other: Tally) -> None:
        """Adds everything the other has counted; nothing may be added to the other afterwards."""
        self._unread.append(other)

    def _read(self) -> None:
        """Counts everything that was added, in that order, with a single wait for the GPU."""
        tensors = list(self._tensors())
        if self._unread:
            self._count_up(iter(to_host(tensors)))

    def _tensors(self) -> Iterator[Tensor]:
        for each in self._unread:
            if isinstance(each, Tally):
                yield from each._tensors()
            else:
                for measured in each.values():
                    if isinstance(measured, MaskedValues):
                        yield from (measured.values, measured.mask)
                    else:
                        yield measured

    def _count_up(self, on_host: Iterator[Tensor]) -> None:
        """Counts what is unread; its tensors are taken from `on_host`, in the order of `_tensors`."""
        unread, self._unread = self._unread, []
        for each in unread:
            if isinstance(each, Tally):
                each._count_up(on_host)
                for name, count in each._count.items():
                    self._add(name, count, each._sum[name], each._largest[name])
                continue
            for name, measured in each.items():
                values = next(on_host)
                values = values[next(on_host)] if isinstance(measured, MaskedValues) else values
                if values.numel():
                    self._add(name, values.numel(), float(values.double().sum()), float(values.max()))

    def _add(self, name: str, count: int, total: float, largest: float) -> None:
        self._count[name] = self._count.get(name, 0) + count
        self._sum[name] = self._sum.get(name, 0.0) + total
        self._largest[name] = max(self._largest.get(name, largest), largest)

    def mean(self, name: str) -> float | None:
        """None if nothing of this name was counted."""
        self._read()
        return self._sum[name] / self._count[name] if name in self._count else None

    def largest(self, name: str) -> float | None:
        """None if nothing of this name was counted."""
        self._read()
        return self._largest.get(name)

    def means(self) -> dict[str, float]:
        self._read()
        return {name: self._sum[name] / self._count[name] for name in sorted(self._count)}

    def as_json(self) -> dict[str, list[float]]:
        """Everything counted, as content that JSON can represent."""
        self._read()
        return {name: [self._count[name], self._sum[name], self._largest[name]] for name in self._count}

    def add_json(self, content: Mapping[str, Sequence[float]]) -> None:
        """Adds what another tally's `as_json` returned."""
        self._read()
        for name, (count, total, largest) in content.items():
            self._add(name, int(count), total, largest)


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """The metrics of one optimizer update. Those that an algorithm does not have are None.

    `log_prob_mismatch` is the mean |new - rollout's log-prob| of fresh samples before the batch's first update,
    where both should be equal. `gradient_norm` is before clipping; if it is not finite, the update was `skipped`.
    `preferred` is the share of terms in which a better sample is preferred more than by the reference. Rewards are
    those of the update's groups; a group of equal rewards is counted in the last update that trains
    part of it. `terms` is the denominator Z. `memory_retries` counts the allocator's retries since the previous
    update: if it is not 0, memory is so tight that the GPU waits for it.
    """

    batch: int
    update: int
    reward_mean: float
    reward_std: float
    gradient_norm: float
    skipped: int
    zero_spread_groups: int
    terms: int
    pack_size: int
    ratio_mean: float | None
    ratio_max: float | None
    clip_fraction: float | None
    kl: float | None
    log_prob_mismatch: float | None
    measures: Mapping[str, float]
    memory_retries: int | None = None
    stale_weight: float | None = None
    stale_weight_capped: float | None = None
    preferred: float | None = None


def update_metrics(
    tally: Tally,
    *,
    batch: int,
    update: int,
    rewards: Sequence[float],
    gradient_norm: float,
    memory_retries: int | None,
    **counts: int,
) -> UpdateMetrics:
    """The metrics of one update, from the tally of all its packs and the rewards of its samples."""
    center = math.fsum(rewards) / len(rewards)
    return UpdateMetrics(
        batch=batch,
        update=update,
        reward_mean=center,
        reward_std=math.sqrt(math.fsum((reward - center) ** 2 for reward in rewards) / len(rewards)),
        gradient_norm=gradient_norm,
        ratio_mean=tally.mean("ratio"),
        ratio_max=tally.largest("ratio"),
        clip_fraction=tally.mean("clipped"),
        kl=tally.mean("kl"),
        log_prob_mismatch=tally.mean("log_prob_mismatch"),
        measures=tally.means(),
        memory_retries=memory_retries,
        stale_weight=tally.mean("stale_weight"),
        stale_weight_capped=tally.mean("stale_weight_capped"),
        preferred=tally.mean("preferred"),
        **counts,
    )


def log_prob_mismatch(pairs: PairBatch, rows: int) -> Measures:
    """How much the log-probs of the first rows differ from the rollout's, for samples of the same weights."""
    if not isinstance(pairs, StepPairs):
        return {}
    difference_R = (pairs.log_prob_R - pairs.rollout_log_prob_R).detach().abs()
    return {"log_prob_mismatch": MaskedValues(difference_R[:rows], pairs.fresh_R[:rows])}
