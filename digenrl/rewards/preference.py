"""The preference that a pair in a file states: 1 for its chosen image, 0 for its rejected one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from digenrl.config.rewards.table import PreferenceSettings
from digenrl.rewards.contract import PREFERRED, Metadata, Reward, RewardBatch, RewardError


class PreferenceReward(Reward):
    """Looks at no pixels."""

    def _score(self, pixels_BFCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> RewardBatch:
        unpaired = tuple(index for index, one in enumerate(metadata) if PREFERRED not in one)
        if unpaired:
            raise RewardError(self.label, "is not an image of a pair; set prompts.pair_columns", unpaired)
        return RewardBatch(tuple(float(one[PREFERRED]) for one in metadata))


def build(settings: PreferenceSettings) -> PreferenceReward:
    return PreferenceReward(settings.shown_as)
