"""Chooses the prompt of a group, as a pure function of (seed, step, group)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from digenrl.config.reading import ConfigError
from digenrl.prompts.sources import Prompt


class PromptSampler:
    """Draws `prompts_per_step` prompts per step. Every prompt occurs once per epoch; each epoch has its own order.

    A step may contain the end of one epoch and the start of the next.
    """

    def __init__(self, prompts: Sequence[Prompt], prompts_per_step: int, seed: int, shuffle: bool = True) -> None:
        if not prompts:
            raise ConfigError("no prompts to sample from; at least one is needed")
        if prompts_per_step < 1:
            raise ConfigError(f"prompts per step must be at least 1, got {prompts_per_step}")
        self.prompts = tuple(prompts)
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self.shuffle = shuffle

    def prompt_for(self, step: int, group: int) -> Prompt:
        """The prompt of a group.

        Groups from `prompts_per_step` on replace groups that failed. Their prompts are drawn from those that the
        step does not have yet, if there are any; no other group changes.
        """
        if step < 0 or group < 0:
            raise ValueError(f"step and group are counted from 0, got step {step} and group {group}")
        if group < self.prompts_per_step:
            return self.prompts[self._index(step * self.prompts_per_step + group)]
        own = {self.prompt_for(step, other).id for other in range(self.prompts_per_step)}
        spare = [prompt for prompt in self.prompts if prompt.id not in own] or list(self.prompts)
        order = _shuffled(len(spare), f"{self.seed}/replacements of step {step}")
        return spare[order[(group - self.prompts_per_step) % len(spare)]]

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, len(self.prompts))
        return _shuffled(len(self.prompts), f"{self.seed}/epoch {epoch}")[place] if self.shuffle else place


@lru_cache(maxsize=4)
def _shuffled(count: int, key: str) -> tuple[int, ...]:
    """0 to count - 1 in an order that depends only on the key, on every machine and Python version."""
    return tuple(
        sorted(range(count), key=lambda index: blake2b(f"{key}/{index}".encode(), digest_size=16).digest())
    )
