"""`digenrl profile`: measures this device at a recipe's work, in one process, with the roles of a run's workers.

The model is loaded once. First it is a lane's, without a trainer, then a trainer's, so that the memory of each is
what it has in a run; text encoders and rewards come and go before and after.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from time import perf_counter
from typing import TypeVar

import torch
from diffusers.utils import logging as diffusers_logging

from digenrl.commands.device_facts import device_facts
from digenrl.commands.profile_training import PractiseStep, Practising, StepPractised, small_batch
from digenrl.config.profiles import Profile, ProfiledWork, SliceCost, TrainingCost, rounded
from digenrl.config.reading import ConfigError
from digenrl.config.recipe import Recipe
from digenrl.driver.backends import make_exchange
from digenrl.driver.placement import place
from digenrl.exchange.folder import ExchangeFolder
from digenrl.exchange.tensors import TensorExchange
from digenrl.models.contract import DiffusionModel
from digenrl.models.transfers import wait_for
from digenrl.planning.recipe_workload import profiled_work
from digenrl.records import Lease, Slice
from digenrl.rewards.building import build_rewards
from digenrl.rewards.contract import RewardError
from digenrl.runs.stopping import RunFailedError
from digenrl.training.trainer import Trainer
from digenrl.worker.assignment import threads_per_worker
from digenrl.worker.blueprint import load_model, load_text_encoders, read_blueprint
from digenrl.worker.orders import (
    EncodedPrompt,
    EncodePrompts,
    LayOutWeights,
    LearningRehearsed,
    LoadWeights,
    MadeSlice,
    MakeSlice,
    MakingRehearsed,
    Order,
    OrderFailed,
    PromptsEncoded,
    RehearseLearning,
    RehearseMaking,
    RehearseSwitching,
    Report,
    SamplesRated,
    ScoreSamples,
    SliceMade,
    SwitchingRehearsed,
    WeightsLaidOut,
    WeightsLoaded,
)
from digenrl.worker.preflight import inspect_here
from digenrl.worker.roles import Encoding, Generating, Learning, Scoring
from digenrl.worker.stages import Blueprint, make_trainer
from digenrl.worker.worker import Worker

# In place of a recipe's prompts: as long as most, and with a text in quotes, which some rewards look for.
PROMPT = EncodedPrompt("prompt-profile", 'A wooden sign over the door of a small shop that says "2718"', {})
REHEARSED_SAMPLES = 4  # at most, as in the rehearsal of a run
UNREPEATED_S = 15.0  # a practised step that takes longer is not warmed up for
OTHER_STAGES = 8  # beside slices

Activity = Callable[[int, int, str], None]  # stages done, stages in all, what is being measured
Answer = TypeVar("Answer", bound=Report)


def profile_recipe(recipe: Recipe, sizes: tuple[int, ...], report: Activity) -> Profile:
    """The profile of the device that the recipe's trainer would be on, with slices of these sizes.

    What fails is left out and remarked upon. Raises RunFailedError where neither slices nor training could be
    measured.
    """
    machine = inspect_here(recipe)
    lanes = recipe.lanes.model_copy(update={"ranks": 1})
    alone = recipe.model_copy(update={"mode": "colocated", "lanes": lanes})
    device = torch.device(place(alone, machine, Path()).trainer.device)
    with _threads(threads_per_worker(recipe, machine)), _exchange(recipe) as exchange:
        bench = _Bench(device, TensorExchange(exchange), report, stages=len(sizes) + OTHER_STAGES)
        return _measure(bench, recipe.model_copy(update={"lanes": lanes}), sizes)


def slice_sizes(recipe: Recipe, largest: int | None) -> tuple[int, ...]:
    """1, 2, 4, ... as far as they cut a group evenly, the recipe's own slice, and the whole group."""
    group, own = recipe.batch.samples_per_prompt, recipe.batch.slice
    doubled = {1 << power for power in range(group.bit_length()) if group % (1 << power) == 0}
    wanted = doubled | {group} | ({own} if isinstance(own, int) else set())
    return tuple(sorted(size for size in wanted if largest is None or size <= largest))


def _measure(bench: _Bench, recipe: Recipe, sizes: tuple[int, ...]) -> Profile:
    work, blueprint = profiled_work(recipe), read_blueprint(recipe)
    bench.begin("matrix products")
    device = device_facts(bench.device)
    bench.begin("prompt")
    _encode(bench, blueprint)
    bench.begin("model")
    model = load_model(blueprint, str(bench.device))
    lane = Worker([Generating(blueprint, model, bench.exchange)])
    slices = _measure_slices(bench, lane, sizes)
    at_once = max((size for size in slices if size <= REHEARSED_SAMPLES), default=1)
    scored = _make_samples(bench, lane, at_once)
    bench.begin("training")
    training = _measure_training(bench, blueprint, model, work, at_once)
    bench.begin("commit")
    stepped = None if training is None else _measure_step(bench, blueprint, model, training, at_once)
    bench.begin("publish")
    publish_s = None if stepped is None else _measure_publish(bench, lane, stepped)
    weights_bytes = sum(parameter.nbytes for parameter in model.transformer.parameters())
    del lane, model
    bench.begin("scoring")
    score_s = None if scored is None else _measure_scoring(bench, blueprint, scored)
    switched = None if stepped is None else stepped.switched
    if not slices and training is None:
        raise RunFailedError(f"nothing could be measured: {'; '.join(bench.remarks)}")
    return Profile(
        device=device,
        work=work,
        weights_bytes=weights_bytes,
        published_bytes=None if stepped is None else stepped.laid_out.weights.bytes,
        slices=slices,
        training=training,
        commit_seconds=None if stepped is None else rounded(stepped.commit_s),
        lay_out_seconds=None if stepped is None else rounded(stepped.lay_out_s),
        publish_seconds=publish_s,
        switch_in_seconds=None if switched is None else rounded(switched.to_generating),
        switch_out_seconds=None if switched is None else rounded(switched.to_training),
        switched_bytes=0 if switched is None else switched.moved_bytes,
        score_seconds=score_s,
        remarks=tuple(bench.remarks),
    )


@dataclass(slots=True)
class _Bench:
    """Where things are measured: what fails becomes a remark, and its memory is freed."""

    device: torch.device
    exchange: TensorExchange
    report: Activity
    stages: int
    remarks: list[str] = field(default_factory=list)
    _begun: int = 0

    def begin(self, what: str) -> None:
        self.free()
        self.report(self._begun, self.stages, what)
        self._begun += 1

    def ask(self, worker: Worker, order: Order, answer: type[Answer], what: str) -> Answer | None:
        report = worker.handle(order)
        if isinstance(report, OrderFailed):
            self.remark(what, report.reason)
            return None
        assert isinstance(report, answer), f"{order} is answered by {answer.__name__}, got {report}"
        return report

    def remark(self, what: str, reason: str) -> None:
        self.remarks.append(f"{what}: {shorten(reason, width=200, placeholder=' ...')}")
        self.free()

    def free(self) -> None:
        """Trainers refer to themselves, so that a card is emptied by collecting them alone."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def _encode(bench: _Bench, blueprint: Blueprint) -> None:
    """The stand-in, which a small model's tokenizer may cut short: nobody needs to hear of that."""
    encoders = load_text_encoders(blueprint, str(bench.device))
    worker = Worker([Encoding(encoders, bench.exchange, blueprint.recipe.model.negative_prompt)])
    told = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_error()
    encoded = bench.ask(worker, EncodePrompts((PROMPT,)), PromptsEncoded, "prompt")
    diffusers_logging.set_verbosity(told)
    if encoded is None:
        raise RunFailedError(bench.remarks[-1])


def _measure_slices(bench: _Bench, lane: Worker, sizes: tuple[int, ...]) -> dict[int, SliceCost]:
    """One size after the other, until one fails."""
    slices: dict[int, SliceCost] = {}
    for size in sizes:
        bench.begin(f"slice of {size}")
        made = bench.ask(lane, RehearseMaking(PROMPT, (size,)), MakingRehearsed, f"slice of {size}")
        if made is None:
            break
        slices[size] = SliceCost(seconds=rounded(made.seconds[size]), peak_bytes=made.peak_bytes.get(size, 0))
    return slices


def _make_samples(bench: _Bench, lane: Worker, size: int) -> MadeSlice | None:
    """A few samples, whose pixels stay in the exchange until they are scored."""
    lease = Lease(Slice(0, 0, 0, size), lane=0, epoch=0, version=0, started_ns=0)
    made = bench.ask(lane, MakeSlice(lease, PROMPT), SliceMade, "scoring")
    return None if made is None else made.made


def _measure_training(
    bench: _Bench, blueprint: Blueprint, model: DiffusionModel, work: ProfiledWork, at_once: int
) -> TrainingCost | None:
    """A replay as in a run's rehearsal, by a trainer of the whole recipe; the time is of a generated sample."""
    trainer = make_trainer(blueprint, model, helps=_helps(blueprint.recipe))
    worker = _training_worker(bench, blueprint, model, trainer)
    samples = min(work.samples_per_prompt, REHEARSED_SAMPLES)
    learnt = bench.ask(worker, RehearseLearning(PROMPT, samples, at_once), LearningRehearsed, "training")
    if learnt is None:
        return None
    return TrainingCost(
        seconds_per_sample=rounded(learnt.seconds_per_sample * work.trained_share),
        pack_size=learnt.pack_size,
        checkpointed_blocks=learnt.checkpointed_blocks,
        peak_bytes=learnt.peak_bytes,
        planned_bytes=learnt.planned_bytes,
        foreseen_bytes=learnt.foreseen_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Stepped:
    """What a trainer did between batches, and the version that it laid out."""

    commit_s: float
    lay_out_s: float
    laid_out: WeightsLaidOut
    switched: SwitchingRehearsed | None


def _measure_step(
    bench: _Bench, blueprint: Blueprint, model: DiffusionModel, training: TrainingCost, at_once: int
) -> _Stepped | None:
    """Optimizer steps on real gradients, of a small batch of made-up samples with as many updates as the recipe's.

    Timed are the commits, from a whole gradient to changed weights, and apart from them laying the version out:
    what neither the number of groups nor that of samples changes. The second of two batches counts, unless the
    first took long.
    """
    samples = min(blueprint.shape.group_size, REHEARSED_SAMPLES)
    small = read_blueprint(small_batch(blueprint, samples, training.pack_size, training.checkpointed_blocks))
    trainer = make_trainer(small, model, helps=_helps(blueprint.recipe))
    worker = _training_worker(bench, small, model, trainer)
    began = perf_counter()
    committed = _commit(bench, worker, at_once)
    if committed is not None and perf_counter() - began < UNREPEATED_S:
        committed = _commit(bench, worker, at_once)
    if committed is None:
        return None
    bench.begin("changes of role")
    switched = bench.ask(worker, RehearseSwitching(), SwitchingRehearsed, "changes of role")
    return _Stepped(*committed, switched)


def _commit(bench: _Bench, worker: Worker, at_once: int) -> tuple[float, float, WeightsLaidOut] | None:
    stepped = bench.ask(worker, PractiseStep(PROMPT, at_once), StepPractised, "commit")
    if stepped is None:
        return None
    began = perf_counter()
    laid_out = bench.ask(worker, LayOutWeights(stepped.version), WeightsLaidOut, "commit")
    seconds = perf_counter() - began
    return None if laid_out is None else (stepped.commit_seconds, seconds, laid_out)


def _measure_publish(bench: _Bench, lane: Worker, stepped: _Stepped) -> float | None:
    """A lane that has no trainer checks and loads a version that is laid out."""
    load = LoadWeights(stepped.laid_out.version, stepped.laid_out.weights)
    began = perf_counter()
    loaded = bench.ask(lane, load, WeightsLoaded, "publish")
    wait_for(bench.device)
    return None if loaded is None else rounded(perf_counter() - began)


def _measure_scoring(bench: _Bench, blueprint: Blueprint, made: MadeSlice) -> float | None:
    """Samples that the model made, scored twice: the second time counts."""
    try:
        rewards = build_rewards(blueprint.recipe.rewards)
    except (ConfigError, RewardError, OSError) as error:
        bench.remark("scoring", str(error))
        return None
    worker = Worker([Scoring(blueprint, rewards, bench.exchange)])
    for _ in range(2):
        began = perf_counter()
        if bench.ask(worker, ScoreSamples(made.slice, made, PROMPT), SamplesRated, "scoring") is None:
            return None
        seconds = perf_counter() - began
    return rounded(seconds / made.slice.size)


def _training_worker(bench: _Bench, blueprint: Blueprint, model: DiffusionModel, trainer: Trainer) -> Worker:
    generating = Generating(blueprint, model, bench.exchange, trainer=trainer)
    learning = Learning(blueprint, model, bench.exchange, trainer, generating)
    return Worker([generating, learning, Practising(blueprint, bench.device, trainer, generating)])


def _helps(recipe: Recipe) -> bool:
    """Whether the recipe's trainer generates, too, and so keeps what that takes."""
    return recipe.topology.shares_cards or recipe.techniques.tag != "none"


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Inside, torch has as many threads on a CPU as a worker of the recipe has."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _exchange(recipe: Recipe) -> Iterator[ExchangeFolder]:
    """Where the recipe's workers would leave tensors; gone afterwards."""
    folder = make_exchange(recipe)
    try:
        yield folder
    finally:
        folder.remove()
