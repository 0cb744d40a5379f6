"""An actor as the driver sees it: its queue of orders, its signs of life, and what an error of it means."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray._private.state import actors

from digenrl.records import Job
from digenrl.transports.contract import Gone
from digenrl.transports.ray.actors import PULSE, Birth
from digenrl.transports.ray.capacity import Need
from digenrl.worker.assignment import Assignment

LONGEST_PAUSE_S = 5.0  # between signs of life
DEAD = (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError)
LOST = ray.exceptions.ObjectLostError  # an argument of a call is on no machine any more


@dataclass(frozen=True, slots=True)
class Sent:
    """An order under way: its report, and what it leaves, as references. Building has no order."""

    order: Job | None
    report: Any
    left: tuple[Any, ...] = ()


@dataclass(slots=True)
class Member:
    """A worker's actor. It is born once it has its place; from then on it is asked for signs of life."""

    assignment: Assignment
    actor: Any
    need: Need
    planned_node: str | None
    asked_s: float
    birth_reference: Any
    pending: dict[int | None, Sent] = field(default_factory=dict)  # by job; None is the start
    placed_s: float | None = None
    birth: Birth | None = None
    ready: bool = False
    ping: Any = None
    ping_s: float = 0.0

    @property
    def name(self) -> str:
        """The worker's."""
        return self.assignment.name

    @property
    def node_id(self) -> str | None:
        """The machine that it is on, or is meant for."""
        return self.planned_node if self.birth is None else self.birth.node_id

    def awaited(self) -> Iterator[Any]:
        """Everything whose arrival is news."""
        yield from (sent.report for sent in self.pending.values())
        if self.birth is None:
            yield self.birth_reference
        elif self.ping is not None:
            yield self.ping

    def is_silent(self, now_s: float, patience_s: float) -> bool:
        """Whether it has not answered for so long; asks for the next sign of life when it is time."""
        if self.birth is None:
            return self.placed_s is not None and now_s - self.placed_s > patience_s
        if self.ping is None and now_s >= self.ping_s + min(LONGEST_PAUSE_S, patience_s / 4):
            self.ping = self.actor.ping.options(concurrency_group=PULSE).remote()
            self.ping_s = now_s
        return self.ping is not None and now_s - self.ping_s > patience_s

    def has_a_place(self, now_s: float) -> bool:
        """Whether a machine runs its process, though that may not have come to itself yet."""
        if self.placed_s is None and actors(self.actor._actor_id.hex()).get("Pid"):
            self.placed_s = now_s
        return self.placed_s is not None

    def kill(self) -> None:
        """Ends the process; what is dead already stays so."""
        with suppress(ray.exceptions.RayError, ValueError):
            ray.kill(self.actor, no_restart=True)


def ending(member: Member, error: Exception) -> Gone:
    """What became of an actor that an error tells of: it ended, or its machine went away."""
    where = "" if member.birth is None else f" on {member.birth.address}"
    text = " ".join(str(error).split())
    if member.node_id in _dead_nodes() or "node has died" in text or "node was terminated" in text:
        return Gone(f"ended with its machine{where.replace(' on', '')}", fault=False)
    if isinstance(error, ray.exceptions.ActorUnavailableError):  # of a process that died, its machine would tell
        return Gone(f"cannot be reached any more{where}: its machine went away, or the network", fault=False)
    detail = re.search(r"exit detail: (.*?)(?: Some common causes|\. The |$)", text)
    return Gone(f"ended{where}: {(detail.group(1) if detail else text)[:300]}")


def _dead_nodes() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if not node["Alive"]}
