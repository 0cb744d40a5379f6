"""What the families share: a `DiffusionModel` around the parts of a diffusers pipeline.

Shape legend: as in contract.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from digenrl.config.reading import ConfigError
from digenrl.models.attention import choosing_processors, forbid_cudnn_attention, rollout_attention
from digenrl.models.captured import CapturedForwards
from digenrl.models.contract import Conditioning, DiffusionModel, SampleSize, Schedule


class PipelineModel(DiffusionModel):
    """Holds a pipeline of the family's own class, and never calls it: only its parts and its small helpers.

    Its denoising loop knows one time-step for a whole batch; ours has one per row. All parts are in evaluation
    mode, the frozen ones (VAE, text encoders) without gradients.
    """

    text_encoders: ClassVar[tuple[str, ...]]  # parts of the pipeline, by name
    text_mask: ClassVar[str | None] = None  # the text argument that says which tokens are padding

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        self.transformer: nn.Module = pipeline.transformer
        self.vae = pipeline.vae
        self._captured: CapturedForwards | None = None
        frozen = [self.vae, *(getattr(pipeline, name) for name in self.text_encoders)]
        for part in frozen:
            if part is not None:
                part.requires_grad_(False).eval()
        if self.transformer is not None:  # absent where prompts are encoded and nothing else
            self.transformer.eval()
        forbid_cudnn_attention()

    def drop_text_encoders(self) -> None:
        """Frees the text encoders; `encode` raises from then on."""
        for name in self.text_encoders:
            setattr(self.pipeline, name, None)

    def compact(self, conditioning: Conditioning) -> Conditioning:
        """Texts no longer than the longest row's, and without a mask where all rows are equally long.

        Samples of one prompt then run with no padding and no mask at all, as they do in the pipeline.
        """
        if self.text_mask is None:
            return conditioning
        negative = conditioning.negative
        return Conditioning(
            without_padding(conditioning.positive, self.text_mask),
            None if negative is None else without_padding(negative, self.text_mask),
        )

    def of_another_length(self, row: Conditioning) -> Conditioning:
        """With a last word less, where a mask tells how long a text is."""
        mask_1T = None if self.text_mask is None else row.positive[self.text_mask]
        if mask_1T is None or self.text_mask is None:
            return row
        shorter_1T = mask_1T.clone()
        shorter_1T[0, int(mask_1T.sum()) - 1] = 0
        return Conditioning({**row.positive, self.text_mask: shorter_1T}, row.negative)

    def text_device(self) -> torch.device:
        """Where the text encoders are; raises if they are gone."""
        encoders = [getattr(self.pipeline, name) for name in self.text_encoders]
        if any(encoder is None for encoder in encoders):
            raise RuntimeError(
                f"{self.family}: the text encoders are not loaded (dropped, left out, or the model has random "
                "weights); encode all prompts before drop_text_encoders(), or load a pipeline directory"
            )
        device: torch.device = encoders[0].device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the transformer's own weights, whatever its adapters have: inputs are cast to it."""
        layer, name = self._typical_weight
        dtype: torch.dtype = getattr(layer, name).dtype
        return dtype

    @cached_property
    def _typical_weight(self) -> tuple[nn.Module, str]:
        """Looked for once: every forward asks for the type, and a transformer has thousands of weights."""
        return typical_weight(self.transformer)

    @cached_property
    def _processors(self) -> list[Any]:
        return choosing_processors(self)

    def rollout_velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        """With the fastest attention there is for a forward alone, and in small batches as a recorded graph."""
        conditioning = self.compact(conditioning)
        if self.text_mask is not None and conditioning.positive[self.text_mask] is not None:
            return self.velocity(latents_BL, timesteps_B, conditioning, guidance, size)
        if self._captured is None:  # not before adapters are there
            self._captured = CapturedForwards(self)
        with rollout_attention(self._processors):
            return self._captured.velocity(latents_BL, timesteps_B, conditioning, guidance, size)

    def forget_rollouts(self) -> None:
        """Recorded graphs hold memory of their own."""
        self._captured = None

    def fresh_scheduler(self, **changes: Any) -> Any:
        """A scheduler as the pipeline's was when loaded: nothing is left behind for the next call."""
        scheduler = self.pipeline.scheduler
        return type(scheduler).from_config(scheduler.config, **changes)

    def shifted_schedule(self, steps: int, shift: float) -> Schedule:
        """By the scheduler itself, with this fixed shift instead of its own."""
        scheduler = self.fresh_scheduler(shift=shift, use_dynamic_shifting=False, shift_terminal=None)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps))
        return schedule_of(scheduler)


def paired_negatives(prompts: Sequence[str], negative_prompts: Sequence[str] | None) -> list[str]:
    """One negative prompt per prompt, empty ones by default."""
    negatives = [""] * len(prompts) if negative_prompts is None else list(negative_prompts)
    if len(negatives) != len(prompts):
        raise ValueError(f"expected one negative prompt per prompt, got {len(negatives)} for {len(prompts)}")
    return negatives


def negative_side(conditioning: Conditioning) -> Mapping[str, Tensor | None]:
    """The unconditional rows, which classifier-free guidance needs."""
    if conditioning.negative is None:
        raise ValueError(
            "a guidance above 1 needs the unconditional rows of the conditioning, got none; "
            "encode the prompts with this model, or set guidance to 1"
        )
    return conditioning.negative


def both_branches(
    forward: Callable[[Tensor, Tensor, Mapping[str, Tensor | None]], Tensor],
    latents_BL: Tensor,
    timesteps_B: Tensor,
    positive: Mapping[str, Tensor | None],
    negative: Mapping[str, Tensor | None],
) -> tuple[Tensor, Tensor]:
    """Conditional and unconditional predictions, from one batch; texts of both have one length."""
    pairs = {name: (value, negative[name]) for name, value in positive.items()}
    text = {name: None if a is None or b is None else torch.cat([b, a]) for name, (a, b) in pairs.items()}
    both = forward(torch.cat([latents_BL] * 2), torch.cat([timesteps_B] * 2), text)
    unconditional_BL, conditional_BL = both.chunk(2)  # in the order of the pipelines
    return conditional_BL, unconditional_BL


def without_padding(text: Mapping[str, Tensor | None], mask_name: str) -> Mapping[str, Tensor | None]:
    """Text arguments without the columns that are padding in every row; the mask is None where no row has any."""
    mask_BT = text[mask_name]
    if mask_BT is None:
        return text
    mask_BT = mask_BT.to(torch.bool)
    length_B = mask_BT.sum(dim=1)
    padded_at_the_end = mask_BT == (torch.arange(mask_BT.shape[1], device=mask_BT.device) < length_B[:, None])
    if not bool(padded_at_the_end.all()):
        return text
    longest = int(length_B.max())
    columns = mask_BT.shape[1]
    cut = {
        name: value[:, :longest] if value is not None and value.ndim > 1 and value.shape[1] == columns else value
        for name, value in text.items()
    }
    return cut | {mask_name: None} if int(length_B.min()) == longest else cut


def typical_weight(transformer: nn.Module) -> tuple[nn.Module, str]:
    """The layer and the name of a weight of the type that most of a transformer's own have.

    Some families keep a few weights in fp32. It is the layer that lasts: parameters are replaced where they are
    spread over ranks.
    """
    elements_per_dtype: Counter[torch.dtype] = Counter()
    found: dict[torch.dtype, tuple[nn.Module, str]] = {}
    for path, layer in transformer.named_modules():
        if "lora_" in path:
            continue
        for name, parameter in layer.named_parameters(recurse=False):
            elements_per_dtype[parameter.dtype] += parameter.numel()
            found.setdefault(parameter.dtype, (layer, name))
    return found[elements_per_dtype.most_common(1)[0][0]]


def at_least_fp32(value: Tensor) -> Tensor:
    """In fp32, or in fp64 where the model itself computes in fp64: gradients are compared there."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def pixels_of_images(decoded_BCHW: Tensor) -> Tensor:
    """What an image VAE gives, in about [-1, 1], as (B, 1, 3, height, width) in [0, 1], fp32."""
    return (decoded_BCHW * 0.5 + 0.5).clamp(0, 1).float().unsqueeze(1)


def latent_height_width(size: SampleSize, pixels_per_latent: int, patch: int = 2) -> tuple[int, int]:
    """(h, w) of the latents; raises ConfigError unless both sides are whole patches."""
    multiple = pixels_per_latent * patch
    if size.height < multiple or size.width < multiple or size.height % multiple or size.width % multiple:
        raise ConfigError(
            f"height and width must be positive multiples of {multiple}, got {size.height} x {size.width}"
        )
    return size.height // pixels_per_latent, size.width // pixels_per_latent


def require_one_frame(size: SampleSize, family: str) -> None:
    """Raises ConfigError if an image family is asked for a video."""
    if size.frames != 1:
        raise ConfigError(f"{family} makes images: frames must be 1, got {size.frames}")


def schedule_of(scheduler: Any) -> Schedule:
    """What a scheduler holds after `set_timesteps`, in fp32 on the CPU."""
    return Schedule(
        sigmas=scheduler.sigmas.detach().to(device="cpu", dtype=torch.float32).clone(),
        timesteps=scheduler.timesteps.detach().to(device="cpu", dtype=torch.float32).clone(),
    )


def shift_from_tokens(config: Mapping[str, Any], tokens: int, default_max_shift: float) -> float:
    """mu, the schedule's shift for this number of image tokens: a line through two points of the configuration.

    The order of operations is that of the diffusers pipelines, so that the schedule is theirs to the last bit.
    """
    base_tokens, max_tokens = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    base_shift, max_shift = config.get("base_shift", 0.5), config.get("max_shift", default_max_shift)
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return float(tokens * slope + (base_shift - slope * base_tokens))
