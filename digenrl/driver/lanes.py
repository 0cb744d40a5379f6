"""The scheduler's lanes and the workers behind them. A lost lane never returns; its worker may. Needs no torch."""

from __future__ import annotations

from collections.abc import Collection

from digenrl.worker.assignment import TRAINER, Assignment, Workers, rank_names

SHARED_LANE = "device-0"  # what generates in mode colocated


class LaneTable:
    """Lanes by the scheduler's index: generators, then the trainer's helpers, then those that joined later."""

    def __init__(self, workers: Workers) -> None:
        self.names: list[str] = [g.name for g in workers.generators] or [SHARED_LANE]
        names = [g.name for g in workers.generators] or [TRAINER]
        if workers.generators and "generate" in workers.trainer.duties:
            names += rank_names(workers.trainer)
            self.names += [f"helper-{index}" for index in range(len(rank_names(workers.trainer)))]
        assigned = workers.by_name() | dict.fromkeys(rank_names(workers.trainer), workers.trainer)
        self.devices = {name: assigned[worker].device for name, worker in zip(self.names, names, strict=True)}
        self._workers: dict[int, str] = dict(enumerate(names))  # of present lanes
        self._times_joined: dict[str, int] = dict.fromkeys(names, 1)

    @property
    def present(self) -> Collection[int]:
        """The lanes that are not lost."""
        return self._workers.keys()

    def worker(self, lane: int) -> str:
        """The worker behind a lane; "" if the lane is lost."""
        return self._workers.get(lane, "")

    def lanes_of(self, worker: str) -> list[int]:
        return [lane for lane, name in self._workers.items() if name == worker]

    def lose(self, lane: int) -> None:
        """Marks the lane as permanently lost."""
        del self._workers[lane]

    def join(self, assignment: Assignment) -> int:
        """A new lane of a worker, named after the worker, with a counter."""
        worker = assignment.name
        times = self._times_joined.get(worker, 0) + 1
        self._times_joined[worker] = times
        name = worker if times == 1 else f"{worker} ({times})"
        self._workers[len(self.names)] = worker
        self.names.append(name)
        self.devices[name] = assignment.device
        return len(self.names) - 1
