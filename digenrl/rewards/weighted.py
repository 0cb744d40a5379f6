"""Several rewards as one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from digenrl.rewards.contract import Metadata, Reward, RewardBatch


class WeightedReward(Reward):
    """The sum of raw scores times weights. Parts: `label` for each raw score, `label/part` for its own parts.

    One reward that fails fails the sample: a sum with a term missing would be another reward.
    """

    def __init__(self, rewards: Sequence[tuple[Reward, float]]) -> None:
        super().__init__(" + ".join(reward.label for reward, _ in rewards))
        assert rewards, "a weighted reward needs at least one"
        self.rewards = tuple(rewards)

    def _score(
        self,
        pixels_BFCHW: Tensor,
        prompts: Sequence[str],
        metadata: Sequence[Metadata],
    ) -> RewardBatch:
        parts: dict[str, tuple[float, ...]] = {}
        weighted = []
        for reward, weight in self.rewards:
            batch = reward.score(pixels_BFCHW, prompts, metadata)
            weighted.append([weight * value for value in batch.values])
            parts[reward.label] = batch.values
            parts.update({f"{reward.label}/{name}": part for name, part in batch.parts.items()})
        return RewardBatch(tuple(math.fsum(terms) for terms in zip(*weighted, strict=True)), parts)
