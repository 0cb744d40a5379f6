"""Runs one world: drivers follow each other until the run is finished, and every promise is checked on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from digenrl.chaos.faults import KINDS, Fault
from digenrl.chaos.injection import BROKEN, Injector
from digenrl.chaos.promises import check_history, check_metrics, check_repeated, promise
from digenrl.chaos.transport import VirtualClock, VirtualTransport
from digenrl.chaos.workers import WorldFacts
from digenrl.chaos.worlds import PATIENCE_S, World, targets_of
from digenrl.driver.calibration import Calibration, publish_initial_weights, schedule_facts
from digenrl.driver.dispatcher import Dispatcher, RunHooks
from digenrl.driver.job_deadlines import UNTIMED_FACTOR
from digenrl.driver.prompt_store import PromptStore
from digenrl.driver.repeated_failures import LIMIT as GROUPS_IN_A_ROW
from digenrl.driver.supervisor import TrainerLostError, WorkerFailedError
from digenrl.loop import RunGaveUpError, drive
from digenrl.prompts.sampler import PromptSampler
from digenrl.prompts.sources import Prompt
from digenrl.records import (
    HELD_OUT_STEP,
    NO_JOB,
    Action,
    ArtifactLost,
    Committed,
    Event,
    Generate,
    JobFailed,
    Quarantine,
    WorkerLost,
)
from digenrl.scheduling import RecordedStep, SchedulerState, initial_state
from digenrl.scheduling.invariants import Auditor
from digenrl.scheduling.recorded_versions import VersionRecord
from digenrl.transports.contract import RunResources
from digenrl.transports.rank_groups import RankGroupTransport
from digenrl.units import NS_PER_SECOND
from digenrl.worker.assignment import TRAINER, rank_names

MOST_DECISIONS = 200_000
MOST_DRIVERS = 30
DRAIN_NS = 2_000 * NS_PER_SECOND  # enough for every job and message that is under way, on a slow worker too
SLOWEST = 12  # how much longer a step may take than expected, with everything slow


class DriverKilledError(Exception):
    """The driver is killed between two decisions."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished run: the faults that struck by kind, the drivers it took, and what it did."""

    struck: Counter[str]
    drivers: int
    decisions: int
    quarantined: int
    hedged: int
    repeated: int  # stale samples that a resumed run had to generate again
    virtual_s: float


def run_world(world: World, faults: Sequence[Fault] | None = None) -> Outcome:
    """Runs a world to its end; raises the error of the first broken promise. Without `faults`, with its own."""
    return _WorldRun(world, world.faults if faults is None else faults).run()


class _WorldRun:
    """The parts of a world that outlive a driver."""

    def __init__(self, world: World, faults: Sequence[Fault]) -> None:
        self._world, self._clock, self._facts = world, VirtualClock(), WorldFacts()
        self._injector = Injector(world, self._clock, faults)
        self._decisions = 0
        self._jobs_issued = self._hedged = self._ended_ns = 0
        self._evaluating: tuple[int, ...] = ()  # the versions that are being evaluated
        self._evaluated: set[int] = set()  # and those whose evaluation is finished, or abandoned
        self._behind: tuple[int, ...] = ()  # older versions that were being evaluated at the last commit
        self._transport: VirtualTransport | None = None
        self._versions = VersionRecord()
        self._interrupted: list[RecordedStep] = []  # what was known about steps that had to be done again
        self._disturbed = False  # by a fault after which a resumed run may not be able to repeat all versions
        targets = targets_of(world, most=0)
        untimed_s = (UNTIMED_FACTOR + 3) * PATIENCE_S  # the deadline of a job that nobody has timed yet
        deadline_ns = round(untimed_s * NS_PER_SECOND)
        self._bound_ns = SLOWEST * targets.nominal_ns + (1 + len(faults)) * deadline_ns

    def run(self) -> Outcome:
        drivers = 0
        finished = False
        while not finished and self._facts.saved.step < self._world.recipe.steps:
            drivers += 1
            promise(drivers <= MOST_DRIVERS, "the run is resumed again and again")
            try:
                finished = self._drive()
            except DriverKilledError:
                self._injector.struck["driver_kill"] += 1
            except (WorkerFailedError, RunGaveUpError) as error:
                promise(self._may_end(error), f"the run ended: {error}")
            if not finished:
                self._interrupted += self._versions.steps(self._facts.saved.step)
        return Outcome(
            self._injector.struck,
            drivers,
            self._decisions,
            len(self._facts.quarantined),
            self._hedged,
            sum(samples.bit_count() for step in self._interrupted for _, samples in step.stale),
            self._ended_ns / NS_PER_SECOND,
        )

    def _drive(self) -> bool:
        """One driver, from its start to its end. Returns whether the run is finished."""
        world, saved = self._world, self._facts.saved
        self._facts.quarantined = {key for key in self._facts.quarantined if key[0] < saved.step}
        transport = VirtualTransport(world, self._clock, self._facts, self._injector, self._bound_ns)
        self._transport = transport
        driver = self._dispatcher(transport)
        driver.start_workers()
        for step in range(saved.step, min(saved.step + 2, world.recipe.steps)):
            driver.encode_now(step)
        driver.encode_now(HELD_OUT_STEP)
        recorded = self._versions.steps(saved.step) if world.recipe.techniques.tcss else ()
        self._versions = VersionRecord(saved.step, recorded)
        repeats = any(step.index == saved.step and step.stale for step in recorded)
        self._evaluated -= {version for version in self._evaluated if version > saved.step}
        unfinished = [
            version
            for version in (*saved.evaluations, saved.step)
            if world.recipe.evaluates(version) and version not in self._evaluated
        ]
        one_behind = repeats or saved.step - 1 in unfinished
        weights = publish_initial_weights(driver, saved.step, one_behind=one_behind)
        promise(
            weights.version == saved.step - one_behind or not saved.has_version_before,
            "the resumed run has not got the version before",
        )
        self._evaluated.update(version for version in unfinished if version < weights.version)  # left out
        state = initial_state(
            *schedule_facts(driver, self._calibration(driver), world.slice_size),
            committed=saved.step,
            jobs_issued=saved.jobs_issued,
            evaluations=[version for version in unfinished if version >= weights.version],
            served=weights.version,
            recorded=recorded,
        )
        state = replace(state, terms=replace(state.terms, search_budget=world.search_budget))
        self._facts.terms = state.terms
        self._jobs_issued, self._behind = saved.jobs_issued, saved.evaluations
        self._evaluating = tuple(each.version for each in state.evaluations)
        transport.expect_progress(self._bound_ns)
        self._injector.attach(transport)
        driver.begin()
        final = drive(state, driver, (Auditor(state), self))
        if final.all_committed:
            self._ended_ns = self._clock.now_ns
            self._check_end(transport, final)
            self._check_exchange(driver, transport)
        return final.all_committed

    def _dispatcher(self, transport: VirtualTransport) -> Dispatcher:
        world, recipe = self._world, self._world.recipe
        prompts = [Prompt(index, f"prompt {index}") for index in range(world.prompts)]
        held_out = [Prompt(index, f"held out {index}") for index in range(world.held_out)]
        sampler = PromptSampler(prompts, recipe.batch.prompts, recipe.seed)
        store = PromptStore(sampler, transport.exchange.drop, held_out, kept=world.kept_prompts)
        ranks = RankGroupTransport(transport, self._clock.monotonic_s)
        resources = RunResources(ranks, transport.exchange, world.workers, lambda: None)
        driver: Dispatcher | None = None

        def poll() -> None:
            if self._injector.wants_stop and driver is not None:
                self._injector.wants_stop = False
                driver.request_stop()

        hooks = RunHooks(
            poll=poll,
            on_step=lambda summary: check_metrics(self._facts.committed[summary.step], summary),
            checkpoint_facts=lambda step: {"jobs_issued": self._jobs_issued, "evaluations": self._behind},
            monotonic=self._clock.monotonic_s,
        )
        driver = Dispatcher(recipe, resources, store, self._clock, hooks)
        return driver

    def _calibration(self, driver: Dispatcher) -> Calibration:
        world, names = self._world, driver.stores.lanes
        workers = [names.worker(lane) for lane in range(len(names.names))]
        both, sizes = world.recipe.shares_work, (world.slice_size, 2 * world.slice_size)
        return Calibration(
            tuple({size: world.slice_seconds(name) * size / sizes[0] for size in sizes} for name in workers),
            world.train_sample_s,
            world.score_sample_s if world.workers.rewards else 0.0,
            world.publish_s,
            pack_size=4,
            train_samples=tuple(2 * world.train_sample_s for _ in workers) if both else (),
        )

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        """Follows the run, and kills its driver."""
        self._decisions += 1
        self._versions.observe(event, actions)
        self._disturbed |= isinstance(event, WorkerLost | ArtifactLost | JobFailed)
        promise(self._decisions < MOST_DECISIONS, "the run decides without end")
        evaluating = tuple(each.version for each in state.evaluations)
        self._evaluated.update(set(self._evaluating) - set(evaluating))
        self._evaluating = evaluating
        if isinstance(event, Committed):
            self._jobs_issued = state.jobs_issued
            self._behind = tuple(version for version in evaluating if version < state.committed)
            assert self._transport is not None
            self._transport.expect_progress(self._bound_ns)
        for action in actions:
            self._hedged += isinstance(action, Generate) and action.hedges != NO_JOB
            if isinstance(action, Quarantine):
                promise(bool(action.reason), f"{action} has no reason")
                self._facts.quarantined.add((action.step, action.group))
        if self._injector.kills and self._decisions >= self._injector.kills[0]:
            self._injector.kills.pop(0)
            raise DriverKilledError

    def _may_end(self, error: Exception) -> bool:
        """Whether this world can end a run: a single card has no copy of its trainer's state.

        Faults can also hit the rewards of several groups in a row, or break every generator that is left.
        """
        struck = self._injector.struck
        if isinstance(error, TrainerLostError):
            return self._world.recipe.mode == "colocated"
        if BROKEN in str(error):
            return not self._injector.works()
        if "with the same error" in str(error):
            return sum(struck[kind] for kind in KINDS if kind.startswith("reward_")) >= GROUPS_IN_A_ROW
        lost = struck["artifact_loss"] + struck["node_loss"] + struck["slice_loss"]
        return self._world.recipe.shares_work and lost > 0 and "partly trained" in str(error)

    def _check_end(self, transport: VirtualTransport, final: SchedulerState) -> None:
        """Every sample is in the final weights once, and the last version is in a checkpoint."""
        steps = self._world.recipe.steps
        promise(self._facts.saved.step == steps, "the last version was not saved")
        due = {version for version in range(steps + 1) if self._world.recipe.evaluates(version)}
        unfinished = {each.version for each in final.evaluations}  # if the user stopped the run
        missing = due - self._evaluated - unfinished
        promise(not missing, f"{sorted(missing)} are not evaluated")
        check_history(final.terms, self._facts.saved.history)
        retired = {(step.step, each.group) for step in self._facts.saved.history for each in step.sum}
        mixed = retired & self._facts.quarantined
        promise(not mixed, f"quarantined groups are in the weights: {sorted(mixed)}")
        if not self._disturbed and not self._hedged:
            check_repeated(self._interrupted, self._facts.saved.history)
        ranks = [name for name in rank_names(self._world.workers.trainer) if name in transport.slots]
        histories = {transport.slots[name].worker.history for name in ranks}
        promise(len(histories) <= 1, f"the ranks of {TRAINER} disagree")

    def _check_exchange(self, driver: Dispatcher, transport: VirtualTransport) -> None:
        """Once all workers are idle, only prompts and the last version are left in the exchange."""
        self._injector.detach()
        transport.expect_progress(1 << 62)
        until_ns = self._clock.now_ns + DRAIN_NS
        unanswered = self._injector.struck["lost"] + self._injector.struck["stall"] > 0
        while self._clock.now_ns < until_ns and (unanswered or not transport.idle):
            driver.receive()
        if unanswered:
            return  # the driver may still wait for a job that wrote something
        names = transport.exchange.names()
        left = [name for name in names if name.startswith(("slice-", "gradients-", "update-"))]
        promise(not left, f"the run leaves {left} in the exchange")
        weights = [name for name in names if name.startswith("weights-")]
        promise(len(weights) <= 1, f"the run leaves {weights} in the exchange")
