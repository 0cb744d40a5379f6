"""The open batch of a trainer: its shape, its groups by place, and the update that each group belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from digenrl.config.reading import ConfigError
from digenrl.config.training import TrainerSettings
from digenrl.models.objective import Advantages, Objective
from digenrl.models.trajectory import ScoredGroup
from digenrl.training.advantage_scale import AdvantageScale


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The number of groups in a batch, and of samples in a group."""

    groups: int
    group_size: int

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ValueError(f"a batch needs at least 1 group, got {self.groups}")
        if self.group_size < 2:
            raise ValueError(
                f"group_size must be at least 2, so that samples can be compared; got {self.group_size}"
            )


@dataclass(slots=True)
class GroupEntry:
    """A group at its place in the batch. A group of a later update is not trained yet."""

    group: ScoredGroup | None  # None once it is not replayed any more, so that its trajectories are freed
    index: int
    rewards: tuple[float, ...]
    advantages: Advantages
    terms: int  # its contribution to the denominator
    trained: bool = False


class OpenBatch:
    """The groups of one batch. A place belongs to a fixed update, whenever its group arrives."""

    def __init__(self, shape: BatchShape, objective: Objective, scale: AdvantageScale, index: int = 0) -> None:
        self._shape, self._objective, self._scale = shape, objective, scale
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
        if not 0 <= place < self._shape.groups or self.update_of(place) < self.update:
            groups = self._shape.groups
            raise ValueError(f"{name} has no place {place}: {groups} groups, update {self.update} is open")
        if len(group.trajectories) != self._shape.group_size:
            raise ValueError(f"{name} has {len(group.trajectories)} samples, expected {self._shape.group_size}")
        terms = self.terms_of(group)
        if any(entry.terms != terms for entry in self.entries.values()):
            raise ValueError(f"{name} has {terms} terms, unlike the other groups of the batch")
        advantages = self._scale.trained_advantages(group.rewards)
        if place in self.entries:
            raise ValueError(f"{name}: place {place} already has group {self.entries[place].index}")
        return GroupEntry(group, group.index, group.rewards, advantages, terms)

    def terms_of(self, group: ScoredGroup) -> int:
        """What a whole group contributes to the denominator."""
        plans = [trajectory.plan for trajectory in group.trajectories]
        counts = {self._objective.terms_per_group(self._shape.group_size, plan) for plan in plans}
        assert len(counts) == 1, "the samples of a group are trained on equally many steps"
        return counts.pop()

    def update_of(self, place: int) -> int:
        """The update that a place belongs to."""
        return update_of(place, self._shape.groups, self._objective.updates_per_batch)

    def places(self) -> list[int]:
        """The places of the open update."""
        return [place for place in range(self._shape.groups) if self.update_of(place) == self.update]

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

    def denominator(self, entry: GroupEntry) -> int:
        """Z of the open update, known from its first group on: all groups contribute equally."""
        return entry.terms * len(self.places())

    def rewards_by_group(self) -> list[tuple[float, ...]]:
        """The rewards of all groups that have arrived, in the order of places."""
        return [self.entries[place].rewards for place in sorted(self.entries)]


def check_shape(shape: BatchShape, objective: Objective, settings: TrainerSettings) -> None:
    """Raises ConfigError if the objective cannot train a batch of this shape with these settings."""
    if shape.groups < objective.updates_per_batch:
        raise ConfigError(
            f"algorithm.options.updates_per_batch: {objective.updates_per_batch} updates need as many prompts, "
            f"got batch.prompts = {shape.groups}; use more prompts or fewer updates"
        )
    if objective.needs.recomputed_log_probs and settings.old_log_probs != "recomputed":
        raise ConfigError(
            f"training.old_log_probs: the algorithm needs 'recomputed', got '{settings.old_log_probs}'; change it"
        )


def update_of(place: int, groups: int, updates: int) -> int:
    """The update of a batch that a place belongs to.

    >>> [update_of(place, groups=5, updates=2) for place in range(5)]
    [0, 0, 0, 1, 1]
    """
    return place * updates // groups
