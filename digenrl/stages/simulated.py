"""The pipeline on a virtual clock: when each stage computes what, and when the step ends. Needs no torch."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Direction = Literal["forward", "backward"]

FORWARD_SHARE = 1 / 3  # of the time of a forward and backward, without gradient checkpointing


@dataclass(frozen=True, slots=True)
class PipelineSpan:
    """A stage computes a micro-batch."""

    stage: int
    direction: Direction
    index: int
    begin_s: float
    end_s: float


class _Stage:
    """What has arrived at a stage, and how many micro-batches are between their forward and backward."""

    def __init__(self) -> None:
        self.waiting: dict[Direction, deque[int]] = {"forward": deque(), "backward": deque()}
        self.in_flight = 0
        self.is_busy = False

    def next(self, most_in_flight: int) -> tuple[Direction, int] | None:
        if self.waiting["backward"]:
            return "backward", self.waiting["backward"].popleft()
        if self.waiting["forward"] and self.in_flight < most_in_flight:
            return "forward", self.waiting["forward"].popleft()
        return None


def simulate_pipeline(
    stage_s: Sequence[float], link_s: Sequence[float], micro_batches: int, in_flight: int | None = None
) -> list[PipelineSpan]:
    """What the stages of `Pipeline` compute in one step, in the order of time; for arguments see `cut`."""
    count, most = len(stage_s), 2 * len(stage_s) if in_flight is None else in_flight
    stages = [_Stage() for _ in stage_s]
    free_at: dict[tuple[int, Direction], float] = {}
    events: list[tuple[float, int, int, Direction, int, bool]] = []
    spans: list[PipelineSpan] = []

    def arrive(at_s: float, stage: int, direction: Direction, index: int, finished: bool = False) -> None:
        heapq.heappush(events, (at_s, len(spans), stage, direction, index, finished))

    def send(now: float, stage: int, direction: Direction, index: int) -> None:
        link, to = (stage, stage + 1) if direction == "forward" else (stage - 1, stage - 1)
        begin = max(now, free_at.get((link, direction), 0.0))
        free_at[link, direction] = begin + link_s[link]
        arrive(begin + link_s[link], to, direction, index)

    def finish(now: float, stage: int, direction: Direction, index: int) -> None:
        stages[stage].is_busy = False
        if direction == "forward" and stage == count - 1:
            stages[stage].waiting["backward"].append(index)
        elif direction == "forward" or stage > 0:
            send(now, stage, direction, index)
        stages[stage].in_flight -= direction == "backward"

    for index in range(micro_batches):
        stages[0].waiting["forward"].append(index)
    arrive(0.0, 0, "forward", -1)
    while events:
        now, _, at, direction, index, finished = heapq.heappop(events)
        if finished:
            finish(now, at, direction, index)
        elif index >= 0:
            stages[at].waiting[direction].append(index)
        work = None if stages[at].is_busy else stages[at].next(most)
        if work is not None:
            share = FORWARD_SHARE if work[0] == "forward" else 1 - FORWARD_SHARE
            stages[at].is_busy = True
            stages[at].in_flight += work[0] == "forward"
            spans.append(PipelineSpan(at, *work, now, now + share * stage_s[at]))
            arrive(now + share * stage_s[at], at, *work, finished=True)
    return spans
