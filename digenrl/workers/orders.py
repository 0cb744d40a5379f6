"""What travels between a runtime and its workers: orders and reports. Ids, texts and numbers; never tensors.

A worker carries out its orders one after the other and answers each with one report. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from digenrl.exchange.folder import WeightsReference
from digenrl.records import Lease, Slice


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt, and the name under which its encoded row lies in the exchange."""

    row: str
    text: str
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scores:
    """One reward per sample, and the named parts that explain it."""

    values: tuple[float, ...]
    parts: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class MadeSlice:
    """A slice that was generated: where its trajectories lie, and the version that made them."""

    slice: Slice
    name: str
    version: int


@dataclass(frozen=True, slots=True)
class LearnableGroup:
    """A whole, scored group and its place in the batch; slices are in the order of their samples."""

    place: int
    prompt: EncodedPrompt
    slices: tuple[MadeSlice, ...]
    rewards: tuple[float, ...]


def slice_name(lease: Lease) -> str:
    """Where the trajectories of a lease lie, once they are made."""
    return f"slice-{lease.epoch}"


# --- Orders ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Order:
    """Something to do; answered by one report."""


@dataclass(frozen=True, slots=True)
class EncodePrompts(Order):
    """Answered by PromptsEncoded."""

    prompts: tuple[EncodedPrompt, ...]


@dataclass(frozen=True, slots=True)
class MakeSlice(Order):
    """Generate and decode. Answered by SliceMade. A worker that can score does it at once."""

    lease: Lease
    prompt: EncodedPrompt


@dataclass(frozen=True, slots=True)
class ScoreSamples(Order):
    """Score some samples of a made slice. Answered by SamplesRated."""

    slice: Slice
    of: MadeSlice
    prompt: EncodedPrompt


@dataclass(frozen=True, slots=True)
class LearnGroups(Order):
    """Replay groups and add to the open gradient. Answered by GroupsLearnt."""

    groups: tuple[LearnableGroup, ...]


@dataclass(frozen=True, slots=True)
class TakeStep(Order):
    """Take the optimizer step and lay the new version out for others. Answered by StepTaken."""

    step: int


@dataclass(frozen=True, slots=True)
class LoadWeights(Order):
    """Serve this version from the next slice on. Answered by WeightsLoaded."""

    version: int
    weights: WeightsReference


@dataclass(frozen=True, slots=True)
class ChangeRole(Order):
    """From training to generating, or back. Answered by RoleChanged."""

    generating: bool


@dataclass(frozen=True, slots=True)
class EvaluatePrompts(Order):
    """Sample held-out prompts with a version, which is loaded first if need be. Answered by PromptsSampled.

    `first` is the place of the first of them among all that are evaluated. Pixels go to the exchange under `name`,
    pictures of those whose place is below `shown` to the folder `pictures`.
    """

    first: int
    prompts: tuple[EncodedPrompt, ...]
    version: int
    weights: WeightsReference
    name: str
    pictures: str
    shown: int


@dataclass(frozen=True, slots=True)
class ScoreEvaluation(Order):
    """Score held-out samples whose pixels lie in the exchange. Answered by PromptsEvaluated."""

    first: int
    prompts: tuple[EncodedPrompt, ...]
    name: str


@dataclass(frozen=True, slots=True)
class SaveCheckpoint(Order):
    """Write the state after `step` optimizer steps into the run's folder. Answered by CheckpointSaved."""

    run: str
    step: int
    facts: Mapping[str, Any]
    keep: int


@dataclass(frozen=True, slots=True)
class RehearseMaking(Order):
    """Make slices of these sizes and forget them. Answered by MakingRehearsed."""

    prompt: EncodedPrompt
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RehearseLearning(Order):
    """Make a few samples, replay them and forget them. Answered by LearningRehearsed."""

    prompt: EncodedPrompt
    samples: int


@dataclass(frozen=True, slots=True)
class ScoreRehearsal(Order):
    """Score noise and forget the scores. Answered by ScoringRehearsed."""

    prompt: EncodedPrompt
    samples: int


@dataclass(frozen=True, slots=True)
class LayOutWeights(Order):
    """Lay the trainer's version out for others. Answered by WeightsLaidOut."""


# --- Reports -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """The answer to one order."""


@dataclass(frozen=True, slots=True)
class Ready(Report):
    """The worker has loaded everything that it needs."""


@dataclass(frozen=True, slots=True)
class PromptsEncoded(Report):
    """The rows lie in the exchange."""

    rows: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SliceMade(Report):
    """Trajectories lie in the exchange, and pixels unless they are scored or could not be."""

    lease: Lease
    made: MadeSlice
    scores: Scores | None = None
    score_failure: str | None = None


@dataclass(frozen=True, slots=True)
class SamplesRated(Report):
    """Rewards, all finite."""

    slice: Slice
    scores: Scores


@dataclass(frozen=True, slots=True)
class GroupsLearnt(Report):
    """Their gradient is accumulated; the metrics of updates that were taken on the way."""

    updates: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class StepTaken(Report):
    """The optimizer step is taken; the new version lies in the exchange."""

    step: int
    updates: tuple[Mapping[str, Any], ...]
    weights: WeightsReference


@dataclass(frozen=True, slots=True)
class WeightsLaidOut(Report):
    """The trainer's version lies in the exchange."""

    version: int
    weights: WeightsReference


@dataclass(frozen=True, slots=True)
class WeightsLoaded(Report):
    """The version was checked and is served."""

    version: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RoleChanged(Report):
    """The worker does the other thing now."""

    generating: bool


@dataclass(frozen=True, slots=True)
class PromptsSampled(Report):
    """The pixels of held-out samples lie in the exchange."""

    name: str


@dataclass(frozen=True, slots=True)
class PromptsEvaluated(Report):
    """The scores of some held-out prompts, in their order."""

    first: int
    scores: Scores


@dataclass(frozen=True, slots=True)
class CheckpointSaved(Report):
    """The checkpoint is whole on disk."""

    step: int
    path: str


@dataclass(frozen=True, slots=True)
class MakingRehearsed(Report):
    """Seconds that a warm slice took, by size."""

    seconds: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class LearningRehearsed(Report):
    """Seconds per sample, warm, and the pack size that was used or found."""

    seconds_per_sample: float
    pack_size: int


@dataclass(frozen=True, slots=True)
class ScoringRehearsed(Report):
    """Seconds per sample, warm."""

    seconds_per_sample: float


@dataclass(frozen=True, slots=True)
class OrderFailed(Report):
    """The worker lives, but could not do it. `mistake` is a user's, told in one line; else `details` has more."""

    order: Order
    reason: str
    mistake: bool = False
    details: str = field(default="", repr=False)
