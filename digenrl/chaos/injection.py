"""Strikes a simulated world with its faults."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any, ClassVar

from digenrl.chaos.faults import Fault
from digenrl.chaos.transport import JobFaults, VirtualClock, VirtualTransport, WorkerSlot
from digenrl.chaos.worlds import PATIENCE_S, World
from digenrl.records import (
    Commit,
    Committed,
    Evaluate,
    Export,
    Generate,
    Generated,
    Job,
    JobFailed,
    Publish,
    Save,
    Score,
    Scored,
    Scores,
    TakeUpdate,
    Train,
    UpdateTaken,
    pixels_name,
)
from digenrl.transports.contract import Message, Report
from digenrl.units import NS_PER_SECOND
from digenrl.worker.assignment import TRAINER

NEVER_S = 1e9
BROKEN = "RuntimeError: everything fails here"
REORDERING_S = 2.0  # the longest extra way of a message
PICTURES = re.compile(r"held-out-\d")  # names of held-out pictures
NOT_A_NUMBER = {"gradient_norm": math.nan, "ratio_mean": math.nan}
NEXT_JOB: dict[str, tuple[type[Job], ...]] = {  # faults that wait for a job
    "reward_timeout": (Score, Generate),
    "reward_error": (Score, Generate),
    "reward_nan": (Score, Generate),
    "reward_garbage": (Score, Generate),
    "trainer_crash": (Train, Save),
    "slice_loss": (Score,),
    "chunk_loss": (Publish,),
    "weights_loss": (Commit,),
    "late_export": (Export,),
    "nan_loss": (Commit, TakeUpdate),
    "out_of_memory": (Generate, Evaluate),
    "partition": (Publish,),
}
AT_THE_BEGINNING = ("slice_loss", "chunk_loss", "trainer_crash")  # of that job
OF_MESSAGES = ("late", "doubled", "lost", "late_export")
AT_THE_END = tuple(kind for kind in NEXT_JOB if kind not in (*AT_THE_BEGINNING, *OF_MESSAGES))
OF_REWARDS = ("reward_timeout", "reward_error", "reward_nan", "reward_garbage")


class Injector(JobFaults):
    """The faults of one world. It outlives drivers: a fault strikes once. `struck` counts those that did."""

    def __init__(self, world: World, clock: VirtualClock, faults: Sequence[Fault]) -> None:
        self._world, self._clock = world, clock
        self._dice = Random(f"injection {world.seed}")
        self._pending = [fault for fault in faults if fault.kind != "driver_kill"]
        self.kills = sorted(int(fault.amount) for fault in faults if fault.kind == "driver_kill")
        self._armed: list[Fault] = []
        self._flapping: Counter[str] = Counter()
        self._stuck: set[str] = set()
        self._reordering_until_ns = 0
        self.struck: Counter[str] = Counter()
        self.wants_stop = False
        self.transport: VirtualTransport | None = None

    def attach(self, transport: VirtualTransport) -> None:
        """A driver starts with this transport."""
        self.transport = transport
        self._armed.clear()
        self._flapping.clear()
        self._stuck.clear()
        self.wants_stop = False
        for fault in list(self._pending):
            transport.at(fault.at_ns, lambda fault=fault: self._strike(fault))  # type: ignore[misc]

    def detach(self) -> None:
        """Nothing strikes any more."""
        self._pending.clear()
        self._armed.clear()

    def _strike(self, fault: Fault) -> None:
        if fault in self._pending:
            self._pending.remove(fault)
            if fault.kind in NEXT_JOB or fault.kind in (*OF_MESSAGES, "stall"):
                self._armed.append(fault)
            elif self._STRIKE[fault.kind](self, fault):
                self.struck[fault.kind] += 1

    @property
    def _there(self) -> VirtualTransport:
        assert self.transport is not None
        return self.transport

    # --- Workers ------------------------------------------------------------------------------------------------

    def _ranks(self, name: str) -> list[str]:
        """The slots of a worker, one per rank."""
        return [slot for slot in self._there.slots if slot.partition("/")[0] == name]

    def _crash(self, fault: Fault) -> bool:
        ranks = self._ranks(fault.worker)
        return bool(ranks) and self._there.kill(self._dice.choice(ranks), "ended by signal 9 (SIGKILL)")

    def _hang(self, fault: Fault) -> bool:
        ranks = self._ranks(fault.worker)
        return bool(ranks) and self._there.silence(self._dice.choice(ranks), PATIENCE_S)

    def _slow(self, fault: Fault) -> bool:
        for name in self._ranks(fault.worker):
            self._there.slots[name].slowdown = fault.amount
        return bool(self._ranks(fault.worker))

    def _break(self, fault: Fault) -> bool:
        """One of several generators. The last one would rightly end the run."""
        slots = self._there.slots
        if fault.worker == TRAINER or fault.worker not in slots or not self.works(but=fault.worker):
            return False
        slots[fault.worker].broken = True
        return True

    def works(self, but: str = "") -> bool:
        """Whether a generator, another one than this, is present and not broken."""
        workers = self._world.workers
        names = [each.name for each in (*workers.generators, *workers.reserve) if each.name != but]
        return any(name in self._there.slots and not self._there.slots[name].broken for name in names)

    def _flap(self, fault: Fault) -> bool:
        self._flapping[fault.worker] = round(fault.amount)
        return self._crash(fault)

    def _stick(self, fault: Fault) -> bool:
        self._stuck.add(fault.worker)
        return self._crash(fault)

    def _leave(self, fault: Fault) -> bool:
        there, struck = self._there, False
        there.full.add(fault.worker)
        for name in self._ranks(fault.worker):
            struck |= there.kill(name, "lost its machine", fault=False)
        there.after(fault.amount, lambda: there.full.discard(fault.worker))
        return struck

    def _join(self, fault: Fault) -> bool:
        has_joined = fault.worker not in self._there.full
        self._there.full.discard(fault.worker)
        return not has_joined

    def _node_loss(self, fault: Fault) -> bool:
        there, nodes = self._there, sorted(set(self._world.nodes.values()))
        node = self._dice.choice(nodes)
        names = [name for name in there.slots if self._world.node(name) == node]
        there.exchange.lose_node(node)
        for name in names:
            self._leave(replace(fault, worker=name.partition("/")[0]))
        return bool(names)

    def _artifact_loss(self, fault: Fault) -> bool:
        # The weights of an update inside a step are lost only with the trainer that made them.
        left = [name for name in self._there.exchange.names() if not name.startswith("update-")]
        names = [name for name in left if self._dice.random() < fault.amount]
        self._there.exchange.lose(names)
        return bool(names)

    def _reordered(self, fault: Fault) -> bool:
        self._reordering_until_ns = self._clock.now_ns + round(fault.amount * NS_PER_SECOND)
        return True

    def _clock_jump(self, fault: Fault) -> bool:
        self._clock.skew_ns += round(fault.amount * NS_PER_SECOND)
        return True

    def _stop(self, fault: Fault) -> bool:
        self.wants_stop = True
        return True

    _STRIKE: ClassVar[dict[str, Callable[[Injector, Fault], bool]]] = {
        "crash": _crash,
        "hang": _hang,
        "slow": _slow,
        "broken": _break,
        "stuck_start": _stick,
        "flap": _flap,
        "leave": _leave,
        "join": _join,
        "node_loss": _node_loss,
        "artifact_loss": _artifact_loss,
        "reordered": _reordered,
        "clock_jump": _clock_jump,
        "stop": _stop,
    }

    # --- Jobs and messages --------------------------------------------------------------------------------------

    def seconds(self, slot: WorkerSlot, job: Job, seconds: float) -> float:
        if slot.broken:
            return 0.0
        fault = self._find(slot, job, AT_THE_BEGINNING)
        if fault is not None and fault.kind == "trainer_crash":
            self._use(fault)
            self._there.after(fault.amount * seconds, self._death(slot))
        elif fault is not None:
            self._lose_slice(fault, job) if isinstance(job, Score) else self._lose_chunks(fault, job)
        stall = self._find(slot, job, ("stall",))
        if stall is not None:
            self._use(stall)
            return NEVER_S
        timeout = self._find(slot, job, ("reward_timeout",))
        return seconds if timeout is None else seconds + timeout.amount

    def _lose_slice(self, loss: Fault, job: Score) -> None:
        """The slice that is being scored; one of which another part is still to be scored, if there are any."""
        wide, artifact = bool(self._world.recipe.cluster.generators), job.artifact
        if artifact is not None and (not wide or job.piece != artifact.slice):
            self._use(loss)
            self._there.exchange.lose((artifact.name, pixels_name(artifact.name)))

    def _lose_chunks(self, loss: Fault, job: Job) -> None:
        """The held-out pictures that wait for a reward lane, and the weights that this job has just read."""
        names = [name for name in self._there.exchange.names() if PICTURES.match(name)]
        if names:
            self._use(loss)
            self._there.exchange.lose((*names, *job.reads()))

    def report(self, slot: WorkerSlot, job: Job) -> Report:
        if slot.broken:
            return JobFailed(0, job, BROKEN)
        fault = self._find(slot, job, AT_THE_END)
        if fault is None:
            return super().report(slot, job)
        self._use(fault)
        if fault.kind == "out_of_memory":
            if fault.amount > 2:
                self._armed.append(replace(fault, amount=fault.amount - 1))
            return JobFailed(0, job, "OutOfMemoryError: CUDA out of memory")
        report = super().report(slot, job)
        if fault.kind == "weights_loss":
            self._there.exchange.lose(job.writes())
        if fault.kind == "partition":
            self._there.silence(slot.name, PATIENCE_S)
            self._there.after(PATIENCE_S + 1, lambda: self._there.deliver(Message(slot.name, job.id, report)))
        return _spoiled(report, fault.kind)

    def delays_s(self, slot: WorkerSlot, job: Job) -> Sequence[float]:
        if slot.silent:
            return ()
        delay_s = 0.0
        if self._clock.now_ns < self._reordering_until_ns:
            delay_s = self._dice.uniform(0, REORDERING_S)
        fault = self._find(slot, job, OF_MESSAGES)
        if fault is None:
            return (delay_s,)
        self._use(fault)
        late_s = delay_s + fault.amount
        return {"doubled": (delay_s, late_s), "lost": ()}.get(fault.kind, (late_s,))

    def never_starts(self, slot: WorkerSlot) -> bool:
        name = slot.name.partition("/")[0]
        stuck = name in self._stuck
        self._stuck.discard(name)
        return stuck

    def started(self, slot: WorkerSlot) -> None:
        name = slot.name.partition("/")[0]
        if self._flapping[name] > 0:
            self._flapping[name] -= 1
            self._there.after(self._dice.uniform(0, 2), self._death(slot))

    def _death(self, slot: WorkerSlot) -> Callable[[], None]:
        there = self._there

        def die() -> None:
            there.kill(slot.name, "ended by signal 11 (SIGSEGV)")

        return die

    def _use(self, fault: Fault) -> None:
        """The fault strikes."""
        self._armed.remove(fault)
        self.struck[fault.kind] += 1

    def _find(self, slot: WorkerSlot, job: Job, kinds: Sequence[str]) -> Fault | None:
        for fault in self._armed:
            if fault.kind not in kinds or not isinstance(job, NEXT_JOB.get(fault.kind, Job)):
                continue
            unscored = isinstance(job, Generate) and "score" not in slot.worker.assignment.duties
            if unscored and fault.kind in OF_REWARDS:
                continue
            if not fault.worker or fault.worker == slot.name.partition("/")[0]:
                return fault
        return None


def _spoiled(report: Report, kind: str) -> Report:
    """The report of a job that a fault has struck."""
    if kind in ("reward_timeout", "reward_error"):
        reason = "the reward timed out" if kind == "reward_timeout" else "the reward failed"
        if isinstance(report, Scored):
            return JobFailed(0, report.job, reason, user_error=True)
        if isinstance(report, Generated):
            return replace(report, scores=None, score_failure=reason)
    if kind in ("reward_nan", "reward_garbage") and isinstance(report, Scored | Generated) and report.scores:
        values = report.scores.values
        bad = (math.nan, *values[1:]) if kind == "reward_nan" else values[1:]
        return replace(report, scores=Scores(bad, report.scores.parts))
    if kind == "nan_loss" and isinstance(report, Committed | UpdateTaken):
        updates: tuple[Any, ...] = tuple({**update, **NOT_A_NUMBER} for update in report.updates)
        return replace(report, updates=updates)
    return report
