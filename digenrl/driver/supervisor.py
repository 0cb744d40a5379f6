"""Starts workers, and starts replacements for those that are lost. Needs no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from digenrl.config.recipes.recipe import ModelSettings
from digenrl.driver.pending_jobs import PendingJobs
from digenrl.transports.contract import Gone
from digenrl.worker.assignment import Assignment, Workers

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0  # between checks for free resources
FORGOTTEN_AFTER_STEPS = 100  # committed ones, after which a fault of a worker does not count any more
LONGEST_WAIT_S = 600.0  # for a worker without which the run cannot continue


class WorkerFailedError(RuntimeError):
    """A worker that the run needs is lost or cannot continue."""


class TrainerLostError(WorkerFailedError):
    """The trainer and its state are lost: the run can only be resumed from its last checkpoint."""


@dataclass(slots=True)
class _Vacancy:
    """A worker that is to be started. The run cannot continue without it since `needed_since_s`, if at all."""

    assignment: Assignment
    needed_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class LateStart:
    """A worker that is not ready in time."""

    worker: str
    waited_s: float


class Supervisor:
    """Starts workers as soon as there is room, and replaces those that fail a limited number of times.

    The run continues without a generator that fails more often, if it has another one.

    `monotonic` is a clock in seconds; `notify` tells the user about lost workers.
    """

    def __init__(
        self,
        workers: Workers,
        jobs: PendingJobs,
        restarts: int,
        monotonic: Callable[[], float],
        notify: Callable[[str], None],
    ) -> None:
        self._workers, self._jobs, self._restarts = workers, jobs, restarts
        self._monotonic, self._notify = monotonic, notify
        self._assignments = workers.by_name()
        self._vacancies: dict[str, _Vacancy] = {}
        self._faults: dict[str, list[int]] = {}  # by worker: the steps that were committed before each
        self._steps = 0  # committed by this driver
        self._announced: set[str] = set()
        self._replacing: set[str] = set()  # lost workers whose replacements are not ready yet
        self._polled_s = monotonic()
        self._minutes_loading = 0  # of the worker that has been loading for longest

    def assignment(self, worker: str) -> Assignment:
        return self._assignments[worker]

    def use_model(self, model: ModelSettings) -> None:
        """Workers that are started from now on load the model with these settings."""
        self._assignments = {
            name: replace(each, recipe=each.recipe.model_copy(update={"model": model}))
            for name, each in self._assignments.items()
        }

    def count_loss(self, worker: str, gone: Gone, is_spare: bool) -> bool:
        """Whether a lost worker is to be replaced: not if it failed more often than the recipe allows.

        Raises WorkerFailedError if it is not and the run needs it.
        """
        faults = self._faults.setdefault(worker, [])
        used = sum(self._steps - step < FORGOTTEN_AFTER_STEPS for step in faults)
        replaced = not gone.fault or used < self._restarts
        again = f", after {used} restart{'s' if used > 1 else ''}" if used and not replaced else ""
        if not replaced and not is_spare:
            raise WorkerFailedError(f"{worker} {gone.reason}{again}; see its file in the run's logs")
        if gone.fault:
            faults.append(self._steps)
        if replaced:
            self._replacing.add(worker)
        logger.warning("%s %s%s", worker, gone.reason, again)
        reaction = "starting a replacement" if replaced else "the run continues without it"
        self._notify(f"{worker} {gone.reason}{again}; {reaction}")
        return replaced

    def step_committed(self) -> None:
        """Faults are forgotten a number of committed steps later."""
        self._steps += 1

    def want(self, worker: str) -> None:
        """The worker is to be started as soon as there is room."""
        self._vacancies[worker] = _Vacancy(self._assignments[worker])

    def ready(self, worker: str) -> None:
        """The worker has loaded everything."""
        logger.info("%s is ready", worker)
        if worker in self._replacing:
            self._replacing.discard(worker)
            self._notify("")

    def start_pending(self) -> None:
        """Starts waiting workers from time to time."""
        if self._vacancies and self._monotonic() - self._polled_s >= POLL_INTERVAL_S:
            self.fill()

    def fill(self) -> None:
        """Starts every wanted worker for which there is room."""
        self._polled_s = self._monotonic()
        for worker, vacancy in list(self._vacancies.items()):
            if self._jobs.transport.has_capacity(vacancy.assignment):
                del self._vacancies[worker]
                self._announced.discard(worker)
                self._jobs.start(vacancy.assignment)
        for worker, vacancy in self._vacancies.items():
            if not self._run_needs(worker):
                vacancy.needed_since_s = None
            else:
                self._check_wait(worker, vacancy)

    def late_start(self) -> LateStart | None:
        """A worker that has not loaded in time, as from a file system that hangs. Each minute before, says so."""
        loading = self._jobs.deadlines.loading()
        if loading is None:
            self._minutes_loading = 0
            return None
        worker, waited_s = loading
        limit_s = self._jobs.deadlines.start_limit_s
        minutes = int(waited_s // 60)
        if minutes > self._minutes_loading:
            left = f"it is ended after {limit_s / 60:.0f} min"
            self._notify(f"{worker} has been loading for {minutes} min; {left}, see its file in the run's logs")
        self._minutes_loading = minutes
        return LateStart(worker, waited_s) if waited_s > limit_s else None

    def present(self, workers: Iterable[Assignment]) -> list[str]:
        """Those of the workers that are started and not lost."""
        return [each.name for each in workers if self._jobs.is_present(each.name)]

    def is_spare(self, worker: str) -> bool:
        """Whether this is a generator, and not the only one that is present."""
        generators = (*self._workers.generators, *self._workers.reserve)
        others = [each for each in generators if each.name != worker]
        return len(others) < len(generators) and bool(self.present(others))

    def _check_wait(self, worker: str, vacancy: _Vacancy) -> None:
        if worker not in self._announced:
            self._announced.add(worker)
            self._notify(f"waiting for free resources for {worker}")
        now_s = self._monotonic()
        vacancy.needed_since_s = now_s if vacancy.needed_since_s is None else vacancy.needed_since_s
        waited_s = now_s - vacancy.needed_since_s
        if waited_s > LONGEST_WAIT_S:
            waited = f"no resources became free within {waited_s:.0f} s"
            raise WorkerFailedError(f"{worker}: {waited}; add machines, and resume")

    def _run_needs(self, worker: str) -> bool:
        """Whether the run cannot continue without this worker. A trainer that may help generates by itself."""
        generators = (*self._workers.generators, *self._workers.reserve)
        if worker in {each.name for each in generators}:
            return "generate" not in self._workers.trainer.duties and not self.present(generators)
        return True
