"""Model FLOP utilization of generation and training."""

from __future__ import annotations

import pytest

from digenrl.metrics.flop_use import FlopMeter, SampleOperations
from digenrl.telemetry.trace import Span, Work

SECOND = 1_000_000_000
OPERATIONS = SampleOperations(
    generate_flop=2e12, train_flop=6e12, lane_tflops={"generator-0": 10.0, "helper-0": 20.0, "trainer": 20.0}
)


def span(lane: str, work: Work, seconds: float, size: int) -> Span:
    return Span(lane, work, 0, int(seconds * SECOND), step=0, group=0, first=0, size=size)


def test_utilization_is_the_share_of_the_rates_of_the_lanes_while_they_worked() -> None:
    meter = FlopMeter(OPERATIONS)
    meter.add(span("generator-0", Work.GENERATE, 2.0, size=4))  # 8 of 20
    meter.add(span("generator-0 (2)", Work.GENERATE, 1.0, size=1))  # 2 of 10
    meter.add(span("helper-0", Work.HELP, 1.0, size=5))  # 10 of 20
    meter.add(span("trainer", Work.TRAIN, 3.0, size=5))  # 30 of 60
    meter.add(span("trainer", Work.COMMIT, 9.0, size=0))
    meter.add(span("new-lane", Work.GENERATE, 1.0, size=9))  # its rate is not known
    assert meter.next_window() == pytest.approx({"generation_mfu": 20 / 50, "training_mfu": 0.5})
    meter.add(span("generator-0", Work.GENERATE, 1.0, size=6))  # 12 of 10: the rate was measured too low
    meter.add(span("trainer", Work.TRAIN, 3.0, size=5))
    assert meter.next_window() == {"training_mfu": 0.5}
    assert meter.next_window() == {}
