"""What a worker can do, as roles; one worker may have several and then shares one model among them.

Every role carries out some kinds of orders. Tensors come from the exchange and go there; reports hold none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, Protocol

import torch
from torch import Tensor

from digenrl.exchange.folder import WeightsReference
from digenrl.exchange.tensors import Exchange
from digenrl.generation.rollout import GeneratedSlice
from digenrl.models.compiled import is_compiled
from digenrl.models.contract import Conditioning, DiffusionModel, TextEncoder
from digenrl.models.pairs import ScoredGroup
from digenrl.models.published import load_published
from digenrl.models.trajectory import Trajectory
from digenrl.models.transfers import sent, wait_for
from digenrl.records import Slice
from digenrl.rewards.contract import Reward, RewardError
from digenrl.training.checkpoint.state_tensors import state_as_tensors, state_of_tensors
from digenrl.training.trainer import Trainer
from digenrl.worker import stages
from digenrl.worker.orders import (
    ChangeRole,
    EncodedPrompt,
    EncodePrompts,
    EvaluatePrompts,
    GroupsLearnt,
    LayOutWeights,
    LearnableGroup,
    LearnGroups,
    LearningRehearsed,
    LoadWeights,
    MadeSlice,
    MakeSlice,
    MakingRehearsed,
    Order,
    PromptsEncoded,
    PromptsEvaluated,
    PromptsSampled,
    RehearseLearning,
    RehearseMaking,
    RehearseSwitching,
    Report,
    RestoreState,
    RoleChanged,
    SamplesRated,
    ScoreEvaluation,
    ScoreRehearsal,
    Scores,
    ScoreSamples,
    ScoringRehearsed,
    SliceMade,
    StateRestored,
    StepTaken,
    SwitchingRehearsed,
    TakeStep,
    WeightsLaidOut,
    WeightsLoaded,
    pixels_name,
    slice_name,
    state_name,
    weights_name,
)
from digenrl.worker.pictures import save_pictures
from digenrl.worker.stages import Blueprint
from digenrl.worker.tensor_files import (
    conditioning_of,
    conditioning_tensors,
    trajectories_of,
    trajectory_tensors,
)
from digenrl.worker.timing import peak_bytes, sustained_seconds, watch_peak

Handlers = Mapping[type[Order], Callable[[Any], Report]]
REHEARSED = -1  # the step of samples that are made and forgotten
NO_WEIGHTS = WeightsReference("", 0, 0)  # where nobody reads them, and of ranks that leave it to the first


class Role(Protocol):
    """Some kinds of orders, and what is done about each."""

    @property
    def handlers(self) -> Handlers: ...


class Encoding:
    """Encodes prompts, each once, and lays their rows out."""

    def __init__(self, model: TextEncoder, exchange: Exchange, negative_prompt: str | None) -> None:
        self._model, self._exchange = model, exchange
        self._negative = None if negative_prompt is None else [negative_prompt]
        self.handlers: Handlers = {EncodePrompts: self.encode}

    @torch.no_grad()
    def encode(self, order: EncodePrompts) -> PromptsEncoded:
        """One prompt at a time: a row's last bits depend on its batch, and a resumed run must see the same."""
        for prompt in order.prompts:
            row = self._model.encode([prompt.text], self._negative)
            self._exchange.put(prompt.row, conditioning_tensors(row.to("cpu")))
        return PromptsEncoded(tuple(prompt.row for prompt in order.prompts))


class Scoring:
    """Turns pixels into rewards."""

    def __init__(self, blueprint: Blueprint, scorer: Reward, exchange: Exchange) -> None:
        self._blueprint, self._scorer, self._exchange = blueprint, scorer, exchange
        self.handlers: Handlers = {
            ScoreSamples: self.score_samples,
            ScoreEvaluation: self.score_evaluation,
            ScoreRehearsal: self.calibrate,
        }

    def score_samples(self, order: ScoreSamples) -> SamplesRated:
        """Some samples of one slice."""
        first = order.slice.first - order.of.slice.first
        pixels_BFCHW = self._exchange.get(pixels_name(order.of.name))["pixels"][first : first + order.slice.size]
        return SamplesRated(order.slice, self.score(pixels_BFCHW, [order.prompt] * order.slice.size))

    def score_evaluation(self, order: ScoreEvaluation) -> PromptsEvaluated:
        """Held-out samples, one per prompt."""
        pixels_BFCHW = self._exchange.get(order.name)["pixels"]
        return PromptsEvaluated(order.first, self.score(pixels_BFCHW, order.prompts))

    def calibrate(self, order: ScoreRehearsal) -> ScoringRehearsed:
        """Scores noise twice, the second time against the clock; a reward that finds nothing in it will do."""
        size = self._blueprint.size
        noise = torch.Generator().manual_seed(0)
        pixels_BFCHW = torch.rand(order.samples, size.frames, 3, size.height, size.width, generator=noise)
        for _ in range(2):
            began = perf_counter()
            with suppress(RewardError):
                self.score(pixels_BFCHW, [order.prompt] * order.samples)
            seconds = perf_counter() - began
        return ScoringRehearsed(seconds / order.samples)

    def score(self, pixels_BFCHW: Tensor, prompts: Sequence[EncodedPrompt]) -> Scores:
        """One number per sample, and its parts."""
        texts, metadata = [prompt.text for prompt in prompts], [prompt.metadata for prompt in prompts]
        batch = stages.reward(self._scorer, pixels_BFCHW, texts, metadata)
        return Scores(batch.values, dict(batch.parts))


class Generating:
    """Makes slices and held-out samples.

    With a trainer it shares the trainer's model, and generates with the version that the trainer published last.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        model: DiffusionModel,
        exchange: Exchange,
        scoring: Scoring | None = None,
        trainer: Trainer | None = None,
        slowdown: float = 1.0,
    ) -> None:
        self._blueprint, self._model, self._exchange = blueprint, model, exchange
        self._scoring, self._trainer, self._slowdown = scoring, trainer, slowdown
        self._limits = stages.row_limits(blueprint)
        self._loaded_version = 0
        self._has_loaded = False
        self.handlers: Handlers = {
            MakeSlice: self.make_slice,
            LoadWeights: self.load_weights,
            EvaluatePrompts: self.evaluate,
            RehearseMaking: self.calibrate,
        }

    @property
    def version(self) -> int:
        """Of the weights that the next slice is made with."""
        return self._loaded_version if self._trainer is None else self._trainer.batch

    def make_slice(self, order: MakeSlice) -> SliceMade:
        """Made with the version at hand: that of the lease, or a newer one that arrived meanwhile."""
        assert self.version >= order.lease.version, f"{order.lease} asks for weights that never came"
        piece, name = order.lease.slice, slice_name(order.lease)
        made, pixels_BFCHW = self._generate(order.prompt, piece)
        self._exchange.put(name, trajectory_tensors(made.trajectories))
        where = MadeSlice(piece, name, self.version)
        if self._scoring is None:
            self._exchange.put(pixels_name(name), {"pixels": pixels_BFCHW})
            return SliceMade(order.lease, where)
        try:
            scores = self._scoring.score(pixels_BFCHW, [order.prompt] * piece.size)
        except RewardError as error:
            return SliceMade(order.lease, where, score_failure=str(error))
        return SliceMade(order.lease, where, scores)

    def load_weights(self, order: LoadWeights) -> WeightsLoaded:
        """From the next slice on. The first time also what it has already, which tells what loading costs."""
        began = perf_counter()
        self._serve(order.version, order.weights, even_if_the_same=not self._has_loaded)
        return WeightsLoaded(order.version, perf_counter() - began)

    def evaluate(self, order: EvaluatePrompts) -> PromptsSampled:
        """Samples prompts in batches as the recipe says; pixels go to the exchange."""
        evaluation = self._blueprint.recipe.evaluation
        assert evaluation is not None
        self._serve(order.version, order.weights)
        pixels = []
        for start in range(0, len(order.prompts), evaluation.batch):
            with self._weights():
                rows = [self._row(prompt) for prompt in order.prompts[start : start + evaluation.batch]]
                pixels.append(
                    stages.held_out_pixels(
                        self._blueprint, self._model, Conditioning.joined(rows), order.first + start, self._limits
                    )
                )
        pixels_BFCHW = torch.cat(pixels)
        save_pictures(pixels_BFCHW, Path(order.pictures), order.first, order.shown)
        self._exchange.put(order.name, {"pixels": pixels_BFCHW})
        return PromptsSampled(order.name)

    def calibrate(self, order: RehearseMaking) -> MakingRehearsed:
        """Makes one slice of every size to warm up, and then one against the clock; held-out samples once."""
        seconds, peaks = {}, {}
        for size in order.sizes:
            watch_peak(self._model.device)
            seconds[size] = self._rehearse_slice(order.prompt, size)
            peaks[size] = peak_bytes(self._model.device)
        for size in order.held_out:
            with self._weights():
                row = self._row(order.prompt)
                rows = Conditioning.joined([self._model.of_another_length(row), *[row] * (size - 1)])
                stages.held_out_pixels(self._blueprint, self._model, rows, 0, self._limits)
        return MakingRehearsed(seconds, peaks)

    def make_and_forget(self, prompt: EncodedPrompt, samples: int, at_once: int) -> ScoredGroup:
        """Some samples with made-up rewards, for a trainer to calibrate with, made in slices of this size."""
        row = self._model.compact(self._row(prompt))
        trajectories: list[Trajectory] = []
        for first in range(0, samples, at_once):
            piece = Slice(REHEARSED, 0, first, at_once)
            with self._weights():
                made, _ = stages.generate(self._blueprint, self._model, row, piece, self.version, self._limits)
            trajectories += made.trajectories
        return ScoredGroup(row, tuple(trajectories[:samples]), tuple(float(index) for index in range(samples)))

    def _generate(self, prompt: EncodedPrompt, piece: Slice) -> tuple[GeneratedSlice, Tensor]:
        began = perf_counter()
        with self._weights():
            row = self._row(prompt)
            made = stages.generate(self._blueprint, self._model, row, piece, self.version, self._limits)
        if self._slowdown > 1:
            sleep((perf_counter() - began) * (self._slowdown - 1))
        return made

    def _rehearse_slice(self, prompt: EncodedPrompt, size: int) -> float:
        name = f"rehearsal-{os.getpid()}"  # everybody rehearses at the same time

        def make() -> None:
            made, pixels_BFCHW = self._generate(prompt, Slice(REHEARSED, 0, 0, size))
            self._exchange.put(name, trajectory_tensors(made.trajectories))
            self._exchange.drop(name)
            if self._scoring is None:
                self._exchange.put(name, {"pixels": pixels_BFCHW})
                self._exchange.drop(name)
                return
            with suppress(RewardError):  # a prompt that cannot be scored is no reason not to begin
                self._scoring.score(pixels_BFCHW, [prompt] * size)

        make()
        return sustained_seconds(make, self._model.device)

    def _serve(self, version: int, weights: WeightsReference, even_if_the_same: bool = False) -> None:
        """Checked by checksum, names and shapes before anything changes; a version at hand stays."""
        newer = version > self._loaded_version or (even_if_the_same and version == self._loaded_version)
        if self._trainer is None and newer:
            load_published(self._model, self._exchange.get_weights(weights))
            self._loaded_version, self._has_loaded = version, True

    def _weights(self) -> AbstractContextManager[None]:
        return nullcontext() if self._trainer is None else self._trainer.generating()

    def _row(self, prompt: EncodedPrompt) -> Conditioning:
        return conditioning_of(self._exchange.get(prompt.row)).to(self._model.device)


class Learning:
    """Trains: replays groups, takes optimizer steps, lays new versions out."""

    def __init__(
        self,
        blueprint: Blueprint,
        model: DiffusionModel,
        exchange: Exchange,
        trainer: Trainer,
        generating: Generating,
        publishes: bool = True,
    ) -> None:
        self._blueprint, self._model, self._exchange = blueprint, model, exchange
        self._trainer, self._generating, self._publishes = trainer, generating, publishes
        self.handlers: Handlers = {
            LearnGroups: self.learn,
            TakeStep: self.take_step,
            ChangeRole: self.change_role,
            LayOutWeights: self.lay_out_weights,
            RestoreState: self.restore,
            RehearseLearning: self.calibrate,
            RehearseSwitching: self.rehearse_switching,
        }

    def learn(self, order: LearnGroups) -> GroupsLearnt:
        """Groups join the gradient in the order given; updates before the batch's last are taken when complete."""
        updates: list[Mapping[str, Any]] = []
        self._trainer.switching.load()  # of a trainer that took another's place, or helped meanwhile
        for group in order.groups:
            stages.train(self._trainer, self._scored(group), group.place)
            last = self._blueprint.algorithm.updates_per_batch - 1
            while self._trainer.update < last and self._trainer.can_commit():
                updates.append(asdict(self._trainer.commit()))
        wait_for(self._model.device)  # once, so that whoever takes the time sees what a group costs
        return GroupsLearnt(tuple(updates))

    def take_step(self, order: TakeStep) -> StepTaken:
        """The batch's last update; the new version is one more than the step."""
        updates: list[Mapping[str, Any]] = []
        while self._trainer.batch == order.step:
            updates.append(asdict(self._trainer.commit()))
        version = LayOutWeights(order.step + 1, order.keep, order.sharded, order.rank)
        return StepTaken(order.step, tuple(updates), self.lay_out_weights(version).weights)

    def lay_out_weights(self, order: LayOutWeights) -> WeightsLaidOut:
        """The weights that the next batch is generated with and, if asked for, all that a successor needs.

        A version that the trainer has left meanwhile is nobody's concern any more, and where nobody else generates
        none ever is.
        """
        if order.version != self._trainer.batch or not self._publishes:
            return WeightsLaidOut(self._trainer.batch, NO_WEIGHTS)
        keeps = order.keep and (order.sharded or order.rank == 0)
        if keeps:
            self._trainer.keep_version()  # which is published from there, too
        published = stages.publish(self._trainer)  # by all ranks together, where weights are sharded
        weights = NO_WEIGHTS
        if order.rank == 0:
            weights = self._exchange.put_weights(weights_name(order.version), published)
        kept_bytes = 0
        if keeps:
            state = self._trainer.state_at_last_version()
            kept_bytes = self._exchange.put(state_name(order.version, order.rank), state_as_tensors(state))
            kept_bytes += state.missing_moment_bytes()  # there has to be room for them, too
        return WeightsLaidOut(order.version, weights, kept_bytes)

    def restore(self, order: RestoreState) -> StateRestored:
        """What was open is the driver's to hand out again."""
        (name,) = order.reads()
        self._trainer.load_state(state_of_tensors(self._exchange.get(name)))
        return StateRestored(order.version)

    def change_role(self, order: ChangeRole) -> RoleChanged:
        """One model serves both. What only training needs makes room, where the recipe says so."""
        return RoleChanged(order.generating, self._switch(order.generating))

    def rehearse_switching(self, order: RehearseSwitching) -> SwitchingRehearsed:
        """There and back, and once more until it takes no more host memory: only the last time counts.

        The first takes most of it. What is kept of a version serves then, too, and no longer once it has changed.
        """
        switching = self._trainer.switching
        self._there_and_back()
        while True:
            taken_before = switching.host_bytes
            rehearsed = self._there_and_back()
            if switching.host_bytes == taken_before:
                return rehearsed

    def _there_and_back(self) -> SwitchingRehearsed:
        switching = self._trainer.switching
        with switching.full_size():
            leaving = self._switch(generating=True)
            moved_bytes = switching.offloaded_bytes
            switching.synchronize()
            if self._publishes:  # to others, and helps them in the middle of a batch
                self._trainer.reserve_version()
            returning = self._switch(generating=False)
        return SwitchingRehearsed(leaving, returning, moved_bytes)

    def _switch(self, generating: bool) -> float:
        """Returns the seconds until work can go on; copies may still be made beside it."""
        began = perf_counter()
        if generating:
            self._trainer.switching.offload()
        else:
            self._trainer.switching.load()
        return perf_counter() - began

    def calibrate(self, order: RehearseLearning) -> LearningRehearsed:
        """Replays a few samples twice, the second time against the clock."""
        group = self._generating.make_and_forget(order.prompt, order.samples, order.at_once or order.samples)
        self._trainer.calibrate(group)
        watch_peak(self._model.device)
        seconds_per_sample = self._timed_replay(group, later=False)
        updates = self._blueprint.algorithm.updates_per_batch
        if self._trainer.later_updates_differ:
            if is_compiled(self._model):
                self._trainer.calibrate(group, later=True)
            later_s = self._timed_replay(group, later=True)
            seconds_per_sample = (seconds_per_sample + (updates - 1) * later_s) / updates
        packing = self._trainer.plan
        assert packing is not None, "a rehearsal finds it"
        return LearningRehearsed(
            seconds_per_sample,
            packing.pack_size,
            packing.checkpointed,
            peak_bytes=peak_bytes(self._model.device),
            planned_bytes=packing.planned_bytes,
            foreseen_bytes=packing.first_estimate_bytes,
        )

    def _timed_replay(self, group: ScoredGroup, later: bool) -> float:
        """Seconds per sample of whole groups."""
        shares: list[float] = []
        seconds = sustained_seconds(
            lambda: shares.append(self._trainer.calibrate(group, later=later)), self._model.device
        )
        return seconds / shares[-1] / self._blueprint.shape.group_size

    def _scored(self, group: LearnableGroup) -> ScoredGroup:
        trajectories = [trajectory for made in group.slices for trajectory in self._trajectories(made)]
        # Made compact here and not for every pack: on a card, the values that it reads have to be waited for.
        row = self._model.compact(conditioning_of(self._exchange.get(group.prompt.row))).to(self._model.device)
        return stages.advantage(self._blueprint, row, trajectories, group.rewards)

    def _trajectories(self, made: MadeSlice) -> Sequence[Any]:
        samples = tuple(made.slice.samples())
        device, laid_out = self._model.device, self._exchange.get(made.name)
        tensors = {name: sent(value, device) for name, value in laid_out.items()}
        return trajectories_of(tensors, samples, stages.plan(self._blueprint, self._model, samples), made.version)
