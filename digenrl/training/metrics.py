"""What an update tells about itself, from per-term values that the loss names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from digenrl.models.pairs import PairBatch, StepPairs


class Tally:
    """Counts, sums and largest values by name; adding tallies in any order gives the same counts and maxima."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}
        self._sum: dict[str, float] = {}
        self._largest: dict[str, float] = {}

    def add(self, measures: Mapping[str, Tensor]) -> None:
        """One value per term, by name."""
        for name, values in measures.items():
            if values.numel():
                self._add(name, values.numel(), float(values.double().sum()), float(values.max()))

    def merge(self, other: Tally) -> None:
        """Adds everything the other has counted."""
        for name, count in other._count.items():
            self._add(name, count, other._sum[name], other._largest[name])

    def _add(self, name: str, count: int, total: float, largest: float) -> None:
        self._count[name] = self._count.get(name, 0) + count
        self._sum[name] = self._sum.get(name, 0.0) + total
        self._largest[name] = max(self._largest.get(name, largest), largest)

    def mean(self, name: str) -> float | None:
        """None where nothing of this name was counted."""
        return self._sum[name] / self._count[name] if name in self._count else None

    def largest(self, name: str) -> float | None:
        """None where nothing of this name was counted."""
        return self._largest.get(name)

    def means(self) -> dict[str, float]:
        """All means, by name."""
        return {name: self._sum[name] / self._count[name] for name in sorted(self._count)}

    def facts(self) -> dict[str, list[float]]:
        """Everything counted, for JSON."""
        return {name: [self._count[name], self._sum[name], self._largest[name]] for name in self._count}

    def add_facts(self, facts: Mapping[str, tuple[int, float, float]]) -> None:
        """Adds what another tally counted, as its `facts` say."""
        for name, (count, total, largest) in facts.items():
            self._add(name, count, total, largest)


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """One optimizer update. What an algorithm does not have is None.

    `log_prob_mismatch` is the mean |new - rollout's log-prob| of fresh samples before the batch's first update,
    where both should be equal. `gradient_norm` is before clipping. Rewards are of the update's groups; `terms` is
    the denominator Z.
    """

    batch: int
    update: int
    reward_mean: float
    reward_std: float
    gradient_norm: float
    zero_spread_groups: int
    terms: int
    pack_size: int
    ratio_mean: float | None
    ratio_max: float | None
    clip_fraction: float | None
    kl: float | None
    log_prob_mismatch: float | None
    measures: Mapping[str, float]


def update_metrics(
    tally: Tally, *, batch: int, update: int, rewards: Sequence[float], gradient_norm: float, **counts: int
) -> UpdateMetrics:
    """The metrics of one update from everything its packs counted; `rewards` are of its groups' samples."""
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
        **counts,
    )


def log_prob_mismatch(pairs: PairBatch, rows: int) -> Mapping[str, Tensor]:
    """How far log-probs of the first rows are from the rollout's, for samples of the same weights."""
    if not isinstance(pairs, StepPairs):
        return {}
    off_R = (pairs.log_prob_R - pairs.rollout_log_prob_R).detach().abs()
    return {"log_prob_mismatch": off_R[:rows][pairs.fresh_R[:rows]]}
