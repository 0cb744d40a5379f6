"""The driver: event -> decide -> submit. The same few lines on a virtual clock, one machine and a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from digenrl.records import Action, Event, GiveUp
from digenrl.scheduling import SchedulerState, decide


class Runtime(Protocol):
    """Whoever has the lanes. It reports every event of an instant, then a Tick, and carries out actions."""

    def next_event(self) -> Event:
        """The next fact, or the Tick that closes an instant; waits for it."""

    def submit(self, action: Action) -> None:
        """Starts an action; its answer comes back as an event."""


class Observer(Protocol):
    """Looks on from outside: traces, metrics, invariants."""

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        """Called after every decision, before its actions start."""


class RunGaveUpError(RuntimeError):
    """Too many groups failed; the message has the last reason."""


def drive(state: SchedulerState, runtime: Runtime, observers: Sequence[Observer] = ()) -> SchedulerState:
    """Runs until all optimizer steps are taken."""
    while not state.finished:
        event = runtime.next_event()
        state, actions = decide(state, event)
        for observer in observers:
            observer.observe(event, actions, state)
        for action in actions:
            if isinstance(action, GiveUp):
                raise RunGaveUpError(action.reason)
            runtime.submit(action)
    return state
