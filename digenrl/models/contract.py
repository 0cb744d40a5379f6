"""What every model family can do, once loaded: the only view of a model that the other rooms have.

Shape legend: B = rows of a batch, N = denoising steps, C = latent channels, F = latent frames, h, w = latent
height and width, L = one sample's latents in the layout that the family's transformer takes (packed or not).
Velocity is v = noise - x0, so that an Euler step is x' = x + (sigma' - sigma) * v, with no sign flips.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class SampleSize:
    """What one sample is, in pixels and frames; an image has one frame."""

    height: int
    width: int
    frames: int = 1


@dataclass(frozen=True, slots=True)
class Schedule:
    """The noise levels of one rollout, from the family's own diffusers scheduler; never derived twice.

    `sigmas` has N + 1 entries and ends with 0; `timesteps` has N, as the scheduler gives them (the family turns
    them into what its transformer wants). Both are fp32 on the CPU.
    """

    sigmas: Tensor
    timesteps: Tensor

    @property
    def steps(self) -> int:
        """N, the number of denoising steps."""
        return len(self.timesteps)


@dataclass(frozen=True, slots=True)
class Conditioning:
    """Encoded prompts, one row per sample: the transformer's text arguments by name.

    `negative` holds the same for the unconditional branch, where the family uses classifier-free guidance.
    A value of None is passed on as None (a mask that is not needed).
    """

    positive: Mapping[str, Tensor | None]
    negative: Mapping[str, Tensor | None] | None = None

    def __len__(self) -> int:
        return len(next(value for value in self.positive.values() if value is not None))

    def rows(self, index_B: Tensor | slice) -> Conditioning:
        """The conditioning of some rows, in the given order; an index may repeat."""
        return self._mapped(lambda value: value[index_B])

    def repeated(self, count: int) -> Conditioning:
        """Every row `count` times, copies of a row next to each other."""
        return self._mapped(lambda value: value.repeat_interleave(count, dim=0))

    @staticmethod
    def joined(rows: Sequence[Conditioning]) -> Conditioning:
        """Several conditionings as one, rows in order; all of one family."""

        def side(sides: Sequence[Mapping[str, Tensor | None]]) -> dict[str, Tensor | None]:
            columns = {name: [each[name] for each in sides] for name in sides[0]}
            return {
                name: None if values[0] is None else torch.cat([value for value in values if value is not None])
                for name, values in columns.items()
            }

        negatives = [row.negative for row in rows if row.negative is not None]
        assert len(negatives) in (0, len(rows)), "all rows have an unconditional branch, or none has"
        return Conditioning(side([row.positive for row in rows]), side(negatives) if negatives else None)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Conditioning:
        """On another device; floating-point values also in another type."""
        return self._mapped(
            lambda value: value.to(device=device, dtype=dtype if value.is_floating_point() else None)
        )

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Conditioning:
        def of(side: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
            return {name: None if value is None else change(value) for name, value in side.items()}

        return Conditioning(of(self.positive), None if self.negative is None else of(self.negative))


class TextEncoder(Protocol):
    """Turns prompts into what a transformer is given of them."""

    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning: ...

    def drop_text_encoders(self) -> None: ...


class DiffusionModel(ABC):
    """One loaded model: transformer, VAE and, until dropped, text encoders."""

    family: str
    transformer: nn.Module
    lora_targets: tuple[str, ...]  # names of the adapted linear layers, as peft's target_modules
    default_guidance: float
    passed_through_blocks: tuple[str, ...] = ("hidden_states", "encoder_hidden_states")
    """Arguments of a repeated block that it gives back changed, for the next one."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of the transformer's own weights, whatever its adapters have."""
        return next(self.transformer.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where the transformer is."""
        return next(self.transformer.parameters()).device

    @abstractmethod
    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning:
        """The prompts as the transformer's text arguments, padded to the family's fixed length.

        Rows of the unconditional branch come from `negative_prompts`, empty prompts by default; families with
        embedded guidance have none.
        """

    def compact(self, conditioning: Conditioning) -> Conditioning:
        """The same, with nothing in it that no row needs: no padding at the end, no mask that hides nothing.

        Reads values, so on a card it waits for them: once for a prompt, not for every forward.
        """
        return conditioning

    def of_another_length(self, row: Conditioning) -> Conditioning:
        """A prompt's row as of a shorter prompt, to calibrate with; the same where all texts have one length."""
        return row

    def dimensions_of_text(self, arguments: Mapping[str, Any]) -> list[tuple[Tensor, int]]:
        """Of a repeated block's arguments, by name: those that grow with a prompt's length, where lengths vary."""
        return []

    @abstractmethod
    def drop_text_encoders(self) -> None:
        """Frees the text encoders; `encode` raises from then on."""

    @abstractmethod
    def schedule(self, steps: int, size: SampleSize) -> Schedule:
        """The sigmas and time-steps of a rollout of so many steps at this size."""

    @abstractmethod
    def shifted_schedule(self, steps: int, shift: float) -> Schedule:
        """Even levels s from 1 to 1 / N, as shift * s / (1 + (shift - 1) * s), whatever the samples' size."""

    @abstractmethod
    def noise_shape(self, size: SampleSize) -> tuple[int, ...]:
        """The shape of one sample's noise before any packing: (C, h, w), or (C, F, h, w) for video."""

    @abstractmethod
    def initial_latents(self, noise_B: Tensor, size: SampleSize) -> Tensor:
        """Noise of shape (B, *noise_shape) as latents (B, *L) in the layout that the transformer takes."""

    @abstractmethod
    def velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        """v of every row, in fp32 (fp64 for an fp64 model), guided as the family's diffusers pipeline does it.

        Rows are independent and may have different time-steps. `timesteps_B` are entries of `Schedule.timesteps`.
        A guidance of 1 or less switches classifier-free guidance off (one forward, no negative rows needed).
        """

    def rollout_velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        """As `velocity`, where there is no gradient and the same shapes come again and again."""
        return self.velocity(latents_BL, timesteps_B, conditioning, guidance, size)

    def forget_rollouts(self) -> None:  # noqa: B027  most models hold nothing
        """Gives back the memory that speeds rollouts up."""

    @abstractmethod
    def decode(self, latents_BL: Tensor, size: SampleSize) -> Tensor:
        """Pixels in [0, 1], fp32: (B, frames, 3, height, width)."""
