"""Splits work into batches that fit in memory; the size is found by halving when memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from digenrl.config.reading import ConfigError

Result = TypeVar("Result")


class RowLimit:
    """The largest number of rows that one kind of work processes at once; None until memory runs out.

    Reuse it for later rows, so that memory does not run out again. `doing` names the work in error messages, and
    `section` the part of the recipe that has the size of the samples. Work of several ranks together is never
    repeated: they would not agree on its size.
    """

    def __init__(
        self,
        largest: int | None = None,
        doing: str = "working on",
        section: str = "sample",
        several_ranks: bool = False,
    ) -> None:
        self.largest = largest
        self._doing, self._section, self._several_ranks = doing, section, several_ranks

    def run(
        self, rows: int, work: Callable[[slice], Result], save_memory: Callable[[], bool] = lambda: False
    ) -> list[Result]:
        """The results of `work` for all rows in order, in parts of about equal size that fit in memory.

        If a single row does not fit, `save_memory` makes `work` need less, or returns False.
        """
        results: list[Result] = []
        done = 0
        while done < rows:
            size = self._next_size(rows - done)
            part = self._try(work, slice(done, done + size), save_memory)
            if part is None:
                self.largest = (size + 1) // 2
            else:
                results.append(part[0])
                done += size
        return results

    def _next_size(self, left: int) -> int:
        parts = -(-left // min(left, self.largest or left))
        return -(-left // parts)

    def _try(
        self, work: Callable[[slice], Result], rows: slice, save_memory: Callable[[], bool]
    ) -> tuple[Result] | None:
        """None if memory ran out; raises ConfigError if it ran out for a single row and none can be saved."""
        try:
            return (work(rows),)
        except torch.OutOfMemoryError as error:
            if self._several_ranks:
                raise ConfigError(
                    f"memory ran out while {self._doing} {rows.stop - rows.start} samples on several cards, which "
                    "cannot try again with fewer; lower batch.slice or evaluation.batch"
                ) from error
            if rows.stop - rows.start == 1 and not save_memory():
                size = " or ".join(f"{self._section}.{key}" for key in ("height", "width", "frames"))
                raise ConfigError(
                    f"memory ran out while {self._doing} a single sample; lower {size}, use "
                    "model.dtype: bfloat16 with adapters (training.lora), model.vae_dtype: bfloat16, or a GPU "
                    "that no other process uses"
                ) from error
        # Outside the except block: the error's traceback would keep the tensors of the failed part alive.
        torch.cuda.empty_cache()  # does nothing without a GPU
        return None


@dataclass(frozen=True, slots=True)
class RowLimits:
    """The limits of one worker. Held-out samples have their own: they may have another size and guidance."""

    denoising: RowLimit
    decoding: RowLimit
    held_out_denoising: RowLimit
    held_out_decoding: RowLimit

    @classmethod
    def decoding_at_most(cls, rows: int | None, several_ranks: bool = False) -> RowLimits:
        """Limits of which only that of decoding is known, if any. Several ranks may denoise together."""
        limits = [
            RowLimit(largest, doing, section, several_ranks and doing == "denoising")
            for section in ("sample", "evaluation")
            for doing, largest in (("denoising", None), ("decoding", rows))
        ]
        return cls(*limits)
