"""Fills in what a job reads: prompts, slices, weights. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any, ClassVar, TypeVar

from digenrl.config.algorithms import AdvantageSettings
from digenrl.driver.stores import DriverStores
from digenrl.records import (
    HELD_OUT_STEP,
    NO_LANE,
    NO_WEIGHTS,
    Calibrate,
    Commit,
    Encode,
    Evaluate,
    Export,
    Generate,
    GroupArtifact,
    HeldOutChunk,
    Job,
    PromptRow,
    Publish,
    Restore,
    Save,
    Score,
    SendGradients,
    Slice,
    SliceArtifact,
    SwitchRole,
    TakeUpdate,
    Train,
    edited_prompts,
)
from digenrl.worker.assignment import TRAINER, own_slice

CLOSE_TO_CLAMP = 0.99

Requests = list[tuple[str, Job]]  # (worker, job)
AnyExport = TypeVar("AnyExport", Commit, Export)
AnyUpdate = TypeVar("AnyUpdate", Commit, TakeUpdate)


class MissingInputError(LookupError):
    """An input was lost or replaced a moment ago, which the scheduler is about to hear."""


class JobInputs:
    """Turns a job of the scheduler into requests to workers, with their inputs.

    `checkpoint_facts` describes a step for its checkpoint.
    """

    def __init__(self, stores: DriverStores, checkpoint_facts: Callable[[int], Mapping[str, Any]]) -> None:
        self._stores, self._checkpoint_facts = stores, checkpoint_facts

    def requests(self, job: Job) -> Requests:
        """The requests of a job; none if its lane is lost, or if there is nothing to encode.

        Raises MissingInputError if a slice that it reads was lost, or if it publishes a version that is outdated.
        """
        return self._FILL[type(job)](self, job)

    def with_state(self, job: AnyExport) -> AnyExport:
        """A Commit or Export job that also leaves the trainer's state, if the run keeps it."""
        keeps_state, sharded = self._stores.versions.keeps_state, self._stores.recipe.sharded
        return replace(job, keeps_state=keeps_state, sharded=sharded)

    def _encode(self, job: Encode) -> Requests:
        missing = self._stores.prompts.missing(job.step, job.groups)
        return [self.encoding(job, missing)] if missing else []

    def encoding(self, job: Encode, prompts: tuple[PromptRow, ...]) -> tuple[str, Encode]:
        """The request to encode these prompts, with their source images."""
        images = self._stores.prompts.images(prompts)
        return self._stores.workers.encoder_name, replace(job, prompts=prompts, images=images)

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
        weights = self._stores.versions.of_update if job.update else NO_WEIGHTS
        filled = replace(job, group=self._group(job.slice), weights=weights)
        return [(TRAINER, filled)] if job.lane == NO_LANE else self._to_lane(job.lane, filled)

    def _group(self, piece: Slice) -> GroupArtifact:
        stores = self._stores
        prompt, size = stores.prompts.row(piece.step, piece.group), stores.recipe.batch.samples_per_prompt
        group = stores.samples.group_artifact(piece, prompt, size)
        if group is None:
            raise MissingInputError(f"{piece} is not complete")
        return group

    def _send_gradients(self, job: SendGradients) -> Requests:
        return self._to_lane(job.lane, job)

    def _commit(self, job: Commit) -> Requests:
        if self._stores.recipe.shares_work:
            job = self._with_groups(job)
        return [(TRAINER, self.with_state(job))]

    def _take_update(self, job: TakeUpdate) -> Requests:
        return [(TRAINER, self._with_groups(job))]

    def _with_groups(self, job: AnyUpdate) -> AnyUpdate:
        recipe, samples = self._stores.recipe, self._stores.samples
        size = recipe.batch.samples_per_prompt
        whole = [Slice(job.step, index, 0, size) for index in samples.complete_groups(job.step, size)]
        groups = tuple(self._group(piece) for piece in whole)
        replays = _may_exceed_clamp(recipe.algorithm.settings().advantage, [group.rewards for group in groups])
        return replace(job, groups=groups, replays=replays)

    def _export(self, job: Export) -> Requests:
        return [(TRAINER, self.with_state(job))]

    def _restore(self, job: Restore) -> Requests:
        return [(TRAINER, replace(job, sharded=self._stores.recipe.sharded))]

    def _publish(self, job: Publish) -> Requests:
        versions = self._stores.versions
        if job.version != versions.newest_version:
            raise MissingInputError(f"version {job.version} was replaced by {versions.newest_version}")
        weights = versions.newest
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
        trained = stores.recipe.calibrated_samples if stores.recipe.shares_work else 0
        prompt = stores.prompts.row(job.step, 0)
        return [(worker, replace(job, prompt=prompt, sizes=sizes, trained=trained, pack_size=stores.pack_size))]

    def _save(self, job: Save) -> Requests:
        run, keep = self._stores.workers.trainer.run, self._stores.recipe.checkpoint.keep
        return [(TRAINER, replace(job, run=str(run), facts=self._checkpoint_facts(job.step), keep=keep))]

    _FILL: ClassVar[dict[type[Job], Callable[[JobInputs, Any], Requests]]] = {
        Encode: _encode,
        Generate: _generate,
        Score: _score,
        Train: _train,
        SendGradients: _send_gradients,
        TakeUpdate: _take_update,
        Commit: _commit,
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
        if isinstance(job, Evaluate) or (isinstance(job, Score) and isinstance(job.piece, HeldOutChunk)):
            return tuple((HELD_OUT_STEP, self._stores.prompts.held_out.index(row)) for row in rows)
        if rows and isinstance(job, Score) and isinstance(job.piece, Slice):
            return ((job.piece.step, job.piece.group),)
        if rows and isinstance(job, Generate | Train):
            return ((job.slice.step, job.slice.group),)
        if rows and isinstance(job, Calibrate):
            return ((job.step, 0),)
        if rows and isinstance(job, Commit | TakeUpdate):
            return tuple((job.step, group.index) for group in job.groups if group.prompt in rows)
        return ()


def _may_exceed_clamp(settings: AdvantageSettings, rewards_by_group: Sequence[Sequence[float]]) -> bool:
    """Whether samples may have to be replayed because they exceed the clamp, once the batch's scale is known."""
    if settings.std_over != "batch":
        return False
    largest = max(abs(reward - fmean(rewards)) for rewards in rewards_by_group for reward in rewards)
    std = pstdev([reward for rewards in rewards_by_group for reward in rewards])
    return largest > CLOSE_TO_CLAMP * settings.clamp * (std + settings.eps)


def prompts_of(job: Job) -> tuple[PromptRow, ...]:
    """The prompts whose encoded rows a job reads."""
    if isinstance(job, Evaluate):
        return job.prompts
    if isinstance(job, Score):
        return edited_prompts(job.prompts)
    if isinstance(job, Train):
        return (job.group.prompt,)
    if isinstance(job, Commit | TakeUpdate) and job.replays:
        return tuple(group.prompt for group in job.groups)
    if isinstance(job, Generate | Calibrate) and job.prompt is not None:
        return (job.prompt,)
    return ()


def slices_of(job: Job) -> tuple[SliceArtifact, ...]:
    if isinstance(job, Score) and job.artifact is not None:
        return (job.artifact,)
    if isinstance(job, Commit | TakeUpdate) and job.replays:
        return tuple(each for group in job.groups for each in group.slices)
    return job.group.slices if isinstance(job, Train) else ()
