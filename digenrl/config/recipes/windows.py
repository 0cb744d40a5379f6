"""Windows: which denoising steps of a rollout are stochastic, and how many of them are kept for training.

The last step of a schedule is never kept, so that at most N - 1 of N steps are, and has no noise unless a recipe
sets `sample.last_step_noise`. The steps themselves are chosen by `digenrl.generation.windows`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal, get_args

from pydantic import Field

from digenrl.config.reading import ConfigError, Frozen, nearest, parse_model


class WindowSettings(Frozen):
    """Base of all windows; `kind` is the name that recipes use.

    With `covers_all_steps`, every step except the last is stochastic, and the last can be.
    """

    covers_all_steps: ClassVar[bool] = False

    kind: str

    @abstractmethod
    def kept_steps(self, steps: int) -> int:
        """How many of a sample's `steps` are kept for training, at most."""

    def trainable_steps(self, steps: int) -> range:
        """The steps that may be kept, by some sample."""
        return range(steps - 1)

    def check(self, steps: int) -> None:
        """Raises ConfigError if the window does not fit a schedule of this many steps."""
        kept, largest = self.kept_steps(steps), len(self.trainable_steps(steps))
        if kept < 1:
            raise ConfigError(f"window '{self.kind}' keeps no step of a schedule of {steps}; use more steps")
        if kept > largest:
            raise ConfigError(
                f"a window of {kept} steps is too wide for a schedule of {steps}, which allows {largest}; "
                "use a narrower window or more steps"
            )


class EulerOnly(WindowSettings):
    """No stochastic step, and none kept: for algorithms that train from the final latents."""

    kind: Literal["none"] = "none"

    def kept_steps(self, steps: int) -> int:
        return 0

    def check(self, steps: int) -> None:
        pass


class AllSteps(WindowSettings):
    """Flow-GRPO: every step except the last is stochastic, the first int(fraction * N) of them are kept."""

    covers_all_steps: ClassVar[bool] = True

    kind: Literal["all"] = "all"
    fraction: float = Field(default=0.99, gt=0, le=1)

    def kept_steps(self, steps: int) -> int:
        return min(int(self.fraction * steps), steps - 1)

    def trainable_steps(self, steps: int) -> range:
        return range(self.kept_steps(steps))


class RandomSubset(WindowSettings):
    """DanceGRPO: every step except the last is stochastic, a random int(fraction * (N - 1)) of them are kept."""

    covers_all_steps: ClassVar[bool] = True

    kind: Literal["random_subset"] = "random_subset"
    fraction: float = Field(default=0.6, gt=0, le=1)

    def kept_steps(self, steps: int) -> int:
        return int(self.fraction * (steps - 1))


class SlidingWindow(WindowSettings):
    """MixGRPO: steps [l, l + width) are stochastic and kept; l grows by 1 every `training_steps_per_shift`.

    l returns to 0 when it reaches N - 2. Near the end of the schedule the window is cut before the last step.
    """

    kind: Literal["sliding"] = "sliding"
    width: int = Field(default=4, ge=1)
    training_steps_per_shift: int = Field(default=25, ge=1)

    def kept_steps(self, steps: int) -> int:
        return self.width

    def trainable_steps(self, steps: int) -> range:
        return range(steps - 1 if steps > 2 else 0)


class FastWindow(WindowSettings):
    """Flow-GRPO-Fast: steps [l, l + width) are stochastic and kept, l uniform in [0, N // 2 - width]."""

    kind: Literal["fast"] = "fast"
    width: int = Field(default=2, ge=1)

    def kept_steps(self, steps: int) -> int:
        return self.width

    def trainable_steps(self, steps: int) -> range:
        return range(min(steps // 2, steps - 1))


class SparseWindow(WindowSettings):
    """`count` random steps of the first int(fraction * N), without the first `skip`, are stochastic and kept.

    They are drawn for every group (Flash-GRPO), or for all groups of a training step (Flow-DPPO).
    """

    kind: Literal["sparse"] = "sparse"
    count: int = Field(default=1, ge=1)
    fraction: float = Field(default=0.5, gt=0, le=1)
    skip: int = Field(default=0, ge=0)
    drawn_per: Literal["group", "training_step"] = "group"

    def trainable_steps(self, steps: int) -> range:
        return range(self.skip, min(int(self.fraction * steps), steps - 1))

    def kept_steps(self, steps: int) -> int:
        return self.count


Window = EulerOnly | AllSteps | RandomSubset | SlidingWindow | FastWindow | SparseWindow

WINDOWS: dict[str, type[Window]] = {each.model_fields["kind"].default: each for each in get_args(Window)}


def read_window(settings: Mapping[str, object]) -> Window:
    """The window that a recipe's settings describe, such as {"kind": "fast", "width": 3}."""
    kind = str(settings.get("kind", ""))
    if kind not in WINDOWS:
        raise ConfigError(f"unknown window kind '{kind}'; {nearest(kind, list(WINDOWS))}")
    return parse_model(WINDOWS[kind], dict(settings))
