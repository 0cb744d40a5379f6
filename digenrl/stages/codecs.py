"""Codes tensors for a link between stages, and decodes them; see `codec_choice` for the codecs."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from digenrl.config.recipes.training import CodecName
from digenrl.stages.codec_choice import BLOCK_VALUES, Codec
from digenrl.stages.sampling_codec import decode_sampled, encode_sampled

LARGEST: dict[CodecName, int] = {"int8": 127, "int4": 7}


def encode(values: Tensor, codec: Codec) -> Tensor:
    """The coded values: a vector of bytes on the same device."""
    if codec.name == "none" or not values.is_floating_point():
        return _bytes(values)
    if codec.name == "bf16":
        return _bytes(values.to(torch.bfloat16))
    if codec.name == "top_k":
        return _encode_top_k(values, codec)
    if codec.name == "sampled":
        return encode_sampled(values, codec.sampled(values.numel()))
    return _encode_blocks(values, codec.name)


def decode(payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype, codec: Codec) -> Tensor:
    """The values of a payload; raises ValueError if its length does not fit."""
    count = prod(shape)
    plain = codec.name == "none" or not dtype.is_floating_point
    used = Codec() if plain else codec
    expected = used.payload_bytes(count, dtype.itemsize)
    if payload.numel() != expected:
        raise ValueError(
            f"damaged: {payload.numel()} bytes for a tensor of shape {shape} in {used.name}, not {expected}"
        )
    if plain:
        return _view(payload, dtype).reshape(shape)
    if codec.name == "bf16":
        return _view(payload, torch.bfloat16).to(dtype).reshape(shape)
    if codec.name == "top_k":
        return _decode_top_k(payload, count, codec).to(dtype).reshape(shape)
    if codec.name == "sampled":
        return decode_sampled(payload, count, codec.sampled(count)).to(dtype).reshape(shape)
    return _decode_blocks(payload, count, codec.name).to(dtype).reshape(shape)


def _encode_blocks(values: Tensor, name: CodecName) -> Tensor:
    """Scales of all blocks, then the integers."""
    flat = values.detach().reshape(-1).float()
    blocks = functional.pad(flat, (0, -flat.numel() % BLOCK_VALUES)).view(-1, BLOCK_VALUES)
    scales = blocks.abs().amax(dim=1) / LARGEST[name]
    # A block with a value that is not finite has such a scale, and decodes to NaN: errors stay visible.
    steps = blocks / torch.where(scales == 0, torch.ones_like(scales), scales)[:, None]
    integers = steps.round().nan_to_num().to(torch.int8).view(-1)[: flat.numel()]
    if name == "int4":
        pairs = functional.pad(integers, (0, integers.numel() % 2)).view(-1, 2).view(torch.uint8)
        integers = ((pairs[:, 0] & 0xF) | (pairs[:, 1] << 4)).view(torch.int8)
    return torch.cat([_bytes(scales), _bytes(integers)])


def _decode_blocks(payload: Tensor, count: int, name: CodecName) -> Tensor:
    blocks = -(-count // BLOCK_VALUES)
    scales, integers = _view(payload[: 4 * blocks], torch.float32), payload[4 * blocks :].view(torch.int8)
    if name == "int4":
        low, high = (integers << 4) >> 4, integers >> 4  # shifts of signed integers keep the sign
        integers = torch.stack([low, high], dim=1).view(-1)[:count]
    steps = functional.pad(integers.float(), (0, -count % BLOCK_VALUES)).view(-1, BLOCK_VALUES)
    return (steps * scales[:, None]).view(-1)[:count]


def _encode_top_k(values: Tensor, codec: Codec) -> Tensor:
    """The largest values, then their indices."""
    flat = values.detach().reshape(-1).float()
    if flat.numel() == 0:
        return _bytes(flat)
    _, indices = flat.abs().topk(codec.kept(flat.numel()), sorted=False)
    return torch.cat([_bytes(flat[indices]), _bytes(indices.to(torch.int32))])


def _decode_top_k(payload: Tensor, count: int, codec: Codec) -> Tensor:
    whole = torch.zeros(count, device=payload.device)
    if count:
        kept = 4 * codec.kept(count)
        indices = _view(payload[kept:], torch.int32).long()
        if int(indices.min()) < 0 or int(indices.max()) >= count:
            raise ValueError(f"damaged: an index of top_k is outside of {count} values")
        whole[indices] = _view(payload[:kept], torch.float32)
    return whole


def _bytes(values: Tensor) -> Tensor:
    return values.detach().contiguous().reshape(-1).view(torch.uint8)


def _view(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes as values; copied, as views must be aligned."""
    return payload.clone().view(dtype)
