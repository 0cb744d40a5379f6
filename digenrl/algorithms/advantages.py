"""From a group's rewards to advantages: A = (r - mean of group) / (std + eps), held to +-clamp.

The std is over the group or over the whole batch. A batch's std does not stop streaming: every loss here is
homogeneous in the advantages but for parts that do not depend on them, so that training may begin with r - mean,
and the accumulated gradient is scaled by 1 / (std + eps) when the batch is whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from digenrl.config.reading import Frozen

ZERO_SPREAD = 1e-6  # a group whose std is below this teaches nothing; rounding keeps it from being exactly 0


class AdvantageSettings(Frozen):
    """How rewards are normalised."""

    std_over: Literal["group", "batch"] = "group"
    ddof: Literal[0, 1] = 0
    eps: float = Field(default=1e-4, gt=0)
    clamp: float = Field(default=5.0, gt=0)


class WholeBatchStd(AdvantageSettings):
    """Flow-GRPO's defaults."""

    std_over: Literal["group", "batch"] = "batch"


class GroupSampleStd(AdvantageSettings):
    """The defaults of DanceGRPO and MixGRPO: each group's own std, of G - 1 degrees of freedom."""

    ddof: Literal[0, 1] = 1
    eps: float = Field(default=1e-8, gt=0)


def checked_rewards(rewards: Sequence[float]) -> Sequence[float]:
    """The rewards of one group, all finite and at least two; anything else raises before an advantage exists."""
    if len(rewards) < 2:
        raise ValueError(f"a group needs at least 2 rewards to be compared, got {len(rewards)}; raise group_size")
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise ValueError(f"reward of sample {index} is {reward}; a reward must be a finite number")
    return rewards


def mean_of(values: Sequence[float]) -> float:
    """The mean, summed exactly: independent of the order of the values."""
    return math.fsum(values) / len(values)


def std_of(values: Sequence[float], ddof: int) -> float:
    """The standard deviation, summed exactly."""
    center = mean_of(values)
    return math.sqrt(math.fsum((value - center) ** 2 for value in values) / (len(values) - ddof))


def centered(rewards: Sequence[float]) -> tuple[float, ...]:
    """r - mean of the group."""
    center = mean_of(rewards)
    return tuple(reward - center for reward in rewards)


def has_spread(rewards: Sequence[float]) -> bool:
    """False for a group whose samples were all rewarded alike."""
    return std_of(rewards, ddof=0) >= ZERO_SPREAD


def clamped(value: float, limit: float) -> float:
    """`value`, held to +-limit."""
    return max(-limit, min(limit, value))
