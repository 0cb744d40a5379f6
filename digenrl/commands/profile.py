"""Measures what a recipe's jobs cost on one device: `digenrl profile`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from textwrap import shorten
from time import perf_counter
from typing import Any, TypeVar

import torch
from diffusers.utils import logging as diffusers_logging

from digenrl.commands.support.device_facts import device_facts
from digenrl.config.profiles import Profile, ProfiledWork, SliceCost, TrainingCost, rounded
from digenrl.config.reading import ConfigError
from digenrl.config.recipes.attention import Kernels
from digenrl.config.recipes.recipe import Recipe
from digenrl.driver.backends import make_exchange
from digenrl.driver.forwards import chosen_kernels, passes_to_try
from digenrl.driver.placement import place
from digenrl.exchange.tensors import TensorExchange
from digenrl.models.contract import DiffusionModel, SampleSize
from digenrl.models.quantized.layers import weight_bytes
from digenrl.models.transfers import synchronize
from digenrl.planning.facts.recipe_workload import profiled_work
from digenrl.prompts.source_images import as_png, probe_image
from digenrl.prompts.sources import read_prompts
from digenrl.records import (
    Calibrate,
    Calibrated,
    Encode,
    Encoded,
    Export,
    Exported,
    Generate,
    Generated,
    Job,
    JobFailed,
    PromptRow,
    Publish,
    Published,
    Result,
    Score,
    Scored,
    Slice,
    SliceArtifact,
    slice_name,
)
from digenrl.rewards.building import build_rewards
from digenrl.rewards.contract import RewardError
from digenrl.runs.stopping import RunFailedError
from digenrl.worker.assignment import threads_per_worker
from digenrl.worker.blueprint import Blueprint, load_model, load_text_encoders, make_trainer, read_blueprint
from digenrl.worker.checks.preflight import inspect_here
from digenrl.worker.checks.sources import sources_of
from digenrl.worker.stages import Stages, WorkerParts
from digenrl.worker.worker import Worker

# In place of a recipe's prompts: of usual length, with a quoted text, which some rewards look for.
TEXT = 'A wooden sign over the door of a small shop that says "2718"'
TRAINED_SAMPLES = 4  # at most, as in the calibration of a run
UNREPEATED_S = 15.0  # a training step that takes longer is not warmed up
OTHER_STAGES = 9  # besides slices

Progress = Callable[[int, int, str], None]  # stages done, stages in all, what is being measured
AnyResult = TypeVar("AnyResult", bound=Result)


def profile_recipe(recipe: Recipe, sizes: tuple[int, ...], progress: Progress) -> Profile:
    """The profile of the device of the recipe's trainer, with slices of these sizes.

    What fails is left out, with a remark. Raises RunFailedError if neither slices nor training could be measured.
    """
    if recipe.sample.precision is not None:
        raise ConfigError(
            f"sample.precision: {recipe.sample.precision}, but a profile measures one model that generates and "
            "trains; leave it out, or set model.base instead"
        )
    machine = inspect_here(recipe)
    lanes = recipe.lanes.model_copy(update={"ranks": 1})
    alone = recipe.model_copy(update={"mode": "colocated", "lanes": lanes})
    device = torch.device(place(alone, machine, Path()).trainer.device)
    with _threads(threads_per_worker(recipe, machine)), ExitStack() as stack:
        exchange = make_exchange(recipe)
        stack.callback(exchange.remove)
        blueprint = read_blueprint(recipe.model_copy(update={"lanes": lanes}))
        stages = len(sizes) + OTHER_STAGES
        bench = _Bench(device, TensorExchange(exchange), prompt_row(blueprint), progress, stages)
        return _measure(bench, blueprint, sizes)


def slice_sizes(recipe: Recipe, largest: int | None) -> tuple[int, ...]:
    """1, 2, 4, ... as far as they divide a group, the recipe's own slice size, and the whole group."""
    group, own = recipe.batch.samples_per_prompt, recipe.batch.slice
    doubled = {1 << power for power in range(group.bit_length()) if group % (1 << power) == 0}
    wanted = doubled | {group} | ({own} if isinstance(own, int) else set())
    return tuple(sorted(size for size in wanted if largest is None or size <= largest))


def _measure(bench: _Bench, blueprint: Blueprint, sizes: tuple[int, ...]) -> Profile:
    recipe, work = blueprint.recipe, profiled_work(blueprint.recipe)
    bench.begin("matrix products")
    device = device_facts(bench.device)
    bench.begin("prompt")
    _encode(bench, blueprint)
    bench.begin("model")
    model = load_model(blueprint, str(bench.device))
    lane = bench.worker(blueprint, model=model)
    bench.begin("attention kernels")
    kernels = _choose_kernels(bench, lane, recipe)
    slices = _measure_slices(bench, lane, sizes)
    at_once = max((size for size in slices if size <= TRAINED_SAMPLES), default=1)
    generated = _generate_samples(bench, lane, at_once)
    bench.begin("training")
    training = _measure_training(bench, blueprint, model, work, at_once)
    bench.begin("commit")
    stepped = None if training is None else _measure_step(bench, blueprint, model, training, at_once)
    bench.begin("publish")
    publish_s = None if stepped is None else _measure_publish(bench, lane, stepped)
    weights_bytes = weight_bytes(model.transformer)
    del lane, model
    bench.begin("scoring")
    score_s = None if generated is None else _measure_scoring(bench, blueprint, generated)
    switched = None if stepped is None else stepped.switched
    if not slices and training is None:
        raise RunFailedError(f"nothing could be measured: {'; '.join(bench.remarks)}")
    return Profile(
        device=device,
        work=work,
        weights_bytes=weights_bytes,
        published_bytes=None if stepped is None else stepped.exported.weights.bytes,
        slices=slices,
        training=training,
        commit_seconds=None if stepped is None else rounded(stepped.commit_s),
        export_seconds=None if stepped is None else rounded(stepped.export_s),
        publish_seconds=publish_s,
        switch_in_seconds=None if switched is None else rounded(switched.seconds[1]),
        switch_out_seconds=None if switched is None else rounded(switched.seconds_back),
        switched_bytes=0 if switched is None else switched.moved_bytes,
        score_seconds=score_s,
        attention=recipe.model.kernels if kernels is None else dict(kernels),
        remarks=tuple(bench.remarks),
    )


@dataclass(slots=True)
class _Bench:
    """Where jobs are measured. What fails becomes a remark, and its memory is freed."""

    device: torch.device
    exchange: TensorExchange
    prompt: PromptRow
    progress: Progress
    stages: int
    remarks: list[str] = field(default_factory=list)
    _begun: int = 0
    _ids: Iterator[int] = field(default_factory=count)

    def begin(self, what: str) -> None:
        self.free()
        self.progress(self._begun, self.stages, what)
        self._begun += 1

    def worker(self, blueprint: Blueprint, **parts: Any) -> Worker:
        return Worker("profile", Stages(WorkerParts(blueprint, self.exchange, **parts)))

    def next_id(self) -> int:
        return next(self._ids)

    def ask(self, worker: Worker, job: Job, kind: type[AnyResult], what: str) -> AnyResult | None:
        result = worker.handle(job)
        if isinstance(result, JobFailed):
            self.remark(what, result.reason)
            return None
        assert isinstance(result, kind), f"{job} is answered by {kind.__name__}, got {result}"
        return result

    def calibrate(self, worker: Worker, what: str, *fields: Any, **data: Any) -> Calibrated | None:
        return self.ask(worker, Calibrate(self.next_id(), 0, *fields, **data), Calibrated, what)

    def remark(self, what: str, reason: str) -> None:
        self.remarks.append(f"{what}: {shorten(reason, width=200, placeholder=' ...')}")
        self.free()

    def free(self) -> None:
        """Trainers are in reference cycles, so a GPU's memory is only freed by collecting them."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def _encode(bench: _Bench, blueprint: Blueprint) -> None:
    """Encodes the prompt without the tokenizer's warnings that a tiny model truncates it."""
    worker = bench.worker(blueprint, encoder=load_text_encoders(blueprint, str(bench.device)))
    verbosity = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_error()
    encoded = bench.ask(worker, encoding_job(bench.next_id(), bench.prompt, blueprint.size), Encoded, "prompt")
    diffusers_logging.set_verbosity(verbosity)
    if encoded is None:
        raise RunFailedError(bench.remarks[-1])


def encoding_job(job_id: int, prompt: PromptRow, size: SampleSize) -> Encode:
    """Encodes the prompt, with its source images and its pair if it has them."""
    image = as_png(probe_image(size.height, size.width))
    images = (image,) * (prompt.sources + 2 * prompt.paired)
    return Encode(job_id, 0, 0, (0,), (prompt,), (images,) if images else ())


def prompt_row(blueprint: Blueprint) -> PromptRow:
    """The prompt in place of a recipe's, with as many source images as the model needs at least."""
    sources, paired = sources_of(blueprint).least, blueprint.recipe.trains_on_pairs
    return PromptRow("prompt-profile", TEXT, {}, sources, paired=paired)


def _choose_kernels(bench: _Bench, lane: Worker, recipe: Recipe) -> Kernels | None:
    """Tries attention kernels as a run would, and uses the chosen ones."""
    passes = passes_to_try(recipe, {"generate", "train"}, bench.device.type)
    if not passes:
        return None
    tried = bench.calibrate(lane, "attention kernels", "forward", bench.prompt, passes=passes)
    kernels = None if tried is None else chosen_kernels(recipe, [tried.attention or {}])
    if kernels is not None:
        bench.calibrate(lane, "attention kernels", "forward", kernels=kernels)
    return kernels


def _measure_slices(bench: _Bench, lane: Worker, sizes: tuple[int, ...]) -> dict[int, SliceCost]:
    """One size after the other, until one fails."""
    slices: dict[int, SliceCost] = {}
    for size in sizes:
        bench.begin(f"slice of {size}")
        timed = bench.calibrate(lane, f"slice of {size}", "generate", bench.prompt, (size,))
        if timed is None:
            break
        slices[size] = SliceCost(seconds=rounded(timed.seconds[size]), peak_bytes=timed.peak_bytes.get(size, 0))
    return slices


def _generate_samples(bench: _Bench, lane: Worker, size: int) -> SliceArtifact | None:
    """A few samples, whose pixels stay in the exchange until they are scored."""
    job = Generate(bench.next_id(), 0, Slice(0, 0, 0, size), lane=0, version=0, prompt=bench.prompt)
    generated = bench.ask(lane, job, Generated, "scoring")
    return None if generated is None else SliceArtifact(job.slice, slice_name(job.id), generated.version)


def _measure_training(
    bench: _Bench, blueprint: Blueprint, model: DiffusionModel, work: ProfiledWork, at_once: int
) -> TrainingCost | None:
    """A replay as in a run's calibration, by the recipe's trainer. The time is per generated sample."""
    trainer = make_trainer(blueprint, model, helps=_helps(blueprint.recipe))
    worker = bench.worker(blueprint, model=model, trainer=trainer)
    samples = min(work.samples_per_prompt, TRAINED_SAMPLES)
    timed = bench.calibrate(worker, "training", "train", bench.prompt, (samples,), at_once=at_once)
    if timed is None:
        return None
    return TrainingCost(
        seconds_per_sample=rounded(timed.seconds[1] * work.trained_share),
        pack_size=timed.pack_size,
        checkpointed_blocks=timed.checkpointed_blocks,
        peak_bytes=timed.peak_bytes[1],
        planned_bytes=timed.planned_bytes,
        predicted_bytes=timed.predicted_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Stepped:
    """What a trainer does between batches, and the version that it exported."""

    commit_s: float
    export_s: float
    exported: Exported
    switched: Calibrated | None


def _measure_step(
    bench: _Bench, blueprint: Blueprint, model: DiffusionModel, training: TrainingCost, at_once: int
) -> _Stepped | None:
    """Optimizer steps on the gradients of a small batch, with as many updates as the recipe's.

    Commits are timed from a complete gradient to changed weights, and exporting the version apart from them.
    Neither depends on the number of samples. The second of two batches counts, unless the first took long.
    """
    samples = min(blueprint.shape.group_size, TRAINED_SAMPLES)
    small = read_blueprint(small_batch(blueprint, samples, training.pack_size, training.checkpointed_blocks))
    trainer = make_trainer(small, model, helps=_helps(blueprint.recipe))
    worker = bench.worker(small, model=model, trainer=trainer)
    began = perf_counter()
    committed = _commit(bench, worker, at_once)
    if committed is not None and perf_counter() - began < UNREPEATED_S:
        committed = _commit(bench, worker, at_once)
    if committed is None:
        return None
    bench.begin("role switches")
    return _Stepped(*committed, bench.calibrate(worker, "role switches", "switch"))


def _commit(bench: _Bench, worker: Worker, at_once: int) -> tuple[float, float, Exported] | None:
    timed = bench.calibrate(worker, "commit", "commit", bench.prompt, at_once=at_once)
    if timed is None:
        return None
    began = perf_counter()
    export = Export(bench.next_id(), 0, worker.stages.version)
    exported = bench.ask(worker, export, Exported, "commit")
    seconds = perf_counter() - began
    return None if exported is None else (timed.seconds[1], seconds, exported)


def _measure_publish(bench: _Bench, lane: Worker, stepped: _Stepped) -> float | None:
    """A lane without a trainer checks and loads an exported version."""
    exported = stepped.exported
    load = Publish(bench.next_id(), 0, exported.job.version, (0,), exported.weights)
    began = perf_counter()
    loaded = bench.ask(lane, load, Published, "publish")
    synchronize(bench.device)
    return None if loaded is None else rounded(perf_counter() - began)


def _measure_scoring(bench: _Bench, blueprint: Blueprint, generated: SliceArtifact) -> float | None:
    """Generated samples, scored twice. The second time counts."""
    try:
        rewards = build_rewards(blueprint.recipe.rewards)
    except (ConfigError, RewardError, OSError) as error:
        bench.remark("scoring", str(error))
        return None
    worker, piece = bench.worker(blueprint, reward=rewards), generated.slice
    prompt = scored_prompt(blueprint.recipe, bench.prompt)
    for _ in range(2):
        began = perf_counter()
        job = Score(bench.next_id(), 0, piece, 0, generated, (prompt,) * piece.size)
        if bench.ask(worker, job, Scored, "scoring") is None:
            return None
        seconds = perf_counter() - began
    return rounded(seconds / piece.size)


def scored_prompt(recipe: Recipe, generated: PromptRow) -> PromptRow:
    """The recipe's first prompt, since rewards may need its metadata; the `generated` one if there is none yet."""
    try:
        first = read_prompts(recipe.prompts)[0]
    except (ConfigError, OSError):
        return generated
    return replace(generated, text=first.text, metadata=first.metadata)


def small_batch(blueprint: Blueprint, samples: int, pack_size: int, checkpointed_blocks: int) -> Recipe:
    """The recipe with one group of a few samples per update, packed as for the whole recipe.

    All samples are trained, and groups are scaled one by one, so that a commit trains nothing and can be timed.
    """
    recipe, algorithm = blueprint.recipe, blueprint.algorithm
    options = {key: value for key, value in recipe.algorithm.options.items() if key != "best_of_n"}
    if algorithm.scale_over == "batch":
        options["advantage"] = {**(options.get("advantage") or {}), "std_over": "group"}
    if algorithm.updates_of == "samples":
        options["updates_of"] = "groups"
    batch = {"prompts": algorithm.updates_per_batch, "samples_per_prompt": samples, "slice": samples}
    training: dict[str, Any] = {"pack_size": pack_size, "gradient_checkpointing": checkpointed_blocks}
    training["job_samples"] = "auto"  # the recipe's own may not divide the smaller group
    return recipe.model_copy(
        update={
            "batch": recipe.batch.model_copy(update=batch),
            "algorithm": recipe.algorithm.model_copy(update={"options": options}),
            "training": recipe.training.model_copy(update=training),
        }
    )


def _helps(recipe: Recipe) -> bool:
    """Whether the recipe's trainer also generates, and so keeps what that takes."""
    return recipe.topology.shares_cards or recipe.techniques.tag != "none"


@contextmanager
def _threads(threads: int) -> Iterator[None]:
    """Inside, torch uses as many CPU threads as a worker of the recipe."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
