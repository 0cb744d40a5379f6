"""Fills in what a job reads: prompts, slices, weights. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from digenrl.driver.stores import DriverStores
from digenrl.records import (
    HELD_OUT_STEP,
    Calibrate,
    Commit,
    Encode,
    Evaluate,
    Export,
    Generate,
    HeldOutChunk,
    Job,
    PromptRow,
    Publish,
    Restore,
    Save,
    Score,
    SliceArtifact,
    SwitchRole,
    Train,
)
from digenrl.worker.assignment import TRAINER, own_slice

Requests = list[tuple[str, Job]]  # (worker, job)
AnyExport = TypeVar("AnyExport", Commit, Export)


class MissingInputError(LookupError):
    """An input was lost a moment ago, which the scheduler is about to hear."""


class JobInputs:
    """Turns a job of the scheduler into requests to workers, with their inputs.

    `checkpoint_facts` describes a step for its checkpoint, and `pictures` is where an evaluation's pictures go.
    """

    def __init__(
        self,
        stores: DriverStores,
        checkpoint_facts: Callable[[int], Mapping[str, Any]],
        pictures: Callable[[int], Path],
    ) -> None:
        self._stores, self._checkpoint_facts, self._pictures = stores, checkpoint_facts, pictures

    def requests(self, job: Job) -> Requests:
        """The requests of a job; none if its lane is lost, or if there is nothing to encode.

        Raises MissingInputError if a slice that it reads was lost.
        """
        return self._FILL[type(job)](self, job)

    def with_state(self, job: AnyExport) -> AnyExport:
        """A Commit or Export job that also leaves the trainer's state, if the run keeps it."""
        keeps_state, sharded = self._stores.versions.keeps_state, self._stores.recipe.sharded
        return replace(job, keeps_state=keeps_state, sharded=sharded)

    def _encode(self, job: Encode) -> Requests:
        missing = self._stores.prompts.missing(job.step, job.groups)
        return [(self._stores.workers.encoder_name, replace(job, prompts=missing))] if missing else []

    def _generate(self, job: Generate) -> Requests:
        prompt = self._stores.prompts.row(job.slice.step, job.slice.group)
        return self._to_lane(job.lane, replace(job, prompt=prompt))

    def _score(self, job: Score) -> Requests:
        stores, piece = self._stores, job.piece
        if isinstance(piece, HeldOutChunk):
            job = replace(job, prompts=self._chunk_prompts(piece))
        else:
            artifact = stores.samples.artifact_of(piece)
            if artifact is None:
                raise MissingInputError(f"{piece} is not there")
            prompts = (stores.prompts.row(piece.step, piece.group),) * piece.size
            job = replace(job, artifact=artifact, prompts=prompts)
        return [(stores.workers.rewards[job.scorer].name, job)]

    def _train(self, job: Train) -> Requests:
        prompt = self._stores.prompts.row(job.slice.step, job.slice.group)
        group = self._stores.samples.group_artifact(job.slice, prompt)
        if group is None:
            raise MissingInputError(f"{job.slice} is not complete")
        return [(TRAINER, replace(job, group=group))]

    def _export(self, job: Any) -> Requests:
        return [(TRAINER, self.with_state(job))]

    def _restore(self, job: Restore) -> Requests:
        return [(TRAINER, replace(job, sharded=self._stores.recipe.sharded))]

    def _publish(self, job: Publish) -> Requests:
        weights = self._stores.versions.newest
        filled = [(lane, replace(job, lanes=(lane,), weights=weights)) for lane in job.lanes]
        return [request for lane, each in filled for request in self._to_lane(lane, each)]

    def _switch_role(self, job: SwitchRole) -> Requests:
        return [(TRAINER, job)]

    def _evaluate(self, job: Evaluate) -> Requests:
        settings = self._stores.recipe.evaluation
        assert settings is not None
        filled = replace(
            job,
            first=job.chunk.index * settings.chunk,
            prompts=self._chunk_prompts(job.chunk),
            pictures=str(self._pictures(job.chunk.version)),
            shown=settings.shown,
        )
        return self._to_lane(job.lane, filled)

    def _calibrate(self, job: Calibrate) -> Requests:
        """Adds a prompt and two slices to time: the smallest that the lane may take, and the largest."""
        stores, worker = self._stores, self._stores.lanes.worker(job.lane)
        if not worker:
            return []
        own = own_slice(stores.workers.by_name()[worker], stores.slice_size)
        sizes = tuple(dict.fromkeys((stores.slice_size, own)))
        return [(worker, replace(job, prompt=stores.prompts.row(job.step, 0), sizes=sizes))]

    def _save(self, job: Save) -> Requests:
        run, keep = self._stores.workers.trainer.run, self._stores.recipe.checkpoint.keep
        return [(TRAINER, replace(job, run=str(run), facts=self._checkpoint_facts(job.step), keep=keep))]

    _FILL: ClassVar[dict[type[Job], Callable[[JobInputs, Any], Requests]]] = {
        Encode: _encode,
        Generate: _generate,
        Score: _score,
        Train: _train,
        Commit: _export,
        Export: _export,
        Restore: _restore,
        Publish: _publish,
        SwitchRole: _switch_role,
        Evaluate: _evaluate,
        Save: _save,
        Calibrate: _calibrate,
    }

    def _to_lane(self, lane: int, job: Job) -> Requests:
        worker = self._stores.lanes.worker(lane)
        return [(worker, job)] if worker else []

    def _chunk_prompts(self, chunk: HeldOutChunk) -> tuple[PromptRow, ...]:
        assert self._stores.recipe.evaluation is not None
        size = self._stores.recipe.evaluation.chunk
        return self._stores.prompts.held_out[chunk.index * size : (chunk.index + 1) * size]

    def prompt_ids(self, job: Job, rows: list[PromptRow]) -> tuple[tuple[int, int], ...]:
        """The (step, group) pairs of some prompts that a job reads."""
        if isinstance(job, Evaluate):
            return tuple((HELD_OUT_STEP, self._stores.prompts.held_out.index(row)) for row in rows)
        if rows and isinstance(job, Generate | Train):
            return ((job.slice.step, job.slice.group),)
        if rows and isinstance(job, Calibrate):
            return ((job.step, 0),)
        return ()


def prompts_of(job: Job) -> tuple[PromptRow, ...]:
    """The prompts whose encoded rows a job reads."""
    if isinstance(job, Evaluate):
        return job.prompts
    if isinstance(job, Train):
        return (job.group.prompt,)
    if isinstance(job, Generate | Calibrate) and job.prompt is not None:
        return (job.prompt,)
    return ()


def slices_of(job: Job) -> tuple[SliceArtifact, ...]:
    """The slices that a job reads."""
    if isinstance(job, Score) and job.artifact is not None:
        return (job.artifact,)
    return job.group.slices if isinstance(job, Train) else ()
