"""The messages between a reward's client and server: JSON, with frames as PNG in base64; never pickle."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from math import prod
from typing import Annotated, Any

import numpy
import torch
from PIL import Image
from pydantic import ConfigDict, Field, ValidationError
from torch import Tensor

from digenrl.config.reading import ConfigError, Frozen, first_problem, one_line
from digenrl.rewards.contract import SOURCE_IMAGES, Metadata, as_pil, as_uint8

Finite = Annotated[float, Field(allow_inf_nan=False)]


class MessageError(ValueError):
    """A malformed message; the text says where."""


class SampleMessage(Frozen):
    """One sample: frames and source images are RGB PNG files in base64; all frames have one size."""

    prompt: str
    metadata: dict[str, Any] = Field(default={})
    frames: tuple[str, ...] = Field(min_length=1)
    source_images: tuple[str, ...] = ()


class ScoreRequest(Frozen):
    """Samples to score together, with the same number of frames, all of one size."""

    samples: tuple[SampleMessage, ...] = Field(min_length=1)


class ScoreReply(Frozen):
    """Finite numbers; strict, so that nothing is converted to a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    values: list[Finite]
    parts: dict[str, list[Finite]] = Field(default={})


class Refusal(Frozen):
    """Why there are no scores. `samples` are positions in the request; empty means all."""

    error: str
    samples: list[int] = Field(default=[])


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server accepts; larger requests are refused before they use memory."""

    body_bytes: int = 256 * 2**20
    samples: int = 256
    frames_per_sample: int = 512
    sources_per_sample: int = 16
    pixels_per_frame: int = 2**24  # 4096 x 4096
    pixels_in_total: int = 2**27  # 1.5 GiB in fp32
    body_s: float = 120.0  # in which the body must arrive
    waiting_requests: int = 64  # which have the token; more are asked to come back


PIXELS_PER_REQUEST = Limits().body_bytes // 5  # a pixel takes 4 bytes as PNG in base64, unless it is compressed


def check_token(token: str, owner: str) -> None:
    """Raises ConfigError, which does not show the token, unless it can be sent in a header."""
    if not token.isascii() or not token.isprintable() or token != token.strip():
        raise ConfigError(f"{owner}: the token must be printable ASCII without surrounding whitespace")


def requests_of(pixels_BFCHW: Tensor, metadata: Sequence[Metadata], batch_size: int) -> Iterator[slice]:
    """The samples of each request: at most `batch_size`, and no more pixels than any server accepts by default.

    A sample that alone has more is sent by itself.
    """
    frames = prod(pixels_BFCHW.shape[1:]) // 3
    pixels = [frames + sum(image.numel() // 3 for image in one.get(SOURCE_IMAGES, ())) for one in metadata]
    start = 0
    for end in range(1, len(pixels) + 1):
        full = end - start == batch_size or end == len(pixels)
        if full or sum(pixels[start : end + 1]) > PIXELS_PER_REQUEST:
            yield slice(start, end)
            start = end


def encode_request(pixels_BFCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> bytes:
    """The body of a request. Raises MessageError for metadata that JSON cannot represent."""
    samples = tuple(
        SampleMessage(
            prompt=prompt,
            metadata={key: value for key, value in one.items() if key != SOURCE_IMAGES},
            frames=tuple(encode_png(image) for image in as_pil(frames)),
            source_images=tuple(encode_png(image) for image in as_pil(map(as_uint8, one.get(SOURCE_IMAGES, ())))),
        )
        for frames, prompt, one in zip(as_uint8(pixels_BFCHW), prompts, metadata, strict=True)
    )
    try:
        return ScoreRequest(samples=samples).model_dump_json().encode()
    except ValueError as error:
        raise MessageError(f"metadata cannot be written as JSON: {error}") from None


def decode_request(body: bytes, limits: Limits) -> tuple[Tensor, list[str], list[Metadata]]:
    """Pixels (B, F, 3, H, W) in [0, 1], prompts and metadata. A MessageError names the sample and frame."""
    try:
        request = ScoreRequest.model_validate_json(body)
    except ValidationError as error:
        raise MessageError(first_problem(error, "the body")) from None
    _check_counts(request, limits)
    images = _Images(limits)
    frames = _decode_frames(request, images)
    count = len(request.samples)
    pixels = torch.stack(frames).float().div_(255).reshape(count, -1, *frames[0].shape)
    metadata = [_metadata(index, sample, images) for index, sample in enumerate(request.samples)]
    return pixels, [sample.prompt for sample in request.samples], metadata


class _Images:
    """Decodes the images of one request, up to the number of pixels that it may have in total."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._left = limits, limits.pixels_in_total

    def decode(self, text: str, where: str) -> Tensor:
        try:
            image = decode_png(text, self._limits, self._left)
        except MessageError as error:
            raise MessageError(f"{where}: {error}") from None
        self._left -= image[0].numel()
        return image


def _metadata(index: int, sample: SampleMessage, images: _Images) -> Metadata:
    """The metadata of a sample, with its source images, if it has any."""
    if SOURCE_IMAGES in sample.metadata:
        where = f"samples.{index}.metadata.{SOURCE_IMAGES}"
        raise MessageError(f"{where}: not metadata; send images as `{SOURCE_IMAGES}` of the sample")
    sources = tuple(
        images.decode(text, f"samples.{index}.source_images.{number}").float() / 255
        for number, text in enumerate(sample.source_images)
    )
    return {**sample.metadata, SOURCE_IMAGES: sources} if sources else sample.metadata


def encode_png(image: Image.Image) -> str:
    """A PNG file in base64, with light compression: sending is faster than compressing."""
    file = BytesIO()
    image.save(file, format="PNG", compress_level=1)
    return base64.b64encode(file.getvalue()).decode()


def decode_png(text: str, limits: Limits, left: int) -> Tensor:
    """(3, H, W) uint8. The size is checked before the pixels are unpacked; `left` are allowed in the request."""
    try:
        with Image.open(BytesIO(base64.b64decode(text, validate=True)), formats=("PNG",)) as image:
            if image.width * image.height > limits.pixels_per_frame:
                size = f"{image.width} x {image.height}"
                raise MessageError(f"{size} pixels are more than the {limits.pixels_per_frame} allowed")
            if image.width * image.height > left:
                raise MessageError(f"more than {limits.pixels_in_total} pixels in one request; send fewer of them")
            if image.mode != "RGB":
                raise MessageError(f"expected an 8-bit RGB image, got mode {image.mode}")
            return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)
    except MessageError:
        raise
    except (
        OSError,
        SyntaxError,
        ValueError,
        EOFError,
        struct.error,
        zlib.error,
        Image.DecompressionBombError,
    ) as error:
        raise MessageError(f"not a PNG file in base64: {one_line(error)}") from None


def _check_counts(request: ScoreRequest, limits: Limits) -> None:
    if len(request.samples) > limits.samples:
        raise MessageError(
            f"{len(request.samples)} samples are more than the {limits.samples} allowed in one request"
        )
    frames = len(request.samples[0].frames)
    if frames > limits.frames_per_sample:
        raise MessageError(f"{frames} frames are more than the {limits.frames_per_sample} allowed in one sample")
    for index, sample in enumerate(request.samples):
        if len(sample.source_images) > limits.sources_per_sample:
            count = f"{len(sample.source_images)} source images"
            raise MessageError(f"samples.{index}: has {count}, more than the {limits.sources_per_sample} allowed")
        if len(sample.frames) != frames:
            raise MessageError(
                f"samples.{index}: has {len(sample.frames)} frames, samples.0 has {frames}; send them separately"
            )


def _decode_frames(request: ScoreRequest, images: _Images) -> list[Tensor]:
    """All frames, sample by sample; raises MessageError at the first wrong one or if there are too many pixels."""
    decoded: list[Tensor] = []
    for index, sample in enumerate(request.samples):
        for number, text in enumerate(sample.frames):
            where = f"samples.{index}.frames.{number}"
            frame = images.decode(text, where)
            if decoded and frame.shape != decoded[0].shape:
                sizes = f"{tuple(frame.shape)}, the first frame is {tuple(decoded[0].shape)}"
                raise MessageError(f"{where}: {sizes}; send each size separately")
            decoded.append(frame)
    return decoded
