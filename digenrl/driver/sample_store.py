"""What is known about the samples of the open steps: where they lie, what they scored. No tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from digenrl.records import SampleId, Slice
from digenrl.worker.orders import EncodedPrompt, LearnableGroup, MadeSlice, Scores

GroupKey = tuple[int, int]  # step and group


@dataclass(slots=True)
class _Group:
    place: int
    made: list[MadeSlice] = field(default_factory=list)
    values: dict[int, float] = field(default_factory=dict)  # by sample index
    parts: dict[int, Mapping[str, float]] = field(default_factory=dict)


class SampleStore:
    """Groups appear with their first slice and are closed when trained or discarded."""

    def __init__(self) -> None:
        self._groups: dict[GroupKey, _Group] = {}
        self._places: dict[GroupKey, int] = {}  # of groups that replace others
        self._retired: set[GroupKey] = set()
        self._closed_step = -1

    def add_made(self, made: MadeSlice) -> bool:
        """Whether anybody wants the slice: a group in quarantine has no use for one that comes late.

        It may come so late that its step is closed.
        """
        key = (made.slice.step, made.slice.group)
        if key in self._retired or made.slice.step <= self._closed_step:
            return False
        self._group(key).made.append(made)
        return True

    def replace_made(self, made: MadeSlice) -> None:
        """A slice that was lost is there again, perhaps by a newer version."""
        group = self._groups.get((made.slice.step, made.slice.group))
        if group is not None:
            group.made = [made if each.name == made.name else each for each in group.made]

    def slice_of(self, piece: Slice) -> MadeSlice | None:
        """The made slice that these samples belong to; None if their group was discarded."""
        group = self._groups.get((piece.step, piece.group))
        for made in group.made if group else ():
            if made.slice.first <= piece.first < made.slice.first + made.slice.size:
                return made
        return None

    def add_scores(self, piece: Slice, scores: Scores) -> None:
        """The rewards of some samples."""
        group = self._groups.get((piece.step, piece.group))
        if group is None:
            return
        for row, sample in enumerate(piece.samples()):
            group.values[sample.index] = scores.values[row]
            group.parts[sample.index] = {name: values[row] for name, values in scores.parts.items()}

    def all_scored(self, made: MadeSlice) -> bool:
        """Whether every sample of a made slice has its reward."""
        group = self._groups.get((made.slice.step, made.slice.group))
        return group is None or all(sample.index in group.values for sample in made.slice.samples())

    def learnable(self, piece: Slice, prompt: EncodedPrompt) -> LearnableGroup:
        """A whole, scored group."""
        group = self._groups[piece.step, piece.group]
        made = tuple(sorted(group.made, key=lambda each: each.slice.first))
        rewards = tuple(group.values[index] for index in range(piece.size))
        return LearnableGroup(group.place, prompt, made, rewards)

    def replace(self, step: int, group: int, replaced_by: int) -> tuple[MadeSlice, ...]:
        """Puts another group in a group's place; returns the slices that nobody needs any more."""
        key = (step, group)
        self._retired.add(key)
        self._places[step, replaced_by] = self._places.get(key, group)
        discarded = self._groups.pop(key, None)
        return tuple(discarded.made) if discarded else ()

    def close_step(self, step: int) -> tuple[dict[SampleId, float], dict[str, list[float]], tuple[MadeSlice, ...]]:
        """The step's rewards, their parts, and its slices, which nobody needs any more."""
        rewards: dict[SampleId, float] = {}
        parts: dict[str, list[float]] = {}
        made: list[MadeSlice] = []
        for key in sorted(key for key in self._groups if key[0] == step):
            group = self._groups.pop(key)
            made += group.made
            rewards |= {SampleId(*key, index): group.values[index] for index in sorted(group.values)}
            for index in sorted(group.parts):
                for name, value in group.parts[index].items():
                    parts.setdefault(name, []).append(value)
        self._closed_step = step
        self._places = {key: place for key, place in self._places.items() if key[0] > step}
        self._retired = {key for key in self._retired if key[0] > step}
        return rewards, parts, tuple(made)

    def _group(self, key: GroupKey) -> _Group:
        if key not in self._groups:
            self._groups[key] = _Group(self._places.get(key, key[1]))
        return self._groups[key]
