"""The formats of frozen weights and their size. Needs no torch."""

from __future__ import annotations

from typing import Final, Literal

UNQUANTIZED: Final = "unquantized"

BasePrecision = Literal["unquantized", "fp8", "int8", "nf4"]
EncoderPrecision = Literal["unquantized", "int8", "nf4"]

NF4_BLOCK = 64  # weights that share a scale
# Of a quantized weight, without the scale of its row.
STORED_BYTES: dict[str, float] = {"fp8": 1.0, "int8": 1.0, "nf4": 0.5 + 2 / NF4_BLOCK}
# fp8 products need the weights row by row: those of the input gradient are a second, transposed copy.
TRAINING_COPIES: dict[str, int] = {"fp8": 2, "int8": 1, "nf4": 1}


def stored_bytes(precision: str, weights: float, *, trains: bool) -> float:
    """The size of this many quantized weights on a card that only generates, or on one that also trains."""
    return weights * STORED_BYTES[precision] * (TRAINING_COPIES[precision] if trains else 1)
