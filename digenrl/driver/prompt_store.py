"""Prompts of a run: which group has which, and which of them are encoded. No torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from digenrl.prompts.sampler import PromptSampler
from digenrl.prompts.sources import Prompt
from digenrl.worker.orders import EncodedPrompt, EncodePrompts


class PromptStore:
    """Has prompts encoded ahead of their use, each once, and keeps the rows of the last `kept` of them.

    `send` hands an order to the encoder and `drop` frees a row. Rows of steps that are open are never dropped.
    """

    def __init__(
        self,
        sampler: PromptSampler,
        send: Callable[[EncodePrompts], None],
        drop: Callable[[str], None],
        kept: int = 1024,
    ) -> None:
        self._sampler, self._send, self._drop, self._kept = sampler, send, drop, kept
        self._rows: OrderedDict[str, bool] = OrderedDict()  # asked for, oldest use first -> encoded
        self._open: dict[int, set[str]] = {}  # rows by step

    def prompt(self, step: int, group: int) -> EncodedPrompt:
        """The prompt of a group."""
        return as_encoded(self._sampler.prompt_for(step, group), "prompt")

    def open_step(self, step: int) -> None:
        """Has the step's prompts encoded."""
        self.ask_for(step, [self.prompt(step, group) for group in range(self._sampler.prompts_per_step)])

    def ask_for(self, step: int, prompts: Iterable[EncodedPrompt]) -> None:
        """Has these prompts encoded and keeps them while the step is open."""
        wanted = {prompt.row: prompt for prompt in prompts}
        self._open.setdefault(step, set()).update(wanted)
        missing = tuple(prompt for row, prompt in wanted.items() if row not in self._rows)
        for row in wanted:
            self._rows.setdefault(row, False)
            self._rows.move_to_end(row)
        if missing:
            self._send(EncodePrompts(missing))

    def close_step(self, step: int) -> None:
        """The step is committed: its rows may go when room is needed."""
        self._open.pop(step, None)
        in_use = set().union(*self._open.values())
        droppable = [row for row, encoded in self._rows.items() if encoded and row not in in_use]
        for row in droppable[: max(0, len(self._rows) - self._kept)]:
            del self._rows[row]
            self._drop(row)

    def mark_encoded(self, rows: Iterable[str]) -> None:
        """These rows lie in the exchange."""
        for row in rows:
            self._rows[row] = True

    def is_encoded(self, prompt: EncodedPrompt) -> bool:
        """Whether the prompt's row lies in the exchange."""
        return self._rows.get(prompt.row, False)

    def all_encoded(self) -> bool:
        """Whether nothing that was asked for is missing."""
        return all(self._rows.values())


def as_encoded(prompt: Prompt, kind: str) -> EncodedPrompt:
    """The prompt with the name that its row has, by kind and place in its file."""
    return EncodedPrompt(f"{kind}-{prompt.id}", prompt.text, prompt.metadata)
