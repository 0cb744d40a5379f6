"""The truth about a simulated run: which samples are in the weights, kept by the workers and not by the driver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose
from statistics import fmean
from zlib import crc32

from digenrl.driver.step_summary import StepSummary
from digenrl.records import GroupArtifact, Slice
from digenrl.scheduling import RecordedStep, Terms


class ViolationError(AssertionError):
    """A promise of the driver is broken; the message says which."""


def promise(kept: bool, broken: str) -> None:
    """Raises ViolationError with what is broken."""
    if not kept:
        raise ViolationError(broken)


def reward_of(artifact: str, index: int) -> float:
    """The reward of a sample: a function of the artifact that holds it, so that mixed-up scores are noticed."""
    return crc32(f"{artifact}/{index}".encode()) / (1 << 32)


@dataclass(frozen=True, slots=True)
class Contribution:
    """The gradient of one sample in a sum."""

    place: int
    group: int
    index: int
    version: int
    reward: float


@dataclass(frozen=True, slots=True)
class TrainedUpdate:
    """One optimizer update in the weights."""

    step: int
    update: int
    sum: tuple[Contribution, ...]


History = tuple[TrainedUpdate, ...]  # of a version: all updates that led to it


def contributions(group: GroupArtifact, wanted: Slice) -> list[Contribution]:
    """The gradients of the wanted samples of a group, whose rewards must be those of their artifacts."""
    found: list[Contribution] = []
    for artifact in group.slices:
        promise(
            (artifact.slice.step, artifact.slice.group) == (wanted.step, wanted.group),
            f"{wanted} is trained with samples of {artifact.slice}",
        )
        for sample in artifact.slice.samples():
            if wanted.mask() >> sample.index & 1:
                expected = reward_of(artifact.name, sample.index)
                promise(
                    group.rewards[sample.index] == expected,
                    f"{sample} is trained with the reward of another picture than {artifact.name}",
                )
                found.append(Contribution(group.place, wanted.group, sample.index, artifact.version, expected))
    indices = sorted(each.index for each in found)
    promise(
        indices == list(range(wanted.first, wanted.first + wanted.size)), f"{wanted} is trained with {indices}"
    )
    return found


def check_update(terms: Terms, step: int, update: int, total: Sequence[Contribution]) -> None:
    """Every sample of the update is in the sum exactly once, and versions are within the staleness bound."""
    counts = Counter((each.place, each.index) for each in total)
    doubled = [key for key, count in counts.items() if count > 1]
    promise(not doubled, f"step {step}: the gradients of {doubled} are added twice")
    places = [place for place in range(terms.prompts) if terms.is_trained_in(place, update)]
    expected = {(place, index) for place in places for index in range(terms.samples_per_prompt)}
    missing, foreign = sorted(expected - counts.keys()), sorted(counts.keys() - expected)
    promise(not missing and not foreign, f"step {step} update {update} lacks {missing} and has foreign {foreign}")
    owners = {(each.place, each.group) for each in total}
    promise(len(owners) == len(places), f"step {step}: groups are mixed up: {sorted(owners)}")
    promise(
        all(step - 1 <= each.version <= step for each in total),
        f"step {step} is trained with versions {sorted({each.version for each in total})}",
    )
    stale = sum(each.version < step for each in total)
    promise(stale <= terms.stale_budget, f"step {step} has {stale} stale samples of {terms.stale_budget}")


def check_metrics(sums: Sequence[Contribution], summary: StepSummary) -> None:
    """The step's mean reward is that of the samples in its weights, and of no others."""
    mean = fmean({(each.place, each.index): each.reward for each in sums}.values())
    promise(
        isclose(summary.values["reward_mean"], mean),
        f"step {summary.step}: a mean reward of {summary.values['reward_mean']} instead of {mean}",
    )


def check_history(terms: Terms, history: History) -> None:
    """The final weights hold every update of the run once, in order."""
    wanted = [(step, update) for step in range(terms.steps) for update in range(max(1, terms.updates))]
    found = [(each.step, each.update) for each in history]
    promise(found == wanted, f"the final weights hold the updates {found} instead of {wanted}")


def check_repeated(recorded: Sequence[RecordedStep], history: History) -> None:
    """A resumed run has generated with the version before what the interrupted run had, and nothing else.

    Rewards may fail in one of them and not in the other, so that other groups are in the weights. Groups that are
    not in them are not compared.
    """
    stale: Counter[tuple[int, int]] = Counter()  # samples as bits, by step and group
    trained = {(update.step, each.group) for update in history for each in update.sum}
    for each in {(update.step, each) for update in history for each in update.sum if each.version < update.step}:
        step, sample = each
        stale[step, sample.group] |= 1 << sample.index
    for record in recorded:
        found = tuple((group, stale[step, group]) for step, group in sorted(stale) if step == record.index)
        kept = [(group, samples) for group, samples in record.stale if (record.index, group) in trained]
        missing = [group for group, samples in kept if samples & ~dict(found).get(group, 0)]
        promise(not missing, f"step {record.index}: stale samples of {missing} were generated anew: {found}")
        promise(
            not record.closed or len(kept) < len(record.stale) or found == record.stale,
            f"step {record.index} has the stale samples {found} instead of {record.stale}",
        )
