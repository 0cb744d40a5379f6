"""Formats of quantized weights: their values, their error, and the gradient of the input."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from digenrl.config.recipes.base_precision import STORED_BYTES, TRAINING_COPIES
from digenrl.models.quantized.formats import FP8_LARGEST, INT8_LARGEST, NF4_LEVELS, quantize_nf4
from digenrl.models.quantized.layers import QuantizedLinear, weight_bytes, weight_count

PRECISIONS = ("nf4", "int8", "fp8")
each_precision = pytest.mark.parametrize("precision", PRECISIONS)
LARGEST_GAP = max(high - low for low, high in pairwise(NF4_LEVELS))


def linear(inputs: int = 64, outputs: int = 48, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, dtype=dtype)


def with_weight(values: list[list[float]]) -> nn.Linear:
    layer = nn.Linear(len(values[0]), len(values), bias=False)
    layer.weight.data = torch.tensor(values)
    return layer


def error_bound(layer: nn.Linear, precision: str) -> Tensor:
    """Half the distance between neighboring values, at the magnitude of each weight."""
    weight = layer.weight.detach()
    largest_N1 = weight.abs().amax(dim=1, keepdim=True)
    if precision == "int8":
        return (largest_N1 / INT8_LARGEST / 2).expand_as(weight)
    if precision == "fp8":  # three bits of mantissa; subnormal numbers are spaced by 2^-9
        return torch.maximum(weight.abs() / 16, largest_N1 / FP8_LARGEST * 2**-10)
    largest_P1 = weight.reshape(-1, 64).abs().amax(dim=1, keepdim=True)
    return (largest_P1 * (LARGEST_GAP / 2 + 2**-8)).expand(-1, 64).reshape(weight.shape)


@pytest.mark.parametrize(
    ("precision", "weights", "expected"),
    [
        ("int8", [[127.0, 0.4, -63.6, 0.0], [0.0, 0.0, 0.0, 0.0]], [[127.0, 0.0, -64.0, 0.0], [0.0] * 4]),
        ("fp8", [[448.0, 1.05, -101.0, 0.0]], [[448.0, 1.0, -104.0, 0.0]]),  # 101 lies between 96 and 104
        ("nf4", [[2.0, -2.0, 0.07, 0.8]], [[2.0, -2.0, 0.0, 2 * 0.44070982933044434]]),
    ],
)
def test_weights_are_rounded_to_the_nearest_value_of_the_format(precision, weights, expected):
    got = QuantizedLinear(with_weight(weights), precision).weight
    assert torch.allclose(got, torch.tensor(expected), rtol=1e-6, atol=0)


def test_nf4_packs_the_first_of_two_levels_into_the_high_half_of_a_byte():
    packed, scale = quantize_nf4(torch.tensor([[-3.0, 3.0, 0.0, 3.0]]))
    assert packed[:2].tolist() == [0x0F, 0x7F] and len(packed) == 32, "one block, padded with zeros"
    assert scale.tolist() == [3.0]


@each_precision
def test_the_error_of_a_round_trip_is_at_most_half_a_step(precision):
    layer = linear(128, 96)
    error = (QuantizedLinear(layer, precision).weight - layer.weight).abs()
    assert bool((error <= error_bound(layer, precision) * (1 + 1e-5)).all())
    assert bool((error > 0).any())


@each_precision
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_and_the_gradient_of_the_input_are_those_of_the_dequantized_layer(precision, dtype):
    layer = linear(dtype=dtype)
    quantized = QuantizedLinear(layer, precision)
    x = torch.randn(2, 5, 64, dtype=dtype, requires_grad=True)
    upstream = torch.randn(2, 5, 48, dtype=dtype)
    got = quantized(x)
    (gradient,) = torch.autograd.grad(got, x, upstream)
    expected = nn.functional.linear(x, quantized.weight, quantized.bias)
    (expected_gradient,) = torch.autograd.grad(expected, x, upstream)
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    if precision == "fp8":  # activations and gradients are rounded too, and W^T has scales of its own
        rounding = 5e-2
    for one, other in ((got, expected), (gradient, expected_gradient)):
        assert one.dtype == dtype and one.shape == other.shape
        assert ((one - other).norm() / other.norm()).item() < rounding


@each_precision
def test_rows_do_not_depend_on_each_other(precision):
    quantized = QuantizedLinear(linear(), precision)
    x = torch.randn(4, 64, dtype=torch.float64)
    scaled = torch.cat([x[:1], 1000 * x[1:]])
    assert torch.equal(quantized(x)[0], quantized(scaled)[0])


@each_precision
def test_no_rows_give_no_rows(precision):
    """As on a card that has no token of a short text, where several cards compute each sample."""
    x = torch.empty(2, 0, 64, requires_grad=True)
    product = QuantizedLinear(linear(), precision)(x)
    product.sum().backward()
    assert product.shape == (2, 0, 48) and x.grad is not None and x.grad.shape == x.shape


@each_precision
def test_autocast_decides_the_dtype_of_the_product(precision):
    quantized = QuantizedLinear(linear(), precision)
    with torch.autocast("cpu", torch.bfloat16):
        assert quantized(torch.randn(3, 64)).dtype == torch.bfloat16


@each_precision
def test_a_quantized_layer_has_the_size_that_plans_expect(precision):
    layer = linear(256, 512, torch.bfloat16)
    for trains, copies in ((True, TRAINING_COPIES[precision]), (False, 1)):
        quantized = QuantizedLinear(layer, precision, trains=trains)
        expected = 256 * 512 * STORED_BYTES[precision] * copies
        assert expected <= quantized.stored_bytes <= 1.03 * expected  # scales of rows come on top
    assert weight_count(nn.Sequential(layer, quantized)) == 2 * (256 * 512 + 512)
    assert weight_bytes(quantized) == quantized.stored_bytes + 512 * 2


@pytest.mark.parametrize("precision", ["nf4", "int8"])
def test_the_operations_of_products_are_counted(precision):
    quantized = QuantizedLinear(linear(), precision)
    with FlopCounterMode(display=False) as counter:
        quantized(torch.randn(2, 5, 64, requires_grad=True)).sum().backward()
    assert counter.get_total_flops() == 2 * (2 * 10 * 64 * 48)


def test_a_layer_for_generating_has_no_gradient_in_fp8():
    quantized = QuantizedLinear(linear(), "fp8", trains=False)
    x = torch.randn(2, 64, requires_grad=True)
    with pytest.raises(AssertionError, match="transposed"):
        quantized(x).sum().backward()


@each_precision
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_nothing_but_quantized_weights_is_saved_for_the_backward(precision, compiled):
    """A compiler that recognizes both dequantizations as the same would keep the dequantized weights."""
    quantized = QuantizedLinear(linear(), precision)
    own = {value.data_ptr() for value in quantized.buffers()}
    saved: list[torch.Size] = []

    def pack(value: Tensor) -> Tensor:
        if value.data_ptr() not in own:
            saved.append(value.shape)
        return value

    x = torch.randn(2, 64, requires_grad=True)
    run = torch.compile(quantized, backend="aot_eager_decomp_partition", fullgraph=True) if compiled else quantized
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        got = run(x)
    assert not saved
    gradients = [torch.autograd.grad(each.square().sum(), x)[0] for each in (got, quantized(x))]
    assert torch.allclose(*gradients, rtol=1e-5)
    torch._dynamo.reset()
