"""A user's own reward: any importable function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from torch import Tensor

from digenrl.config.reading import ConfigError, nearest
from digenrl.config.rewards import FunctionSettings
from digenrl.rewards.contract import Metadata, Reward, RewardBatch, RewardError


class FunctionReward(Reward):
    """Calls `function(pixels_BFCHW, prompts, metadata, **arguments)`.

    It returns one number per sample (a list, a tensor of shape (B,)) or a RewardBatch.
    """

    def __init__(self, label: str, function: Callable[..., Any], arguments: Metadata) -> None:
        super().__init__(label)
        self.function = function
        self.arguments = dict(arguments)

    def _score(
        self,
        pixels_BFCHW: Tensor,
        prompts: Sequence[str],
        metadata: Sequence[Metadata],
    ) -> RewardBatch:
        answer = self.function(pixels_BFCHW, prompts, metadata, **self.arguments)
        if isinstance(answer, RewardBatch):
            return answer
        if isinstance(answer, Tensor):
            answer = answer.detach().tolist()
        if not isinstance(answer, Sequence) or isinstance(answer, str):
            raise RewardError(self.label, f"expected a list of numbers or a RewardBatch, got {answer!r}")
        return RewardBatch(tuple(self._number(index, value) for index, value in enumerate(answer)))

    def _number(self, index: int, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            raise RewardError(self.label, f"expected a number, got {value!r}", (index,)) from None


def build(settings: FunctionSettings) -> FunctionReward:
    """Imports the function; a wrong name is told with the nearest right one."""
    module_name, _, name = settings.target.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, something that it imports is not
        raise ConfigError(
            f"reward '{settings.target}': no module named '{error.name}'; is it on PYTHONPATH or installed?"
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"reward '{settings.target}': {module_name} has no function '{name}'; {nearest(name, known)}"
        )
    return FunctionReward(settings.shown_as, function, settings.arguments)
