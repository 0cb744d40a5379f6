"""Breaks the scheduler, the driver and the supervisor on purpose, and counts the seeds until chaos notices.

`python benchmarks/mutants.py` prints a table of all breaks; with names, only of these. Each runs in its own
process, in which a part of the source is replaced when its module is imported.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

SEEDS = 300
PROCESSES = 2


@dataclass(frozen=True, slots=True)
class Mutant:
    """A break: in a module of digenrl, one text is replaced by another."""

    name: str
    module: str
    old: str
    new: str

    def mutated(self, source: str) -> str:
        """The broken source."""
        if source.count(self.old) != 1:
            raise ValueError(f"{self.name}: found {source.count(self.old)} times in {self.module}: {self.old!r}")
        return source.replace(self.old, self.new)


FAULTS, SCORING, TURNS = "scheduling.faults", "scheduling.scoring", "scheduling.trainer_turns"
SHARED, ASSIGN, EVALUATION = "scheduling.shared_gradients", "scheduling.slice_assignment", "scheduling.evaluation"
DISPATCHER, PENDING, SUPERVISOR = "driver.dispatcher", "driver.pending_jobs", "driver.supervisor"
SAMPLES, OUTPUTS, VERSIONS = "driver.sample_store", "driver.job_outputs", "driver.weight_versions"

MUTANTS = [
    # The scheduler
    Mutant(
        "stale share returned too early",
        "scheduling.decide",
        "if event.version >= piece.step:",
        "if True:",
    ),
    Mutant("failed score ignored", "scheduling.decide", "if event.score_failure:", "if False:"),
    Mutant(
        "encoding never ends",
        "scheduling.decide",
        "encoding=tuple(job for job in state.encoding if job != event.job)",
        "encoding=state.encoding",
    ),
    Mutant(
        "lost lane stays idle",
        FAULTS,
        "idle=tuple(index for index in state.idle if index != lane.index),",
        "idle=state.idle,",
    ),
    Mutant(
        "lost lane's job forgotten",
        FAULTS,
        "reconsider_help(return_job(state, lane.job, event.at_ns))",
        "reconsider_help(state)",
    ),
    Mutant(
        "lost scorer's samples forgotten",
        FAULTS,
        "unscored=(held.piece, *state.unscored)) if wanted else state",
        "unscored=state.unscored)",
    ),
    Mutant(
        "lost trainer's gradient counted",
        FAULTS,
        "groups = tuple(replace(group, trained=0) for group in step.groups)",
        "groups = step.groups",
    ),
    Mutant(
        "lost helper's slice forgotten",
        FAULTS,
        "if lane.job is not None and (lane.helper or state.terms.colocated):",
        "if False:",
    ),
    Mutant(
        "failed slice forgotten",
        FAULTS,
        "    state = reissue(state, job.slice)\n    if failures",
        "    if failures",
    ),
    Mutant(
        "failed reward not quarantined",
        FAULTS,
        "state, actions = quarantine(state, job.piece, event.reason, event.at_ns)",
        "pass",
    ),
    Mutant("untrained group forgotten", FAULTS, "if still_scored and not (", "if False and not ("),
    Mutant(
        "lost slice not made again",
        FAULTS,
        "            state = reissue(state, each)\n    return state\n\n\ndef _awaited",
        "            pass\n    return state\n\n\ndef _awaited",
    ),
    Mutant(
        "void score accepted", FAULTS, "void_scores=state.void_scores | void)", "void_scores=state.void_scores)"
    ),
    Mutant(
        "void score counts",
        SCORING,
        "wanted = job.id not in state.void_scores and is_wanted",
        "wanted = is_wanted",
    ),
    Mutant(
        "quarantined slice issued again",
        FAULTS,
        "    if step is None or step.groups[piece.group].retired:\n        return state\n    waiting",
        "    if step is None:\n        return state\n    waiting",
    ),
    Mutant(
        "quarantined group not replaced",
        FAULTS,
        "if each.group != piece.group), *fresh_slices),",
        "if each.group != piece.group),),",
    ),
    Mutant(
        "stale share returned twice",
        FAULTS,
        "stale_samples=step.stale_samples - returned.bit_count()",
        "stale_samples=step.stale_samples - 2 * returned.bit_count()",
    ),
    Mutant(
        "weights not sent again",
        FAULTS,
        "sent_version=lanes[index].version)",
        "sent_version=lanes[index].sent_version)",
    ),
    Mutant(
        "checkpoint of a lost trainer forgotten",
        FAULTS,
        "trainer=Restoring(job, saves)), (job,)",
        "trainer=Restoring(job, False)), (job,)",
    ),
    Mutant(
        "restarted scorer stays absent",
        SCORING,
        "absent_scorers=state.absent_scorers - {event.lane}",
        "absent_scorers=state.absent_scorers",
    ),
    Mutant(
        "group ready too early",
        SCORING,
        "complete = group.scored == (1 << terms.samples_per_prompt) - 1",
        "complete = group.scored > 0",
    ),
    Mutant(
        "new lane gets no weights",
        "scheduling.lanes",
        "    return state, (publish,)\n\n\ndef absorb_published",
        "    return state, ()\n\n\ndef absorb_published",
    ),
    Mutant(
        "any number of stale samples",
        "scheduling.staleness",
        "return stale_budget - stale_so_far if",
        "return UNLIMITED if",
    ),
    Mutant("two versions behind", "scheduling.staleness", "if version >= step:", "if version >= step - 2:"),
    Mutant("stale samples not counted", ASSIGN, "if version < self._step.index:", "if False:"),
    Mutant("slice handed out twice", ASSIGN, "del self._waiting[place : place + length]", "pass"),
    Mutant(
        "skipped slice handed out twice", ASSIGN, "                insort(self._ahead, at)", "                pass"
    ),
    Mutant("last version not saved", TURNS, "    if terms.saves(version):", "    if False:"),
    Mutant("lost lane's sums counted", FAULTS, "    if lane.trained:\n", "    if False:\n"),
    Mutant("sums of a lost trainer counted", SHARED, "if lane.helper and lane.trained:", "if False:"),
    Mutant(
        "sent sums kept by the lane",
        SHARED,
        "release(state, lane.index, trained=()), state.current",
        "release(state, lane.index), state.current",
    ),
    Mutant(
        "commit before sums are sent",
        SHARED,
        "if any(lane.job is not None if lane.helper else lane.trained for lane in state.present_lanes):",
        "if False:",
    ),
    Mutant(
        "lost sums counted",
        SHARED,
        "kept = tuple(each for each in step.gradients if each.job.id not in jobs)",
        "kept = step.gradients",
    ),
    Mutant(
        "evaluation on a lane that loads weights",
        EVALUATION,
        "state.lanes[index].version == state.lanes[index].sent_version == evaluation",
        "state.lanes[index].version == evaluation",
    ),
    Mutant(
        "lost chunk counted as sampling",
        EVALUATION,
        "sampling=evaluation.sampling - (not sampled),",
        "sampling=evaluation.sampling,",
    ),
    Mutant(
        "slower copy counts",
        "scheduling.hedging",
        "void_jobs=state.void_jobs | {other})), True",
        "void_jobs=state.void_jobs)), True",
    ),
    Mutant(
        "slice of a running copy issued again",
        "scheduling.hedging",
        "return state, other is None",
        "return state, True",
    ),
    # The driver
    Mutant(
        "late result accepted",
        PENDING,
        ".pop(job_id, None)\n        if pending",
        ".get(job_id)\n        if pending",
    ),
    Mutant(
        "jobs of an absent worker dropped", PENDING, "for job in self._waiting.pop(name, ()):", "for job in ():"
    ),
    Mutant("job for a lost worker sent", DISPATCHER, "if worker in self._unheard_losses:", "if False:"),
    Mutant(
        "wrong scorer reported lost",
        DISPATCHER,
        'losses = [WorkerLost(now_ns, rewards.index(worker), "reward")]',
        'losses = [WorkerLost(now_ns, 0, "reward")]',
    ),
    Mutant(
        "loss not reported", DISPATCHER, "        self._events += losses\n", "        self._events += losses[1:]\n"
    ),
    Mutant(
        "restart not reported",
        DISPATCHER,
        "self._events.append(WorkerRestarted(self._now_ns, rewards.index(worker)))",
        "pass",
    ),
    Mutant("lost prompt counts as encoded", DISPATCHER, "stores.prompts.forget(row.row)", "pass"),
    Mutant("parked jobs forgotten", DISPATCHER, "for each, _ in parked:", "for each, _ in ():"),
    Mutant("NaN rewards accepted", DISPATCHER, "with_valid_scores(job, result)", "result"),
    Mutant("lost slice stays in the store", DISPATCHER, "if stores.samples.remove_slice(artifact))", "if True)"),
    Mutant("lost lane keeps its worker", "driver.lanes", "del self._workers[lane]", "pass"),
    Mutant(
        "state not kept",
        "driver.job_inputs",
        "return replace(job, keeps_state=keeps_state,",
        "return replace(job, keeps_state=False,",
    ),
    Mutant(
        "wrong picture scored",
        SAMPLES,
        "if artifact.slice.first <= piece.first < artifact.slice.first + artifact.slice.size:",
        "if artifact.slice.first <= piece.first:",
    ),
    Mutant("replacement in the wrong place", SAMPLES, "self._places.get(key, group)", "replaced_by"),
    Mutant(
        "score of a lost picture kept",
        SAMPLES,
        "if group is None or artifact not in group.slices:\n            return\n",
        "if group is None:\n            return\n",
    ),
    Mutant("slice of a quarantined group kept", SAMPLES, "if key in self._retired or", "if"),
    Mutant(
        "outdated export taken",
        OUTPUTS,
        "if result.job.version >= versions.newest_version:",
        "if True:",
    ),
    Mutant(
        "prompt of a pending job dropped",
        "driver.prompt_store",
        "in_use = {prompt.row for prompt in pending}",
        "in_use = set()",
    ),
    Mutant(
        "both copies of a slice kept", SAMPLES, "if any(each.slice.mask() & artifact.slice.mask()", "if any(False"
    ),
    Mutant(
        "stamped with the version of its lease",
        OUTPUTS,
        "slice_name(job.id), result.version)",
        "slice_name(job.id), job.version)",
    ),
    Mutant(
        "pixels dropped too early",
        OUTPUTS,
        "if stores.samples.all_scored(job.artifact):",
        "if True:",
    ),
    Mutant("weights dropped too early", VERSIONS, "if name not in wanted and", "if"),
    Mutant("wrong state dropped", VERSIONS, "state_name(self.kept_state or 0, rank)", "state_name(version, rank)"),
    Mutant(
        "broken worker kept",
        DISPATCHER,
        "if self._failures.fails_always(",
        "if False and self._failures.fails_always(",
    ),
    # The supervisor
    Mutant("worker started again and again", SUPERVISOR, "                del self._vacancies[worker]\n", ""),
    Mutant("lost worker not replaced", SUPERVISOR, "self._vacancies[worker] = _Vacancy(", "_ = _Vacancy("),
    Mutant(
        "never looks for room again", SUPERVISOR, "self._monotonic() - self._polled_s >= POLL_INTERVAL_S", "False"
    ),
    Mutant("every loss ends the run", SUPERVISOR, "not gone.fault or used < self._restarts", "not gone.fault"),
]
BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


def source_of(mutant: Mutant) -> str:
    """The source of the module that it breaks."""
    spec = find_spec(f"digenrl.{mutant.module}")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


class _BrokenLoader(SourceFileLoader):
    """Loads the module that a mutant breaks."""

    mutant: Mutant

    def exec_module(self, module: ModuleType) -> None:
        source = self.mutant.mutated(Path(self.path).read_text(encoding="utf-8"))
        exec(compile(source, self.path, "exec"), module.__dict__)


class _Finder(PathFinder):
    mutant: Mutant

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = super().find_spec(fullname, path, target)
        if spec is not None and fullname == f"digenrl.{cls.mutant.module}":
            assert isinstance(spec.loader, SourceFileLoader)
            loader: Loader = _BrokenLoader(fullname, spec.loader.path)
            loader.mutant = cls.mutant  # type: ignore[attr-defined]
            spec.loader = loader
        return spec


def hunt(name: str, seeds: int = SEEDS) -> int | None:
    """In this process: the number of seeds until the break is noticed; None if it is not."""
    _Finder.mutant = BY_NAME[name]
    sys.meta_path.insert(0, _Finder)
    from digenrl.chaos.campaign import Campaign, run_quietly

    campaign = Campaign(seeds)
    for seed in range(seeds):
        world = campaign.world(seed)
        if isinstance(run_quietly(world, world.faults), Exception):
            return seed + 1
    return None


def seeds_until_caught(name: str, seeds: int = SEEDS) -> int | None:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--hunt", name, str(seeds)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(result.stderr)
    found: int | None = json.loads(result.stdout)
    return found


def main(arguments: Sequence[str]) -> None:
    """Prints the table; exits with 1 if a break survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="breaks to try, all by default")
    names: list[str] = parser.parse_args(arguments).names
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        parser.error(f"unknown break '{unknown[0]}'; known: {', '.join(BY_NAME)}")
    chosen = [BY_NAME[name] for name in names] or MUTANTS
    survivors = 0
    with ThreadPoolExecutor(PROCESSES) as pool:
        caught = pool.map(partial(seeds_until_caught), [mutant.name for mutant in chosen])
        for mutant, seeds in zip(chosen, caught, strict=True):
            survivors += seeds is None
            verdict = f"not caught in {SEEDS} seeds" if seeds is None else f"caught by seed {seeds - 1}"
            print(f"{mutant.name:42} {mutant.module:30} {verdict}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} breaks are caught within {SEEDS} seeds")
    sys.exit(survivors > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--hunt"]:
        print(json.dumps(hunt(sys.argv[2], int(sys.argv[3]))))
    else:
        main(sys.argv[1:])
