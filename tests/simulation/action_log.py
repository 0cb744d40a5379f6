"""An observer for tests that look at decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from digenrl.records import Action, Event
from digenrl.scheduling import SchedulerState


@dataclass(slots=True)
class ActionLog:
    """Records every action with its time."""

    actions: list[tuple[int, Action]] = field(default_factory=list)

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        self.actions += ((event.at_ns, action) for action in actions)
