"""Workers as actors of a Ray cluster, one each. The driver sends orders and gets reports; tensors it never gets.

What an order reads travels beside it, as references: Ray brings it to the worker's machine while that still
carries out earlier orders. What it leaves stays in the object store of that machine until somebody reads it.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from digenrl.config.recipe import Recipe
from digenrl.records import Job, JobFailed, Publish, Published
from digenrl.transports.contract import Gone, InputsLost, Message, Report
from digenrl.transports.processes import ENVIRONMENT
from digenrl.transports.ray.actors import (
    PULSE,
    WIRE,
    Builder,
    Surroundings,
    WorkerActor,
    build_worker,
    letter_of,
)
from digenrl.transports.ray.artifact_store import RayArtifactStore
from digenrl.transports.ray.capacity import Need, NodeFacts, Packing
from digenrl.transports.ray.joining import RayCluster
from digenrl.transports.ray.members import DEAD, LOST, Member, Sent, ending
from digenrl.transports.ray.placing import need_of, threads_of
from digenrl.transports.ray.weight_broadcast import Delivery, WeightBroadcast
from digenrl.worker.assignment import Assignment

ROUND_S = 0.5  # signs of life and time limits are looked at so often


class RayTransport:
    """Actors by worker's name. What they print goes to `logs`, where their machine sees that folder.

    `deliveries` are told of weights that reached workers; `driver_bytes` are those of all reports so far, which is
    all that the driver gets.
    """

    def __init__(
        self,
        cluster: RayCluster,
        recipe: Recipe,
        logs: Path | None = None,
        deliveries: Callable[[Delivery], None] = lambda delivery: None,
        build: Builder = build_worker,
    ) -> None:
        self._cluster, self._logs, self._tell, self._build = cluster, logs, deliveries, build
        self._patience_s, self._start_timeout_s = recipe.lanes.patience_s, recipe.cluster.start_timeout_s
        self._by_wire = recipe.training.lora is None
        self._members: dict[str, Member] = {}
        self._meetings: dict[int, Any] = {}  # by the ranks' epoch
        self._wire = WeightBroadcast(self._members, deliveries)
        self.shelf = RayArtifactStore(holds_weights=not self._by_wire)
        self.driver_bytes = 0

    # --- Starting and ending ------------------------------------------------------------------------------------

    def start(self, assignment: Assignment) -> None:
        """Asks for an actor and goes on; one without a place after `cluster.start_timeout_s` is gone."""
        assert assignment.name not in self._members, f"{assignment.name} is there already"
        if self._logs is not None:
            self._logs.mkdir(parents=True, exist_ok=True)
        need = need_of(assignment)
        node_id = self._packing().put(need)
        actor = _actor_class(need, node_id).remote(
            assignment, _surroundings(assignment), self._log(assignment), self._build
        )
        member = Member(assignment, actor, need, node_id, time.monotonic(), actor.tell_birth.remote())
        member.pending[None] = Sent(None, actor.build.remote(self._meeting(assignment, actor)))
        self._members[assignment.name] = member

    def has_room(self, assignment: Assignment) -> bool:
        """Whether it would find a place now, with all its ranks, beside those that were just asked for."""
        need, packing = need_of(assignment), self._packing()
        return all(packing.put(need) is not None for _ in range(need.count))

    def end(self, worker: str) -> None:
        """At once; it does not report any more."""
        member = self._members.get(worker)
        if member is not None:
            self._forget(member)

    def stop(self) -> None:
        """Ends everybody, and frees what they left; may be called twice."""
        for worker in list(self._members):
            self.end(worker)
        self.shelf.clear()

    def births(self) -> dict[str, Any]:
        """Where the workers are that have a place, by name."""
        return {name: member.birth for name, member in self._members.items() if member.birth is not None}

    def _forget(self, member: Member) -> None:
        self._wire.forget(member.name)
        del self._members[member.name]
        member.kill()

    def _packing(self) -> Packing:
        """What is free. Ray's own figures lag behind what it was just asked for: the lower of both counts."""
        nodes = self._cluster.facts().nodes
        return Packing(nodes, {node.id: self._free(node) for node in nodes})

    def _free(self, node: NodeFacts) -> dict[str, float]:
        left = dict(node.resources)
        for member in self._members.values():
            if member.node_id == node.id:
                for kind, amount in member.need.resources.items():
                    left[kind] = left.get(kind, 0) - amount
        return {kind: min(amount, node.free.get(kind, 0)) for kind, amount in left.items()}

    def _meeting(self, assignment: Assignment, actor: Any) -> Any:
        """Where ranks meet: the first one's actor says so to all of them; nobody waits for it here."""
        ranks = assignment.ranks
        if ranks is None:
            return ""
        if ranks.index == 0:
            self._meetings = {ranks.epoch: actor.choose_rendezvous.remote()}
        return self._meetings[ranks.epoch]

    def _log(self, assignment: Assignment) -> Path | None:
        return None if self._logs is None else self._logs / f"{assignment.name.replace('/', '-')}.log"

    # --- Orders and reports -------------------------------------------------------------------------------------

    def send(self, worker: str, job_id: int, order: Job) -> None:
        """Hands over an order, and references to what it reads; to a worker that is gone, this does nothing."""
        member = self._members.get(worker)
        if member is None:
            return
        found = {name: self.shelf.get(name) for name in self._carried(order)}
        absent = tuple(name for name, reference in found.items() if reference is None)
        assert not absent, f"{order} reads {', '.join(absent)}, which nobody left, or which was dropped"
        leaves = len(order.writes())
        call = member.actor.carry_out.options(num_returns=1 + leaves)
        references = call.remote(letter_of(order, tuple(found)), *found.values())
        report, *left = references if leaves else [references]
        member.pending[job_id] = Sent(order, report, tuple(left))
        if self._by_wire:
            self._wire.ordered(worker, order)

    def receive(self, timeout_s: float) -> Sequence[Message]:
        """Everything that has arrived; waits for the first for so long."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            messages = list(self._round(max(0.0, min(ROUND_S, left_s))))
            if messages or left_s <= 0:
                return messages

    def _carried(self, order: Job) -> tuple[str, ...]:
        """What an order reads of what travels beside it."""
        weights = getattr(order, "weights", None) if self._by_wire else None
        return tuple(name for name in dict.fromkeys(order.reads()) if weights is None or name != weights.name)

    def _round(self, wait_s: float) -> Iterator[Message]:
        self._wire.go_on()
        awaited = [*self._wire.awaited(), *(each for m in self._members.values() for each in m.awaited())]
        arrived = _arrived(awaited, wait_s)
        for member in list(self._members.values()):
            yield from self._messages(member, arrived)

    def _messages(self, member: Member, arrived: set[Any]) -> Iterator[Message]:
        """The reports of a worker that have arrived, and its end."""
        for job_id, sent in [each for each in member.pending.items() if each[1].report in arrived]:
            report = self._report(member, sent)
            if isinstance(report, Gone):
                self._forget(member)
                yield Message(member.name, None, report)
                return
            del member.pending[job_id]
            yield Message(member.name, job_id, report)
        gone = self._sign(member, arrived)
        if gone is not None:
            self._forget(member)
            yield Message(member.name, None, gone)

    def _report(self, member: Member, sent: Sent) -> Report:
        """The report of a job that has ended."""
        try:
            answer: bytes = ray.get(sent.report)
        except DEAD as error:
            return ending(member, error)
        except LOST as error:
            return self._lost(sent, error)
        report: Report = pickle.loads(answer)
        self.driver_bytes += len(answer)
        self._note(member, sent, report)
        return report

    def _note(self, member: Member, sent: Sent, report: Report) -> None:
        member.ready = True
        order = sent.order
        if order is not None and not isinstance(report, JobFailed | InputsLost):
            for name, reference in zip(order.writes(), sent.left, strict=True):
                self.shelf.keep(name, reference, member.node_id)
        if self._by_wire:
            self._wire.reported(member.name, report)
        elif isinstance(report, Published) and isinstance(order, Publish):
            self._tell(Delivery(order.weights.name, (member.name,), order.weights.bytes, report.seconds))

    def _lost(self, sent: Sent, error: Exception) -> Report:
        """An order was not carried out, since what it reads is nowhere any more."""
        if sent.order is None:
            return Gone("lost the first rank before they met", fault=False)
        names = self.shelf.lost(self._carried(sent.order), error)
        if not names:
            raise error  # it is not what the order reads
        return InputsLost(names)

    def _sign(self, member: Member, arrived: set[Any]) -> Gone | None:
        """That a worker is gone, if it is: dead, silent, or without a place."""
        now_s = time.monotonic()
        try:
            if member.birth is None and member.birth_reference in arrived:
                member.birth, member.ping_s = ray.get(member.birth_reference), now_s
            if member.ping is not None and member.ping in arrived:
                ray.get(member.ping)
                member.ping = None
        except DEAD as error:
            return ending(member, error)
        waited_s = now_s - member.asked_s
        if member.birth is None and waited_s > self._start_timeout_s and not member.has_a_place(now_s):
            return Gone(
                f"found no room: no machine had {member.need.each()} free within {self._start_timeout_s:g} s",
                False,
            )
        if member.is_silent(now_s, self._patience_s):
            return Gone(f"gave no sign of life for {self._patience_s:g} s")
        return None


def _arrived(awaited: Sequence[Any], wait_s: float) -> set[Any]:
    """Those that are there; waits for the first for so long."""
    if not awaited:
        time.sleep(wait_s)
        return set()
    ray.wait(awaited, num_returns=1, timeout=wait_s)
    return set(ray.wait(awaited, num_returns=len(awaited), timeout=0)[0])


def _actor_class(need: Need, node_id: str | None) -> Any:
    """The class of an actor that takes what is needed; on that machine, or else on another of its kind."""
    custom = {kind: amount for kind, amount in need.resources.items() if kind not in ("CPU", "GPU")}
    affinity = (
        {} if node_id is None else {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=True)}
    )
    return ray.remote(
        num_cpus=need.resources.get("CPU", 0),
        num_gpus=need.resources.get("GPU", 0),
        resources=custom,
        accelerator_type=need.accelerator,
        label_selector=dict(need.labels) or None,
        max_restarts=0,
        max_task_retries=0,
        concurrency_groups={PULSE: 1, WIRE: 1},
        **affinity,
    )(WorkerActor)


def _surroundings(assignment: Assignment) -> Surroundings:
    """Variables that are read when torch is imported; a worker on the CPU sees no card."""
    cards = {"CUDA_VISIBLE_DEVICES": ""} if assignment.device == "cpu" else {}
    environment = ENVIRONMENT | {"OMP_NUM_THREADS": str(threads_of(assignment))} | cards
    return Surroundings(environment, tuple(place or str(Path.cwd()) for place in sys.path))
