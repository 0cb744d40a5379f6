"""Jobs that were sent to workers, by id, and what to do when each completes, fails or is lost. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from digenrl.transports.contract import Message, Transport
from digenrl.worker.assignment import Assignment, rank_names
from digenrl.worker.orders import Order, OrderFailed, Report


@dataclass(frozen=True, slots=True)
class Completed:
    """A report on an order, when that began (it may have waited behind others) and when it was answered."""

    worker: str
    order: Order
    report: Report
    began_ns: int
    at_ns: int

    @property
    def took_ns(self) -> int:
        """How long the worker was at it, as the driver saw it."""
        return self.at_ns - self.began_ns


@dataclass(frozen=True, slots=True)
class PendingJob:
    """An order under way. `lost` is called when its worker is gone, or what it reads; else others see to it.

    One with a number in `first` also goes to a worker that is held back: it is part of bringing that up to date,
    for the how manieth time.
    """

    order: Order
    sent_ns: int
    then: Callable[[Completed], None]
    otherwise: Callable[[OrderFailed], None] | None = None
    lost: Callable[[], None] | None = None
    first: int = 0


STARTING = Order()  # stands for the report that a worker is ready


class PendingJobs:
    """Issues job ids and matches reports to jobs by id. Jobs for an absent worker are held until it is there."""

    def __init__(self, transport: Transport, clock: Callable[[], int]) -> None:
        self.transport, self._clock = transport, clock
        self._under_way: dict[str, dict[int | None, PendingJob]] = {}  # by job id; None is the start
        self._job_ids = count()
        self._held: dict[str, list[PendingJob]] = {}  # for workers that are not there, or are held back
        self._held_back: set[str] = set()
        self._free_since: dict[str, int] = {}

    def start(self, assignment: Assignment, ready: Callable[[Completed], None]) -> None:
        """Starts a worker with all its ranks, which then gets what was held for it."""
        self._under_way[assignment.name] = {None: PendingJob(STARTING, self._clock(), ready)}
        names = dict.fromkeys((assignment.name, *rank_names(assignment)))
        for name in names:
            self._under_way.setdefault(name, {})
            self._free_since.pop(name, None)
        self.transport.start(assignment)
        for name in names:
            self._hand_over(name)

    def hold_back(self, workers: Iterable[str]) -> None:
        """From now on these get nothing but what is to come first."""
        self._held_back |= set(workers)

    def let_go(self, workers: Iterable[str]) -> None:
        """These get what was held for them."""
        for worker in workers:
            self._held_back.discard(worker)
            self._hand_over(worker)

    def _hand_over(self, worker: str) -> None:
        for each in self._held.pop(worker, ()):
            self.post(worker, each)

    def send(
        self,
        worker: str,
        order: Order,
        then: Callable[[Completed], None] = lambda answered: None,
        otherwise: Callable[[OrderFailed], None] | None = None,
        lost: Callable[[], None] | None = None,
        first: int = 0,
    ) -> None:
        """Gives an order."""
        self.post(worker, PendingJob(order, self._clock(), then, otherwise, lost, first))

    def post(self, worker: str, expected: PendingJob) -> None:
        """Sends an order, or holds it until its worker is there."""
        if worker not in self._under_way or (worker in self._held_back and not expected.first):
            self._held.setdefault(worker, []).append(expected)
            return
        job_id = next(self._job_ids)
        self._under_way[worker][job_id] = expected
        self.transport.send(worker, job_id, expected.order)

    def is_there(self, worker: str) -> bool:
        """Whether it was started and is not gone."""
        return worker in self._under_way

    def answer(self, message: Message, now_ns: int) -> tuple[PendingJob, Completed]:
        """The order that a report belongs to; it is under way no more."""
        expected = self._under_way[message.worker].pop(message.job_id)
        began_ns = max(expected.sent_ns, self._free_since.get(message.worker, 0))
        self._free_since[message.worker] = now_ns
        return expected, Completed(message.worker, expected.order, message.report, began_ns, now_ns)

    def lose(self, worker: str) -> list[PendingJob]:
        """The worker is gone; returns what it had under way."""
        return list(self._under_way.pop(worker, {}).values())

    def take_held(self, worker: str) -> list[PendingJob]:
        """What waits for an absent worker, for somebody else to do."""
        return self._held.pop(worker, [])

    def load(self, worker: str) -> int:
        """How many orders a worker has under way."""
        return len(self._under_way.get(worker, ()))

    def orders(self, worker: str | None = None) -> Iterator[Order]:
        """The orders of a worker, or of everybody, under way or held."""
        for name, jobs in self._under_way.items():
            if worker in (None, name):
                yield from (each.order for each in jobs.values())
        for name, held in self._held.items():
            if worker in (None, name):
                yield from (each.order for each in held)
