"""The scheduler's lanes and the workers behind them. A lost lane never comes back; its worker may. No torch."""

from __future__ import annotations

from collections.abc import Collection

from digenrl.worker.assignment import TRAINER, Assignment, Workers, rank_names

SHARED_LANE = "device-0"  # what generates in mode colocated


class Lanes:
    """Lanes by the scheduler's numbers: generators, then the trainer's helpers, then whoever joined later."""

    def __init__(self, crew: Workers) -> None:
        self.names: list[str] = [g.name for g in crew.generators] or [SHARED_LANE]
        self._workers: list[str] = [g.name for g in crew.generators] or [TRAINER]
        if crew.generators and "generate" in crew.trainer.duties:
            self._workers += rank_names(crew.trainer)
            self.names += [f"helper-{index}" for index in range(len(rank_names(crew.trainer)))]
        assigned = {each.name: each for each in (*crew.initial(), *crew.reserve)}
        assigned |= dict.fromkeys(rank_names(crew.trainer), crew.trainer)
        self.devices = {
            name: assigned[worker].device for name, worker in zip(self.names, self._workers, strict=True)
        }
        self._times_joined: dict[str, int] = dict.fromkeys(self._workers, 1)

    def worker(self, lane: int) -> str:
        """Whoever makes the lane's slices; nobody, "", once it is lost."""
        return self._workers[lane]

    def lanes_of(self, worker: str) -> list[int]:
        """The lanes that a worker is behind; none while it is being replaced."""
        return [lane for lane, name in enumerate(self._workers) if name == worker]

    def lose(self, lane: int) -> None:
        """The lane is out for good."""
        self._workers[lane] = ""

    def join(self, assignment: Assignment) -> int:
        """A new lane of a worker, whose name tells the how manieth of that worker it is."""
        worker = assignment.name
        times = self._times_joined.get(worker, 0) + 1
        self._times_joined[worker] = times
        name = worker if times == 1 else f"{worker} ({times})"
        self._workers.append(worker)
        self.names.append(name)
        self.devices[name] = assignment.device
        return len(self.names) - 1

    def row_of(self, worker: str, unheard: Collection[str] = ()) -> str:
        """The row of the trace that shows a worker's own work: its newest lane that the loop has heard of."""
        rows = zip(self._workers, self.names, strict=True)
        own = {name: lane for name, lane in rows if not name.startswith(TRAINER) and lane not in unheard}
        return own.get(worker, worker)
