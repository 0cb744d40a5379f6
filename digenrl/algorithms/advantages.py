"""From a group's rewards to advantages: A = (r - mean of group) / (std + eps), clamped to +-clamp.

The std is over the group or over the whole batch, or nothing is divided. The std of a batch does not prevent
streaming: every loss is homogeneous in the advantages, apart from terms that do not depend on them. Training can
start with r - mean, and the accumulated gradient is scaled by 1 / (std + eps) when the batch is complete.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

ZERO_SPREAD = 1e-6  # of the largest reward: rounding rarely leaves a std of exactly 0


def checked_rewards(rewards: Sequence[float]) -> Sequence[float]:
    """The rewards of one group; raises ValueError unless there are at least two and all are finite."""
    if len(rewards) < 2:
        raise ValueError(
            f"a group needs at least 2 rewards to be compared, got {len(rewards)}; raise samples_per_prompt"
        )
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            raise ValueError(f"reward of sample {index} is {reward}; a reward must be a finite number")
    return rewards


def std_of(values: Sequence[float], ddof: int) -> float:
    """The standard deviation, summed exactly: independent of the order of the values."""
    center = fmean(values)
    return math.sqrt(math.fsum((value - center) ** 2 for value in values) / (len(values) - ddof))


def centered(rewards: Sequence[float]) -> tuple[float, ...]:
    """r - mean of the group."""
    center = fmean(rewards)
    return tuple(reward - center for reward in rewards)


def has_spread(rewards: Sequence[float]) -> bool:
    """False if all samples of a group have the same reward, up to rounding."""
    return std_of(rewards, ddof=0) > ZERO_SPREAD * max(map(abs, rewards))


def normalized_sum(
    scores_by_reward: Sequence[Sequence[float]], weights: Sequence[float], ddof: int, eps: float
) -> tuple[float, ...]:
    """GDPO's reward of a group's samples: the sum of weight * (r - mean of group) / (std of group + eps).

    Each reward has the same influence per weight, whatever its scale. One without spread adds 0.
    """
    terms = []
    for scores, weight in zip(scores_by_reward, weights, strict=True):
        checked_rewards(scores)
        factor = weight / (std_of(scores, ddof) + eps) if has_spread(scores) else 0.0
        terms.append([factor * deviation for deviation in centered(scores)])
    return tuple(math.fsum(values) for values in zip(*terms, strict=True))
