"""The opening of a run: everybody is ready, has the same version and was timed, and the scheduler knows the costs.

Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from digenrl.config.reading import ConfigError
from digenrl.config.recipe import Recipe
from digenrl.driver.batch_sizes import (
    colocated_choices,
    met_beforehand,
    sizes_held_out,
    sizes_of_lane,
    sizes_to_try,
)
from digenrl.driver.cost_tracker import NS, CostTracker, expected_ns, timed_offer
from digenrl.driver.dispatcher import Dispatcher
from digenrl.records import LaneOffer
from digenrl.scheduling import Costs, SchedulerState, Terms, initial_state
from digenrl.simulation.prediction import predict
from digenrl.transports.contract import ArtifactStore
from digenrl.worker.assignment import TRAINER, Assignment, own_slice, rank_names
from digenrl.worker.orders import (
    ChangeRole,
    EncodedPrompt,
    LearningRehearsed,
    LoadWeights,
    MakingRehearsed,
    Order,
    RehearseLearning,
    RehearseMaking,
    RehearseSwitching,
    ScoreRehearsal,
    ScoringRehearsed,
    SwitchingRehearsed,
    WeightsLoaded,
)

FORESEEN_STEPS = 4  # when slice sizes are compared


@dataclass(frozen=True, slots=True)
class Calibration:
    """Seconds that things take, measured with everybody at work. Slices by lane, then by size."""

    slices: tuple[Mapping[int, float], ...]
    train_sample: float
    score_sample: float
    publish: float
    pack_size: int
    switch_in: float = 0.0  # from training to generating, where something has to move
    switch_out: float = 0.0  # and back

    def costs(self) -> Costs:
        """What the scheduler counts on until the run measures itself; a commit is guessed."""
        return Costs(
            train_sample_ns=Fraction(max(1, round(self.train_sample * NS))),
            commit_ns=round(self.train_sample * NS),
            publish_ns=round(self.publish * NS),
            switch_in_ns=round(self.switch_in * NS),
            switch_out_ns=round(self.switch_out * NS),
            score_ns=max(1, round(self.score_sample * NS)) if self.score_sample else 0,
        )


def export_initial_weights(runtime: Dispatcher, version: int) -> float:
    """The trainer's version goes to everybody; returns the seconds that the slowest took to load it."""
    laid_out = runtime.export_initial_weights(version)
    parts = runtime.recipe.lanes.ranks if runtime.recipe.sharded else 1
    check_room(runtime.exchange, laid_out.weights.bytes, parts * laid_out.kept_bytes)
    load = LoadWeights(laid_out.version, laid_out.weights)
    loaded: list[WeightsLoaded] = runtime.ask([(worker, load) for worker in runtime.generator_workers()])
    return max(report.seconds for report in loaded)


def check_room(exchange: ArtifactStore, weights_bytes: int, kept_bytes: int) -> None:
    """Raises ConfigError unless two more versions fit: one is laid out while some still load the one before."""
    free, weights = exchange.free_bytes(), 2 * weights_bytes if exchange.holds_weights else 0
    if free < weights + 2 * kept_bytes:
        raise ConfigError(
            f"lanes.exchange: {exchange.where()} has {free / 1e9:.1f} GB free, and two versions of the weights "
            f"take {weights / 1e9:.1f} GB, of the state that is kept {2 * kept_bytes / 1e9:.1f} GB; give a folder "
            "with more room, as lanes.exchange=DIR, keep no state (checkpoint.in_memory=false), or use LoRA"
        )


def calibrate(
    runtime: Dispatcher, publish_s: float, first_step: int = 0, say: Callable[[str], None] = lambda text: None
) -> Calibration:
    """Everybody does a little of its work at the same time, twice: once to warm up and once against the clock.

    The prompt is one of the step that the run begins with: those of other steps may not be encoded. Where this may
    take minutes, its parts are told.
    """
    recipe, all_sizes = runtime.recipe, met_beforehand(runtime.recipe, runtime.crew)
    tell = say if all_sizes else lambda text: None
    prompt = runtime.desk.prompt(first_step, 0)
    sizes = sizes_to_try(recipe, all_sizes)
    tell(f"rehearsing slices of {' and '.join(str(size) for size in sizes)} samples{_compiling(runtime)}")
    makers: list[tuple[str, Order]] = [
        (worker, RehearseMaking(prompt, tuple(dict.fromkeys((*sizes, own_slice(assignment, max(sizes)))))))
        for worker, assignment in _makers(runtime)
    ]
    made: list[MakingRehearsed] = runtime.ask(makers)
    samples = min(recipe.batch.samples_per_prompt, 4)
    at_once = max((size for size in sizes if size <= samples), default=min(sizes)) if all_sizes else None
    tell(f"rehearsing training{_compiling(runtime)}")
    learnt: LearningRehearsed = runtime.ask([(TRAINER, RehearseLearning(prompt, samples, at_once))])[0]
    tell("rehearsing rewards and changes of role")
    score_sample = _rehearse_scoring(runtime, prompt, max(sizes))
    switch_in, switch_out = _rehearse_switching(runtime)
    return Calibration(
        slices=tuple(report.seconds for report in made),
        train_sample=learnt.seconds_per_sample,
        score_sample=score_sample,
        publish=publish_s,
        pack_size=learnt.pack_size,
        switch_in=switch_in,
        switch_out=switch_out,
    )


def calibrate_rest(
    runtime: Dispatcher, rehearsal: Calibration, slice_size: int, first_step: int = 0
) -> Calibration:
    """The same, and what the run will ask for now that the size of a slice is settled and nobody has done yet."""
    recipe = runtime.recipe
    if not met_beforehand(recipe, runtime.crew):
        return rehearsal
    prompt, makers = runtime.desk.prompt(first_step, 0), _makers(runtime)
    evaluating, orders = runtime.generator_workers(), {}
    for lane, (worker, assignment) in enumerate(makers):
        sizes = tuple(s for s in sizes_of_lane(assignment, slice_size) if s not in rehearsal.slices[lane])
        evaluates = worker in evaluating and recipe.model.compiles(assignment.device)
        held_out = sizes_held_out(recipe) if evaluates else ()
        if sizes or held_out:
            orders[lane] = (worker, RehearseMaking(prompt, sizes, held_out))
    made: dict[int, MakingRehearsed] = dict(zip(orders, runtime.ask(list(orders.values())), strict=True))
    slices = tuple(
        {**seconds, **made[lane].seconds} if lane in made else seconds
        for lane, seconds in enumerate(rehearsal.slices)
    )
    return replace(rehearsal, slices=slices)


def _compiling(runtime: Dispatcher) -> str:
    everybody = (*runtime.crew.generators, runtime.crew.trainer)
    compiles = any(runtime.recipe.model.compiles(each.device) for each in everybody)
    return ", which compiles the model for each size: minutes, the first time" if compiles else ""


def _makers(runtime: Dispatcher) -> list[tuple[str, Assignment]]:
    """Who generates, lane by lane, and what each is for."""
    crew = runtime.crew
    if not crew.generators:
        return [(TRAINER, crew.trainer)]
    helpers = rank_names(crew.trainer) if "generate" in crew.trainer.duties else []
    return [*((each.name, each) for each in crew.generators), *((name, crew.trainer) for name in helpers)]


def _rehearse_scoring(runtime: Dispatcher, prompt: EncodedPrompt, samples: int) -> float:
    if not runtime.reward_workers():
        return 0.0
    orders: list[tuple[str, Order]] = [
        (worker, ScoreRehearsal(prompt, samples)) for worker in runtime.reward_workers()
    ]
    scored: list[ScoringRehearsed] = runtime.ask(orders)
    return max(report.seconds_per_sample for report in scored)


def _rehearse_switching(runtime: Dispatcher) -> tuple[float, float]:
    """Seconds of the trainer's change to generating and back; no time, and no order, where nothing moves.

    A colocated run begins by generating, so that the trainer is left there.
    """
    trainer = runtime.crew.trainer
    if "generate" not in trainer.duties or not runtime.recipe.training.offloads(trainer.device):
        return 0.0, 0.0
    switched: SwitchingRehearsed = runtime.ask([(TRAINER, RehearseSwitching())])[0]
    if runtime.recipe.topology.shares_cards:
        runtime.ask([(TRAINER, ChangeRole(generating=True))])
    return switched.to_generating, switched.to_training


def choose_slice_size(runtime: Dispatcher, rehearsal: Calibration) -> int:
    """The recipe's slice, or the one with which a few foreseen steps take least, the largest of equals.

    On a single device it is the one with which a sample takes least.
    """
    recipe = runtime.recipe
    if isinstance(recipe.batch.slice, int):
        return recipe.batch.slice
    if recipe.topology.shares_cards:
        seconds = rehearsal.slices[0]
        choices = colocated_choices(recipe.batch)
        return min(reversed(choices), key=lambda size: expected_ns(seconds, size) / size)

    pools = [pool.slice for pool in recipe.cluster.generators if pool.slice is not None]
    sizes = [size for size in recipe.batch.slice_sizes() if not any(own % size for own in pools)]

    def foreseen_ns(size: int) -> int:
        generators, helpers = offers(runtime, rehearsal, size)
        terms = terms_of(recipe, size, steps=FORESEEN_STEPS, scorers=len(runtime.reward_workers()))
        return predict(terms, rehearsal.costs(), generators, helpers, steps=FORESEEN_STEPS).trace.end_ns

    return min(reversed(sizes), key=foreseen_ns)


def offers(
    runtime: Dispatcher, rehearsal: Calibration, size: int
) -> tuple[tuple[LaneOffer, ...], tuple[LaneOffer, ...]]:
    """Generator lanes and helper lanes, with what they take at once and how long that takes each."""
    own = [own_slice(each, size) for each in runtime.crew.generators]
    every = tuple(
        timed_offer(name, rehearsal.slices[lane], size, own[lane] if lane < len(own) else size)
        for lane, name in enumerate(runtime.lane_names())
    )
    count = len(runtime.crew.generators) or 1
    return every[:count], every[count:]


def terms_of(recipe: Recipe, slice_size: int, *, steps: int, scorers: int) -> Terms:
    """What the scheduler is told about the recipe's work and techniques."""
    techniques, batch = recipe.techniques, recipe.batch
    colocated = recipe.topology.shares_cards
    streams = techniques.gap and not colocated
    return Terms(
        steps=steps,
        prompts=batch.prompts,
        samples_per_prompt=batch.samples_per_prompt,
        slice_size=slice_size,
        order="generation" if streams else "batch",
        stream="group" if streams else "batch",
        help="none" if colocated else techniques.tag,
        dispatch=techniques.dispatch,
        stale_budget=int(Fraction(str(techniques.tcss)) * batch.prompts * batch.samples_per_prompt),
        colocated=colocated,
        scorers=scorers,
        score_batch=slice_size,
    )


def initial_scheduler_state(
    runtime: Dispatcher, rehearsal: Calibration, slice_size: int, *, committed: int = 0, leases_issued: int = 0
) -> SchedulerState:
    """The scheduler before the first tick; the runtime measures from here on."""
    generators, helpers = offers(runtime, rehearsal, slice_size)
    costs = rehearsal.costs()
    profile = CostTracker(dict(enumerate((*generators, *helpers))), costs)
    runtime.measure(profile, slice_size)
    terms = terms_of(runtime.recipe, slice_size, steps=runtime.recipe.steps, scorers=len(runtime.reward_workers()))
    return initial_state(terms, costs, generators, helpers, committed=committed, leases_issued=leases_issued)
