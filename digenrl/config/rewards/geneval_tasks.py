"""GenEval's metadata of a prompt: the objects that an image should show, their counts, colors and positions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from digenrl.config.reading import Frozen

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")

Relation = Literal["left of", "right of", "above", "below"]


class Wanted(Frozen):
    """Objects of one class; `position` is relative to the objects of an earlier entry, by its index."""

    label: str = Field(alias="class", min_length=1)
    count: PositiveInt
    color: str | None = None
    position: tuple[Relation, int] | None = None


class Task(Frozen):
    """What an image should show: GenEval's metadata of a prompt."""

    tag: str = ""
    include: tuple[Wanted, ...] = Field(min_length=1)
    exclude: tuple[Wanted, ...] = ()

    @model_validator(mode="after")
    def _can_be_judged(self) -> Task:
        for index, wanted in enumerate(self.include):
            if wanted.color is not None and wanted.color not in COLORS:
                raise ValueError(f"include.{index}.color: '{wanted.color}'; known: {', '.join(COLORS)}")
            if wanted.position is not None and not 0 <= wanted.position[1] < index:
                raise ValueError(
                    f"include.{index}.position: refers to {wanted.position[1]}, not to an earlier entry"
                )
        return self
