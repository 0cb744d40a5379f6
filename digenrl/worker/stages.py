"""What a worker does: encode, generate, score, train, commit, publish, evaluate, save. One method per job.

Read from top to bottom, this is the way of a prompt to published weights. Each stage calls one package. Tensors
come from the exchange and go there; jobs and results hold names and numbers only. The scheduler decides which
stage runs where and when.

Shape legend: B = samples, F = frames, C = 3 colors, H and W = height and width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.exchange.tensors import Exchange
from digenrl.generation.rollout import GeneratedSlice, decode_slice
from digenrl.models.contract import Conditioning, DiffusionModel, TextEncoder
from digenrl.models.loading.parked import ParkedModel
from digenrl.models.model_weights import load_weights, weights_replaced
from digenrl.models.rounded_weights import rounded_before_use
from digenrl.models.trajectory import ScoredGroup, ScoredSamples, Trajectory
from digenrl.models.transfers import synchronize, to_device
from digenrl.records import (
    NO_LANE,
    NO_WEIGHTS,
    Commit,
    Committed,
    Encode,
    Encoded,
    Evaluate,
    Evaluated,
    Export,
    Exported,
    Generate,
    Generated,
    GradientsSent,
    GroupArtifact,
    PromptRow,
    Publish,
    Published,
    Restore,
    Restored,
    Role,
    RoleSwitched,
    Save,
    Saved,
    Score,
    Scored,
    Scores,
    SendGradients,
    Slice,
    SliceArtifact,
    SwitchRole,
    TakeUpdate,
    Train,
    Trained,
    UpdateTaken,
    WeightsReference,
    gradients_name,
    held_out_name,
    pixels_name,
    slice_name,
    state_name,
    update_name,
    weights_name,
)
from digenrl.rewards.contract import PREFERRED, SOURCE_IMAGES, Reward, RewardError
from digenrl.training.checkpoint.checkpoints import prune_checkpoints, save_checkpoint
from digenrl.training.checkpoint.export import export_weights, weights_to_export
from digenrl.training.checkpoint.format import BASE_WEIGHTS, CheckpointError
from digenrl.training.checkpoint.state_tensors import state_as_tensors, state_of_tensors
from digenrl.training.gradients.share import share_as_tensors, share_of_tensors
from digenrl.training.ranks.rank_group import RankGroup, RanksError, all_or_none
from digenrl.training.trainer import Trainer
from digenrl.worker.blueprint import Blueprint
from digenrl.worker.encoding import encode_prompt, images_for_rewards, paired_images, source_images
from digenrl.worker.pictures import picture_files
from digenrl.worker.rollouts import encode_images, held_out_pixels, plan, roll_out, row_limits, shuffled
from digenrl.worker.tensor_files import (
    PAIR,
    SOURCE,
    conditioning_of,
    conditioning_tensors,
    image_tensors,
    images_of,
    trajectories_of,
    trajectory_tensors,
)

AVERAGE = "average/"  # before the names of a published moving average
TRAINED = "trained/"  # before the names of trained weights that are published with a version that lags


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a worker has loaded for its duties. It gets no jobs for what it lacks.

    With a trainer, the model is the trainer's, and generation uses the version that the trainer committed last or,
    if it is the trainer of a generator that also trains and never `commits`, the version that was published to it.
    Without a `held_out_reward`, held-out samples are scored with `reward`; without a `held_out_model`, they are
    generated with `model`. `publishes` is false if no other worker generates. A `slowdown` above 1 imitates a
    slower device. Checkpoints name the weights that training started from by their fingerprint, `base_weights`.
    `version_before` are the published weights one version before those that the trainer has loaded, if known.

    A worker may be one of several `ranks`. Those of a generator compute every sample together: the first one
    leaves and scores them, and the others only follow.
    """

    blueprint: Blueprint
    exchange: Exchange
    encoder: TextEncoder | None = None
    model: DiffusionModel | None = None
    reward: Reward | None = None
    held_out_reward: Reward | None = None
    held_out_model: ParkedModel | None = None
    trainer: Trainer | None = None
    commits: bool = True
    publishes: bool = True
    slowdown: float = 1.0
    base_weights: str = ""
    version_before: Mapping[str, Tensor] = field(default_factory=dict)
    ranks: RankGroup | None = None
    follows: bool = False


class Stages:
    """The stages of one worker, in the order in which data passes through them."""

    def __init__(self, parts: WorkerParts) -> None:
        self.parts = parts
        self._blueprint, self._exchange = parts.blueprint, parts.exchange
        together = parts.model is not None and parts.model.exchange is not None
        self.row_limits = row_limits(parts.blueprint, several_ranks=together)
        self._loaded_version = 0
        self._has_loaded = False
        self._opened = (0, 0, 0)  # step, update and attempt that a worker that never commits trains
        self._average: Mapping[str, Tensor] = {}  # published with the loaded version if that is evaluated
        self._trained: Mapping[str, Tensor] = {}  # published with the loaded version if that lags
        self._version_before = parts.version_before

    # --- Generators and reward lanes ----------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, job: Encode) -> Encoded:
        """Encodes prompts one at a time: a row's last bits depend on its batch, and a resumed run must match.

        Source images are resized and encoded here. Rewards find them beside the encoded prompt, and generators the
        images of a pair.
        """
        assert self.parts.encoder is not None
        for prompt, contents in zip(job.prompts, job.images or [()] * len(job.prompts), strict=True):
            images = source_images(self._blueprint, contents[: prompt.sources], prompt.where, prompt.held_out)
            pair = paired_images(self._blueprint, contents[prompt.sources :], prompt.where)
            row = encode_prompt(self._blueprint, self.parts.encoder, prompt.text, images, prompt.held_out)
            tensors = conditioning_tensors(row.to("cpu"))
            self._exchange.put(prompt.row, tensors | image_tensors(images, SOURCE) | image_tensors(pair, PAIR))
        return Encoded(0, job)

    def generate(self, job: Generate) -> Generated:
        """Rolls out a slice and decodes it. Scores it here if this worker has a reward, else leaves its pixels.

        The samples of a paired prompt are its images.
        """
        assert self.version >= job.version, f"{job} needs weights that were never loaded"
        generated, pixels_BFCHW = self.roll_out(job.prompt, job.slice)
        if self.parts.follows:
            return Generated(0, job, self.version)
        name = slice_name(job.id)
        self._exchange.put(name, trajectory_tensors(generated.trajectories))
        if self.parts.reward is None:
            self._exchange.put(pixels_name(name), {"pixels": pixels_BFCHW})
            return Generated(0, job, self.version)
        try:
            scores = self.score_pixels(pixels_BFCHW, [job.prompt] * job.slice.size, job.slice.first)
        except RewardError as error:
            return Generated(0, job, self.version, score_failure=str(error))
        return Generated(0, job, self.version, scores=scores)

    def score(self, job: Score) -> Scored:
        """Scores samples whose pixels are in the exchange."""
        pixels_BFCHW = self._exchange.get(job.pixels())["pixels"]
        if isinstance(job.piece, Slice):
            assert job.artifact is not None
            first = job.piece.first - job.artifact.slice.first
            pixels_BFCHW = pixels_BFCHW[first : first + job.piece.size]
            return Scored(0, job, self.score_pixels(pixels_BFCHW, job.prompts, job.piece.first))
        return Scored(0, job, self.score_pixels(pixels_BFCHW, job.prompts, held_out=True))

    # --- The trainer --------------------------------------------------------------------------------------------

    def train(self, job: Train) -> Trained:
        """Adds the gradient of samples to the open batch. Takes the optimizer updates before the batch's last."""
        trainer, updates = self.trainer, []
        trainer.switching.load()  # a replacement trainer has no role yet
        if not self._commits:
            self._open_update(job)
        trainer.add_samples(self._scored_samples(job.group, job.slice), job.group.place)
        last = self._blueprint.algorithm.updates_per_batch - 1
        while job.lane == NO_LANE and trainer.update < last and trainer.can_commit():
            updates.append(asdict(trainer.commit()))
        synchronize(self.model.device)  # so that the driver measures the whole job
        return Trained(0, job, tuple(updates))

    def send_gradients(self, job: SendGradients) -> GradientsSent:
        """Leaves the gradient sums of this worker in the exchange, and starts over."""
        share = self.trainer.take_share()
        assert share.batch == job.step, f"{job}, but the open batch is {share.batch}"
        self._exchange.put(gradients_name(job.id), share_as_tensors(share))
        return GradientsSent(0, job)

    def take_update(self, job: TakeUpdate) -> UpdateTaken:
        """Takes an optimizer update before the batch's last one, for which other workers have trained as well."""
        self._complete_batch(job)
        metrics = self.trainer.commit()
        weights = self._exchange.put_weights(update_name(job.id), self.trainer.trained_weights())
        return UpdateTaken(0, job, (asdict(metrics),), weights)

    def commit(self, job: Commit) -> Committed:
        """Takes the batch's last optimizer update and exports the new version.

        If other workers train as well, adds their gradients first.
        """
        updates: list[Mapping[str, Any]] = []
        if job.groups:
            self._complete_batch(job)
        self._keep_version_before(job)
        while self.trainer.batch == job.step:
            updates.append(asdict(self.trainer.commit()))
        weights, _ = self._export(job)
        return Committed(0, job, tuple(updates), weights)

    def publish(self, job: Publish) -> Published:
        """Loads a version, to be served from the next slice on.

        Names, shapes and checksum are checked before anything changes. The first version is loaded even if this
        worker has it already, which tells what loading costs.
        """
        began = perf_counter()
        first_of_all = not self._has_loaded and job.version == self._loaded_version
        if not self._commits and (job.version > self._loaded_version or first_of_all):
            published = self._exchange.get_weights(job.weights)
            self._average, self._trained = _named(published, AVERAGE), _named(published, TRAINED)
            weights = {name: value for name, value in published.items() if not name.startswith((AVERAGE, TRAINED))}
            if self.parts.trainer is None:
                load_weights(self.model, weights)
            else:
                self.trainer.start_version(job.version, weights)
                if self._trained:
                    self.trainer.start_update(0, self._trained)
                self._opened = (job.version, 0, 0)
            self._loaded_version, self._has_loaded = job.version, True
        return Published(0, job, job.lanes, perf_counter() - began)

    def switch_role(self, job: SwitchRole) -> RoleSwitched:
        """Moves what only training needs off the device, or back, where the recipe asks for it."""
        self.switch_to(job.role)
        return RoleSwitched(0, job)

    def evaluate(self, job: Evaluate) -> Evaluated:
        """Samples held-out prompts with the served version, or with the moving average that belongs to it.

        Scores them here if this worker has a reward.
        """
        settings = self._blueprint.recipe.evaluation
        assert settings is not None
        assert self.version == job.chunk.version, f"{job} needs other weights than those of version {self.version}"
        pixels: list[Tensor] = []
        with self.evaluated_weights(), self.held_out_model() as model:
            for start in range(0, len(job.prompts), settings.batch):
                rows = [self.row(prompt) for prompt in job.prompts[start : start + settings.batch]]
                first = job.first + start
                pixels.append(held_out_pixels(self._blueprint, model, rows, first, self.row_limits))
        if self.parts.follows:
            return Evaluated(0, job)
        pixels_BFCHW = torch.cat(pixels)
        pictures = tuple(picture_files(pixels_BFCHW, job.first, job.shown).items())
        if self.parts.reward is not None:
            return Evaluated(0, job, self.score_pixels(pixels_BFCHW, job.prompts, held_out=True), pictures)
        self._exchange.put(held_out_name(job.chunk), {"pixels": pixels_BFCHW})
        return Evaluated(0, job, pictures=pictures)

    def save(self, job: Save) -> Saved:
        """Writes a checkpoint of the last version and the exported weights, and removes old checkpoints.

        The open batch is not saved: a resumed run does it again. All ranks of a trainer save together.
        """
        trainer = self.trainer
        with suppress(ConfigError):  # without room for a host copy the state is read from the device, more slowly
            trainer.keep_version()
        run, state, ranks = Path(job.run), trainer.state_at_last_version(), trainer.ranks
        assert state.batch == job.step, f"to save step {job.step}, but the trainer is at {state.batch}"
        facts = {**job.facts, BASE_WEIGHTS: self.parts.base_weights}
        before = self._version_before
        if before and self._blueprint.recipe.techniques.tcss == 0 and job.step - 1 not in job.facts["evaluations"]:
            before = {}  # its evaluation is finished
        path = save_checkpoint(run / "checkpoints", job.step, state, facts, ranks=ranks, version_before=before)
        values = weights_to_export(state)
        if trainer.shard is not None:
            values = trainer.policies.published(values)
        try:
            with all_or_none(ranks):
                if ranks is None or ranks.rank.is_first:
                    prune_checkpoints(run / "checkpoints", job.keep, path)
                    export_weights(self.model, run, values)
        except RanksError as error:
            raise CheckpointError(f"{run}: the export was not written: {error}") from error
        return Saved(0, job, str(path))

    # --- Recovery -----------------------------------------------------------------------------------------------

    def export(self, job: Export) -> Exported:
        """Exports the trainer's current version: for the first time, or because the last export was lost.

        A run that repeats stale samples after it was resumed needs the version before, too.
        """
        if job.version == self.trainer.batch - 1 and self._version_before and job.rank == 0:
            name = weights_name(job.version)
            return Exported(0, job, self._exchange.put_weights(name, dict(self._version_before)), 0)
        weights, state_bytes = self._export(job)
        return Exported(0, job, weights, state_bytes)

    def restore(self, job: Restore) -> Restored:
        """Continues from the state that the lost trainer had exported."""
        (name,) = job.reads()
        self._version_before = {}
        self.trainer.load_state(state_of_tensors(self._exchange.get(name)))
        return Restored(0, job)

    # --- Parts of stages, which calibration uses as well --------------------------------------------------------

    @property
    def model(self) -> DiffusionModel:
        """The model that this worker generates or trains with."""
        assert self.parts.model is not None
        return self.parts.model

    @property
    def trainer(self) -> Trainer:
        assert self.parts.trainer is not None
        return self.parts.trainer

    @property
    def _commits(self) -> bool:
        """Whether new versions are made here."""
        return self.parts.trainer is not None and self.parts.commits

    @property
    def version(self) -> int:
        """The version that the next slice is generated with."""
        return self.trainer.batch if self._commits else self._loaded_version

    def roll_out(self, prompt: PromptRow, piece: Slice) -> tuple[GeneratedSlice, Tensor]:
        """The trajectories of a slice, and its pixels_BFCHW."""
        began = perf_counter()
        generated = self.sample(prompt, piece)
        if prompt.paired:
            pixels_BFCHW = self._images_of_pair(prompt, piece)
        else:
            pixels_BFCHW = decode_slice(self.model, generated, self.row_limits.decoding)
        if self.parts.slowdown > 1:
            sleep((perf_counter() - began) * (self.parts.slowdown - 1))
        return generated, pixels_BFCHW

    def sample(self, prompt: PromptRow, piece: Slice) -> GeneratedSlice:
        """The trajectories of a slice. Ranks of a divided model have their VAE on the CPU, and do not decode."""
        if prompt.paired:
            pixels_BFCHW = self._images_of_pair(prompt, piece)
            return encode_images(self._blueprint, self.model, pixels_BFCHW, piece, self.version)
        with self.served_weights():
            return roll_out(self._blueprint, self.model, self.row(prompt), piece, self.version, self.row_limits)

    def _images_of_pair(self, prompt: PromptRow, piece: Slice) -> Tensor:
        pair = images_of(self._exchange.get(prompt.row), PAIR)
        return torch.stack([pair[sample.index] for sample in piece.samples()]).unsqueeze(1)

    def score_pixels(
        self, pixels_BFCHW: Tensor, prompts: Sequence[PromptRow], first: int = 0, held_out: bool = False
    ) -> Scores:
        """One finite number per sample, and its parts, by the rewards of training or of the evaluation.

        `first` is the index of the first sample in its group. Of a pair, sample 0 is the chosen image.
        """
        reward = (self.parts.held_out_reward if held_out else None) or self.parts.reward
        assert reward is not None
        different = {prompt.row: prompt for prompt in prompts}
        try:
            sources = {row: self._source_images(prompt, held_out) for row, prompt in different.items()}
        except ConfigError as error:
            raise RewardError(reward.label, str(error)) from None
        metadata = [
            {
                **prompt.metadata,
                **({SOURCE_IMAGES: sources[prompt.row]} if sources[prompt.row] else {}),
                **({PREFERRED: index == 0} if prompt.paired else {}),
            }
            for index, prompt in enumerate(prompts, start=first)
        ]
        batch = reward.score(pixels_BFCHW, [prompt.text for prompt in prompts], metadata)
        return Scores(batch.values, dict(batch.parts))

    def _source_images(self, prompt: PromptRow, held_out: bool) -> tuple[Tensor, ...]:
        """What rewards see: the images that the model got, or else those that the metadata names for a reward."""
        if prompt.sources:
            return images_of(self._exchange.get(prompt.row), SOURCE)
        return images_of(image_tensors(images_for_rewards(self._blueprint, prompt, held_out), SOURCE), SOURCE)

    def switch_to(self, role: Role) -> float:
        """The seconds until work can continue. Copies may still run in the background."""
        began = perf_counter()
        if role == "generate":
            self.trainer.switching.offload()
        else:
            self.trainer.switching.load()
        return perf_counter() - began

    def served_weights(self) -> AbstractContextManager[None]:
        """Inside, the model has the version that is served."""
        return nullcontext() if self.parts.trainer is None else self.trainer.generating()

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """Inside, the model has the weights that evaluations use."""
        with self.served_weights():
            if not self._blueprint.recipe.evaluates_average:
                yield
                return
            average = self.trainer.published_average() if self._commits else self._average
            with weights_replaced(self.model, average):
                yield

    def held_out_model(self) -> AbstractContextManager[DiffusionModel]:
        """The model that generates held-out samples, with the trained weights that this worker's model has now."""
        other = self.parts.held_out_model
        return nullcontext(self.model) if other is None else other.with_weights_of(self.model)

    def row(self, prompt: PromptRow) -> Conditioning:
        """The encoded prompt, on this worker's device."""
        return conditioning_of(self._exchange.get(prompt.row)).to(self.model.device)

    def _open_update(self, job: Train) -> None:
        """Gets the weights of the job's update, if another one is open here."""
        wanted = (job.slice.step, job.update, job.attempt)
        if self._opened != wanted:
            weights = self._exchange.get_weights(job.weights) if job.update else self._trained
            self.trainer.start_update(job.update, weights or None)
            self._opened = wanted

    def _complete_batch(self, job: Commit | TakeUpdate) -> None:
        """All rewards, the gradients of other workers, and groups that have to be replayed once more."""
        trainer = self.trainer
        for group in job.groups:
            trainer.add_rewards(group.place, group.index, self._rewards_of(group))
        for job_id in job.gradients:
            trainer.add_share(share_of_tensors(self._exchange.get(gradients_name(job_id))))
        groups = {group.place: group for group in job.groups}
        for place in trainer.places_to_replay() if job.replays else ():
            whole = Slice(job.step, groups[place].index, 0, len(groups[place].rewards))
            samples = self._scored_samples(groups[place], whole)
            trainer.hold_group(ScoredGroup(samples.conditioning, samples.trajectories, samples.rewards), place)

    def _scored_samples(self, group: GroupArtifact, wanted: Slice) -> ScoredSamples:
        """Some samples of a group, with all its rewards."""
        trajectories = [
            trajectory
            for piece in group.slices
            for trajectory in self._trajectories(piece)
            if wanted.mask() >> trajectory.sample.index & 1
        ]
        # Made compact once and not for every pack: on a GPU this waits for the device.
        row = self.model.compact(conditioning_of(self._exchange.get(group.prompt.row))).to(self.model.device)
        return ScoredSamples(row, tuple(trajectories), self._rewards_of(group))

    def _rewards_of(self, group: GroupArtifact) -> tuple[float, ...]:
        if not self._blueprint.recipe.shuffled_rewards:
            return group.rewards
        first = next(group.slices[0].slice.samples())
        return tuple(shuffled(group.rewards, self._blueprint.recipe.seed, first))

    def _trajectories(self, piece: SliceArtifact) -> Sequence[Trajectory]:
        samples = tuple(piece.slice.samples())
        tensors = {
            name: to_device(value, self.model.device) for name, value in self._exchange.get(piece.name).items()
        }
        return trajectories_of(tensors, samples, plan(self._blueprint, self.model, samples), piece.version)

    def _keep_version_before(self, job: Commit) -> None:
        """Keeps what was published, for the next checkpoint."""
        self._version_before = {}
        if not self.parts.publishes or not self._blueprint.recipe.keeps_published(job.step):
            return
        published = self._published(job.step)
        if job.rank == 0:
            rounded = {name: self._rounded(name, value.detach()) for name, value in published.items()}
            copies = {name: value.to("cpu", copy=True) for name, value in rounded.items()}
            self._version_before = {name: value.contiguous() for name, value in copies.items()}

    def _export(self, job: Commit | Export) -> tuple[WeightsReference, int]:
        """Leaves the weights and, if asked for, the state that a replacement needs. Returns the state's bytes."""
        trainer = self.trainer
        if job.new_version != trainer.batch or not self.parts.publishes:
            return NO_WEIGHTS, 0
        if job.writes_state and self.model.device.type != "cpu":
            trainer.keep_version()  # one host copy serves both
        published = self._published(job.new_version)
        if self._blueprint.recipe.shares_work and trainer.version_lags:
            published |= {TRAINED + name: value for name, value in trainer.trained_at_version().items()}
        published = {name: self._rounded(name, value) for name, value in published.items()}
        weights = NO_WEIGHTS
        if job.rank == 0:
            weights = self._exchange.put_weights(weights_name(job.new_version), published)
        state_bytes = 0
        if job.writes_state:
            state = trainer.state_at_last_version(copied=False)
            state_bytes = self._exchange.put(state_name(job.new_version, job.rank), state_as_tensors(state))
            state_bytes += state.missing_moment_bytes()  # room that it will need once there are optimizer moments
        return weights, state_bytes

    def _rounded(self, name: str, value: Tensor) -> Tensor:
        """A weight in the precision in which it is published."""
        dtype = self._blueprint.recipe.publish.dtype
        exact = dtype == "auto" and name.removeprefix(AVERAGE).removeprefix(TRAINED) in self._rounded_before_use
        return value.to(torch.bfloat16) if exact or dtype == "bfloat16" else value

    @cached_property
    def _rounded_before_use(self) -> frozenset[str]:
        recipe = self._blueprint.recipe
        if recipe.training.lora is None and recipe.generating_base != recipe.model.base:
            return frozenset()  # generators quantize the weights they get
        return rounded_before_use(self.model, autocast=recipe.training.autocast == "bf16")

    def _published(self, version: int) -> dict[str, Tensor]:
        """The trainer's version for the generators, and the moving average if that is evaluated.

        All ranks call it together, if weights are sharded.
        """
        recipe, published = self._blueprint.recipe, self.trainer.published()
        if recipe.evaluates(version) and recipe.evaluates_average:
            published |= {AVERAGE + name: value for name, value in self.trainer.published_average().items()}
        return published


def _named(published: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The published tensors with this prefix, under their names without it."""
    return {name.removeprefix(prefix): value for name, value in published.items() if name.startswith(prefix)}
