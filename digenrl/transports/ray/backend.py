"""A Ray cluster as the place of a run: joined or started, and found to have what the recipe asks for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from digenrl.config.recipe import Recipe
from digenrl.transports.contract import RunResources
from digenrl.transports.processes import prepare_fork_server
from digenrl.transports.rank_groups import RankGroupTransport
from digenrl.transports.ray.joining import RayCluster, open_cluster
from digenrl.transports.ray.placing import cpus_wanted, place_on_cluster
from digenrl.worker.assignment import Machine, threads_per_worker
from digenrl.worker.preflight import cores_here, inspect

if TYPE_CHECKING:
    from digenrl.transports.ray.weight_broadcast import Delivery


class Carried:
    """Weights that went to workers since somebody asked."""

    def __init__(self) -> None:
        self._deliveries: list[Delivery] = []

    def add(self, delivery: Delivery) -> None:
        """They arrived."""
        self._deliveries.append(delivery)

    def take(self) -> dict[str, float]:
        """Bytes in all, over all receivers, and the seconds of the slowest delivery."""
        deliveries, self._deliveries = self._deliveries, []
        return {
            "wire_bytes": sum(each.bytes * len(each.receivers) for each in deliveries),
            "wire_s": max((each.seconds for each in deliveries), default=0.0),
        }


class RayBackend:
    """A cluster that this process is connected to."""

    def __init__(self, cluster: RayCluster) -> None:
        self.cluster = cluster
        self.driver_bytes: Callable[[], int] = lambda: 0  # that reports brought here, in the last run

    @classmethod
    def find(cls, recipe: Recipe) -> RayBackend:
        """The recipe's cluster; raises ConfigError where it is not there, lacks something, or has other code."""
        prepare_fork_server(threads_per_worker(recipe, Machine(cores_here())))  # it loads torch meanwhile
        cluster = open_cluster(recipe.cluster, cpus_wanted(recipe))
        try:
            from digenrl.transports.ray.package_versions import check_versions

            facts = cluster.facts()
            place_on_cluster(recipe, facts)
            check_versions(facts, recipe.cluster.start_timeout_s)
            inspect(recipe)
        except BaseException:
            cluster.close()
            raise
        return cls(cluster)

    def prepare(self, recipe: Recipe, run: Path, checkpoint: Path | None) -> RunResources:
        """Actors are started later, each where there is room."""
        from digenrl.transports.ray.transport import RayTransport

        crew = place_on_cluster(recipe, self.cluster.facts(), checkpoint, run)
        carried = Carried()
        transport = RayTransport(self.cluster, recipe, run / "logs", carried.add)
        self.driver_bytes = lambda: transport.driver_bytes
        return RunResources(RankGroupTransport(transport), transport.shelf, crew, transport.stop, carried.take)

    def close(self) -> None:
        """Leaves the cluster; one that was started for the run is ended."""
        self.cluster.close()
