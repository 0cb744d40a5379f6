"""What jobs cost: first as calibrated, then as measured during the run. Needs no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from statistics import fmean, median
from typing import Any, TypeVar

from digenrl.records import CostsMeasured, LaneOffer
from digenrl.scheduling import Costs
from digenrl.units import NS_PER_SECOND

Value = TypeVar("Value")

REMEMBERED = 20  # measurements of each kind
# The costs besides slices, as fields of Costs and CostsMeasured; "train_sample" and "score" are per sample.
KINDS = ("train_sample", "commit", "publish", "switch_in", "switch_out", "score", "evaluate", "save", "send")
OUTLIER = 2  # times the median: what took longer waited for something else


@dataclass(slots=True)
class _Recent:
    """The last measurements of one cost; the estimate until there is one."""

    estimate_ns: int
    values: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def add(self, ns: int) -> None:
        self.values.append(max(1, ns))

    def typical_ns(self) -> int:
        """The mean without outliers. The mean, because times are added up."""
        if not self.values:
            return self.estimate_ns
        longest = OUTLIER * median(self.values)
        return round(fmean(value for value in self.values if value <= longest))


def timed_offer(
    name: str, seconds: Mapping[int, float], slice_size: int, own_size: int, train_seconds: float = 0.0
) -> LaneOffer:
    """The offer of a lane that was timed with slices of some sizes and takes `own_size` samples at once.

    A lane that also trains needs `train_seconds` per sample. With adapters, a change of its role moves nothing.
    """
    takes = range(slice_size, own_size + 1, slice_size)
    take_ns = tuple(expected_ns(seconds, size) for size in takes) if own_size > slice_size else ()
    train_ns = Fraction(max(1, round(train_seconds * NS_PER_SECOND))) if train_seconds else Fraction(0)
    return LaneOffer(name, expected_ns(seconds, own_size), len(takes), take_ns, train_ns)


def expected_ns(seconds: Mapping[int, float], size: int) -> int:
    """The time of a slice of this size, on a line through the smallest and the largest that were timed."""
    points = sorted(seconds.items())
    (x0, y0), (x1, y1) = (points[0], points[-1]) if len(points) > 1 else ((0, 0.0), points[0])
    on_the_line = y0 + (y1 - y0) * (size - x0) / (x1 - x0)
    return max(1, round(max(on_the_line, points[0][1] / 10) * NS_PER_SECOND))


class CostTracker:
    """Costs that follow the run, in nanoseconds."""

    def __init__(self, offers: Mapping[int, LaneOffer], costs: Costs) -> None:
        self._offers = dict(offers)
        self._slice = {lane: _Recent(offer.slice_ns) for lane, offer in offers.items()}
        self._training = {lane: _training(offer) for lane, offer in offers.items() if offer.train_sample_ns}
        self._kinds = {kind: _Recent(round(getattr(costs, f"{kind}_ns"))) for kind in KINDS}
        self._publications: dict[str, _Recent] = {}  # by pool
        self._pools: dict[int, str] = {}  # of lanes that have got a version

    def add_lane(self, lane: int, offer: LaneOffer) -> None:
        """A lane that joined, once its times are known."""
        self._offers[lane] = offer
        self._slice[lane] = _Recent(offer.slice_ns)
        if offer.train_sample_ns:
            self._training[lane] = _training(offer)

    def add_training(self, lane: int, samples: int, ns: int) -> None:
        """The time of a Train job on a lane that trains alone."""
        self._training[lane].add(ns // samples)

    def add_slices(self, lane: int, slices: int, ns: int) -> None:
        """The time of a Generate job. One with fewer slices than the lane can take counts in proportion."""
        offer = self._offers[lane]
        self._slice[lane].add(round(ns * offer.slice_ns / offer.expected_ns(slices)))

    def add(self, kind: str, ns: int) -> None:
        """Any other cost, one of KINDS."""
        self._kinds[kind].add(ns)

    def add_publication(self, pool: str, lanes: Sequence[int], ns: int) -> None:
        """The time in which lanes of a pool got a version."""
        self.add("publish", ns)
        self._publications.setdefault(pool, _Recent(ns)).add(ns)
        self._pools |= dict.fromkeys(lanes, pool)

    def offer(self, lane: int | None, name: str) -> LaneOffer:
        """The offer of a new lane that is as fast as this one; one without times if this one was never timed."""
        if lane not in self._offers:
            return LaneOffer(name, 0)
        offer = replace(self._offers[lane], name=name, slice_ns=self._slice[lane].typical_ns())
        if lane in self._training:
            offer = replace(offer, train_sample_ns=Fraction(self._training[lane].typical_ns()))
        return offer

    def measured(self, at_ns: int, present: Collection[int]) -> CostsMeasured:
        """All costs, as an event for the scheduler; of lanes, those that are present."""
        typical: dict[str, Any] = {f"{kind}_ns": recent.typical_ns() for kind, recent in self._kinds.items()}
        typical["train_sample_ns"] = Fraction(typical["train_sample_ns"])
        lanes = tuple((lane, recent.typical_ns()) for lane, recent in _of(present, self._slice))
        trains = tuple((lane, Fraction(recent.typical_ns())) for lane, recent in _of(present, self._training))
        return CostsMeasured(
            at_ns,
            **typical,
            lane_slice_ns=lanes,
            lane_train_ns=trains,
            lane_publish_ns=self._lane_publish_ns(present),
        )

    def _lane_publish_ns(self, present: Collection[int]) -> tuple[tuple[int, int], ...]:
        """The typical time of each lane's pool; of no lane if there is only one pool."""
        if len(self._publications) < 2:
            return ()
        typical = {pool: recent.typical_ns() for pool, recent in self._publications.items()}
        return tuple((lane, typical[pool]) for lane, pool in _of(present, self._pools))


def _of(lanes: Collection[int], values: Mapping[int, Value]) -> list[tuple[int, Value]]:
    """The values of these lanes, in their order."""
    return [(lane, values[lane]) for lane in sorted(lanes) if lane in values]


def _training(offer: LaneOffer) -> _Recent:
    return _Recent(max(1, round(offer.train_sample_ns)))
