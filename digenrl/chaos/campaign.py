"""Runs many seeds, on all cores, and shrinks the failures."""

from __future__ import annotations

import logging
import multiprocessing
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

from digenrl.chaos.faults import Fault
from digenrl.chaos.run import Outcome, run_world
from digenrl.chaos.shrinking import shrink
from digenrl.chaos.worlds import EVERY_KIND, World, draw_world

FEW_SEEDS = 40  # fewer do not pay for other processes


@dataclass(frozen=True, slots=True)
class Campaign:
    """Which seeds to run: small worlds or large ones, with which kinds of faults, or only some of their faults."""

    seeds: int
    first_seed: int = 0
    kinds: tuple[str, ...] = EVERY_KIND
    large: bool = False
    only: tuple[int, ...] | None = None  # numbers of a seed's faults

    def world(self, seed: int) -> World:
        return draw_world(seed, self.kinds, self.large)

    def faults(self, world: World) -> tuple[Fault, ...]:
        """The faults that strike it."""
        if self.only is None:
            return world.faults
        return tuple(world.faults[number] for number in self.only if number < len(world.faults))

    def replay_command(self, seed: int, only: Sequence[int]) -> str:
        """The command that runs this seed with these of its faults."""
        words = ["digenrl simulate --chaos 1", f"--first-seed {seed}"]
        if self.large:
            words.append("--large")
        if self.kinds != EVERY_KIND:
            words.append(f"--faults {','.join(self.kinds)}")
        words.append(f"--only {','.join(map(str, only)) or 'none'}")
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed that failed: its error, and the least faults with which it still fails."""

    seed: int
    error: str
    faults: tuple[str, ...]
    command: str


@dataclass(slots=True)
class CampaignResult:
    """What was injected and what came of it."""

    seeds: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    at_once: int = 0  # seeds with two faults at one instant
    resumed: int = 0  # drivers that resumed a run
    decisions: int = 0
    quarantined: int = 0
    hedged: int = 0  # slices that were given to a second lane
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: CampaignResult) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


def run_seed(campaign: Campaign, seed: int) -> CampaignResult:
    """Runs one seed. A failure is shrunk."""
    world = campaign.world(seed)
    faults = campaign.faults(world)
    result = CampaignResult(seeds=1, at_once=len({fault.at_ns for fault in faults}) < len(faults))
    outcome = run_quietly(world, faults)
    if isinstance(outcome, Exception):
        result.failures.append(_shrunk(campaign, world, faults, outcome))
        return result
    result.struck, result.decisions = outcome.struck, outcome.decisions
    result.resumed, result.quarantined, result.hedged = outcome.drivers - 1, outcome.quarantined, outcome.hedged
    return result


def run_quietly(world: World, faults: Sequence[Fault]) -> Outcome | Exception:
    """The outcome of a world, or the error that ended it, without the driver's warnings."""
    with _quiet():
        try:
            return run_world(world, faults)
        except Exception as error:  # whatever it is, it ends a run that should not have ended
            return error


def _shrunk(campaign: Campaign, world: World, faults: Sequence[Fault], error: Exception) -> Failure:
    numbers = campaign.only if campaign.only is not None else tuple(range(len(faults)))

    def fails(kept: Sequence[int]) -> bool:
        return isinstance(run_quietly(world, [faults[index] for index in kept]), Exception)

    least = shrink(len(faults), fails)
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
    command = campaign.replay_command(world.seed, [numbers[index] for index in least])
    return Failure(world.seed, text, tuple(faults[index].describe() for index in least), command)


def run_campaign(
    campaign: Campaign, report: Callable[[int, int], None] = lambda done, total: None, processes: int | None = None
) -> CampaignResult:
    """Runs all seeds and reports how many are done. Uses all cores unless `processes` is given."""
    seeds = range(campaign.first_seed, campaign.first_seed + campaign.seeds)
    count = processes or len(os.sched_getaffinity(0))
    total = CampaignResult()
    for result in _results(campaign, seeds, count):
        total.add(result)
        report(total.seeds, campaign.seeds)
    return total


def _results(campaign: Campaign, seeds: range, processes: int) -> Iterator[CampaignResult]:
    one = partial(run_seed, campaign)
    if processes == 1 or (len(seeds) <= FEW_SEEDS and not campaign.large):
        yield from map(one, seeds)
        return
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from pool.map(one, seeds, chunksize=1 if campaign.large else 10)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the driver's warnings about lost workers."""
    logger = logging.getLogger("digenrl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
