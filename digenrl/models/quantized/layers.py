"""A linear layer with quantized, frozen weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from digenrl.models.quantized.formats import quantize_fp8, quantize_int8, quantize_nf4
from digenrl.models.quantized.products import Fp8Linear, dequantize, has_fp8_units, quantized_linear

FP8_MULTIPLE = 16  # inputs and outputs of a product on fp8 units


class QuantizedLinear(nn.Linear):
    """Replaces a linear layer. Only its input has a gradient; it computes in the dtype of its input.

    `weight` is dequantized whenever it is read. `trains` keeps what the backward needs. With `fused`, dequantizing
    is compiled. `native` products run on a card's fp8 units, others multiply the same fp8 values in another dtype.
    """

    qweight: Tensor
    scale: Tensor
    transposed: Tensor | None
    transposed_scale: Tensor | None

    def __init__(
        self, layer: nn.Linear, precision: str, device: torch.device | str | None = None, *, trains: bool = True
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.precision, self.dtype, self.fused = precision, layer.weight.dtype, False
        weight_NK = layer.weight.detach().to(device)
        quantize = {"nf4": quantize_nf4, "int8": quantize_int8, "fp8": quantize_fp8}[precision]
        for names, weight in (
            (("qweight", "scale"), weight_NK),
            (("transposed", "transposed_scale"), weight_NK.t() if precision == "fp8" and trains else None),
        ):
            for name, value in zip(names, (None, None) if weight is None else quantize(weight), strict=True):
                self.register_buffer(name, None if value is None else value.contiguous())
        multiples = self.in_features % FP8_MULTIPLE == self.out_features % FP8_MULTIPLE == 0
        self.native = precision == "fp8" and multiples and has_fp8_units(self.qweight.device)
        self.bias = (
            None if layer.bias is None else nn.Parameter(layer.bias.detach().to(device), requires_grad=False)
        )

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weights as they are multiplied, in the dtype of the layer that was replaced."""
        shape = self.out_features, self.in_features
        return dequantize(self.precision, self.qweight, self.scale, shape, self.dtype)

    @property
    def weight_count(self) -> int:
        return self.out_features * self.in_features

    @property
    def stored_bytes(self) -> int:
        """The memory of the quantized weights and their scales."""
        return sum(value.nbytes for value in self.buffers())

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        if self.precision != "fp8":
            return self._dequantized_product(x, self.bias)
        product = self.product(x)
        return product if self.bias is None else product + self.bias.to(x.dtype)

    def product(self, x: Tensor, quantized: tuple[Tensor | None, Tensor | None] = (None, None)) -> Tensor:
        """The output without the bias. Layers with fp8 weights can share `quantized`, the rows of x and scales."""
        if self.precision != "fp8":
            return self._dequantized_product(x, None)
        product: Tensor = Fp8Linear.apply(  # type: ignore[no-untyped-call]
            x, self.qweight, self.scale, self.transposed, self.transposed_scale, self.native, *quantized
        )
        return product

    def _dequantized_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = quantized_linear(
            x, self.qweight, self.scale, bias, self.out_features, self.precision, self.fused
        )
        return product

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, precision={self.precision}"


def multiplies_fp8_elsewhere(module: nn.Module) -> bool:
    """Whether a layer has fp8 weights that are not multiplied on a card's fp8 units."""
    layers = (layer for layer in module.modules() if isinstance(layer, QuantizedLinear))
    return any(layer.precision == "fp8" and not layer.native for layer in layers)


def weight_count(module: nn.Module) -> int:
    """The number of a model's weights, quantized or not."""
    quantized = sum(layer.weight_count for layer in module.modules() if isinstance(layer, QuantizedLinear))
    return quantized + sum(weight.numel() for weight in module.parameters())


def weight_bytes(module: nn.Module) -> int:
    """The memory of a model's weights, quantized or not."""
    quantized = sum(layer.stored_bytes for layer in module.modules() if isinstance(layer, QuantizedLinear))
    return quantized + sum(weight.nbytes for weight in module.parameters())
