"""What travels between a runtime and its workers: orders and reports. Ids, texts and numbers; never tensors.

A worker carries out its orders one after the other and answers each with one report. An order knows the names in
the exchange that it reads and those that it may leave there. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
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


def pixels_name(slice_name: str) -> str:
    """Where the pixels of a made slice lie until they are scored."""
    return f"{slice_name}-pixels"


def weights_name(version: int) -> str:
    """Where a version's weights lie."""
    return f"weights-{version}"


def state_name(version: int, rank: int) -> str:
    """Where a trainer's state at a version lies, for one that takes its place; each rank's where it is sharded."""
    return f"state-{version}-{rank}"


# --- Orders ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Order:
    """Something to do; answered by one report."""

    def reads(self) -> tuple[str, ...]:
        """Names that have to lie in the exchange."""
        return ()

    def leaves(self) -> tuple[str, ...]:
        """Names that may lie in the exchange afterwards."""
        return ()

    def for_rank(self, rank: int) -> Order:
        """The same order, as one of several ranks that carry it out together gets it."""
        return self


@dataclass(frozen=True, slots=True)
class EncodePrompts(Order):
    """Completed by PromptsEncoded."""

    prompts: tuple[EncodedPrompt, ...]

    def leaves(self) -> tuple[str, ...]:
        return _rows(self.prompts)


@dataclass(frozen=True, slots=True)
class MakeSlice(Order):
    """Generate and decode. Completed by SliceMade. A worker that can score does it at once."""

    lease: Lease
    prompt: EncodedPrompt

    def reads(self) -> tuple[str, ...]:
        return (self.prompt.row,)

    def leaves(self) -> tuple[str, ...]:
        name = slice_name(self.lease)
        return (name, pixels_name(name))


@dataclass(frozen=True, slots=True)
class ScoreSamples(Order):
    """Score some samples of a made slice. Completed by SamplesRated."""

    slice: Slice
    of: MadeSlice
    prompt: EncodedPrompt

    def reads(self) -> tuple[str, ...]:
        return (pixels_name(self.of.name),)


@dataclass(frozen=True, slots=True)
class LearnGroups(Order):
    """Replay groups and add to the open gradient. Completed by GroupsLearnt."""

    groups: tuple[LearnableGroup, ...]

    def reads(self) -> tuple[str, ...]:
        made = tuple(each.name for group in self.groups for each in group.slices)
        return (*_rows(group.prompt for group in self.groups), *made)


@dataclass(frozen=True, slots=True)
class TakeStep(Order):
    """Take the optimizer step and lay the new version out for others. Completed by StepTaken.

    With `keep` the whole state is laid out too, for a trainer that takes this one's place. Of a replicated trainer
    the first rank does so, of a `sharded` one every rank.
    """

    step: int
    keep: bool = False
    sharded: bool = False
    rank: int = 0

    def leaves(self) -> tuple[str, ...]:
        weights = (weights_name(self.step + 1),) if self.rank == 0 else ()
        keeps = self.keep and (self.sharded or self.rank == 0)
        return (*weights, state_name(self.step + 1, self.rank)) if keeps else weights

    def for_rank(self, rank: int) -> TakeStep:
        return replace(self, rank=rank)


@dataclass(frozen=True, slots=True)
class RestoreState(Order):
    """Go on from the state that a trainer before this one laid out at `version`. Completed by StateRestored."""

    version: int
    sharded: bool = False
    rank: int = 0

    def reads(self) -> tuple[str, ...]:
        return (state_name(self.version, self.rank if self.sharded else 0),)

    def for_rank(self, rank: int) -> RestoreState:
        return replace(self, rank=rank)


@dataclass(frozen=True, slots=True)
class LoadWeights(Order):
    """Serve this version from the next slice on. Completed by WeightsLoaded."""

    version: int
    weights: WeightsReference

    def reads(self) -> tuple[str, ...]:
        return (self.weights.name,)


@dataclass(frozen=True, slots=True)
class ChangeRole(Order):
    """From training to generating, or back. Completed by RoleChanged."""

    generating: bool


@dataclass(frozen=True, slots=True)
class EvaluatePrompts(Order):
    """Sample held-out prompts with a version, which is loaded first if need be. Completed by PromptsSampled.

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

    def reads(self) -> tuple[str, ...]:
        return (self.weights.name, *_rows(self.prompts))

    def leaves(self) -> tuple[str, ...]:
        return (self.name,)


@dataclass(frozen=True, slots=True)
class ScoreEvaluation(Order):
    """Score held-out samples whose pixels lie in the exchange. Completed by PromptsEvaluated."""

    first: int
    prompts: tuple[EncodedPrompt, ...]
    name: str

    def reads(self) -> tuple[str, ...]:
        return (self.name,)


@dataclass(frozen=True, slots=True)
class SaveCheckpoint(Order):
    """Write the state after `step` optimizer steps into the run's folder. Completed by CheckpointSaved."""

    run: str
    step: int
    facts: Mapping[str, Any]
    keep: int


@dataclass(frozen=True, slots=True)
class RehearseMaking(Order):
    """Make slices of these sizes and forget them. Completed by MakingRehearsed.

    Held-out samples are made, too, so many at once: a compiled model meets all sizes of a batch before the run.
    """

    prompt: EncodedPrompt
    sizes: tuple[int, ...]
    held_out: tuple[int, ...] = ()

    def reads(self) -> tuple[str, ...]:
        return (self.prompt.row,)


@dataclass(frozen=True, slots=True)
class RehearseLearning(Order):
    """Make a few samples, replay them and forget them. Completed by LearningRehearsed.

    They are made `at_once` by so many, all by default; what is more than the samples is not replayed.
    """

    prompt: EncodedPrompt
    samples: int
    at_once: int | None = None

    def reads(self) -> tuple[str, ...]:
        return (self.prompt.row,)


@dataclass(frozen=True, slots=True)
class RehearseSwitching(Order):
    """Change from training to generating and back, and stay as before. Completed by SwitchingRehearsed."""


@dataclass(frozen=True, slots=True)
class ScoreRehearsal(Order):
    """Score noise and forget the scores. Completed by ScoringRehearsed."""

    prompt: EncodedPrompt
    samples: int


@dataclass(frozen=True, slots=True)
class LayOutWeights(Order):
    """Lay the trainer's version, which is this one, out for others. Completed by WeightsLaidOut.

    `keep` and what follows are as in TakeStep.
    """

    version: int
    keep: bool = False
    sharded: bool = False
    rank: int = 0

    def leaves(self) -> tuple[str, ...]:
        return TakeStep(self.version - 1, self.keep, self.sharded, self.rank).leaves()

    def for_rank(self, rank: int) -> LayOutWeights:
        return replace(self, rank=rank)


def _rows(prompts: Iterable[EncodedPrompt]) -> tuple[str, ...]:
    return tuple(prompt.row for prompt in prompts)


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
class StateRestored(Report):
    """The trainer stands where its predecessor did."""

    version: int


@dataclass(frozen=True, slots=True)
class WeightsLaidOut(Report):
    """The trainer's version lies in the exchange; without weights if it is not the one that was asked for.

    `kept_bytes` are those of the state that one rank laid out beside it.
    """

    version: int
    weights: WeightsReference
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WeightsLoaded(Report):
    """The version was checked and is served."""

    version: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RoleChanged(Report):
    """The worker does the other thing now; the seconds that it could do neither."""

    generating: bool
    seconds: float = 0.0


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
    """Seconds that a warm slice took and the card's memory at its fullest, weights included, by size.

    Memory is 0 on a CPU.
    """

    seconds: Mapping[int, float]
    peak_bytes: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LearningRehearsed(Report):
    """Seconds per sample, warm, and how pairs are packed: as told, or as measured memory allows.

    `peak_bytes` is the card's memory at its fullest, weights included, `planned_bytes` what was expected before
    it was measured, and `foreseen_bytes` before a pack was tried; 0 on a CPU, or where nothing was planned.
    """

    seconds_per_sample: float
    pack_size: int
    checkpointed_blocks: int = 0
    peak_bytes: int = 0
    planned_bytes: int = 0
    foreseen_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SwitchingRehearsed(Report):
    """Seconds of one change to generating and of one back, with what is held in the middle of a step.

    `moved_bytes` leave the card and come back; copies that go on beside other work are not in the seconds.
    """

    to_generating: float
    to_training: float
    moved_bytes: int


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
