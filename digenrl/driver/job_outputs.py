"""Keeps what results bring: artifacts, scores, weight versions, costs and metrics. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from digenrl.driver.job_inputs import prompts_of
from digenrl.driver.pending_jobs import CompletedJob
from digenrl.driver.step_summary import StepSummary, step_summary
from digenrl.driver.stores import DriverStores
from digenrl.records import (
    NO_LANE,
    NO_WEIGHTS,
    Committed,
    Encoded,
    Evaluate,
    Evaluated,
    Exported,
    Generate,
    Generated,
    GradientsSent,
    HeldOutChunk,
    Job,
    JobFailed,
    Publish,
    Published,
    Result,
    RoleSwitched,
    Saved,
    Score,
    Scored,
    SendGradients,
    SliceArtifact,
    TakeUpdate,
    Trained,
    UpdateTaken,
    WeightsReference,
    held_out_name,
    pixels_name,
    slice_name,
)


class JobOutputs:
    """Takes results apart. `pending` are the jobs without a result; `on_step` gets every step's metrics."""

    def __init__(
        self, stores: DriverStores, pending: Callable[[], Iterable[Job]], on_step: Callable[[StepSummary], None]
    ) -> None:
        self._stores, self._pending, self._on_step = stores, pending, on_step
        self._updates: list[Mapping[str, Any]] = []
        self._publish_s = 0.0
        self._gradients: list[str] = []  # sums in the exchange
        self.abandoned: set[int] = set()  # versions whose evaluation was abandoned

    def keep(self, completed: CompletedJob, result: Result) -> None:
        keep = self._KEEP.get(type(result))
        if keep is not None:
            keep(self, completed, result)

    def forget_updates(self) -> None:
        """The trainer was lost in the middle of a step, whose updates are taken again."""
        self._updates = []

    def discard(self, job: Job, *, worker_lost: bool = False) -> None:
        """Frees what a job that did not complete may have left.

        If its worker is lost, held-out samples stay: they are scored by another one.
        """
        if isinstance(job, Generate | Evaluate | SendGradients | TakeUpdate):
            for name in job.writes():
                self._stores.artifacts.drop(name)
        elif isinstance(job, Score) and isinstance(job.piece, HeldOutChunk):
            if not worker_lost or job.piece.version in self.abandoned:
                self._stores.artifacts.drop(held_out_name(job.piece))
        elif isinstance(job, Publish):
            self._stores.versions.drop_old(self._pending())

    def abandon_evaluation(self, version: int, unsent: Iterable[Job]) -> None:
        """Frees what was sampled for a version, except for what a job still reads, sent or not."""
        self.abandoned.add(version)
        being_read = {job.piece for job in (*self._pending(), *unsent) if isinstance(job, Score)}
        for index in range(self._stores.evaluation_chunks):
            chunk = HeldOutChunk(version, index)
            if chunk not in being_read:
                self._stores.artifacts.drop(held_out_name(chunk))

    def discard_late(self, report: object) -> None:
        """Frees what a job has left whose result came too late. A doubled result's slice may be in use."""
        if isinstance(report, Generated) and not self._stores.samples.holds(slice_name(report.job.id)):
            self.discard(report.job)

    def _encoded(self, completed: CompletedJob, result: Encoded) -> None:
        self._stores.prompts.add_encoded(result.job.prompts)

    def _generated(self, completed: CompletedJob, result: Generated) -> None:
        stores, job = self._stores, result.job
        assert stores.costs is not None
        stores.costs.add_slices(job.lane, job.slice.size // stores.slice_size, completed.took_ns)
        artifact = SliceArtifact(job.slice, slice_name(job.id), result.version)
        if result.score_failure or not stores.samples.add_slice(artifact):  # without scores it would be in the way
            stores.drop_slice(artifact.name)
        elif result.scores is not None:
            stores.samples.add_scores(job.slice, result.scores, artifact)

    def _scored(self, completed: CompletedJob, result: Scored) -> None:
        stores, job = self._stores, result.job
        if isinstance(job.piece, HeldOutChunk):
            stores.artifacts.drop(held_out_name(job.piece))
            return
        assert job.artifact is not None, f"{job} was sent without its slice"
        self._measure("score", completed, job.piece.size)
        stores.samples.add_scores(job.piece, result.scores, job.artifact)
        if stores.samples.all_scored(job.artifact):
            stores.artifacts.drop(pixels_name(job.artifact.name))

    def _trained(self, completed: CompletedJob, result: Trained) -> None:
        self._updates += result.updates
        lane, samples, versions = result.job.lane, result.job.slice.size, self._stores.versions
        if result.job.weights != versions.of_update:  # of an update that was taken again since
            versions.drop_old(self._pending())
        if lane == NO_LANE:
            self._measure("train_sample", completed, samples)
        elif self._stores.costs is not None:
            parts = self._stores.recipe.updates_per_group  # of which one was trained
            self._stores.costs.add_training(lane, samples, parts * completed.took_ns)

    def _gradients_sent(self, completed: CompletedJob, result: GradientsSent) -> None:
        self._measure("send", completed)
        self._gradients += result.job.writes()

    def _update_taken(self, completed: CompletedJob, result: UpdateTaken) -> None:
        self._measure("commit", completed)
        self._updates += result.updates
        self._stores.versions.take_update(result.weights)
        self._stores.versions.drop_old(self._pending())
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for name in self._gradients:
            self._stores.artifacts.drop(name)
        self._gradients = []

    def _committed(self, completed: CompletedJob, result: Committed) -> None:
        stores, job = self._stores, result.job
        self._measure("commit", completed)
        rewards, parts, slices = stores.samples.close_step(job.step)
        for artifact in slices:
            stores.drop_slice(artifact.name)
        self._drop_gradients()
        stores.versions.take_update(NO_WEIGHTS)
        updates, self._updates = (*self._updates, *result.updates), []
        self._take_weights(job.new_version, result.weights)
        stores.prompts.close_step(job.step, (prompt for each in self._pending() for prompt in prompts_of(each)))
        publish_s, self._publish_s = self._publish_s, 0.0  # of the slowest lane, for the version before this one
        self._on_step(step_summary(job.step, rewards, parts, updates, result.weights.bytes, publish_s))

    def _exported(self, completed: CompletedJob, result: Exported) -> None:
        versions = self._stores.versions
        if result.job.version >= versions.newest_version:
            self._take_weights(result.job.version, result.weights)
        else:  # a commit came before it
            versions.take_outdated(result.weights)
            versions.drop_old(self._pending())

    def _take_weights(self, version: int, weights: WeightsReference) -> None:
        self._stores.versions.take(version, weights)
        self._stores.versions.drop_old(self._pending())

    def _published(self, completed: CompletedJob, result: Published) -> None:
        if self._stores.costs is not None:
            pool = self._stores.workers.by_name()[completed.worker].pool or ""
            self._stores.costs.add_publication(pool, result.lanes, round(result.seconds * 1e9))
        self._publish_s = max(self._publish_s, result.seconds)
        self._stores.versions.drop_old(self._pending())

    def _role_switched(self, completed: CompletedJob, result: RoleSwitched) -> None:
        self._measure("switch_in" if result.job.role == "generate" else "switch_out", completed)

    def _evaluated(self, completed: CompletedJob, result: Evaluated) -> None:
        self._measure("evaluate", completed)
        if result.job.chunk.version in self.abandoned:
            self._stores.artifacts.drop(held_out_name(result.job.chunk))

    def _saved(self, completed: CompletedJob, result: Saved) -> None:
        self._measure("save", completed)

    _KEEP: ClassVar[dict[type[Result], Callable[[JobOutputs, CompletedJob, Any], None]]] = {
        Encoded: _encoded,
        Generated: _generated,
        Scored: _scored,
        Trained: _trained,
        GradientsSent: _gradients_sent,
        UpdateTaken: _update_taken,
        Committed: _committed,
        Exported: _exported,
        Published: _published,
        RoleSwitched: _role_switched,
        Evaluated: _evaluated,
        Saved: _saved,
    }

    def _measure(self, kind: str, completed: CompletedJob, samples: int = 1) -> None:
        if self._stores.costs is not None:
            self._stores.costs.add(kind, completed.took_ns // samples)


def with_valid_scores(job: Job, result: Result) -> Result:
    """The result, or a failure if it has not one finite reward per sample: a failed reward is never a number."""
    scores = result.scores if isinstance(result, Scored | Generated | Evaluated) else None
    if scores is None:
        return result
    expected = job.slice.size if isinstance(job, Generate) else len(getattr(job, "prompts", ()))
    if len(scores.values) == expected and all(math.isfinite(value) for value in scores.values):
        return result
    reason = f"expected {expected} finite rewards, got {list(scores.values)}"
    if isinstance(result, Generated):
        return replace(result, scores=None, score_failure=reason)
    return JobFailed(0, job, reason)
