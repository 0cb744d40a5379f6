"""Calibrate jobs: do a little work of one kind, discard it, and report how long it took."""

from __future__ import annotations

import math
import os
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from time import perf_counter

import torch

from digenrl.models.contract import SampleSize
from digenrl.models.parallel.shards import is_sharded
from digenrl.models.passes.compiled import is_compiled
from digenrl.models.passes.matrix_rate import matrix_tflops
from digenrl.models.trajectory import ScoredGroup, Trajectory
from digenrl.models.transfers import synchronize
from digenrl.records import Calibrate, Calibrated, PromptRow, SampleId, Slice
from digenrl.rewards.contract import RewardError
from digenrl.training.ranks.rank_group import RankGroup
from digenrl.worker.forward_trial import sample_forward, train_flop, try_attention
from digenrl.worker.rollouts import held_out_pixels
from digenrl.worker.stages import Stages
from digenrl.worker.tensor_files import trajectory_tensors
from digenrl.worker.timing import peak_bytes, sustained_seconds, watch_peak

CALIBRATION_STEP = -1  # the step of samples that are discarded


class StageCalibration:
    """Times one worker's stages."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._blueprint, self._exchange = stages.parts.blueprint, stages.parts.exchange
        self._tasks = {
            "forward": self._forward,
            "generate": self._generation,
            "score": self._scoring,
            "train": self._training,
            "switch": self._switching,
            "commit": self._commits,
        }

    def calibrate(self, job: Calibrate) -> Calibrated:
        """Runs the job's task once to warm up and then against the clock."""
        return self._tasks[job.task](job)

    def _forward(self, job: Calibrate) -> Calibrated:
        """Uses the given attention kernels, or measures the device, and with a prompt a forward."""
        model = self._stages.model
        if job.kernels is not None:
            model.use_attention(job.kernels)
            return Calibrated(0, job, {})
        if job.prompt is None:
            return Calibrated(0, job, {}, matrix_tflops=matrix_tflops(model.device))
        row = self._stages.row(job.prompt)
        with self._own_forwards():
            forward = sample_forward(self._blueprint, model, row)
            return Calibrated(
                0,
                job,
                {},
                generate_flop=self._of_all_cards(self._denoising_steps(job) * forward.flop),
                train_flop=self._of_all_cards(train_flop(self._blueprint, model, row, forward)),
                matrix_tflops=matrix_tflops(model.device),
                attention=try_attention(self._blueprint, model, row, forward, job.passes),
            )

    def _denoising_steps(self, job: Calibrate) -> int:
        """Of every sample; the images of a pair are not denoised."""
        return 0 if _prompt(job).paired else self._blueprint.recipe.sample.denoising_steps

    def _own_forwards(self) -> AbstractContextManager[None]:
        """Inside, the stages of a model can compute forwards alone, each its own part."""
        own = self._stages.model.own_blocks
        return nullcontext() if own is None else own.without_others()

    def _of_all_cards(self, flop: float) -> float:
        """The operations of all cards that compute a sample together, given those of this one."""
        exchange, ranks = self._stages.model.exchange, self._stages.parts.ranks
        if ranks is not None and self._stages.model.own_blocks is not None:
            return math.fsum(ranks.gather(flop))
        if exchange is None or ranks is None:
            return flop
        return math.fsum(ranks.gather(flop)) * exchange.ranks / ranks.rank.count

    def _generation(self, job: Calibrate) -> Calibrated:
        """One slice of every size, and held-out batches once so that a compiled model has met their sizes."""
        prompt, model = _prompt(job), self._stages.model
        seconds: dict[int, float] = {}
        peaks: dict[int, int] = {}
        for size in job.sizes:
            watch_peak(model.device)
            seconds[size] = self._timed_slice(prompt, size)
            peaks[size] = peak_bytes(model.device)
        for size in job.held_out:
            with self._stages.served_weights(), self._stages.held_out_model() as held_out_model:
                row = self._stages.row(prompt)
                rows = [model.shortened_prompt(row), *[row] * (size - 1)]
                held_out_pixels(self._blueprint, held_out_model, rows, 0, self._stages.row_limits)
        train_seconds = 0.0
        if job.trained:
            self._use_pack_size(job)
            train_seconds = self._time_training(prompt, job.trained, max(job.sizes))
        return Calibrated(0, job, seconds, train_seconds, peak_bytes=peaks)

    def _use_pack_size(self, job: Calibrate) -> None:
        """Packs of another size round differently: all workers that train use the trainer's."""
        if job.pack_size:
            self._stages.trainer.use_pack_size(job.pack_size)

    def _time_training(self, prompt: PromptRow, samples: int, at_once: int) -> float:
        """Seconds per sample, of a lane that joins a run and also trains."""
        group = self.sample_group(prompt, samples, min(samples, at_once))
        self._stages.trainer.calibrate(group)
        return self._timed_replay(group, later=False)

    def _timed_slice(self, prompt: PromptRow, size: int) -> float:
        name = f"calibration-{os.getpid()}"  # all workers calibrate at the same time

        def generate() -> None:
            generated, pixels_BFCHW = self._stages.roll_out(prompt, Slice(CALIBRATION_STEP, 0, 0, size))
            self._put_and_drop(name, trajectory_tensors(generated.trajectories))
            if self._stages.parts.reward is None:
                self._put_and_drop(name, {"pixels": pixels_BFCHW})
                return
            with suppress(RewardError):  # a prompt that cannot be scored is no reason not to start
                self._stages.score_pixels(pixels_BFCHW, [prompt] * size)

        generate()
        return sustained_seconds(generate, self._stages.model.device, self._ranks_in_lockstep())

    def _ranks_in_lockstep(self) -> RankGroup | None:
        """The ranks without which this worker computes no forward, if there are any."""
        model = self._stages.model
        divided = model.exchange is not None or model.own_blocks is not None
        in_lockstep = divided or is_sharded(model.transformer)
        return self._stages.parts.ranks if in_lockstep else None

    def _put_and_drop(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        self._exchange.put(name, tensors)
        self._exchange.drop(name)

    def _scoring(self, job: Calibrate) -> Calibrated:
        """Scores noise twice and times the second call. A reward that finds nothing in it will do.

        The rewards of an evaluation are called once, so that its first call is not slower than later ones.
        """
        (samples,) = job.sizes
        if self._blueprint.recipe.evaluation is not None:
            self._score_noise(job, self._blueprint.held_out_size, 1, held_out=True)
        for _ in range(2):
            seconds = self._score_noise(job, self._blueprint.size, samples)
        return Calibrated(0, job, {1: seconds / samples})

    def _score_noise(self, job: Calibrate, size: SampleSize, samples: int, held_out: bool = False) -> float:
        noise = torch.Generator().manual_seed(0)
        pixels_BFCHW = torch.rand(samples, size.frames, 3, size.height, size.width, generator=noise)
        began = perf_counter()
        with suppress(RewardError):
            self._stages.score_pixels(pixels_BFCHW, [_prompt(job)] * samples, held_out=held_out)
        return perf_counter() - began

    def _training(self, job: Calibrate) -> Calibrated:
        """Replays a few samples twice and times the second replay. Finds the pack size on the way."""
        trainer, (samples,) = self._stages.trainer, job.sizes
        self._use_pack_size(job)
        group = self.sample_group(_prompt(job), samples, job.at_once or samples)
        trainer.calibrate(group)
        watch_peak(self._stages.model.device)
        seconds = self._timed_replay(group, later=False)
        updates = self._blueprint.algorithm.updates_per_batch
        if trainer.later_updates_differ:
            if is_compiled(self._stages.model):
                trainer.calibrate(group, later=True)
            seconds = (seconds + (updates - 1) * self._timed_replay(group, later=True)) / updates
        plan = trainer.plan
        assert plan is not None, "calibration makes a plan"
        return Calibrated(
            0,
            job,
            {1: seconds},
            peak_bytes={1: peak_bytes(self._stages.model.device)},
            pack_size=plan.pack_size,
            checkpointed_blocks=plan.checkpointed,
            planned_bytes=plan.planned_bytes,
            predicted_bytes=plan.first_estimate_bytes,
        )

    def sample_group(self, prompt: PromptRow, samples: int, at_once: int) -> ScoredGroup:
        """Samples with made-up rewards, generated `at_once` at a time."""
        trajectories: list[Trajectory] = []
        for first in range(0, samples, at_once):
            with self._own_forwards():
                generated = self._stages.sample(prompt, Slice(CALIBRATION_STEP, 0, first, at_once))
            trajectories += generated.trajectories
        row = self._stages.model.compact(self._stages.row(prompt))
        return ScoredGroup(row, tuple(trajectories[:samples]), tuple(float(index) for index in range(samples)))

    def _timed_replay(self, group: ScoredGroup, later: bool) -> float:
        """Seconds per sample."""
        trainer, shares = self._stages.trainer, []
        seconds = sustained_seconds(
            lambda: shares.append(trainer.calibrate(group, later=later)),
            self._stages.model.device,
            self._ranks_in_lockstep(),
        )
        return seconds / shares[-1] / self._blueprint.shape.group_size

    def _switching(self, job: Calibrate) -> Calibrated:
        """Switches to generating and back until no more host memory is allocated, and reports the last time.

        The first switches allocate the host memory that later ones reuse.
        """
        switching = self._stages.trainer.switching
        self._there_and_back(job)
        while True:
            allocated = switching.host_bytes
            calibrated = self._there_and_back(job)
            if switching.host_bytes == allocated:
                return calibrated

    def _there_and_back(self, job: Calibrate) -> Calibrated:
        trainer = self._stages.trainer
        switching = trainer.switching
        with switching.full_size():
            to_generating = self._stages.switch_to("generate")
            moved_bytes = switching.offloaded_bytes
            switching.synchronize()
            if self._stages.parts.publishes:  # a version is kept while the trainer helps within a batch
                trainer.reserve_version()
            to_training = self._stages.switch_to("train")
        return Calibrated(0, job, {1: to_generating}, seconds_back=to_training, moved_bytes=moved_bytes)

    def _commits(self, job: Calibrate) -> Calibrated:
        """Trains a whole batch of discarded samples and times its optimizer updates. The version advances."""
        trainer, shape = self._stages.trainer, self._blueprint.shape
        batch, seconds = trainer.batch, 0.0
        group = self.sample_group(_prompt(job), shape.group_size, job.at_once or shape.group_size)
        for place in range(shape.groups):
            trainer.add_group(_placed(group, batch, place), place)
            while trainer.batch == batch and trainer.can_commit():
                seconds += self._timed_commit()
        assert trainer.batch == batch + 1, "the whole batch was trained"
        return Calibrated(0, job, {1: seconds})

    def _timed_commit(self) -> float:
        device = self._stages.model.device
        self._stages.trainer.switching.synchronize()
        synchronize(device)
        began = perf_counter()
        self._stages.trainer.commit()
        synchronize(device)
        return perf_counter() - began


def _prompt(job: Calibrate) -> PromptRow:
    assert job.prompt is not None, f"{job} needs a prompt"
    return job.prompt


def _placed(group: ScoredGroup, batch: int, place: int) -> ScoredGroup:
    """The same samples as a group of the open batch."""
    trajectories = tuple(
        replace(each, sample=SampleId(batch, place, each.sample.index), version=batch)
        for each in group.trajectories
    )
    return replace(group, trajectories=trajectories)
