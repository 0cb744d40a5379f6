"""The interface of a loaded model, and the only view of it that the rest of the package has.

Shape legend: B = rows of a batch, N = denoising steps, C = latent channels, F = latent frames, h, w = latent
height and width, L = one sample's latents in the layout of the family's transformer (packed or not).
Velocity is v = noise - x0, so an Euler step is x' = x + (sigma' - sigma) * v.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.attention import Kernels
from digenrl.models.parallel.own_blocks import OwnBlocks
from digenrl.models.parallel.token_exchange import TokenExchange, TokenShares

if TYPE_CHECKING:
    from PIL import Image

Text = Mapping[str, Tensor | None]
"""A transformer's text arguments by name. One that is not needed, such as a mask, may be None."""

ComfyuiLayers = Mapping[str, tuple[str, ...]]
"""ComfyUI's layers, each with the diffusers layers whose outputs it concatenates; `*` is the index of a block.

A renamed layer of an AdaLayerNormContinuous has its halves in the other order: diffusers has the scale first.
"""


@dataclass(frozen=True, slots=True)
class SampleSize:
    """The size of a sample in pixels and frames; an image has one frame."""

    height: int
    width: int
    frames: int = 1


@dataclass(frozen=True, slots=True)
class Schedule:
    """The noise levels of a rollout, from the family's diffusers scheduler.

    `sigmas` has N + 1 entries and ends with 0; `timesteps` has N, as the scheduler returns them (the family
    converts them for its transformer). Both are fp32 on the CPU. A rollout starts from noise times `noise_scale`.
    """

    sigmas: Tensor
    timesteps: Tensor
    noise_scale: float = 1.0

    @property
    def steps(self) -> int:
        """N, the number of denoising steps."""
        return len(self.timesteps)


@dataclass(frozen=True, slots=True)
class Conditioning:
    """Encoded prompts, one row per sample: the transformer's text arguments by name.

    `negative` holds the same for the unconditional branch, if the family uses classifier-free guidance. `images`
    holds encoded source images by name, which both branches share. Rows with sources of other sizes have other
    shapes and cannot be joined.
    """

    positive: Text
    negative: Text | None = None
    images: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(value for value in self.positive.values() if value is not None))

    def rows(self, index_B: Tensor | slice) -> Conditioning:
        """Selected rows in the given order; an index may repeat."""
        return self.mapped(lambda value: value[index_B])

    def repeated(self, count: int) -> Conditioning:
        """Every row `count` times, with copies next to each other."""
        return self.mapped(lambda value: value.repeat_interleave(count, dim=0))

    @staticmethod
    def joined(rows: Sequence[Conditioning]) -> Conditioning:
        """Concatenates conditionings of one family."""

        def side(sides: Sequence[Text]) -> dict[str, Tensor | None]:
            columns = {name: [each[name] for each in sides] for name in sides[0]}
            return {
                name: None if values[0] is None else torch.cat([value for value in values if value is not None])
                for name, values in columns.items()
            }

        negatives = [row.negative for row in rows if row.negative is not None]
        assert len(negatives) in (0, len(rows)), "all rows have an unconditional branch, or none"
        assert all(row.images.keys() == rows[0].images.keys() for row in rows), "as many sources in every row"
        images = {name: torch.cat([row.images[name] for row in rows]) for name in rows[0].images}
        return Conditioning(side([row.positive for row in rows]), side(negatives) if negatives else None, images)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of one row of every tensor; rows of equal shapes can be joined."""
        sides = {"positive": self.positive, "negative": self.negative or {}, "images": self.images}
        return {
            f"{side}.{name}": () if value is None else tuple(value.shape[1:])
            for side, values in sides.items()
            for name, value in values.items()
        }

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Conditioning:
        """A copy on another device; floating-point values can also change their dtype."""
        return self.mapped(
            lambda value: value.to(device=device, dtype=dtype if value.is_floating_point() else None)
        )

    def tensors(self) -> list[Tensor]:
        """All tensors, in the order in which `mapped` changes them."""
        sides = [self.positive, self.negative or {}, self.images]
        return [value for side in sides for value in side.values() if value is not None]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Conditioning:
        """The same with every tensor changed."""

        def of(side: Text) -> dict[str, Tensor | None]:
            return {name: None if value is None else change(value) for name, value in side.items()}

        positive, negative = of(self.positive), None if self.negative is None else of(self.negative)
        return Conditioning(positive, negative, {name: change(value) for name, value in self.images.items()})


class TextEncoder(Protocol):
    """Encodes prompts; see `DiffusionModel.encode` and `DiffusionModel.encode_with_images`."""

    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning: ...

    def encode_with_images(
        self,
        prompts: Sequence[str],
        images: Sequence[Sequence[Image.Image]],
        size: SampleSize,
        negative_prompts: Sequence[str] | None = None,
    ) -> Conditioning: ...

    def drop_text_encoders(self) -> None: ...


class DiffusionModel(ABC):
    """A loaded model: transformer, VAE and, until dropped, text encoders."""

    family: str  # the family's name in recipes
    pipeline_class: type[Any]  # of diffusers; it writes and loads exported adapters
    transformer: nn.Module
    lora_targets: tuple[str, ...]  # names of the adapted linear layers, as peft's target_modules
    # Empty if ComfyUI knows the names of diffusers, None if its names are not known.
    comfyui_layers: ClassVar[ComfyuiLayers | None] = None
    # Other layers that LoRA files may adapt, described in the same way: those that only the original code has.
    fused_layers: ClassVar[ComfyuiLayers] = {}
    default_guidance: float
    # The arguments of a repeated block that it updates, for the next block, in the order in which it returns them.
    block_state_arguments: tuple[str, ...] = ("encoder_hidden_states", "hidden_states")
    # Lists of repeated blocks that are not a chain with the others; a model in stages has them on its first stage.
    blocks_before_chain: ClassVar[tuple[str, ...]] = ()
    # Names of a repeated block's layers in which all its tokens attend to each other; empty if the tokens of a
    # forward cannot be divided over several cards.
    self_attention: ClassVar[tuple[str, ...]] = ()
    # Connects the ranks that compute each forward together; None if this process computes alone.
    exchange: TokenExchange | None = None
    # The blocks that this process computes, if the model is cut into stages; None if it computes all of them.
    own_blocks: OwnBlocks | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the transformer's weights, not counting adapters."""
        return next(self.transformer.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """The device of the transformer."""
        return next(self.transformer.parameters()).device

    @abstractmethod
    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning:
        """Encodes prompts as the transformer's text arguments, padded to the family's fixed length.

        The unconditional branch encodes `negative_prompts`, empty prompts by default. Families with embedded
        guidance have no such branch, and raise ConfigError if negative prompts are given.
        """

    def encode_with_images(
        self,
        prompts: Sequence[str],
        images: Sequence[Sequence[Image.Image]],
        size: SampleSize,
        negative_prompts: Sequence[str] | None = None,
    ) -> Conditioning:
        """As `encode`, of prompts with source images: RGB, in their final sizes, as many for every prompt.

        `size` is that of the samples.
        """
        raise ConfigError(
            f"{self.family} takes no source images; leave them out, or use a family that edits images"
        )

    def image_shapes(self, sources: Sequence[SampleSize], size: SampleSize) -> Mapping[str, tuple[int, ...]]:
        """The shape of one row of each of `Conditioning.images`, for a prompt with sources of these sizes."""
        return {}

    def compact(self, conditioning: Conditioning) -> Conditioning:
        """The same without padding that no row needs, and without a mask that masks nothing.

        It reads values, which synchronizes with a GPU: call it once per prompt, not once per forward.
        """
        return conditioning

    def shortened_prompt(self, row: Conditioning) -> Conditioning:
        """A prompt's row with one token less, for calibration; unchanged if all texts have the same length."""
        return row

    def text_length_dims(self, arguments: Mapping[str, Any]) -> list[tuple[Tensor, int]]:
        """A repeated block's arguments that vary with the prompt's length, each with the dimension that varies."""
        return []

    def own_arguments(self, arguments: Mapping[str, Any], shares: TokenShares) -> dict[str, Any]:
        """A repeated block's arguments with one entry per token, except for its states, cut to a rank's tokens.

        Only for models whose tokens are divided over several cards.
        """
        return {}

    @abstractmethod
    def drop_text_encoders(self) -> None:
        """Frees the text encoders; `encode` raises from then on."""

    @abstractmethod
    def schedule(self, steps: int, size: SampleSize) -> Schedule:
        """The sigmas and timesteps of a rollout with this number of steps, at this size."""

    @abstractmethod
    def shifted_schedule(self, steps: int, shift: float) -> Schedule:
        """Evenly spaced s from 1 to 1 / N, mapped to shift * s / (1 + (shift - 1) * s), for any sample size."""

    @abstractmethod
    def noise_shape(self, size: SampleSize) -> tuple[int, ...]:
        """The shape of one sample's noise before packing: (C, h, w), or (C, F, h, w) for most videos."""

    def latent_frames(self, size: SampleSize) -> int | None:
        """F, or None for an image."""
        shape = self.noise_shape(size)
        return shape[1] if len(shape) == 4 else None

    @abstractmethod
    def initial_latents(self, noise_B: Tensor, size: SampleSize) -> Tensor:
        """Noise of shape (B, *noise_shape) as latents (B, *L) in the transformer's layout, on its device."""

    @abstractmethod
    def velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        """v of every row, in fp32 (fp64 for an fp64 model), with the guidance of the family's diffusers pipeline.

        Rows are independent and may have different timesteps. `timesteps_B` are entries of `Schedule.timesteps`.
        Attention is masked if the conditioning has masks, of which `compact` drops those that mask nothing.
        A guidance of 1 or less disables classifier-free guidance (one branch, no negative rows needed).
        """

    def rollout_velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        """As `velocity`, for rollouts: without gradient, with few different shapes."""
        return self.velocity(latents_BL, timesteps_B, conditioning, guidance, size)

    def use_attention(self, kernels: Kernels) -> None:  # noqa: B027  optional
        """Uses these attention kernels from now on; compiled graphs of other kernels stay valid for those."""

    def release_rollout_memory(self) -> None:  # noqa: B027  optional
        """Frees memory that `rollout_velocity` holds between calls."""

    def decode_in_tiles(self) -> bool:
        """Decodes large samples in overlapping tiles from now on; False if it does already, or cannot."""
        return False

    def encode_pixels(self, pixels_BFCHW: Tensor) -> Tensor:
        """The latents (B, *L) of images in [0, 1], in fp32: the inverse of `decode`, as far as the VAE is one.

        Images have the size of a sample. The most likely latents are returned; nothing is drawn.
        """
        raise ConfigError(f"{self.family} cannot train on given images; use a family that makes images")

    def check_shape(self, method: str, got: Tensor, expected: Sequence[int]) -> None:
        """Raises ConfigError if a method of the model returned another shape, which might be broadcast later."""
        if tuple(got.shape) != tuple(expected):
            raise ConfigError(
                f"model family '{self.family}': {method} returned a tensor of shape {tuple(got.shape)}, expected "
                f"{tuple(expected)}"
            )

    @abstractmethod
    def decode(self, latents_BL: Tensor, size: SampleSize) -> Tensor:
        """Pixels in [0, 1], fp32: (B, frames, 3, height, width)."""
