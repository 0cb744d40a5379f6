"""Decides which adapters travel as patches. Adapters are in the object store, whole and, if made, as a patch."""

from __future__ import annotations

from collections.abc import Mapping

from digenrl.config.recipes.cluster import WeightPatches
from digenrl.records import Commit, Committed, Export, Exported, Job, Publish, Published, patch_name
from digenrl.transports.contract import Report
from digenrl.transports.ray.artifact_store import RayArtifactStore
from digenrl.transports.ray.worker_handles import WorkerHandle


def patch_outputs(job: Job) -> tuple[str, ...]:
    """The names of patches that a job may leave besides the names it writes: none unless it exports weights."""
    if not isinstance(job, Commit | Export) or job.rank != 0:
        return ()
    return (patch_name(job.weights_name),)


def made_patches(report: Report) -> tuple[str, ...]:
    if not isinstance(report, Committed | Exported) or not report.weights.patch_bytes:
        return ()
    return (patch_name(report.weights.name),)


class AdapterPatches:
    """Knows which version each worker has loaded. One that has the base of a patch gets the patch.

    With `auto`, only workers on another machine than the trainer's get patches, and none are made without such
    workers: on one machine, adapters are read from shared memory.
    """

    def __init__(
        self, setting: WeightPatches, workers: Mapping[str, WorkerHandle], artifacts: RayArtifactStore
    ) -> None:
        self._setting, self._workers, self._artifacts = setting, workers, artifacts
        self._held: dict[str, str] = {}  # names of weights, by worker

    def wanted(self, worker: str, job: Job) -> bool:
        """Whether the worker makes a patch in this job, or keeps the weights of this job for the next patch."""
        node_id = self._workers[worker].node_id
        if isinstance(job, Commit | Export):
            return any(
                self._is_receiver(other, node_id) for other in self._workers.values() if other.name != worker
            )
        return isinstance(job, Publish) and self._crosses(node_id, self._artifacts.node_of(job.weights.name))

    def inputs(self, worker: str, job: Job) -> tuple[str, ...]:
        """Names of the inputs that are passed to the worker: a patch instead of weights if it has their base."""
        names = tuple(dict.fromkeys(job.reads()))
        if not isinstance(job, Publish) or not self.wanted(worker, job):
            return names
        weights, patch = job.weights, patch_name(job.weights.name)
        applies = (
            weights.base and self._held.get(worker) == weights.base and self._artifacts.get(patch) is not None
        )
        return tuple(patch if applies and name == weights.name else name for name in names)

    def report_received(self, worker: str, job: Job, report: Report) -> None:
        """Notes the version that a worker has loaded; none if it could not be loaded."""
        if isinstance(job, Publish):
            self._held.pop(worker, None)
            if isinstance(report, Published) and self.wanted(worker, job):
                self._held[worker] = job.weights.name

    def forget(self, worker: str) -> None:
        self._held.pop(worker, None)

    def _is_receiver(self, worker: WorkerHandle, node_id: str | None) -> bool:
        return "generate" in worker.assignment.duties and self._crosses(worker.node_id, node_id)

    def _crosses(self, node_id: str | None, other_id: str | None) -> bool:
        return self._setting == "always" or (self._setting == "auto" and node_id != other_id)
