"""How orders reach workers and reports come back: all that a runtime knows about processes. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from digenrl.config.recipe import Recipe
from digenrl.worker.assignment import Assignment, Workers
from digenrl.worker.orders import Order, Report


@dataclass(frozen=True, slots=True)
class Gone(Report):
    """The worker is no more; its orders are not answered. Not its `fault`: its machine went away."""

    reason: str
    fault: bool = True


@dataclass(frozen=True, slots=True)
class InputsLost(Report):
    """The job did not run: tensors that it reads were lost with the machine that held them."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """A report from a worker, matched to its job by id.

    `job_id` is None for the first report after a start (`Ready`, or why the worker was not built) and for `Gone`.
    `waited_ns` is the time between the report and its receipt, where the driver was too busy to receive it.
    """

    worker: str
    job_id: int | None
    report: Report
    waited_ns: int = 0


class Transport(Protocol):
    """Starts workers by name, sends jobs to them and receives their reports.

    A worker runs its jobs in the order in which they were sent. Reports carry the id of their job.
    """

    def start(self, assignment: Assignment) -> None:
        """Starts a worker; its first report is Ready, or OrderFailed if it cannot be built."""

    def has_room(self, assignment: Assignment) -> bool:
        """Whether a worker that is started now would find a place."""

    def send(self, worker: str, job_id: int, order: Order) -> None:
        """Sends a job, whose id is unique in the run; does nothing if the worker is gone."""

    def receive(self, timeout_s: float) -> Sequence[Message]:
        """Everything that has arrived; waits for the first for so long.

        A worker without a sign of life for the recipe's `lanes.patience_s` is ended and reported as gone.
        """

    def end(self, worker: str) -> None:
        """Ends a worker at once; it does not report any more, not even that it is gone."""

    def stop(self) -> None:
        """Ends all workers; may be called twice."""


class ArtifactStore(Protocol):
    """The driver's side of an exchange: names that it can forget, never tensors.

    `holds_weights` is false where weights go from worker to worker beside it.
    """

    holds_weights: bool

    def drop(self, name: str) -> None:
        """Forgets a name; dropping what is not there does nothing."""

    def free_bytes(self) -> int:
        """How much more it can hold."""

    def where(self) -> str:
        """What it is called, for people."""


@dataclass(frozen=True, slots=True)
class RunResources:
    """What one run works with. `close` ends its workers and frees what they left; it may be called twice.

    `carried` are numbers about what went over a network since it was asked last, where there is one.
    """

    transport: Transport
    exchange: ArtifactStore
    crew: Workers
    close: Callable[[], None]
    carried: Callable[[], dict[str, float]] = dict


class Backend(Protocol):
    """What there is to work on, found good for a recipe before anything is written or loaded."""

    def settle(self, recipe: Recipe, run: Path, checkpoint: Path | None) -> RunResources:
        """Makes ready for a run, which may begin from a checkpoint; workers are started later."""

    def close(self) -> None:
        """Lets go of everything."""
