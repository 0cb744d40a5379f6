"""A transport on a virtual clock: workers take time, messages take their way, and faults strike both."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from zlib import crc32

from digenrl.chaos.exchange import VirtualExchange
from digenrl.chaos.faults import NS
from digenrl.chaos.ledger import ViolationError
from digenrl.chaos.workers import SimulatedWorker, WorldFacts, nominal_seconds
from digenrl.chaos.worlds import World
from digenrl.records import Job
from digenrl.transports.contract import Gone, Message, Report
from digenrl.worker.assignment import Assignment, Ready

LEAST_NS = 1_000  # no job is instant
REFUSAL_S = 0.01  # until a worker reports that inputs are lost
START_NS = 2_000 * NS  # the longest start of all workers
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
        return self.now_ns / NS


@dataclass(slots=True)
class Seat:
    """A started worker, with its queue and what faults do to it."""

    worker: SimulatedWorker
    name: str
    queue: deque[Job] = field(default_factory=deque)
    busy: bool = True  # until it has started
    silent: bool = False  # it does nothing more, or cannot be reached
    slowdown: float = 1.0
    gone: bool = False


class JobFaults:
    """Faults that wait for a job or a message. The default ones change nothing."""

    def seconds(self, seat: Seat, job: Job, seconds: float) -> float:
        """How long a job takes."""
        return seconds

    def report(self, seat: Seat, job: Job) -> Report:
        """What a worker makes of a job that it has begun."""
        return seat.worker.carry_out(job)

    def delays_s(self, seat: Seat, job: Job) -> Sequence[float]:
        """When the copies of a message arrive; none if it is lost."""
        return (0.0,)

    def started(self, seat: Seat) -> None:
        """A worker has started."""


class VirtualTransport:
    """Implements Transport, for one driver. A worker runs its jobs in order."""

    def __init__(self, world: World, clock: VirtualClock, facts: WorldFacts, faults: JobFaults) -> None:
        self._world, self._clock, self._facts, self._faults = world, clock, facts, faults
        self.exchange = VirtualExchange()
        self.seats: dict[str, Seat] = {}
        self.full: set[str] = {each.name for each in world.workers.reserve}  # workers without room
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._inbox: list[Message] = []
        self._scheduled = 0
        self._starts = 0
        self.expect_progress(START_NS)

    def expect_progress(self, within_ns: int) -> None:
        """Raises StuckError if this is not called again within this time."""
        self.since_ns, self.give_up_ns = self._clock.now_ns, self._clock.now_ns + within_ns

    # --- Transport ----------------------------------------------------------------------------------------------

    def start(self, assignment: Assignment) -> None:
        name = assignment.name
        if name in self.seats:
            raise ViolationError(f"{name} was started twice")
        self._starts += 1
        seat = Seat(SimulatedWorker(assignment, self._world, self.exchange, self._facts), name)
        self.seats[name] = seat
        self.after(self._world.start_s * self._noise(f"start {name} {self._starts}"), lambda: self._started(seat))

    def has_room(self, assignment: Assignment) -> bool:
        return assignment.name.partition("/")[0] not in self.full

    def send(self, worker: str, job: Job) -> None:
        seat = self.seats.get(worker)
        if seat is not None:
            seat.queue.append(job)
            self._work(seat)

    def receive(self, timeout_s: float) -> Sequence[Message]:
        """The messages of the next instant that has any, or none after some time. Short timeouts are stretched.

        A busy driver finds several messages at once.
        """
        clock, until_ns = self._clock, self._clock.now_ns + round(max(timeout_s, LEAST_WAIT_S) * NS)
        while not self._inbox:
            if not self._due or self._due[0][0] > until_ns:
                self._pass_time(until_ns)
                return ()
            self._advance()
        until_ns = clock.now_ns + round(self._world.look_s * NS)
        while self._due and self._due[0][0] <= until_ns:
            self._advance()
        messages, self._inbox = self._inbox, []
        return messages

    def end(self, worker: str) -> None:
        """Kills a worker. Messages that are on their way still arrive, which a driver has to bear."""
        seat = self.seats.pop(worker, None)
        if seat is not None:
            seat.gone = True

    def stop(self) -> None:
        for name in list(self.seats):
            self.end(name)

    # --- Time ---------------------------------------------------------------------------------------------------

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        """Does something later."""
        self.at(self._clock.now_ns + max(LEAST_NS, round(seconds * NS)), then)

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
            raise StuckError(f"no step was committed between {self.since_ns / NS:.3f} s and {until_ns / NS:.3f} s")
        self._clock.now_ns = until_ns

    def _noise(self, key: str) -> float:
        """A factor around 1 that depends on the seed and the key alone, so that faults do not change it."""
        return 0.9 + 0.2 * crc32(f"{self._world.seed} {key}".encode()) / (1 << 32)

    # --- Workers ------------------------------------------------------------------------------------------------

    def _started(self, seat: Seat) -> None:
        if seat.gone or seat.silent:
            return
        seat.busy = False
        self.post(Message(seat.name, None, Ready()))
        self._faults.started(seat)
        self._work(seat)

    def _work(self, seat: Seat) -> None:
        if seat.busy or seat.gone or not seat.queue:
            return
        seat.busy = True
        job = seat.queue.popleft()
        refusal = seat.worker.begin(job)
        if refusal is not None:
            self.after(REFUSAL_S, lambda: self._done(seat, job, refusal))
            return
        seconds = nominal_seconds(self._world, seat.name, job) * self._noise(f"{seat.name} {job.id}")
        seconds = self._faults.seconds(seat, job, seconds * seat.slowdown)
        self.after(seconds, lambda: self._done(seat, job))

    def _done(self, seat: Seat, job: Job, refusal: Report | None = None) -> None:
        if seat.gone or seat.silent:
            return
        message = Message(seat.name, job.id, refusal or self._faults.report(seat, job))
        for delay_s in self._faults.delays_s(seat, job):
            if delay_s > 0:
                self.after(delay_s, lambda: self.post(message))
            else:
                self.post(message)
        seat.busy = False
        self._work(seat)

    def post(self, message: Message) -> None:
        """A message reaches the driver."""
        self._inbox.append(message)

    def kill(self, name: str, reason: str, fault: bool = True) -> bool:
        """A worker dies with its jobs, of which the driver hears. Returns whether it was there."""
        if name not in self.seats:
            return False
        self.end(name)
        self.post(Message(name, None, Gone(reason, fault)))
        return True

    def silence(self, name: str, patience_s: float) -> bool:
        """A worker stops. After its patience it is killed. Returns whether it was there."""
        seat = self.seats.get(name)
        if seat is None or seat.silent:
            return False
        seat.silent = True

        def give_up() -> None:
            if self.seats.get(name) is seat:
                self.kill(name, "gave no sign of life any more and was ended")

        self.after(patience_s, give_up)
        return True
