"""A scheduler that is fed events by hand, with its auditor on."""

from __future__ import annotations

from typing import Any

from digenrl.records import Action, Event, Generate, Generated
from digenrl.scheduling import SchedulerState, decide
from digenrl.scheduling.invariants import Auditor
from digenrl.simulation.virtual_cluster import VirtualCluster


def generated(at_ns: int, job: Generate, score_failure: str = "") -> Generated:
    """The result of a job that used the version it was issued with."""
    return Generated(at_ns, job, job.version, score_failure)


class AuditedScheduler:
    """A scheduler and its auditor, fed by hand. It remembers the actions of the last call."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self.actions: tuple[Action, ...] = ()
        self._auditor = Auditor(state)

    def feed(self, *events: Event) -> AuditedScheduler:
        """Feeds events. The actions of all of them together are the last ones."""
        self.actions = ()
        for event in events:
            self.state, actions = decide(self.state, event)
            self._auditor.observe(event, actions, self.state)
            self.actions += actions
        return self

    def issued(self, kind: type[Action]) -> list[Any]:
        """The last actions of one kind."""
        return [action for action in self.actions if isinstance(action, kind)]

    def run_to_commit(self, cluster: VirtualCluster) -> AuditedScheduler:
        """Runs on a virtual cluster until the first commit."""
        while self.state.committed == 0:
            self.feed(cluster.next_event())
            for action in self.actions:
                cluster.submit(action)
        return self
