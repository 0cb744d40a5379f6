"""The reward face_count on a photograph that scikit-image contains."""

from __future__ import annotations

import pytest
import torch
from skimage import data
from torch import Tensor

from digenrl.config.rewards.table import parse_reward
from digenrl.rewards.building import build_reward
from digenrl.rewards.contract import RewardError


@pytest.fixture(scope="module")
def portrait() -> Tensor:
    """One person, (1, 1, 3, 512, 512)."""
    return torch.from_numpy(data.astronaut()).permute(2, 0, 1)[None, None].float() / 255


def test_faces_are_counted_against_the_wanted_number(portrait: Tensor) -> None:
    nobody, couple = torch.full_like(portrait, 0.5), torch.cat([portrait, portrait], dim=4)
    reward = build_reward(parse_reward({"name": "face_count", "faces": 1}))
    alone = reward.score(torch.cat([portrait, nobody]), ["a"] * 2, [{}, {"faces": None}])
    assert (alone.values, alone.parts["faces"], alone.parts["exact"]) == ((1.0, 0.0), (1.0, 0.0), (1.0, 0.0))
    two = reward.score(torch.cat([couple] * 3), ["a"] * 3, [{"faces": 2}, {"faces": 4}, {"faces": 0}])
    assert (two.values, two.parts["faces"]) == ((1.0, 0.5, 0.0), (2.0, 2.0, 2.0))


def test_the_wanted_number_must_be_known(portrait: Tensor) -> None:
    reward = build_reward(parse_reward("face_count"))
    with pytest.raises(RewardError, match=r"metadata `faces`.*None") as error:
        reward.score(torch.cat([portrait] * 2), ["a"] * 2, [{"faces": 1}, {}])
    assert error.value.samples == (1,)
