"""Which prompt a group gets: a pure function of (seed, step, group), whoever asks, when and how often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from digenrl.config.reading import ConfigError
from digenrl.prompts.sources import Prompt

STATE_FORMAT = 1


class PromptSampler:
    """Draws `prompts_per_step` prompts a step. Every prompt comes once per epoch; each epoch has its own order.

    A step may lie across the border of two epochs. `take_step` moves on; `prompt_for` looks without moving.
    """

    def __init__(
        self, prompts: Sequence[Prompt], prompts_per_step: int, seed: int, shuffle: bool = True, next_step: int = 0
    ) -> None:
        if not prompts:
            raise ConfigError("no prompts to sample from; at least one is needed")
        if prompts_per_step < 1:
            raise ConfigError(f"prompts per step must be at least 1, got {prompts_per_step}")
        self.prompts = tuple(prompts)
        self.prompts_per_step = prompts_per_step
        self.seed = seed
        self.shuffle = shuffle
        self.next_step = next_step

    def prompt_for(self, step: int, group: int) -> Prompt:
        """The prompt of a group.

        Groups below `prompts_per_step` are the step's own. Higher ones replace groups that failed: they are drawn
        from the prompts that the step does not have yet, where there are any, and no other group changes.
        """
        if step < 0 or group < 0:
            raise ValueError(f"step and group are counted from 0, got step {step} and group {group}")
        if group < self.prompts_per_step:
            return self.prompts[self._index(step * self.prompts_per_step + group)]
        own = {self.prompt_for(step, other).id for other in range(self.prompts_per_step)}
        spare = [prompt for prompt in self.prompts if prompt.id not in own] or list(self.prompts)
        order = _shuffled(len(spare), f"{self.seed}/replacements of step {step}")
        return spare[order[(group - self.prompts_per_step) % len(spare)]]

    def take_step(self) -> tuple[Prompt, ...]:
        """The next step's prompts, one per group."""
        step = self.next_step
        self.next_step = step + 1
        return tuple(self.prompt_for(step, group) for group in range(self.prompts_per_step))

    def state(self) -> dict[str, int | bool | str]:
        """Where it stands, for `json.dumps`; small whatever the number of prompts."""
        return {
            "format": STATE_FORMAT,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "prompts_per_step": self.prompts_per_step,
            "next_step": self.next_step,
            "prompts": fingerprint(self.prompts),
        }

    @classmethod
    def resumed(cls, prompts: Sequence[Prompt], state: Mapping[str, Any]) -> PromptSampler:
        """The sampler that `state` was taken of; the prompts must be the same, in the same order."""
        if state.get("format") != STATE_FORMAT:
            raise ConfigError(f"prompt sampler state of format {state.get('format')!r}; known: {STATE_FORMAT}")
        if state["prompts"] != fingerprint(prompts):
            raise ConfigError(
                "the prompts have changed since this run was saved; resume with the same file, or start anew"
            )
        return cls(prompts, state["prompts_per_step"], state["seed"], state["shuffle"], state["next_step"])

    def _index(self, position: int) -> int:
        epoch, place = divmod(position, len(self.prompts))
        return _shuffled(len(self.prompts), f"{self.seed}/epoch {epoch}")[place] if self.shuffle else place


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Differs where any text, or the order of texts, differs."""
    digest = blake2b(digest_size=16)
    for prompt in prompts:
        encoded = prompt.text.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "big") + encoded)
    return digest.hexdigest()


@lru_cache(maxsize=4)
def _shuffled(count: int, key: str) -> tuple[int, ...]:
    """0 to count - 1 in an order that depends on the key alone, on every machine and Python version."""
    return tuple(
        sorted(range(count), key=lambda index: blake2b(f"{key}/{index}".encode(), digest_size=16).digest())
    )
