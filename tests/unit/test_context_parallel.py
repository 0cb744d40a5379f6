"""Ranks that divide the tokens of a forward compute the velocity and the gradient of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from context_models import DIVISIBLE, PROMPTS, lively_model, one_pass, passes, passes_on_ranks, trained
from rank_cases import assert_close_metrics
from rank_processes import on_ranks
from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.models.blocks import repeated_blocks
from digenrl.models.parallel.context_parallel import check_ranks, divide_tokens
from digenrl.models.parallel.token_exchange import TokenExchange, TokenShares
from digenrl.models.registry import FAMILIES


def error_of(ours: Tensor, expected: Tensor) -> float:
    """The largest absolute error of some values, relative to the largest value if that is above 1."""
    return float((ours - expected).abs().max() / expected.abs().max().clamp(min=1))


def test_four_ranks_give_the_velocity_and_gradient_of_one_process(tmp_path: Path) -> None:
    """Two ranks that divide the tokens are among those that train, below."""
    assert {"sd3", "flux", "qwen_image", "wan", "hunyuan_video"} <= set(DIVISIBLE)
    on_each = on_ranks(4, tmp_path, passes_on_ranks)
    for family in DIVISIBLE:
        expected = passes(family)
        for one, *several in zip(expected, *(each[family] for each in on_each), strict=True):
            for each in several:
                assert torch.equal(each.velocity, several[0].velocity), "the same bits on all ranks"
            assert error_of(several[0].velocity, one.velocity) < 1e-6, family
            assert several[0].gradients.keys() == one.gradients.keys()
            errors = [error_of(several[0].gradients[name], value) for name, value in one.gradients.items()]
            assert max(errors) < 1e-6, family
            assert max(float(value.abs().max()) for value in one.gradients.values()) > 1e-2


@pytest.mark.parametrize(("base", "ranks"), [("int8", 2), ("sharded", 4)])
def test_pairs_of_cards_that_train_each_sample_together_train_as_one_process(
    base: str | None, ranks: int, tmp_path: Path
) -> None:
    several = on_ranks(ranks, tmp_path, trained, 2, base)
    weights, metrics = trained(None, 1, base)
    published, their_metrics = several[0]
    assert published.keys() == weights.keys()
    assert max(error_of(published[name], value) for name, value in weights.items()) < 1e-6
    assert all(each == their_metrics for _, each in several)
    assert_close_metrics(their_metrics, metrics)


def test_more_ranks_than_divide_the_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 cards per sample .* 4 attention heads"):
        divide_tokens(lively_model("wan"), TokenExchange(0, 3))


@pytest.mark.parametrize("family", ["z_image", "sd15"])  # no number of heads is in their configuration
def test_a_family_that_cannot_be_divided_is_refused_before_anything_is_loaded(family: str) -> None:
    kind, transformer = FAMILIES[family].model_class, FAMILIES[family].build_transformer(torch.float32, "meta")
    with pytest.raises(ConfigError, match="one card per sample"):
        check_ranks(kind.family, kind.self_attention, transformer, 2)


class _OwnAttention:
    """An attention processor that does not use torch's attention."""

    def __call__(self, attn: Any, hidden_states: Tensor, *others: Any, **named: Any) -> Tensor:
        return hidden_states


def test_attention_that_would_leave_out_the_tokens_of_other_ranks_is_refused() -> None:
    model = lively_model("wan")
    repeated_blocks(model.transformer)[0].attn1.processor = _OwnAttention()
    divide_tokens(model, TokenExchange(0, 2))
    with pytest.raises(RuntimeError, match="_OwnAttention"):
        one_pass(model, "wan", PROMPTS[:1], checkpointed=False)


def test_every_token_belongs_to_exactly_one_rank() -> None:
    joint = torch.arange(7 + 5)
    shares = [TokenShares(rank, 4, image=7, text=5) for rank in range(4)]
    pieces = [each.own(joint, 0, "text", "image") for each in shares]
    assert [len(piece) for piece in pieces] == shares[0].sizes("image", "text") == [4, 3, 3, 2]
    assert sorted(torch.cat(pieces).tolist()) == joint.tolist()
    assert pieces[0].tolist() == [0, 1, 5, 6], "the first text tokens, then the first of the image"
