"""The loop: event -> decide -> submit. It is the same on a virtual clock, one machine and a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from digenrl.records import Action, Event, GiveUp
from digenrl.scheduling import SchedulerState, decide


class Runtime(Protocol):
    """Carries out jobs. It reports every event of an instant, then a Tick."""

    def next_event(self) -> Event:
        """Waits for the next event, or the Tick that closes an instant."""

    def submit(self, action: Action) -> None:
        """Starts a job; its result comes back as an event."""


class Observer(Protocol):
    """Observes the loop: traces, metrics, invariants."""

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        """Called after every decision, before its actions start."""


class RunGaveUpError(RuntimeError):
    """Too many groups failed; the message has the last reason."""


def drive(state: SchedulerState, runtime: Runtime, observers: Sequence[Observer] = ()) -> SchedulerState:
    """Runs until the scheduler has nothing left to do. Returns its last state."""
    for _, after in decisions(state, runtime, observers):
        state = after
    return state


def decisions(
    state: SchedulerState, runtime: Runtime, observers: Sequence[Observer] = ()
) -> Iterator[tuple[Event, SchedulerState]]:
    """As `drive`, one event at a time: every event, and the state after its decision."""
    while not state.finished:
        event = runtime.next_event()
        state, actions = decide(state, event)
        for observer in observers:
            observer.observe(event, actions, state)
        for action in actions:
            if isinstance(action, GiveUp):
                raise RunGaveUpError(action.reason)
            runtime.submit(action)
        yield event, state
