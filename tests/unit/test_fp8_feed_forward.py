"""Fused feed-forward layers with fp8 weights compute what the layers compute one after the other."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention import FeedForward
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock
from torch import Tensor, nn

from digenrl.models.passes.fused_gelu import fuse_gelus
from digenrl.models.quantized.feed_forward import (
    Fp8FeedForward,
    Fp8FluxBlock,
    fuse_feed_forwards,
    gelu_fp8,
    gelu_fp8_backward,
)
from digenrl.models.quantized.layers import QuantizedLinear

TOKENS, WIDTH, HIDDEN = 6, 32, 96


def quantized(module: nn.Module, precision: str = "fp8") -> nn.Module:
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, QuantizedLinear(child, precision))
    return module


def feed_forward() -> nn.Module:
    return FeedForward(WIDTH, inner_dim=HIDDEN, activation_fn="gelu-approximate")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ff = quantized(feed_forward())

    def forward(self, x: Tensor) -> Tensor:
        return self.ff(x)


def output_and_gradient(module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The outputs, and the gradients of all inputs for a fixed gradient of the outputs."""
    inputs = tuple(each.clone().requires_grad_() for each in inputs)
    results = module(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    weights = [torch.linspace(-1, 1, each.numel()).view_as(each) for each in results]
    torch.autograd.backward(results, weights)
    return [*results, *(each.grad for each in inputs if each.grad is not None)]


@pytest.mark.parametrize("kind", ["feed-forward", "single block"])
def test_fused_layers_have_the_outputs_and_gradients_of_separate_ones(kind):
    torch.manual_seed(0)
    x = torch.randn(2, TOKENS, WIDTH)
    if kind == "feed-forward":
        block, inputs, expected_class = Block(), (x,), Fp8FeedForward
    else:
        block = quantized(FluxSingleTransformerBlock(WIDTH, num_attention_heads=2, attention_head_dim=16))
        inputs, expected_class = (x, torch.randn(2, 3, WIDTH), torch.randn(2, WIDTH)), Fp8FluxBlock
    expected = output_and_gradient(block, inputs)
    fuse_gelus(block)
    fuse_feed_forwards(block)
    assert any(isinstance(layer, expected_class) for layer in block.modules())
    eager = output_and_gradient(block, inputs)
    fused = output_and_gradient(torch.compile(block, backend="aot_eager", fullgraph=True), inputs)
    assert all(torch.equal(one, other) for one, other in zip(eager, expected, strict=True))
    for one, other in zip(fused, expected, strict=True):
        # A sigmoid rounds differently from a tanh, and a value may be quantized to a neighboring one.
        assert (one - other).norm() < 5e-3 * other.norm()


def test_layers_with_other_weights_are_not_fused():
    block = Block()
    block.ff = quantized(feed_forward(), "int8")
    fuse_feed_forwards(block)
    assert type(block.ff) is FeedForward


def test_what_is_beside_shares_the_scale_of_its_row():
    product, bias, beside = torch.randn(TOKENS, HIDDEN), torch.randn(HIDDEN), 100 * torch.randn(TOKENS, WIDTH)
    values, scale = gelu_fp8(product, bias, beside)
    expected = torch.cat([beside, nn.functional.gelu(product + bias, approximate="tanh")], dim=1)
    assert values.shape == expected.shape and scale.shape == (TOKENS, 1)
    assert ((values.float() * scale - expected).abs() <= expected.abs() / 16 + scale / 512).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("hidden", [12288, 13824, 6144])
def test_kernels_round_as_the_operators_on_a_cpu(hidden):
    product, gradient = (torch.randn(64, hidden, dtype=torch.bfloat16) for _ in range(2))
    bias, beside = torch.randn(hidden, dtype=torch.bfloat16), torch.randn(64, 3072, dtype=torch.bfloat16)
    joined = torch.cat([beside, gradient], dim=1)
    for operator, inputs in (
        (gelu_fp8, lambda device: (product.to(device), bias.to(device), None)),
        (gelu_fp8, lambda device: (product.to(device), bias.to(device), beside.to(device))),
        (gelu_fp8_backward, lambda device: (joined.to(device)[:, 3072:], product.to(device), bias.to(device))),
    ):
        expected, found = (
            [each.float().cpu() for each in operator(*inputs(device))] for device in ("cpu", "cuda")
        )
        torch.testing.assert_close(found[1], expected[1], rtol=1e-2, atol=0)
        wanted = expected[0] * expected[1]
        assert (found[0] * found[1] - wanted).norm() < 0.02 * wanted.norm()
