"""Names and sizes of the codecs of a link between stages, and which of them a link needs. Needs no torch.

`none` sends values as they are. `bf16` rounds them. `int8` and `int4` round them to integers, in blocks of 64 with
an fp32 scale. `top_k` sends only the largest ones, one of `ratio`, each with its index. `sampled` takes as many
bytes as `top_k`, for a sample that is right on average (`sampling_codec`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from digenrl.config.recipes.training import CodecName

CODEC_NAMES: tuple[CodecName, ...] = get_args(CodecName)

BLOCK_VALUES = 64
SCALE_BYTES = 4
KEPT_VALUE_BYTES = 8  # fp32, and an int32 index
SAMPLED_VALUE_BYTES = 4  # bf16, and a 16-bit index within a block
SAMPLED_BLOCK = 1 << 16
COUNT_BYTES = 4  # of a block

# From the mildest on. Without most of their values, activations are not those of the policy that generates.
ACTIVATION_CODECS: tuple[CodecName, ...] = ("none", "bf16", "int8", "int4")
GRADIENT_CODECS: tuple[CodecName, ...] = ("none", "bf16", "int8", "int4", "sampled")


@dataclass(frozen=True, slots=True)
class Codec:
    """How values are sent; `ratio` is for `top_k` and `sampled`."""

    name: CodecName = "none"
    ratio: float = 10.0

    def __post_init__(self) -> None:
        if self.name not in CODEC_NAMES:
            raise ValueError(f"no codec {self.name!r}; known: {', '.join(CODEC_NAMES)}")
        if not self.ratio >= 1:
            raise ValueError(f"the ratio of {self.name} must be at least 1, got {self.ratio:g}")

    def __str__(self) -> str:
        return f"{self.name} 1/{self.ratio:.3g}" if self.name in ("top_k", "sampled") else self.name

    def kept(self, values: int) -> int:
        """How many of these values `top_k` sends."""
        return min(values, max(1, int(values / self.ratio)))

    def sampled(self, values: int) -> int:
        """How many of these values `sampled` sends, in as many bytes as `top_k`."""
        budget = KEPT_VALUE_BYTES * self.kept(values) - COUNT_BYTES * _blocks(values, SAMPLED_BLOCK)
        return min(values, max(1, budget // SAMPLED_VALUE_BYTES))

    def payload_bytes(self, values: int, item_bytes: int) -> int:
        """The bytes of `values` coded values, each of `item_bytes` before."""
        blocks = _blocks(values, BLOCK_VALUES)
        counts = COUNT_BYTES * _blocks(values, SAMPLED_BLOCK)
        sizes: dict[CodecName, int] = {
            "none": item_bytes * values,
            "bf16": 2 * values,
            "int8": values + SCALE_BYTES * blocks,
            "int4": -(-values // 2) + SCALE_BYTES * blocks,
            "top_k": KEPT_VALUE_BYTES * self.kept(values),
            "sampled": counts + SAMPLED_VALUE_BYTES * self.sampled(values),
        }
        return sizes[self.name]


def _blocks(values: int, size: int) -> int:
    return -(-values // size)


@dataclass(frozen=True, slots=True)
class LinkCodecs:
    """The codecs of a link: for activations forwards, for gradients backwards."""

    activations: Codec = Codec()
    gradients: Codec = Codec()


def kept_ratio(link_s: float, slowest_stage_s: float, item_bytes: int = 4) -> float:
    """The ratio of `top_k` or `sampled` that makes a link as fast as the slowest stage; 1 if it already is.

    `link_s` is the transfer of all values without a codec.
    """
    if link_s <= slowest_stage_s:
        return 1.0
    return max(1.0, KEPT_VALUE_BYTES / item_bytes * link_s / slowest_stage_s)


def mildest_codec(
    names: Sequence[CodecName], values: int, item_bytes: int, bytes_per_s: float, slowest_stage_s: float
) -> Codec:
    """The first of these codecs with which a link is no slower than the slowest stage, or else the smallest.

    `top_k` and `sampled` adapt their ratio to the link.
    """
    ratio = kept_ratio(item_bytes * values / bytes_per_s, slowest_stage_s, item_bytes)
    codecs = [Codec(name, ratio if math.isfinite(ratio) else float(values)) for name in names]
    for codec in codecs:
        if codec.payload_bytes(values, item_bytes) <= slowest_stage_s * bytes_per_s:
            return codec
    return min(codecs, key=lambda each: each.payload_bytes(values, item_bytes))
