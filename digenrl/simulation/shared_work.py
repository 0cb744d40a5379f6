"""Chooses how lanes that both generate and train share the work, by simulating the choices."""

from __future__ import annotations

from digenrl.loop import drive
from digenrl.scheduling import SchedulerState
from digenrl.simulation.virtual_cluster import VirtualCluster

COMPARED_STEPS = 2  # steps of a run resemble each other from the second on


def makespan_ns(opening: SchedulerState) -> int:
    """When the last step is committed."""
    cluster = VirtualCluster(opening)
    drive(opening, cluster)
    return cluster.now_ns
