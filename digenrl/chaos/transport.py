"""A transport on a virtual clock: workers take time, messages take their way, and faults strike both."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from zlib import crc32

from digenrl.chaos.exchange import VirtualExchange
from digenrl.chaos.promises import ViolationError
from digenrl.chaos.workers import SimulatedWorker, WorldFacts, nominal_seconds
from digenrl.chaos.worlds import World
from digenrl.records import Job
from digenrl.transports.contract import Gone, Message, Report
from digenrl.units import NS_PER_SECOND
from digenrl.worker.assignment import Assignment, Ready

LEAST_NS = 1_000  # no job is instant
REFUSAL_S = 0.01  # until a worker reports that inputs are lost
LEAST_WAIT_S = 2.0  # a driver that polls more often only makes simulations slower


class StuckError(ViolationError):
    """The run makes no progress."""


class VirtualClock:
    """Virtual time. The driver's clock may differ from it by `skew_ns`."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.skew_ns = 0

    def __call__(self) -> int:
        return self.now_ns + self.skew_ns

    def monotonic_s(self) -> float:
        """Seconds, for the supervisor."""
        return self.now_ns / NS_PER_SECOND


@dataclass(slots=True)
class WorkerSlot:
    """A started worker, with its queue and what faults do to it."""

    worker: SimulatedWorker
    name: str
    queue: deque[Job] = field(default_factory=deque)
    busy: bool = True  # until it has started
    silent: bool = False  # it does nothing more, or cannot be reached
    slowdown: float = 1.0
    broken: bool = False  # it fails every job at once
    gone: bool = False


class JobFaults:
    """Faults that wait for a job or a message. The default ones change nothing."""

    def seconds(self, slot: WorkerSlot, job: Job, seconds: float) -> float:
        """How long a job takes."""
        return seconds

    def report(self, slot: WorkerSlot, job: Job) -> Report:
        """What a worker makes of a job that it has begun."""
        return slot.worker.carry_out(job)

    def delays_s(self, slot: WorkerSlot, job: Job) -> Sequence[float]:
        """When the copies of a message arrive; none if it is lost."""
        return (0.0,)

    def never_starts(self, slot: WorkerSlot) -> bool:
        """Whether a worker hangs while it loads."""
        return False

    def started(self, slot: WorkerSlot) -> None:
        """A worker has started."""


class VirtualTransport:
    """Implements Transport, for one driver, whose start `start_ns` limits. A worker runs its jobs in order."""

    def __init__(
        self, world: World, clock: VirtualClock, facts: WorldFacts, faults: JobFaults, start_ns: int
    ) -> None:
        self._world, self._clock, self._facts, self._faults = world, clock, facts, faults
        self.exchange = VirtualExchange()
        self.slots: dict[str, WorkerSlot] = {}
        self.full: set[str] = {each.name for each in world.workers.reserve}  # workers without room
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._inbox: list[Message] = []
        self._scheduled = 0
        self._starts = 0
        self.expect_progress(start_ns)

    def expect_progress(self, within_ns: int) -> None:
        """Raises StuckError if this is not called again within this time."""
        self.since_ns, self.give_up_ns = self._clock.now_ns, self._clock.now_ns + within_ns

    @property
    def idle(self) -> bool:
        """Whether nothing happens any more unless the driver sends something."""
        busy = any(slot.busy or slot.queue for slot in self.slots.values())
        return not (busy or self._due or self._inbox)

    # --- Transport ----------------------------------------------------------------------------------------------

    def start(self, assignment: Assignment) -> None:
        name = assignment.name
        if name in self.slots:
            raise ViolationError(f"{name} was started twice")
        self._starts += 1
        slot = WorkerSlot(SimulatedWorker(assignment, self._world, self.exchange, self._facts), name)
        self.slots[name] = slot
        if self._faults.never_starts(slot):
            return
        self.after(self._world.start_s * self._noise(f"start {name} {self._starts}"), lambda: self._started(slot))

    def has_capacity(self, assignment: Assignment) -> bool:
        return assignment.name.partition("/")[0] not in self.full

    def send(self, worker: str, job: Job) -> None:
        slot = self.slots.get(worker)
        if slot is not None:
            slot.queue.append(job)
            self._work(slot)

    def receive(self, timeout_s: float) -> Sequence[Message]:
        """The messages of the next instant that has any, or none after some time. Short timeouts are stretched.

        A busy driver finds several messages at once.
        """
        clock, until_ns = self._clock, self._clock.now_ns + round(max(timeout_s, LEAST_WAIT_S) * NS_PER_SECOND)
        while not self._inbox:
            if not self._due or self._due[0][0] > until_ns:
                self._pass_time(until_ns)
                return ()
            self._advance()
        until_ns = clock.now_ns + round(self._world.look_s * NS_PER_SECOND)
        while self._due and self._due[0][0] <= until_ns:
            self._advance()
        messages, self._inbox = self._inbox, []
        return messages

    def end(self, worker: str) -> None:
        """Kills a worker. Messages that are on their way still arrive, which a driver has to bear."""
        slot = self.slots.pop(worker, None)
        if slot is not None:
            slot.gone = True

    def stop(self) -> None:
        for name in list(self.slots):
            self.end(name)

    # --- Time ---------------------------------------------------------------------------------------------------

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        """Does something later."""
        self.at(self._clock.now_ns + max(LEAST_NS, round(seconds * NS_PER_SECOND)), then)

    def at(self, at_ns: int, then: Callable[[], None]) -> None:
        """Does something at a time, or now if that has passed."""
        self._scheduled += 1
        heappush(self._due, (max(at_ns, self._clock.now_ns), self._scheduled, then))

    def _advance(self) -> None:
        at_ns, _, then = heappop(self._due)
        self._pass_time(at_ns)
        then()

    def _pass_time(self, until_ns: int) -> None:
        if until_ns > self.give_up_ns:
            since_s, until_s = self.since_ns / NS_PER_SECOND, until_ns / NS_PER_SECOND
            raise StuckError(f"no step was committed between {since_s:.3f} s and {until_s:.3f} s")
        self._clock.now_ns = until_ns

    def _noise(self, key: str) -> float:
        """A factor around 1 that depends on the seed and the key alone, so that faults do not change it."""
        return 0.9 + 0.2 * crc32(f"{self._world.seed} {key}".encode()) / (1 << 32)

    # --- Workers ------------------------------------------------------------------------------------------------

    def _started(self, slot: WorkerSlot) -> None:
        if slot.gone or slot.silent:
            return
        slot.busy = False
        self.deliver(Message(slot.name, None, Ready()))
        self._faults.started(slot)
        self._work(slot)

    def _work(self, slot: WorkerSlot) -> None:
        if slot.busy or slot.gone or not slot.queue:
            return
        slot.busy = True
        job = slot.queue.popleft()
        refusal = slot.worker.begin(job)
        if refusal is not None:
            self.after(REFUSAL_S, lambda: self._done(slot, job, refusal))
            return
        seconds = nominal_seconds(self._world, slot.name, job) * self._noise(f"{slot.name} {job.id}")
        seconds = self._faults.seconds(slot, job, seconds * slot.slowdown)
        self.after(seconds, lambda: self._done(slot, job))

    def _done(self, slot: WorkerSlot, job: Job, refusal: Report | None = None) -> None:
        if slot.gone or slot.silent:
            return
        message = Message(slot.name, job.id, refusal or self._faults.report(slot, job))
        for delay_s in self._faults.delays_s(slot, job):
            if delay_s > 0:
                self.after(delay_s, lambda: self.deliver(message))
            else:
                self.deliver(message)
        slot.busy = False
        self._work(slot)

    def deliver(self, message: Message) -> None:
        self._inbox.append(message)

    def kill(self, name: str, reason: str, fault: bool = True) -> bool:
        """A worker dies with its jobs, of which the driver hears. Returns whether it was there."""
        if name not in self.slots:
            return False
        self.end(name)
        self.deliver(Message(name, None, Gone(reason, fault)))
        return True

    def silence(self, name: str, patience_s: float) -> bool:
        """A worker stops. After its patience it is killed. Returns whether it was there."""
        slot = self.slots.get(name)
        if slot is None or slot.silent:
            return False
        slot.silent = True

        def give_up() -> None:
            if self.slots.get(name) is slot:
                self.kill(name, "stopped sending heartbeats and was killed")

        self.after(patience_s, give_up)
        return True
