"""What is known about the samples of the open steps: their artifacts and their scores. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from digenrl.driver.reward_sum import Normalization
from digenrl.records import GroupArtifact, PromptRow, SampleId, Scores, Slice, SliceArtifact

GroupKey = tuple[int, int]  # step and group


@dataclass(slots=True)
class _Group:
    place: int
    slices: list[SliceArtifact] = field(default_factory=list)
    values: dict[int, float] = field(default_factory=dict)  # by sample index
    parts: dict[int, Mapping[str, float]] = field(default_factory=dict)


class SampleStore:
    """Groups appear with their first slice and are removed when their step is committed or they are replaced.

    Groups are trained with the weighted sum of raw scores, unless a `normalization` is given.
    """

    def __init__(self, normalization: Normalization | None = None) -> None:
        self._normalization = normalization
        self._groups: dict[GroupKey, _Group] = {}
        self._places: dict[GroupKey, int] = {}  # of groups that replace others
        self._retired: set[GroupKey] = set()
        self._closed_step = -1

    def add_slice(self, artifact: SliceArtifact) -> bool:
        """Whether the slice is wanted: its group may be quarantined, its step committed, or its copy faster."""
        key = (artifact.slice.step, artifact.slice.group)
        if key in self._retired or artifact.slice.step <= self._closed_step:
            return False
        if any(each.slice.mask() & artifact.slice.mask() for each in self._group(key).slices):
            return False
        self._group(key).slices.append(artifact)
        return True

    def holds(self, name: str) -> bool:
        """Whether this artifact is one of the slices."""
        return any(artifact.name == name for group in self._groups.values() for artifact in group.slices)

    def remove_slice(self, artifact: SliceArtifact) -> bool:
        """The artifact was lost. Returns whether it was wanted: it may have been generated again meanwhile."""
        group = self._groups.get((artifact.slice.step, artifact.slice.group))
        if group is None or artifact not in group.slices:
            return False
        group.slices.remove(artifact)
        for sample in artifact.slice.samples():
            group.values.pop(sample.index, None)
            group.parts.pop(sample.index, None)
        return True

    def artifact_of(self, piece: Slice) -> SliceArtifact | None:
        """The slice that these samples are part of; None if their group was discarded."""
        group = self._groups.get((piece.step, piece.group))
        for artifact in group.slices if group else ():
            if artifact.slice.first <= piece.first < artifact.slice.first + artifact.slice.size:
                return artifact
        return None

    def add_scores(self, piece: Slice, scores: Scores, artifact: SliceArtifact) -> None:
        """The rewards of some samples of an artifact, unless that was lost: its samples are scored again."""
        group = self._groups.get((piece.step, piece.group))
        if group is None or artifact not in group.slices:
            return
        for row, sample in enumerate(piece.samples()):
            group.values[sample.index] = scores.values[row]
            group.parts[sample.index] = {name: values[row] for name, values in scores.parts.items()}

    def all_scored(self, artifact: SliceArtifact) -> bool:
        """Whether every sample of a slice has its reward."""
        group = self._groups.get((artifact.slice.step, artifact.slice.group))
        return group is None or all(sample.index in group.values for sample in artifact.slice.samples())

    def group_artifact(self, piece: Slice, prompt: PromptRow, group_size: int) -> GroupArtifact | None:
        """A complete, scored group, with the slices that have some of these samples; None if some were lost."""
        group = self._groups[piece.step, piece.group]
        slices = sorted(group.slices, key=lambda each: each.slice.first)
        wanted = tuple(each for each in slices if each.slice.mask() & piece.mask())
        covered = sum((each.slice.mask() & piece.mask()).bit_count() for each in wanted)
        if covered < piece.size or len(group.values) < group_size:
            return None
        rewards = tuple(group.values[index] for index in range(group_size))
        if self._normalization is not None:
            rewards = self._normalization([group.parts[index] for index in range(group_size)])
        return GroupArtifact(group.place, prompt, wanted, rewards)

    def complete_groups(self, step: int, group_size: int) -> tuple[int, ...]:
        """The groups of a step that are scored and complete, without those that were replaced."""
        groups = ((key, group) for key, group in self._groups.items() if key[0] == step)
        return tuple(sorted(key[1] for key, group in groups if len(group.values) == group_size))

    def replace(self, step: int, group: int, replaced_by: int) -> tuple[SliceArtifact, ...]:
        """Puts another group in a group's place; returns the slices that are not needed any more."""
        key = (step, group)
        self._retired.add(key)
        self._places[step, replaced_by] = self._places.get(key, group)
        discarded = self._groups.pop(key, None)
        return tuple(discarded.slices) if discarded else ()

    def close_step(
        self, step: int
    ) -> tuple[dict[SampleId, float], dict[str, list[float]], tuple[SliceArtifact, ...]]:
        """The step's rewards, their parts, and its slices, which are not needed any more."""
        rewards: dict[SampleId, float] = {}
        parts: dict[str, list[float]] = {}
        slices: list[SliceArtifact] = []
        for key in sorted(key for key in self._groups if key[0] == step):
            group = self._groups.pop(key)
            slices += group.slices
            rewards |= {SampleId(*key, index): group.values[index] for index in sorted(group.values)}
            for index in sorted(group.parts):
                for name, value in group.parts[index].items():
                    parts.setdefault(name, []).append(value)
        self._closed_step = step
        self._places = {key: place for key, place in self._places.items() if key[0] > step}
        self._retired = {key for key in self._retired if key[0] > step}
        return rewards, parts, tuple(slices)

    def _group(self, key: GroupKey) -> _Group:
        if key not in self._groups:
            self._groups[key] = _Group(self._places.get(key, key[1]))
        return self._groups[key]
