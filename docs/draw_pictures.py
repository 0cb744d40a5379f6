"""Draws every picture in docs/images with DigenRL's own simulator and Gantt view: `make docs`.

All pictures share one time scale, so a shorter run is a shorter picture.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from digenrl.config.limits import SIMULATED_SEARCH_BUDGET
from digenrl.config.spec import read_spec
from digenrl.loop import drive
from digenrl.records import SampleId, WorkerLost
from digenrl.scheduling.invariants import Auditor
from digenrl.simulation.simulator import simulate
from digenrl.simulation.spec_costs import NS_PER_SECOND, initial_scheduler_state
from digenrl.simulation.virtual_cluster import Faults, VirtualCluster
from digenrl.telemetry.gantt_svg import gantt_svg
from digenrl.telemetry.recorder import Recorder
from digenrl.telemetry.trace import Trace
from digenrl.telemetry.writing import write_atomically

DOCS = Path(__file__).parent
SPECS = DOCS / "specs"
IMAGES = DOCS / "images"
AXIS_S = 86

LANE_LOST_AT_S = 10
BAD_REWARD = SampleId(step=0, group=3, index=1)


@dataclass(frozen=True)
class Picture:
    """docs/images/`name`.svg, drawn from docs/specs/`spec`.yaml."""

    name: str
    spec: str
    title: str
    faults: Faults | None = None


PICTURES = (
    Picture("colocated", "colocated", "Colocated: the same cards generate, switch, train and switch back"),
    Picture("naive", "naive", "Naive: two pools, and a barrier between them"),
    Picture("gap", "gap", "GAP: groups complete one after another and stream to the trainer"),
    Picture("tsp", "tsp", "GAP + TSP: packed time-steps, training takes 0.7 of the time"),
    Picture("tag_greedy", "tag_greedy", "TAG, greedy: help whenever nothing is ready to train"),
    Picture("tag_search", "tag_search", "TAG, search: help where it brings the commit forward"),
    Picture("both", "both", "Both directions: all six cards generate and train"),
    Picture("tcss", "tcss", "TCSS without help: half of a step may start on stale weights"),
    Picture("everything_on", "everything_on", "All techniques: GAP, TSP, TAG (auto) and TCSS"),
    Picture("unequal_eager", "unequal_eager", "Unequal lanes, eager: slow lanes take the last slices"),
    Picture("unequal", "unequal", "Unequal lanes, earliest_finish: slow lanes leave the last slices"),
    Picture(
        "faults",
        "tsp",
        "Faults: gen-1 is lost at 10 s, and a reward of group 3 fails",
        Faults(
            events=(WorkerLost(LANE_LOST_AT_S * NS_PER_SECOND, lane=1),),
            failing_samples=frozenset({BAD_REWARD}),
        ),
    ),
)


def run(picture: Picture) -> Trace:
    """The trace of the picture's run on a virtual clock, audited after every event."""
    spec = read_spec(SPECS / f"{picture.spec}.yaml")
    if spec.shares_work:
        return simulate(spec).trace
    initial = initial_scheduler_state(spec, SIMULATED_SEARCH_BUDGET)
    recorder = Recorder(initial)
    drive(initial, VirtualCluster(initial, picture.faults), (recorder, Auditor(initial)))
    return recorder.trace()


def draw(picture: Picture) -> str:
    """The picture as SVG; its title ends with the makespan."""
    trace = run(picture)
    title = f"{picture.title}: {trace.end_ns / NS_PER_SECOND:.4g} s"
    return gantt_svg(trace, title, axis_ns=AXIS_S * NS_PER_SECOND)


def main() -> None:
    """Draws all pictures."""
    IMAGES.mkdir(exist_ok=True)
    for picture in PICTURES:
        write_atomically(IMAGES / f"{picture.name}.svg", draw(picture))
        print(f"docs/images/{picture.name}.svg")


if __name__ == "__main__":
    main()
