"""The lanes in run.json: their devices, and when they joined and left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from digenrl.records import Action, Event, WorkerJoined, WorkerLost
from digenrl.run_folder.folder import LaneEntry, RunFolder
from digenrl.scheduling import SchedulerState
from digenrl.telemetry.trace import POOLS


class LaneRecorder:
    """Records in run.json when generator lanes leave and join. `devices` is keyed by lane name."""

    def __init__(self, folder: RunFolder, devices: Mapping[str, str]) -> None:
        self._folder, self._devices = folder, devices

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        # A lost generator lane never returns: its replacement joins under another name. Other lanes return.
        if isinstance(event, WorkerLost) and event.pool == "generator":
            name = state.lanes[event.lane].name
            left = {"left_ns": event.at_ns}
            entries = self._folder.info.lanes
            self._write([each.model_copy(update=left) if each.name == name else each for each in entries])
        elif isinstance(event, WorkerJoined):
            name = event.offer.name
            entries = self._folder.info.lanes
            # A resumed run may use the name of an earlier lane again: that is one row of the trace.
            joined_ns = min((each.joined_ns for each in entries if each.name == name), default=event.at_ns)
            joined = LaneEntry(name=name, pool="generator", device=self._devices[name], joined_ns=joined_ns)
            self._write([*(each for each in entries if each.name != name), joined])

    def _write(self, entries: Sequence[LaneEntry]) -> None:
        self._folder.update_info(lanes=_in_order(entries))


def lanes_of_whole_run(before: Sequence[LaneEntry], now: Sequence[LaneEntry], at_ns: int) -> tuple[LaneEntry, ...]:
    """The lanes of a run resumed at `at_ns`: those it has now, and those it had until then."""
    joined, present = {each.name: each.joined_ns for each in before}, {each.name for each in now}
    gone = [
        each.model_copy(update={"left_ns": at_ns if each.left_ns is None else min(each.left_ns, at_ns)})
        for each in before
        if each.name not in present and each.joined_ns < at_ns
    ]
    here = [each.model_copy(update={"joined_ns": joined.get(each.name, at_ns)}) for each in now]
    return _in_order([*here, *gone])


def _in_order(entries: Sequence[LaneEntry]) -> tuple[LaneEntry, ...]:
    return tuple(sorted(entries, key=lambda each: POOLS.index(each.pool)))
