"""Workers come and go: places that are vacant are filled as soon as there is room. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from digenrl.driver.pending_jobs import Completed, PendingJobs
from digenrl.transports.contract import Gone
from digenrl.worker.assignment import Assignment, Workers

LOOK_EVERY_S = 1.0  # for room
LONGEST_WAIT_S = 600.0  # for room for somebody whom the run cannot do without


class WorkerFailedError(RuntimeError):
    """A worker that a run cannot do without is lost or cannot go on."""


class TrainerLostError(WorkerFailedError):
    """The trainer is lost, and so is what it stood for: the run can go on from its last checkpoint alone."""


@dataclass(frozen=True, slots=True)
class _Vacancy:
    assignment: Assignment
    ready: Callable[[Completed], None]
    since_s: float


class Supervisor:
    """Starts workers, and starts others in the place of those that are lost, a limited number of times.

    `monotonic` is a clock in seconds; `say` tells the user who is lost, and who waits for room.
    """

    def __init__(
        self,
        crew: Workers,
        post: PendingJobs,
        restarts: int,
        monotonic: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self._crew, self._post, self._restarts = crew, post, restarts
        self._monotonic, self._say = monotonic, say
        self._assignments = {each.name: each for each in (*crew.initial(), *crew.reserve)}
        self._vacancies: dict[str, _Vacancy] = {}
        self._faults: Counter[str] = Counter()
        self._told: set[str] = set()
        self._lost: set[str] = set()  # whose successors are not up yet
        self._looked_s = monotonic()

    def assignment(self, worker: str) -> Assignment:
        """What a worker is for."""
        return self._assignments[worker]

    def count_loss(self, worker: str, gone: Gone) -> None:
        """Raises WorkerFailedError for a worker that ended more often than the recipe bears."""
        used = self._faults[worker]
        if gone.fault and used >= self._restarts:
            again = f", after {used} restart{'s' if used > 1 else ''}" if used else ""
            raise WorkerFailedError(f"{worker} {gone.reason}{again}; see its file in the run's logs")
        self._faults[worker] += gone.fault
        self._lost.add(worker)
        self._say(f"{worker} {gone.reason}; another takes its place")

    def seek(self, worker: str, ready: Callable[[Completed], None] = lambda answered: None) -> None:
        """Somebody is wanted in this place; `ready` is called when they are up."""

        def up(answered: Completed) -> None:
            if worker in self._lost:
                self._lost.discard(worker)
                self._say("")
            ready(answered)

        self._vacancies[worker] = _Vacancy(self._assignments[worker], up, self._monotonic())

    def look_for_room(self) -> None:
        """Every now and then, whether somebody who waits can be started."""
        if self._vacancies and self._monotonic() - self._looked_s >= LOOK_EVERY_S:
            self.fill()

    def fill(self) -> None:
        """Starts everybody for whom there is room."""
        self._looked_s = self._monotonic()
        for worker, vacancy in list(self._vacancies.items()):
            if self._post.transport.has_room(vacancy.assignment):
                del self._vacancies[worker]
                self._told.discard(worker)
                self._post.start(vacancy.assignment, vacancy.ready)
        if self._vacancies:
            self._mind_waiting()

    def present(self, workers: Iterable[Assignment]) -> list[str]:
        """Those of them who are there, or starting."""
        return [each.name for each in workers if self._post.is_there(each.name)]

    def generators(self) -> list[str]:
        """The generators that are there; all of the opening's if none is, since one will be."""
        every = (*self._crew.generators, *self._crew.reserve)
        return self.present(every) or [each.name for each in self._crew.generators]

    def _mind_waiting(self) -> None:
        for worker, vacancy in self._vacancies.items():
            if not self._is_missed(worker):
                continue
            if worker not in self._told:
                self._told.add(worker)
                self._say(f"waiting for room for {worker}")
            waited_s = self._monotonic() - vacancy.since_s
            if waited_s > LONGEST_WAIT_S:
                raise WorkerFailedError(f"{worker} found no room for {waited_s:.0f} s; add machines, and resume")

    def _is_missed(self, worker: str) -> bool:
        """Whether the run stands still without this worker."""
        generators = (*self._crew.generators, *self._crew.reserve)
        if worker in {each.name for each in generators}:
            return not self.present(generators)
        return True
