"""A Ray cluster as the backend of a run: joined or started, and checked against the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from digenrl.config.recipes.recipe import Recipe
from digenrl.transports.contract import RunResources
from digenrl.transports.processes import prepare_fork_server
from digenrl.transports.rank_groups import RankGroupTransport
from digenrl.transports.ray.joining import RayCluster, open_cluster
from digenrl.transports.ray.placing import place_on_cluster, total_cpus
from digenrl.worker.assignment import Machine, threads_per_worker
from digenrl.worker.checks.preflight import cores_here, inspect

if TYPE_CHECKING:
    from digenrl.transports.ray.weight_broadcast import WeightTransfer


class TransferMetrics:
    """Collects weight transfers between two readings."""

    def __init__(self) -> None:
        self._transfers: list[WeightTransfer] = []

    def add(self, transfer: WeightTransfer) -> None:
        self._transfers.append(transfer)

    def take(self) -> dict[str, float]:
        """Totals over all receivers since the last call, as sent and without patches, and the slowest transfer."""
        transfers, self._transfers = self._transfers, []
        return {
            "wire_bytes": sum(each.bytes * len(each.receivers) for each in transfers),
            "wire_whole_bytes": sum(each.whole_bytes * len(each.receivers) for each in transfers),
            "wire_s": max((each.seconds for each in transfers), default=0.0),
        }


class RayBackend:
    """A cluster to which this process is connected."""

    def __init__(self, cluster: RayCluster) -> None:
        self.cluster = cluster

    @classmethod
    def find(cls, recipe: Recipe) -> RayBackend:
        """The recipe's cluster. Raises ConfigError if it is missing, lacks resources, or has other versions."""
        prepare_fork_server(threads_per_worker(recipe, Machine(cores_here())))  # loads torch in the background
        cluster = open_cluster(recipe.cluster, total_cpus(recipe))
        try:
            from digenrl.transports.ray.package_versions import check_versions

            resources = cluster.resources()
            place_on_cluster(recipe, resources)
            if not cluster.started_here:  # otherwise it has only this machine, with this Python
                check_versions(resources, recipe.cluster.start_timeout_s)
            inspect(recipe)
        except BaseException:
            cluster.close()
            raise
        return cls(cluster)

    def prepare(self, recipe: Recipe, run: Path, checkpoint: Path | None) -> RunResources:
        from digenrl.transports.ray.transport import RayTransport

        workers = place_on_cluster(recipe, self.cluster.resources(), checkpoint, run)
        metrics = TransferMetrics()
        transport = RayTransport(self.cluster, recipe, run / "logs", metrics.add)
        return RunResources(
            RankGroupTransport(transport), transport.artifacts, workers, transport.stop, metrics.take
        )

    def close(self) -> None:
        """Leaves the cluster, and ends it if it was started for the run."""
        self.cluster.close()
