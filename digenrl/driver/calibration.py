"""Before a run: every worker is timed, the slice size is chosen, and the scheduler's initial state is built.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.recipe import Recipe
from digenrl.driver.batch_sizes import (
    calibrates_all_sizes,
    colocated_choices,
    sizes_held_out,
    sizes_of_lane,
    sizes_to_try,
)
from digenrl.driver.cost_tracker import CostTracker, expected_ns, timed_offer
from digenrl.driver.dispatcher import Dispatcher
from digenrl.records import (
    NO_WEIGHTS,
    AssistName,
    Calibrate,
    Calibrated,
    LaneOffer,
    PromptRow,
    Publish,
    Published,
    SwitchRole,
    WeightsReference,
)
from digenrl.scheduling import Costs, SchedulerState, SharedWorkRule, Terms, initial_state
from digenrl.simulation.prediction import predict
from digenrl.simulation.shared_work import CHANGES, best_rules, best_stale_work, compared_steps, greedy_rule
from digenrl.simulation.spec_costs import with_rules
from digenrl.training.update_split import stale_groups, updates_of_places
from digenrl.transports.contract import ArtifactStore
from digenrl.units import NS_PER_SECOND
from digenrl.worker.assignment import TRAINER, Assignment, own_slice, rank_names


@dataclass(frozen=True, slots=True)
class Calibration:
    """Seconds per job, measured with all workers busy. Slices by lane, then by size."""

    slices: tuple[Mapping[int, float], ...]
    train_sample: float  # of the trainer
    score_sample: float
    publish: float
    pack_size: int
    switch_in: float = 0.0  # from training to generating, if something has to move
    switch_out: float = 0.0
    train_samples: tuple[float, ...] = ()  # by lane, if lanes train on their own

    def costs(self, *, shares_work: bool = False) -> Costs:
        """What the scheduler counts on until the run has measured itself. The commit is an estimate.

        If lanes share gradients, sending their sums and adding those of one lane are expected to take as long as
        loading published weights.
        """
        publish_ns = round(self.publish * NS_PER_SECOND)
        senders = len(self.train_samples) - 1 if shares_work else 0
        return Costs(
            train_sample_ns=Fraction(max(1, round(self.train_sample * NS_PER_SECOND))),
            commit_ns=round(self.train_sample * NS_PER_SECOND) + senders * publish_ns,
            publish_ns=publish_ns,
            switch_in_ns=round(self.switch_in * NS_PER_SECOND),
            switch_out_ns=round(self.switch_out * NS_PER_SECOND),
            score_ns=max(1, round(self.score_sample * NS_PER_SECOND)) if self.score_sample else 0,
            send_ns=publish_ns if senders else 0,
        )


@dataclass(frozen=True, slots=True)
class InitialWeights:
    """The version that all generators have loaded, and the seconds that the slowest of them needed."""

    version: int
    publish_s: float


def publish_initial_weights(driver: Dispatcher, version: int, *, one_behind: bool = False) -> InitialWeights:
    """The trainer's version goes to all generators.

    If a resumed run needs the version before again, it starts `one_behind`, provided that the checkpoint has it.
    """
    before = driver.export_now(version - 1).weights if one_behind else NO_WEIGHTS
    if before.name:
        loaded = _publish(driver, version - 1, before)
    exported = driver.export_now(version)
    parts = driver.stores.recipe.lanes.ranks if driver.stores.recipe.sharded else 1
    check_room(driver.stores.artifacts, exported.weights.bytes, parts * exported.state_bytes)
    return loaded if before.name else _publish(driver, version, exported.weights)


def _publish(driver: Dispatcher, version: int, weights: WeightsReference) -> InitialWeights:
    requests = [
        (worker, Publish(driver.own_job_id(), 0, version, (lane,), weights))
        for lane, worker in enumerate(driver.stores.workers.generator_names)
    ]
    loaded: list[Published] = driver.ask(requests)
    return InitialWeights(version, max(result.seconds for result in loaded))


def check_room(artifacts: ArtifactStore, weights_bytes: int, state_bytes: int) -> None:
    """Raises ConfigError unless two more versions fit: one is exported while the last is still being loaded."""
    free, weights = artifacts.free_bytes(), 2 * weights_bytes if artifacts.holds_weights else 0
    if free < weights + 2 * state_bytes:
        raise ConfigError(
            f"lanes.exchange: {artifacts.where()} has {free / 1e9:.1f} GB free, and two versions of the weights "
            f"take {weights / 1e9:.1f} GB, of the trainer's state {2 * state_bytes / 1e9:.1f} GB; name a folder "
            "with more room (lanes.exchange=DIR), keep no state (checkpoint.in_memory=false), or use LoRA"
        )


def calibrate(
    driver: Dispatcher, publish_s: float, first_step: int = 0, notify: Callable[[str], None] = lambda message: None
) -> Calibration:
    """Times generation, training, scoring and role switches, each with all its workers busy at once.

    The prompt is one of the first step, which is encoded. `notify` says what is timed if this may take minutes.
    """
    recipe, all_sizes = driver.stores.recipe, calibrates_all_sizes(driver.stores.recipe, driver.stores.workers)
    announce = notify if all_sizes else lambda message: None
    prompt = driver.stores.prompts.row(first_step, 0)
    sizes = sizes_to_try(recipe, all_sizes)
    announce(f"calibrating: slices of {' and '.join(str(size) for size in sizes)} samples{_compiling(driver)}")
    generated: list[Calibrated] = driver.ask(
        [
            (worker, _job(driver, prompt, tuple(dict.fromkeys((*sizes, own_slice(assignment, max(sizes)))))))
            for worker, assignment in _generators(driver)
        ]
    )
    samples = recipe.calibrated_samples
    at_once = max((size for size in sizes if size <= samples), default=min(sizes)) if all_sizes else None
    announce(f"calibrating: training{_compiling(driver)}")
    training = Calibrate(driver.own_job_id(), 0, "train", prompt, (samples,), at_once=at_once)
    trained: Calibrated = driver.ask([(TRAINER, training)])[0]
    driver.stores.pack_size = trained.pack_size
    if trained.planned_bytes:
        notify(memory_plan_message(trained))
    others = [each.name for each in driver.stores.workers.generators] if recipe.shares_work else []
    again = [(worker, replace(training, pack_size=trained.pack_size)) for worker in others]
    again += [(TRAINER, training)] if others else []  # now, all of them are busy
    shared: list[Calibrated] = driver.ask(
        [(worker, replace(job, id=driver.own_job_id())) for worker, job in again]
    )
    announce("calibrating: rewards and role switches")
    score_sample = _time_scoring(driver, prompt, max(sizes))
    switch_in, switch_out = _time_switching(driver)
    return Calibration(
        slices=tuple(result.seconds for result in generated),
        train_sample=trained.seconds[1],
        score_sample=score_sample,
        publish=publish_s,
        pack_size=trained.pack_size,
        switch_in=switch_in,
        switch_out=switch_out,
        train_samples=tuple(each.seconds[1] for each in shared),
    )


def memory_plan_message(trained: Calibrated) -> str:
    """What was chosen for training to fit the card."""
    planned, used = (size / 2**30 for size in (trained.planned_bytes, trained.peak_bytes[1]))
    return (
        f"training: packs of {trained.pack_size} (sample, time-step) pairs, {trained.checkpointed_blocks} "
        f"checkpointed blocks: {planned:.1f} GiB planned, {used:.1f} GiB used"
    )


def calibrate_remaining_sizes(
    driver: Dispatcher, calibration: Calibration, slice_size: int, first_step: int = 0
) -> Calibration:
    """Adds the sizes that the run will use, now that the slice size is known, and that no lane has met yet."""
    recipe = driver.stores.recipe
    if not calibrates_all_sizes(recipe, driver.stores.workers):
        return calibration
    prompt, requests = driver.stores.prompts.row(first_step, 0), {}
    for lane, (worker, assignment) in enumerate(_generators(driver)):
        sizes = tuple(s for s in sizes_of_lane(assignment, slice_size) if s not in calibration.slices[lane])
        evaluates = worker in driver.stores.workers.generator_names and recipe.model.compiles(assignment.device)
        held_out = sizes_held_out(recipe, len(driver.stores.prompts.held_out)) if evaluates else ()
        if sizes or held_out:
            requests[lane] = (worker, _job(driver, prompt, sizes, held_out))
    results: dict[int, Calibrated] = dict(zip(requests, driver.ask(list(requests.values())), strict=True))
    slices = tuple(
        {**seconds, **results[lane].seconds} if lane in results else seconds
        for lane, seconds in enumerate(calibration.slices)
    )
    return replace(calibration, slices=slices)


def _job(
    driver: Dispatcher, prompt: PromptRow, sizes: tuple[int, ...], held_out: tuple[int, ...] = ()
) -> Calibrate:
    return Calibrate(driver.own_job_id(), 0, "generate", prompt, sizes, held_out)


def _compiling(driver: Dispatcher) -> str:
    assignments = (*driver.stores.workers.generators, driver.stores.workers.trainer)
    compiles = any(driver.stores.recipe.model.compiles(each.device) for each in assignments)
    return "; compiling the model takes minutes the first time" if compiles else ""


def _generators(driver: Dispatcher) -> list[tuple[str, Assignment]]:
    """The workers that generate, lane by lane."""
    workers = driver.stores.workers
    if not workers.generators:
        return [(TRAINER, workers.trainer)]
    helpers = rank_names(workers.trainer) if "generate" in workers.trainer.duties else []
    generators = [(each.name, each) for each in workers.generators]
    return [*generators, *((name, workers.trainer) for name in helpers)]


def _time_scoring(driver: Dispatcher, prompt: PromptRow, samples: int) -> float:
    if not driver.stores.workers.reward_names:
        return 0.0
    scored: list[Calibrated] = driver.ask(
        [
            (worker, Calibrate(driver.own_job_id(), 0, "score", prompt, (samples,)))
            for worker in driver.stores.workers.reward_names
        ]
    )
    return max(result.seconds[1] for result in scored)


def _time_switching(driver: Dispatcher) -> tuple[float, float]:
    """Seconds of the trainer's switch to generating and back; none if nothing has to move.

    A colocated run starts by generating, so the trainer is left in that role.
    """
    trainer = driver.stores.workers.trainer
    if "generate" not in trainer.duties or not driver.stores.recipe.training.offloads(trainer.device):
        return 0.0, 0.0
    switched: Calibrated = driver.ask([(TRAINER, Calibrate(driver.own_job_id(), 0, "switch"))])[0]
    if driver.stores.recipe.topology.shares_cards:
        driver.ask([(TRAINER, SwitchRole(driver.own_job_id(), 0, "generate"))])
    return switched.seconds[1], switched.seconds_back


def choose_slice_size(driver: Dispatcher, calibration: Calibration) -> int:
    """The recipe's slice size, or the one with the shortest predicted steps, the largest among equals.

    On a single device it is the one with the least time per sample.
    """
    recipe = driver.stores.recipe
    if isinstance(recipe.batch.slice, int):
        return recipe.batch.slice
    if recipe.topology.shares_cards:
        seconds = calibration.slices[0]
        choices = colocated_choices(recipe.batch)
        return min(reversed(choices), key=lambda size: expected_ns(seconds, size) / size)

    pools = [pool.slice for pool in recipe.cluster.generators if pool.slice is not None]
    sizes = [size for size in recipe.batch.slice_sizes() if not any(own % size for own in pools)]

    def predicted(size: int) -> int:
        return predicted_ns(driver, calibration, choose_terms(driver, calibration, size, thorough=False))

    return min(reversed(sizes), key=predicted)


def choose_terms(driver: Dispatcher, calibration: Calibration, slice_size: int, *, thorough: bool = True) -> Terms:
    """The recipe's terms. If lanes generate and train, those with the shortest predicted steps.

    With `greedy`, idle lanes take any available work. With `search`, they follow the best rule that is found. With
    `auto`, generators do not train if steps are predicted to be as short without that.
    """
    recipe, terms = driver.stores.recipe, _terms(driver, slice_size)
    if not recipe.shares_work:
        return terms
    if recipe.techniques.tag == "greedy":
        return replace(terms, shared_work=greedy_rule())
    generators, helpers = offers(driver, calibration, slice_size)
    costs = calibration.costs(shares_work=terms.shares_work)

    def state_with(rule: SharedWorkRule) -> SchedulerState:
        return initial_state(replace(terms, shared_work=rule), costs, generators, helpers)

    def expected_ns(rule: SharedWorkRule) -> int:
        return predicted_ns(driver, calibration, replace(terms, shared_work=rule))

    rules = best_rules(state_with, most_at_once=1, changes=CHANGES if thorough else 0)
    if thorough:
        rules = [best_stale_work(rules, terms, expected_ns)]
    choices = [replace(terms, shared_work=rule) for rule in rules]
    if recipe.techniques.tag == "auto":
        choices = [*_terms_without_sharing(driver, slice_size), *choices]
    return min(choices, key=lambda each: predicted_ns(driver, calibration, each))


def _terms_without_sharing(driver: Dispatcher, slice_size: int) -> list[Terms]:
    """The same work if only the trainer trains, and helps to generate or not; the weights are the same.

    If an update trains some samples of every group, a trainer that shares updates needs all of them again.
    """
    recipe = driver.stores.recipe
    if recipe.updates_per_group > 1:
        return []
    return [_terms(driver, slice_size, assist) for assist in ("none", "trainer")]


def predicted_ns(driver: Dispatcher, calibration: Calibration, terms: Terms) -> int:
    """The predicted time of a few steps."""
    generators, helpers = offers(driver, calibration, terms.slice_size)
    costs = calibration.costs(shares_work=terms.shares_work)
    return predict(terms, costs, generators, helpers, steps=compared_steps(terms)).trace.end_ns


def _terms(driver: Dispatcher, slice_size: int, assist: AssistName | None = None) -> Terms:
    """The terms of the recipe, or with another choice of who helps."""
    recipe = driver.stores.recipe
    if assist is not None:
        techniques = recipe.techniques.model_copy(update={"assist": assist})
        recipe = recipe.model_copy(update={"techniques": techniques})
    return terms_of(recipe, slice_size, scorers=len(driver.stores.workers.reward_names))


def offers(
    driver: Dispatcher, calibration: Calibration, size: int
) -> tuple[tuple[LaneOffer, ...], tuple[LaneOffer, ...]]:
    """The offers of generator lanes and of helper lanes."""
    own = [own_slice(each, size) for each in driver.stores.workers.generators]
    trains = calibration.train_samples or (0.0,) * len(calibration.slices)
    every = tuple(
        timed_offer(name, calibration.slices[lane], size, own[lane] if lane < len(own) else size, trains[lane])
        for lane, name in enumerate(driver.stores.lanes.names)
    )
    count = len(driver.stores.workers.generators) or 1
    return every[:count], every[count:]


def terms_of(recipe: Recipe, slice_size: int, *, scorers: int) -> Terms:
    """What the scheduler needs to know about the recipe's work and techniques."""
    work = Terms(
        steps=recipe.steps,
        prompts=recipe.batch.prompts,
        samples_per_prompt=recipe.batch.samples_per_prompt,
        slice_size=slice_size,
        scorers=scorers,
        score_batch=slice_size,
        **(shared_training(recipe) if recipe.shares_work else {}),
    )
    return with_rules(work, recipe.techniques.schedule_rules(recipe.topology.shares_cards))


def shared_training(recipe: Recipe) -> dict[str, Any]:
    """The terms of training that lanes share: its jobs, and the updates of a step."""
    algorithm, prompts = recipe.algorithm.settings(), recipe.batch.prompts
    updates = algorithm.updates_per_batch
    whole_groups = algorithm.updates_of == "groups"
    stale = stale_groups(recipe.techniques.tcss, prompts)
    return {
        "job_samples": recipe.job_samples,
        "updates": updates,
        "update_of_place": tuple(updates_of_places(prompts, updates, stale)) if whole_groups else (),
        "updates_need_all_rewards": algorithm.advantage.std_over == "batch",
    }


def schedule_facts(
    driver: Dispatcher, calibration: Calibration, slice_size: int
) -> tuple[Terms, Costs, Sequence[LaneOffer], Sequence[LaneOffer]]:
    """What `initial_state` needs to know of a run. The driver measures costs from here on."""
    recipe = driver.stores.recipe
    generators, helpers = offers(driver, calibration, slice_size)
    terms = replace(
        choose_terms(driver, calibration, slice_size),
        encodes=True,
        hedge_after=recipe.lanes.hedge_after,
        evaluate_every=0 if recipe.evaluation is None else recipe.evaluation.every,
        evaluation_chunks=driver.stores.evaluation_chunks,
        save_every=recipe.checkpoint.every,
    )
    costs = calibration.costs(shares_work=terms.shares_work)
    driver.use_costs(CostTracker(dict(enumerate((*generators, *helpers))), costs), slice_size)
    return terms, costs, generators, helpers
