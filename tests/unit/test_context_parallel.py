"""Ranks that divide the tokens of a forward compute the velocity and the gradient of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from context_models import PROMPTS, lively_model, one_pass, passes_on_ranks
from rank_processes import on_ranks
from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.models.context_parallel import divide_tokens
from digenrl.models.registry import FAMILIES
from digenrl.models.token_exchange import TokenExchange, TokenShares

# Both prompts together need a mask where texts have different lengths; a single one has none.
CASES = [
    (family, prompts, checkpointed)
    for family in FAMILIES
    for prompts, checkpointed in ((PROMPTS, False), (PROMPTS[:1], True))
]


def error_of(ours: Tensor, expected: Tensor) -> float:
    """The largest absolute error of some values, relative to the largest value if that is above 1."""
    return float((ours - expected).abs().max() / expected.abs().max().clamp(min=1))


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_give_the_velocity_and_gradient_of_one_process(ranks: int, tmp_path: Path) -> None:
    on_each = on_ranks(ranks, tmp_path, passes_on_ranks, CASES)
    for case, *several in zip(CASES, *on_each, strict=True):
        one = one_pass(lively_model(case[0]), *case)
        for each in several:
            assert torch.equal(each.velocity, several[0].velocity), "the same bits on all ranks"
        assert error_of(several[0].velocity, one.velocity) < 1e-6, case
        assert several[0].gradients.keys() == one.gradients.keys()
        differences = [error_of(several[0].gradients[name], value) for name, value in one.gradients.items()]
        assert max(differences) < 1e-6, case
        assert max(float(value.abs().max()) for value in one.gradients.values()) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_more_ranks_than_divide_the_heads_are_refused(family: str) -> None:
    with pytest.raises(ConfigError, match=r"3 cards per sample .* 4 attention heads"):
        divide_tokens(lively_model(family), TokenExchange(0, 3))


def test_every_token_belongs_to_exactly_one_rank() -> None:
    joint = torch.arange(7 + 5)
    shares = [TokenShares(rank, 4, image=7, text=5) for rank in range(4)]
    pieces = [each.own(joint, 0, "text", "image") for each in shares]
    assert [len(piece) for piece in pieces] == shares[0].sizes("image", "text") == [4, 3, 3, 2]
    assert sorted(torch.cat(pieces).tolist()) == joint.tolist()
    assert pieces[0].tolist() == [0, 1, 5, 6], "the first text tokens, then the first of the image"
