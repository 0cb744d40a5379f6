"""A worker's actor as the driver sees it: its pending jobs, its heartbeat, and the meaning of its errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray

from digenrl.config.reading import one_line
from digenrl.records import Job
from digenrl.transports.contract import Gone
from digenrl.transports.ray.actors import HEARTBEAT, ActorLocation
from digenrl.transports.ray.capacity import ResourceRequest
from digenrl.transports.ray.internals import has_process
from digenrl.worker.assignment import Assignment

MAX_HEARTBEAT_INTERVAL_S = 5.0
ACTOR_DIED = (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError)


@dataclass(frozen=True, slots=True)
class PendingCall:
    """References to a job's report and to the tensors that it leaves, and the names of those that it reads.

    The call that builds a worker has no job.
    """

    job: Job | None
    report: Any
    outputs: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()


@dataclass(slots=True)
class WorkerHandle:
    """A worker's actor. It has a location once its process runs; from then on its heartbeat is checked."""

    assignment: Assignment
    actor: Any
    request: ResourceRequest
    planned_node: str | None
    requested_s: float
    location_reference: Any
    pending: dict[int | None, PendingCall] = field(default_factory=dict)  # by job id; None is the start
    location: ActorLocation | None = None
    ready: bool = False
    _process_seen_s: float | None = None
    _ping: Any = None
    _ping_s: float = 0.0

    @property
    def name(self) -> str:
        return self.assignment.name

    @property
    def node_id(self) -> str | None:
        """The machine on which it runs, or is expected to run."""
        return self.planned_node if self.location is None else self.location.node_id

    def awaited(self) -> Iterator[Any]:
        """References to wait for."""
        yield from (call.report for call in self.pending.values())
        if self.location is None:
            yield self.location_reference
        elif self._ping is not None:
            yield self._ping

    def update(self, arrived: set[Any], now_s: float) -> None:
        """Takes the location and the answer to a ping, if they have arrived. Raises ACTOR_DIED if it is dead."""
        if self.location is None and self.location_reference in arrived:
            self.location, self._ping_s = ray.get(self.location_reference), now_s
        if self._ping is not None and self._ping in arrived:
            ray.get(self._ping)
            self._ping = None

    def is_unresponsive(self, now_s: float, timeout_s: float) -> bool:
        """Whether it has not answered for this long. Sends the next ping when it is due."""
        if self.location is None:
            return self._process_seen_s is not None and now_s - self._process_seen_s > timeout_s
        if self._ping is None and now_s >= self._ping_s + min(MAX_HEARTBEAT_INTERVAL_S, timeout_s / 4):
            self._ping = self.actor.ping.options(concurrency_group=HEARTBEAT).remote()
            self._ping_s = now_s
        return self._ping is not None and now_s - self._ping_s > timeout_s

    def has_process(self, now_s: float) -> bool:
        """Whether a machine runs its process, which may still be starting."""
        if self._process_seen_s is None and has_process(self.actor):
            self._process_seen_s = now_s
        return self._process_seen_s is not None

    def kill(self) -> None:
        with suppress(ray.exceptions.RayError, ValueError):  # it has ended already
            ray.kill(self.actor, no_restart=True)

    def explain_death(self, error: Exception) -> Gone:
        """Whether the process ended by itself, or was lost with its machine."""
        address = "" if self.location is None else f" {self.location.address}"
        where, text = f" on{address}" if address else "", one_line(error)
        dead_nodes = {node["NodeID"] for node in ray.nodes() if not node["Alive"]}
        if self.node_id in dead_nodes or "node has died" in text or "node was terminated" in text:
            return Gone(f"ended with its machine{address}", fault=False)
        if isinstance(error, ray.exceptions.ActorUnavailableError):  # a live machine would report its death
            return Gone(f"cannot be reached{where}: its machine or the network failed", fault=False)
        detail = re.search(r"exit detail: (.*?)(?: Some common causes|\. The |$)", text)
        return Gone(f"ended{where}: {(detail.group(1) if detail else text)[:300]}")
