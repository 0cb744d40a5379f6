"""The prompts of a run: which group has which, and which of them are encoded. Needs no torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from digenrl.prompts.sampler import PromptSampler
from digenrl.prompts.source_images import image_bytes, pair_bytes
from digenrl.prompts.sources import Prompt
from digenrl.records import HELD_OUT_STEP, PromptRow


class PromptStore:
    """Knows the rows of encoded prompts in the exchange and keeps the last `kept` of them; `drop` frees a row.

    Rows of open steps and of held-out prompts are never dropped.
    """

    def __init__(
        self,
        sampler: PromptSampler,
        drop: Callable[[str], None],
        held_out: Sequence[Prompt] = (),
        kept: int = 1024,
    ) -> None:
        self._sampler, self._drop, self._kept = sampler, drop, kept
        self.held_out = tuple(_row(prompt, held_out=True) for prompt in held_out)
        self._with_images = {
            _row(prompt, is_held_out).row: prompt
            for prompts, is_held_out in ((sampler.prompts, False), (held_out, True))
            for prompt in prompts
            if prompt.images or prompt.pair
        }
        self._encoded: OrderedDict[str, None] = OrderedDict()  # least recently used first
        self._open: dict[int, set[str]] = {}  # rows by step

    def row(self, step: int, group: int) -> PromptRow:
        """The prompt of a group, or a held-out prompt."""
        if step == HELD_OUT_STEP:
            return self.held_out[group]
        return _row(self._sampler.prompt_for(step, group), held_out=False)

    def groups(self, step: int) -> tuple[int, ...]:
        """The groups of a step before any is replaced; all held-out prompts for HELD_OUT_STEP."""
        return tuple(range(len(self.held_out) if step == HELD_OUT_STEP else self._sampler.prompts_per_step))

    def missing(self, step: int, groups: Iterable[int]) -> tuple[PromptRow, ...]:
        """The prompts of these groups that are not encoded. All of them are kept until the step is closed."""
        wanted = {row.row: row for row in (self.row(step, group) for group in groups)}
        self._open.setdefault(step, set()).update(wanted)
        for row in wanted:
            if row in self._encoded:
                self._encoded.move_to_end(row)
        return tuple(prompt for row, prompt in wanted.items() if row not in self._encoded)

    def images(self, prompts: Sequence[PromptRow]) -> tuple[tuple[bytes, ...], ...]:
        """The source images and pairs of these prompts, read from their files; empty if no prompt has any."""
        if not any(prompt.sources or prompt.paired for prompt in prompts):
            return ()
        return tuple(self._image_bytes(prompt) for prompt in prompts)

    def _image_bytes(self, prompt: PromptRow) -> tuple[bytes, ...]:
        sources = image_bytes(self._with_images[prompt.row]) if prompt.sources else ()
        return sources + (pair_bytes(self._with_images[prompt.row]) if prompt.paired else ())

    def add_encoded(self, prompts: Iterable[PromptRow]) -> None:
        """The prompts' rows are in the exchange."""
        self._encoded |= dict.fromkeys(prompt.row for prompt in prompts)

    def forget(self, row: str) -> None:
        """The row was lost."""
        self._encoded.pop(row, None)

    def is_encoded(self, prompt: PromptRow) -> bool:
        """Whether the prompt's row is in the exchange."""
        return prompt.row in self._encoded

    def close_step(self, step: int, pending: Iterable[PromptRow] = ()) -> None:
        """The step is committed: its rows may be dropped to make room, except those that `pending` jobs read."""
        self._open.pop(step, None)
        in_use = {prompt.row for prompt in pending}.union(*self._open.values())
        droppable = [row for row in self._encoded if row not in in_use]
        for row in droppable[: max(0, len(self._encoded) - self._kept)]:
            del self._encoded[row]
            self._drop(row)


def _row(prompt: Prompt, held_out: bool) -> PromptRow:
    """The prompt with the name of its row, by kind and place in its file. Held-out prompts have no pair."""
    name = f"{'held-out-prompt' if held_out else 'prompt'}-{prompt.id}"
    paired = bool(prompt.pair) and not held_out
    return PromptRow(name, prompt.text, prompt.metadata, len(prompt.images), held_out, paired, prompt.where)
