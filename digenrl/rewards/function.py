"""Rewards outside this package: any importable function or subclass of `Reward`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor

from digenrl.config.import_paths import import_object
from digenrl.config.reading import ConfigError, one_line
from digenrl.config.rewards.table import FunctionSettings
from digenrl.rewards.contract import Metadata, Reward, RewardBatch, RewardError


class FunctionReward(Reward):
    """Calls `function(pixels_BFCHW, prompts, metadata, **arguments)`.

    If it `scores` groups, calls `function(pixels_BFCHW, prompt, metadata, **arguments)` with the prompt that all
    samples have, and its metadata. The function returns one number per sample (a list, tensor or array of
    shape (B,)) or a RewardBatch.
    """

    def __init__(
        self,
        label: str,
        function: Callable[..., Any],
        arguments: Metadata,
        scores: Literal["samples", "groups"] = "samples",
    ) -> None:
        super().__init__(label)
        self.function = function
        self.arguments = dict(arguments)
        self.scores = scores

    def _score(self, pixels_BFCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> RewardBatch:
        if self.scores == "groups":
            if any(prompt != prompts[0] for prompt in prompts):
                raise RewardError(self.label, f"compares samples of one prompt, got {len(set(prompts))} prompts")
            answer = self.function(pixels_BFCHW, prompts[0], metadata[0], **self.arguments)
        else:
            answer = self.function(pixels_BFCHW, prompts, metadata, **self.arguments)
        if isinstance(answer, RewardBatch):
            return answer
        if hasattr(answer, "tolist"):  # a tensor or an array
            answer = answer.tolist()
        if not isinstance(answer, Sequence) or isinstance(answer, str):
            raise RewardError(self.label, f"expected a list of numbers or a RewardBatch, got {answer!r}")
        return RewardBatch(tuple(self._number(index, value) for index, value in enumerate(answer)))

    def _number(self, index: int, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            raise RewardError(self.label, f"expected a number, got {value!r}", (index,)) from None


def build(settings: FunctionSettings) -> Reward:
    """The reward of an imported function or class, isolated or not; raises ConfigError if it cannot be built."""
    if settings.isolated:
        from digenrl.rewards.serving.isolated import IsolatedReward

        return IsolatedReward(settings)
    return build_here(settings)


def build_here(settings: FunctionSettings) -> Reward:
    """The reward in this process; raises ConfigError if its arguments are wrong."""
    target = import_target(settings)
    if not isinstance(target, type):
        return FunctionReward(settings.shown_as, target, settings.arguments, settings.scores)
    try:
        reward: Reward = target(settings.shown_as, **settings.arguments)
    except TypeError as error:
        raise ConfigError(f"reward '{settings.target}': {one_line(error)}; check its `arguments`") from error
    if not hasattr(reward, "label"):
        raise ConfigError(
            f"reward '{settings.target}': it has no label; call super().__init__(label) in its __init__"
        )
    return reward


def import_target(settings: FunctionSettings) -> Callable[..., Any]:
    """The function, or the subclass of `Reward`.

    Raises ConfigError if it does not exist, is something else, or does not take the settings' arguments.
    """
    target: Any = import_object(settings.target, what="reward", kind="function or class")
    if isinstance(target, type) and not issubclass(target, Reward):
        raise ConfigError(
            f"reward '{settings.target}': expected a function or a subclass of digenrl.rewards.contract.Reward, "
            f"got the class {target.__name__}; derive it from Reward or FrameReward"
        )
    if not callable(target):
        raise ConfigError(f"reward '{settings.target}': expected a function or class, got {target!r}")
    if inspect.isabstract(target):
        missing = ", ".join(sorted(target.__abstractmethods__))
        raise ConfigError(f"reward '{settings.target}': the class does not implement {missing}; add it")
    found: Callable[..., Any] = target
    _check_arguments(found, settings)
    return found


def _check_arguments(target: Callable[..., Any], settings: FunctionSettings) -> None:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # of a function in C
        return
    given = ("label",) if isinstance(target, type) else ("pixels", "prompts", "metadata")
    try:
        signature.bind(*given, **settings.arguments)
    except TypeError as error:
        raise ConfigError(
            f"reward '{settings.target}': {error}; it is called with {', '.join(given)} and its `arguments` "
            f"({', '.join(settings.arguments) or 'none'}), and takes {signature}"
        ) from None
