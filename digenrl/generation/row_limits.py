"""How much of a worker's work fits in memory at once, found out on the way: what does not is made in halves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from digenrl.config.reading import ConfigError

Made = TypeVar("Made")


class RowLimit:
    """How many rows of one kind of work are done at once: all of them, until so many did not fit.

    Whoever keeps it for the next rows does not run out of memory again.
    """

    def __init__(self, largest: int | None = None, doing: str = "working on") -> None:
        self.largest = largest
        self._doing = doing

    def run(self, rows: int, make: Callable[[slice], Made]) -> list[Made]:
        """What `make` gives for all rows, in order, in parts as even as can be and no larger than what fits."""
        made: list[Made] = []
        done = 0
        while done < rows:
            size = self._next(rows - done)
            part = self._tried(make, slice(done, done + size))
            if part is None:
                self.largest = (size + 1) // 2
            else:
                made.append(part[0])
                done += size
        return made

    def _next(self, left: int) -> int:
        parts = -(-left // min(left, self.largest or left))
        return -(-left // parts)

    def _tried(self, make: Callable[[slice], Made], rows: slice) -> tuple[Made] | None:
        """None where there was no room for so many; raises ConfigError where there is none for one alone."""
        try:
            return (make(rows),)
        except torch.OutOfMemoryError as error:
            if rows.stop - rows.start == 1:
                raise ConfigError(
                    f"memory ran out while {self._doing} a single sample; lower sample.height, sample.width or "
                    "sample.frames, use model.dtype: bfloat16 with adapters (training.lora), or give the lane a "
                    "card that nobody else uses"
                ) from error
        # Outside the except block: the error's traceback would keep the tensors of the failed part alive.
        torch.cuda.empty_cache()  # without a card it does nothing
        return None


@dataclass(frozen=True, slots=True)
class RowLimits:
    """Of one worker. Held-out samples may be guided otherwise, and then take another amount of memory."""

    denoising: RowLimit = field(default_factory=lambda: RowLimit(doing="denoising"))
    held_out: RowLimit = field(default_factory=lambda: RowLimit(doing="denoising"))
    decoding: RowLimit = field(default_factory=lambda: RowLimit(doing="decoding"))

    @classmethod
    def decoding_at_most(cls, rows: int | None) -> RowLimits:
        """Nothing is known yet but how many rows may be decoded at once, if that."""
        return cls(decoding=RowLimit(rows, doing="decoding"))
