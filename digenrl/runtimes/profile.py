"""What things cost on this machine: measured before the run by a rehearsal, and while it runs. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from statistics import fmean, median

from digenrl.records import CostsMeasured
from digenrl.scheduling import Costs

REMEMBERED = 20  # measurements of each kind
HICCUP = 2  # times the median: what took longer waited for something else


@dataclass(slots=True)
class _Recent:
    """The last few measurements of one thing; the estimate before the first."""

    estimate_ns: int
    values: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def add(self, ns: int) -> None:
        self.values.append(max(1, ns))

    def typical_ns(self) -> int:
        """The mean, because times are added up, without hiccups."""
        if not self.values:
            return self.estimate_ns
        longest = HICCUP * median(self.values)
        return round(fmean(value for value in self.values if value <= longest))


class RunningProfile:
    """Costs that follow the run. Everything is in nanoseconds."""

    def __init__(self, lane_slice_ns: Mapping[int, int], costs: Costs) -> None:
        self._slice = {lane: _Recent(ns) for lane, ns in lane_slice_ns.items()}
        self._kinds = {
            "train_sample": _Recent(round(costs.train_sample_ns)),
            "commit": _Recent(costs.commit_ns),
            "publish": _Recent(costs.publish_ns),
            "switch_in": _Recent(costs.switch_in_ns),
            "switch_out": _Recent(costs.switch_out_ns),
            "score": _Recent(costs.score_ns),
        }

    def add_lane(self, lane: int, slice_ns: int) -> None:
        """A lane that joined."""
        self._slice[lane] = _Recent(slice_ns)

    def add_slice(self, lane: int, ns: int) -> None:
        """A slice that a lane made."""
        self._slice[lane].add(ns)

    def add(self, kind: str, ns: int) -> None:
        """Anything else: train_sample, commit, publish, switch_in, switch_out, score (per sample)."""
        self._kinds[kind].add(ns)

    def slice_ns(self, lane: int) -> int:
        """What a slice takes on a lane."""
        return self._slice[lane].typical_ns()

    def costs(self, at_ns: int) -> CostsMeasured:
        """Everything, as an event for the scheduler."""
        typical = {kind: recent.typical_ns() for kind, recent in self._kinds.items()}
        return CostsMeasured(
            at_ns=at_ns,
            train_sample_ns=Fraction(typical["train_sample"]),
            commit_ns=typical["commit"],
            publish_ns=typical["publish"],
            switch_in_ns=typical["switch_in"],
            switch_out_ns=typical["switch_out"],
            score_ns=typical["score"],
            lane_slice_ns=tuple((lane, recent.typical_ns()) for lane, recent in sorted(self._slice.items())),
        )
