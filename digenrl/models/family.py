"""A model family before a model is loaded: its pipeline and model class, its published sizes, how it is loaded.

A loaded model is a `DiffusionModel`; see `digenrl.models.contract`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn

from digenrl.config.reading import ConfigError, nearest
from digenrl.config.recipes.base_precision import UNQUANTIZED
from digenrl.config.recipes.recipe import Recipe
from digenrl.models.contract import Conditioning, SampleSize
from digenrl.models.experts import Experts, parts_of
from digenrl.models.loading.pipelines import (
    building_on,
    building_without_weights,
    cast_stored_buffers,
    component_names,
    keep_fp32_modules,
    load_pipeline,
    pipeline_without,
)
from digenrl.models.loading.single_file import COMPONENT
from digenrl.models.loading.sources import ModelSource, check_single_file, component_files, fetch_json, local_json
from digenrl.models.loading.weight_files import INDEX_NAME
from digenrl.models.pipeline_model import TRAINED_TIMESTEPS, PipelineModel, check_tokenizer_allows
from digenrl.models.quantized.replacing import (
    BaseWeights,
    building_without_linear_weights,
    fill_linears,
    quantize_text_encoder,
    quantize_transformer,
)

ONE_OF_TWO = re.compile(r"(high|low)[-_]?noise", re.IGNORECASE)  # in names of files with one of two transformers
SIZE_TOLERANCE = 0.15  # of the number of parameters: files also hold tables of positions
CPU = torch.device("cpu")
AS_PUBLISHED = BaseWeights()
NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Component:
    """A component of a diffusers pipeline: its class and constructor arguments."""

    cls: type[Any]
    arguments: Mapping[str, Any]

    def build(self) -> Any:
        """A new instance; its weights, if any, are random."""
        return self.cls(**self.arguments)


@dataclass(frozen=True, slots=True)
class FullSize:
    """One published size of a family."""

    billions: float  # parameters of the transformer, rounded to two places
    transformer: Component
    text_shapes: Mapping[str, tuple[int, ...]]  # one row of every text argument; a mask is all ones
    hub_id: str | None = None  # the published pipeline
    vae: Component | None = None  # if it is not the family's
    scheduler: Component | None = None  # likewise
    pipeline_settings: Mapping[str, Any] = field(default_factory=dict)  # arguments besides its components

    @property
    def has_experts(self) -> bool:
        """Whether it has two transformers, one for high and one for low noise levels."""
        return self.pipeline_settings.get("boundary_ratio") is not None


REQUIRED_ATTRIBUTES = ("family", "default_guidance", "lora_targets", "text_encoders")  # of a model class
Task = Literal["text_to_image", "image_edit", "text_to_video", "image_to_video"]


@dataclass(frozen=True, slots=True)
class SourceCount:
    """How many source images a prompt has."""

    least: int
    most: int


NO_SOURCES = SourceCount(0, 0)


@dataclass(frozen=True, slots=True)
class Distilled:
    """A published model that was distilled to few steps or to no guidance, recognized by its name in a source."""

    name: str
    steps: int | None  # with which it was published; None if it takes as many as before
    guidance: float | None = None  # likewise; None if the transformer takes none
    text_tokens: int | None = None  # the length of its text, if it is not the family's default


@dataclass(frozen=True, slots=True)
class Family:
    """A model family, as registered in `digenrl.models.registry` or named by an import path."""

    kind: Literal["image", "video"]
    pipeline_class: type[Any]
    model_class: type[PipelineModel]
    sizes: Mapping[str, FullSize]  # the first is the default
    vae: Component
    scheduler: Component
    uses_negative_prompts: bool  # True for classifier-free, False for embedded guidance
    distilled: tuple[Distilled, ...] = ()
    sources: SourceCount = NO_SOURCES
    # That of one model, by the configurations of its transformer and of its pipeline, if not all take as many.
    own_sources: Callable[[Mapping[str, Any], Mapping[str, Any]], SourceCount] | None = None

    @property
    def name(self) -> str:
        return self.model_class.family

    def missing(self) -> list[str]:
        """What the model class does not define: abstract methods, and attributes without a default."""
        own = self.model_class
        abstract = getattr(own, "__abstractmethods__", ())
        return [*(name for name in REQUIRED_ATTRIBUTES if not hasattr(own, name)), *sorted(abstract)]

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What the family can do, with and without source images."""
        is_video = self.kind == "video"
        from_text: Task = "text_to_video" if is_video else "text_to_image"
        from_images: Task = "image_to_video" if is_video else "image_edit"
        return (*((from_text,) if self.sources.least == 0 else ()), *((from_images,) if self.sources.most else ()))

    def distilled_as(self, source: str) -> Distilled | None:
        """The distilled model that a recipe's source names."""
        return next((each for each in self.distilled if each.name.lower() in source.lower()), None)

    def text_tokens_of(self, recipe: Recipe) -> int | None:
        """The length of the text, as set or as published for a distilled model; None for the family's default."""
        distilled = self.distilled_as(recipe.model.source)
        published = None if distilled is None else distilled.text_tokens
        return published if recipe.model.text_tokens is None else recipe.model.text_tokens

    @property
    def denoiser(self) -> str:
        """The component of the pipeline that is trained, usually its transformer."""
        return self.model_class.denoiser

    @property
    def default_guidance(self) -> float:
        """The guidance scale of a recipe that sets none."""
        return self.model_class.default_guidance

    def load(
        self,
        source: str | Path | ModelSource,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = CPU,
        *,
        text_encoders: bool = True,
        vae_dtype: torch.dtype = torch.float32,
        text_tokens: int | None = None,
        base: BaseWeights = AS_PUBLISHED,
    ) -> PipelineModel:
        """Loads the model from a pipeline directory, a single file, or a hub id, first looked up in the cache.

        Raises ConfigError, before any weights are read, if the source is missing or belongs to another family.
        Without text encoders, they and the tokenizers are not read at all and `encode` raises. `text_tokens` is
        the length of the text, the family's default if None. The linear layers of the transformer's blocks are
        quantized one by one if `base` says so.
        """
        without = () if text_encoders else self._text_components()
        pipeline = self._load_pipeline(source, {"default": dtype, "vae": vae_dtype}, without)
        for name in self.model_class.denoisers():
            if getattr(pipeline, name) is not None:
                quantize_transformer(getattr(pipeline, name), base, device)
        return self._as_model(pipeline.to(device), text_tokens)

    def load_text_encoders(
        self,
        source: str | Path | ModelSource,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = CPU,
        *,
        vae_dtype: torch.dtype = torch.float32,
        text_tokens: int | None = None,
        precision: str = UNQUANTIZED,
        quantize_on: torch.device | str | None = None,
    ) -> PipelineModel:
        """Loads the text encoders and, if the family takes source images, the VAE: the model can only encode.

        Quantizing is faster on a card, even if the encoders do not stay there: `quantize_on`.
        """
        unused = () if self.sources.most else self.model_class.unused_by_encoders
        without = (*self.model_class.denoisers(), *unused)
        pipeline = self._load_pipeline(source, {"default": dtype, "vae": vae_dtype}, without)
        for name in self.model_class.text_encoders:
            if getattr(pipeline, name) is not None:
                quantize_text_encoder(getattr(pipeline, name), precision, quantize_on or device)
        return self._as_model(pipeline.to(device), text_tokens)

    def load_without_weights(
        self,
        source: str | Path | ModelSource,
        dtype: torch.dtype = torch.float32,
        *,
        vae_dtype: torch.dtype = torch.float32,
        text_tokens: int | None = None,
    ) -> tuple[PipelineModel, tuple[Path, ...]]:
        """The model of a pipeline without text encoders, on the CPU, and the files of its transformer's weights.

        The transformer's parameters are on the meta device, in the dtypes that loading would give them.
        """
        without = self._text_components()
        files = component_files(self.denoiser, self.pipeline_class, self.with_base(source), without)
        dtypes = {"default": dtype, "vae": vae_dtype}
        pipeline = self._load_pipeline(source, dtypes, (*without, self.denoiser))
        kind = self.full_size().transformer.cls
        with building_without_weights(dtype):
            transformer = kind.from_config(kind.load_config(files[0].parent, local_files_only=True))
        keep_fp32_modules(transformer)
        cast_stored_buffers(transformer, dtype)
        pipeline.register_modules(**{self.denoiser: transformer})
        return self._as_model(pipeline, text_tokens), files

    def _text_components(self) -> tuple[str, ...]:
        own = (*self.model_class.text_encoders, *self.model_class.vision_components)
        return (*own, *component_names(self.pipeline_class, "tokenizer"))

    def _load_pipeline(
        self, source: str | Path | ModelSource, dtypes: Mapping[str, torch.dtype], without: Sequence[str]
    ) -> Any:
        own, without = self.model_class, (*without, *self.model_class.unused_components)
        pipeline, optional, processors = self.with_base(source), own.optional_components, own.processors
        return load_pipeline(self.pipeline_class, pipeline, dtypes, without, optional, processors)

    def _as_model(self, pipeline: Any, text_tokens: int | None) -> PipelineModel:
        model = self.model_class(pipeline)
        model.set_text_tokens(text_tokens)
        return model

    def with_base(self, source: str | Path | ModelSource) -> ModelSource:
        """The source; a single file without a base pipeline gets the published one of its size.

        Raises ConfigError if no published size has about as many parameters as the file, or if it cannot be read.
        """
        source = ModelSource.of(source)
        if source.file is not None and self.denoiser != COMPONENT:
            raise ConfigError(
                f"{source}: single files with a {self.denoiser} are not supported; give the folder or hub id of a "
                f"{self.pipeline_class.__name__}"
            )
        if source.file is None or source.base is not None:
            return source
        if self.model_class.may_have_experts and ONE_OF_TWO.search(source.file.name):
            raise ConfigError(f"{source}: is one of two transformers; give a folder or hub id with both")
        count = sum(tensor.elements for tensor in check_single_file(source.file).values()) / 1e9
        sizes = {name: size for name, size in self.sizes.items() if size.hub_id is not None}
        near = [size for size in sizes.values() if abs(size.billions - count) <= SIZE_TOLERANCE * size.billions]
        if not near:
            known = ", ".join(f"{name} {size.billions} billion" for name, size in sizes.items())
            raise ConfigError(
                f"{source}: has {count:.3g} billion parameters, as no published size of {self.name} ({known}); "
                "set model.base_source to the folder or hub id with its other components"
            )
        return replace(source, base=min(near, key=lambda size: abs(size.billions - count)).hub_id)

    def build_transformer(
        self,
        dtype: torch.dtype,
        device: torch.device | str,
        size: str | None = None,
        base: BaseWeights = AS_PUBLISHED,
    ) -> nn.Module:
        """The transformer at full size with random weights; on "meta" it has shapes only.

        Every weight has the dtype that loading the published model in `dtype` gives it. A quantized base is built
        layer by layer: the device never holds all weights in `dtype`.
        """
        full = self.full_size(size)
        built: list[nn.Module] = []
        for _ in range(1 + full.has_experts):
            with (
                building_on(dtype, device),
                building_without_linear_weights() if base.quantized else nullcontext(),
            ):
                transformer: nn.Module = full.transformer.build()
            keep_fp32_modules(transformer)
            if base.quantized:
                fill_linears(transformer, base, device)
            built.append(transformer)
        if not full.has_experts:
            return built[0]
        return Experts(built[0], built[1], full.pipeline_settings["boundary_ratio"] * TRAINED_TIMESTEPS)

    def transformer_without_weights(self, source: str | Path | ModelSource) -> nn.Module:
        """The transformer of a pipeline directory, or of a hub id in the cache, on the meta device.

        Of two transformers, which have the same layers, it is the first. Raises OSError if its configuration
        cannot be read.
        """
        kind, pipeline = self.full_size().transformer.cls, self.with_base(source).pipeline
        config = kind.load_config(
            pipeline.location,
            subfolder=f"{pipeline.within}{self.denoiser}",
            revision=pipeline.revision,
            local_files_only=True,
        )
        with building_on(torch.float32, "meta"):
            transformer: nn.Module = kind.from_config(config)
        return transformer

    def build_full(
        self,
        dtype: torch.dtype,
        device: torch.device | str,
        size: str | None = None,
        seed: int = 0,
        *,
        vae_dtype: torch.dtype = torch.float32,
        text_tokens: int | None = None,
        base: BaseWeights = AS_PUBLISHED,
    ) -> PipelineModel:
        """The model at full size with random weights and no text encoders, for profiles and benchmarks.

        The same seed gives the same weights on devices of the same type.
        """
        full, devices = self.full_size(size), [torch.device(device)] if torch.device(device).type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            with building_on(vae_dtype, device):
                vae = (full.vae or self.vae).build()
            transformer = self.build_transformer(dtype, device, size, base)
        parts = {"vae": vae, "scheduler": (full.scheduler or self.scheduler).build()}
        parts |= {name or self.denoiser: part for name, part in parts_of(transformer).items()}
        pipeline = pipeline_without(self.pipeline_class, **parts, **full.pipeline_settings)
        return self._as_model(pipeline, text_tokens)

    def random_images(
        self,
        sources: Sequence[SampleSize],
        size: SampleSize,
        dtype: torch.dtype,
        seed: int,
        full: str | None = None,
    ) -> dict[str, torch.Tensor]:
        """Random `Conditioning.images` of one prompt with sources of these sizes, on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        own = self.full_size(full)
        shapes = self.model_of_shapes(own.vae or self.vae, own.pipeline_settings).image_shapes(sources, size)
        return {name: torch.randn(1, *shape, generator=generator).to(dtype) for name, shape in shapes.items()}

    def model_of_shapes(self, vae: Component, settings: Mapping[str, Any] = NO_SETTINGS) -> PipelineModel:
        """A model without weights, which knows the shapes of latents and of source images."""
        with building_on(torch.float32, "meta"):
            return self.model_class(pipeline_without(self.pipeline_class, vae=vae.build(), **settings))

    def vae_of(self, source: str | Path | ModelSource) -> Component | None:
        """The VAE of a local pipeline, or of the published pipeline of this hub id; None if it is not known."""
        source = self.with_base(source)
        settings = local_json(source, "vae/config.json")
        if settings is not None:
            return replace(self.vae, arguments={k: v for k, v in settings.items() if not k.startswith("_")})
        published = self._published(source)
        return None if published is None else published.vae or self.vae

    def sources_of(self, source: str | Path | ModelSource) -> SourceCount:
        """How many source images the model takes, as far as is known without the network."""
        source = self.with_base(source)
        transformer, pipeline = local_json(source, f"{self.denoiser}/config.json"), local_json(source, INDEX_NAME)
        if transformer is not None and pipeline is not None:
            return self.sources_by(transformer, pipeline)
        published = self._published(source)
        return self.sources if published is None else self.published_sources(published)

    def published_sources(self, published: FullSize) -> SourceCount:
        return self.sources_by(published.transformer.arguments, published.pipeline_settings)

    def sources_by(self, transformer: Mapping[str, Any], pipeline: Mapping[str, Any]) -> SourceCount:
        """How many source images a model takes whose transformer and pipeline have these configurations."""
        return self.sources if self.own_sources is None else self.own_sources(transformer, pipeline)

    def _published(self, source: ModelSource) -> FullSize | None:
        return next((size for size in self.sizes.values() if size.hub_id == source.pipeline.location), None)

    def random_conditioning(
        self,
        rows: int,
        dtype: torch.dtype,
        device: torch.device | str,
        seed: int,
        size: str | None = None,
        text_tokens: int | None = None,
        prompt_tokens: int | None = None,
    ) -> Conditioning:
        """Random text arguments of the full-size shapes, for texts of `text_tokens`, the family's default if None.

        A mask shows the first `prompt_tokens` tokens, or all.
        """
        generator = torch.Generator().manual_seed(seed)

        def one_side() -> dict[str, torch.Tensor | None]:
            side: dict[str, torch.Tensor | None] = {}
            for name, shape in self.text_shapes(size, text_tokens).items():
                if "mask" in name:
                    value = torch.zeros(rows, *shape)
                    value[:, :prompt_tokens] = 1
                else:
                    value = torch.randn(rows, *shape, generator=generator)
                side[name] = value.to(device=device, dtype=dtype)
            return side

        return Conditioning(one_side(), one_side() if self.uses_negative_prompts else None)

    def text_shapes(
        self, size: str | None = None, text_tokens: int | None = None
    ) -> Mapping[str, tuple[int, ...]]:
        """The shape of one row of every text argument, with texts of this length, the default if None."""
        shapes, length = self.full_size(size).text_shapes, self.model_class.text_length
        if text_tokens is None or length is None:
            return shapes
        more = text_tokens - length.default
        return {
            name: (shape[0] + more, *shape[1:]) if len(shape) > 1 or "mask" in name else shape
            for name, shape in shapes.items()
        }

    def check_text_tokens(self, text_tokens: int | None) -> None:
        """Raises ConfigError if this length of the text is more than the family takes."""
        length = self.model_class.text_length
        if text_tokens is None:
            return
        if length is None:
            raise ConfigError(f"model.text_tokens: {self.name} has a fixed length of text; leave it out")
        if text_tokens > length.most:
            raise ConfigError(
                f"model.text_tokens: {text_tokens} is more than {length.most}, the most that {self.name} takes; "
                f"lower it, or leave it out for {length.default}"
            )

    def check_tokenizer(self, text_tokens: int | None, source: ModelSource) -> None:
        """Raises ConfigError if the tokenizer of the source allows fewer tokens; fetches a few kB at most."""
        length = self.model_class.text_length
        if text_tokens is None or length is None:
            return
        settings = fetch_json(self.with_base(source), f"{length.tokenizer}/tokenizer_config.json") or {}
        most = settings.get("model_max_length")
        if isinstance(most, int | float):
            check_tokenizer_allows(text_tokens, most, source)

    def full_size(self, size: str | None = None) -> FullSize:
        """A published size by name, the first by default; raises ConfigError if it is unknown."""
        if size is None:
            return next(iter(self.sizes.values()))
        if size not in self.sizes:
            raise ConfigError(f"unknown size '{size}' of {self.name}; {nearest(size, list(self.sizes))}")
        return self.sizes[size]
