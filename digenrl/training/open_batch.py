"""The open batch of a trainer: its shape, its groups by place, and what its open update trains."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from digenrl.config.reading import ConfigError
from digenrl.config.training import TrainerSettings
from digenrl.models.objective import Advantages, Objective
from digenrl.models.trajectory import ScoredGroup
from digenrl.training.advantage_scale import AdvantageScale
from digenrl.training.packing.packs import Term, terms_of
from digenrl.training.update_split import UpdateSplit


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The number of groups in a batch, and of samples in a group.

    Samples of the first `stale_groups` may come from weights one version old.
    """

    groups: int
    group_size: int
    stale_groups: int = 0

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ValueError(f"a batch needs at least 1 group, got {self.groups}")
        if self.group_size < 2:
            raise ValueError(
                f"group_size must be at least 2, so that samples can be compared; got {self.group_size}"
            )


@dataclass(slots=True)
class GroupEntry:
    """A group at its place in the batch. `trained` says that the open update has trained its part of the group."""

    group: ScoredGroup | None  # None once it is not replayed any more, so that its trajectories are freed
    index: int
    rewards: tuple[float, ...]
    advantages: Advantages
    steps: int  # terms of each of its units: of a sample, or of a pair that is compared
    trained: bool = False

    @property
    def has_spread(self) -> bool:
        """Whether the group's rewards differ."""
        return any(self.advantages.values)


class OpenBatch:
    """The groups of one batch. What an update trains of a place is fixed, whenever its group arrives."""

    def __init__(self, shape: BatchShape, objective: Objective, scale: AdvantageScale, index: int = 0) -> None:
        self._shape, self._objective, self._scale = shape, objective, scale
        self._split = UpdateSplit(
            shape.groups,
            objective.units_per_group(shape.group_size),
            objective.updates_per_batch,
            objective.updates_of,
            shape.stale_groups,
        )
        self.index = index
        self.update = 0
        self.entries: dict[int, GroupEntry] = {}

    def of_step(self, index: int) -> OpenBatch:
        """An empty batch of another step."""
        return OpenBatch(self._shape, self._objective, self._scale, index)

    def checked(self, group: ScoredGroup, place: int) -> GroupEntry:
        """An entry for the group; raises ValueError if it cannot be trained at this place. Changes nothing."""
        step = group.trajectories[0].sample.step
        name = f"group {group.index} of step {step}"
        if step != self.index:
            raise ValueError(f"{name} does not belong to the open batch, which is of step {self.index}")
        if not 0 <= place < self._shape.groups or self._split.last_update(place) < self.update:
            groups = self._shape.groups
            raise ValueError(f"{name} has no place {place}: {groups} groups, update {self.update} is open")
        if len(group.trajectories) != self._shape.group_size:
            raise ValueError(f"{name} has {len(group.trajectories)} samples, expected {self._shape.group_size}")
        steps = self._steps_of(group)
        if any(entry.steps != steps for entry in self.entries.values()):
            raise ValueError(f"{name} trains {steps} steps per sample, unlike the other groups of the batch")
        advantages = self._scale.trained_advantages(group.rewards)
        if place in self.entries:
            raise ValueError(f"{name}: place {place} already has group {self.entries[place].index}")
        return GroupEntry(group, group.index, group.rewards, advantages, steps)

    def most_terms_of(self, group: ScoredGroup) -> int:
        """The most terms of a group that one update trains."""
        return self._split.most_units() * self._steps_of(group)

    def _steps_of(self, group: ScoredGroup) -> int:
        counts = {len(self._objective.trained_steps(trajectory.plan)) for trajectory in group.trajectories}
        assert len(counts) == 1, "the samples of a group are trained on equally many steps"
        return counts.pop()

    def terms(self, place: int, entry: GroupEntry, samples: Collection[int] | None = None) -> list[Term]:
        """The terms of a group that the open update trains, or those of some of its samples."""
        assert entry.group is not None
        units = self._split.units(place, self.update)
        return terms_of(entry.group, entry.advantages, self._objective, units=units, samples=samples)

    def places(self) -> list[int]:
        """The places of the open update."""
        return self._split.places(self.update)

    def is_replayed_later(self, place: int) -> bool:
        """Whether a later update trains another part of the group at this place."""
        return self._split.last_update(place) > self.update

    def open_entries(self) -> list[GroupEntry]:
        """The entries of the open update that have arrived, in the order of places."""
        return [self.entries[place] for place in self.places() if place in self.entries]

    def missing(self) -> list[int]:
        """The places whose groups the open update still needs: for training, or for the batch's scale."""
        trained = {place for place, entry in self.entries.items() if entry.trained}
        missing = set(self.places()) - trained
        if self._scale.over_batch:
            missing |= set(range(self._shape.groups)) - self.entries.keys()
        return sorted(missing)

    def denominator(self, entry: GroupEntry, places: Iterable[int] | None = None) -> int:
        """Z of the open update, known from its first group on; or the part of Z that some places contribute."""
        places = self.places() if places is None else places
        return entry.steps * sum(len(self._split.units(place, self.update)) for place in places)

    def zero_spread_groups(self) -> int:
        """Groups of equal rewards in the open update, without those that a later update trains too."""
        finished = [place for place in self.places() if not self.is_replayed_later(place)]
        return sum(not self.entries[place].has_spread for place in finished)

    def mean_factor(self) -> float:
        """The factor that makes a sum over all terms divided by Z the mean that the objective wants.

        It is above 1 if groups of equal rewards are left out, which is known once the update is complete.
        """
        if self._objective.zero_spread_groups != "left_out":
            return 1.0
        counted = [place for place in self.places() if self.entries[place].has_spread]
        any_entry = self.entries[self.places()[0]]
        return self.denominator(any_entry) / self.denominator(any_entry, counted) if counted else 1.0

    def rewards_by_group(self) -> list[tuple[float, ...]]:
        """The rewards of all groups that have arrived, in the order of places."""
        return [self.entries[place].rewards for place in sorted(self.entries)]


def check_shape(shape: BatchShape, objective: Objective, settings: TrainerSettings) -> None:
    """Raises ConfigError if the objective cannot train a batch of this shape with these settings."""
    updates = objective.updates_per_batch
    if objective.updates_of == "groups" and shape.groups < updates:
        raise ConfigError(
            f"algorithm.options.updates_per_batch: {updates} updates need as many prompts, "
            f"got batch.prompts = {shape.groups}; use more prompts or fewer updates"
        )
    units = objective.units_per_group(shape.group_size)
    if objective.updates_of == "samples" and shape.groups + units <= updates:
        raise ConfigError(
            f"algorithm.options.updates_per_batch: {updates} updates of {shape.groups} groups, each with {units} "
            "trained samples or pairs, leave some update empty; use fewer updates"
        )
    if objective.needs.recomputed_log_probs and settings.old_log_probs != "recomputed":
        raise ConfigError(
            f"training.old_log_probs: the algorithm needs 'recomputed', got '{settings.old_log_probs}'; change it"
        )
