"""A model family: what it is called, how it is loaded, built at full size, and written at tiny size.

The model itself, once loaded, is a `DiffusionModel`; everything here happens before that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from digenrl.config.reading import ConfigError, nearest
from digenrl.models.contract import Conditioning, SampleSize
from digenrl.models.loading import building_on, load_pipeline, pipeline_without
from digenrl.models.pipeline_model import PipelineModel

LOCAL = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Part:
    """A class of diffusers and the arguments that build it."""

    cls: type[Any]
    arguments: Mapping[str, Any]

    def build(self) -> Any:
        """A new one; weights, if any, are random."""
        return self.cls(**self.arguments)


@dataclass(frozen=True, slots=True)
class FullSize:
    """One published size of a family."""

    billions: float  # parameters of the transformer, rounded to two places
    transformer: Part
    text_shapes: Mapping[str, tuple[int, ...]]  # one row of every text argument; a mask is all ones


@dataclass(frozen=True, slots=True)
class Family:
    """One entry of the registry.

    `call_arguments(model, guidance)` are the arguments with which the family's own diffusers pipeline does what
    our Euler loop does with that model and guidance, beyond prompt, negative_prompt, height, width, num_frames,
    num_inference_steps, latents and output_type.
    """

    kind: Literal["image", "video"]
    pipeline_class: type[Any]
    model_class: type[PipelineModel]
    sizes: Mapping[str, FullSize]  # the first is the default
    vae: Part
    scheduler: Part
    write_tiny: Callable[[Path, int], None]
    tiny_size: SampleSize
    call_arguments: Callable[[Any, float], dict[str, Any]]
    uses_negative_prompts: bool  # True for classifier-free, False for embedded guidance

    @property
    def name(self) -> str:
        """What recipes call it."""
        return self.model_class.family

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """Names of the adapted linear layers, as peft's target_modules."""
        return self.model_class.lora_targets

    @property
    def default_guidance(self) -> float:
        """The guidance scale of a recipe that gives none."""
        return self.model_class.default_guidance

    def load(
        self,
        source: str | Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = LOCAL,
        *,
        text_encoders: bool = True,
    ) -> PipelineModel:
        """The model of a diffusers pipeline directory or hub id; a directory, then the local cache, goes first.

        Raises ConfigError before any weights load if the source is missing or of another family. Without text
        encoders they are not even read, and `encode` raises from the start.
        """
        without = () if text_encoders else self.model_class.text_encoders
        pipeline = load_pipeline(self.pipeline_class, source, dtype, without)
        return self.model_class(pipeline.to(device))

    def load_text_encoders(
        self, source: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = LOCAL
    ) -> PipelineModel:
        """What encodes prompts, and nothing else: `encode` is all that the model can do."""
        pipeline = load_pipeline(self.pipeline_class, source, dtype, without=("transformer", "vae"))
        return self.model_class(pipeline.to(device))

    def build_transformer(
        self, dtype: torch.dtype, device: torch.device | str, size: str | None = None
    ) -> nn.Module:
        """The transformer at full size with random weights; on "meta" it has shapes only."""
        with building_on(dtype, device):
            transformer: nn.Module = self.full_size(size).transformer.build()
        return transformer

    def build_full(
        self, dtype: torch.dtype, device: torch.device | str, size: str | None = None, seed: int = 0
    ) -> PipelineModel:
        """The model at full size with random weights and no text encoders, for profiles and benchmarks.

        The same seed gives the same weights on devices of one kind.
        """
        devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            with building_on(dtype, device):
                vae = self.vae.build()
            transformer = self.build_transformer(dtype, device, size)
        scheduler = self.scheduler.build()
        return self.model_class(
            pipeline_without(self.pipeline_class, transformer=transformer, vae=vae, scheduler=scheduler)
        )

    def random_conditioning(
        self,
        rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
        seed: int,
        size: str | None = None,
        text_tokens: int | None = None,
    ) -> Conditioning:
        """Text arguments of the full-size shapes, for benchmarks: random numbers.

        Masks, where the family has one, show the first `text_tokens` tokens, all by default.
        """
        generator = torch.Generator().manual_seed(seed)

        def one_side() -> dict[str, torch.Tensor | None]:
            side: dict[str, torch.Tensor | None] = {}
            for name, shape in self.full_size(size).text_shapes.items():
                if "mask" in name:
                    value = torch.zeros(rows, *shape)
                    value[:, :text_tokens] = 1
                else:
                    value = torch.randn(rows, *shape, generator=generator)
                side[name] = value.to(device=device, dtype=dtype)
            return side

        return Conditioning(one_side(), one_side() if self.uses_negative_prompts else None)

    def full_size(self, size: str | None = None) -> FullSize:
        """A published size by its name, the first by default."""
        if size is None:
            return next(iter(self.sizes.values()))
        if size not in self.sizes:
            raise ConfigError(f"unknown size '{size}' of {self.name}; {nearest(size, list(self.sizes))}")
        return self.sizes[size]
