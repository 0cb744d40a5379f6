"""The part of `DiffusionModel` that all families share: a model made of the components of a diffusers pipeline.

Shape legend: as in contract.py.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from torch import Tensor, nn

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.attention import Kernels
from digenrl.models.contract import Conditioning, DiffusionModel, SampleSize, Schedule, Text
from digenrl.models.experts import EXPERTS, Experts
from digenrl.models.passes.attention import AttentionSwitch, prepare_attention
from digenrl.models.passes.cuda_graphs import GraphedForwards
from digenrl.models.quantized.layers import QuantizedLinear

logger = logging.getLogger(__name__)
TRAINED_TIMESTEPS = 1000  # num_train_timesteps of all schedulers
HIGHEST_LEVEL = 1.001  # solvers round
UNEVEN_LEVELS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")  # settings of schedulers


@dataclass(frozen=True, slots=True)
class TextLength:
    """To how many tokens a family pads or cuts the text of one of its tokenizers."""

    tokenizer: str  # the pipeline component
    default: int
    most: int


def check_tokenizer_allows(tokens: int, most: float, source: object) -> None:
    """Raises ConfigError if a recipe's texts are longer than the tokenizer of its source allows."""
    if tokens > most:
        raise ConfigError(
            f"model.text_tokens: {tokens} is more than the {most:g} tokens that the tokenizer of {source} allows; "
            "lower it"
        )


class PipelineModel(DiffusionModel):
    """Holds a pipeline of the family's class and uses its components and helper methods; never calls the pipeline.

    The pipeline's denoising loop has one timestep for the whole batch, ours one per row. All components are in
    evaluation mode; the VAE and the text encoders are frozen.
    """

    denoiser: ClassVar[str] = "transformer"  # the pipeline component that is trained
    may_have_experts: ClassVar[bool] = False  # True if some pipelines have a second one, for low noise levels
    text_encoders: ClassVar[tuple[str, ...]]  # names of pipeline components
    # Components that encode source images, and their processors, besides the VAE and the text encoders.
    vision_components: ClassVar[tuple[str, ...]] = ()
    vision_tokens: ClassVar[int] = 0  # that a source image typically adds to the text
    sources_are_tokens: ClassVar[bool] = False  # whether source images follow the sample's tokens in the sequence
    tokens_beside_text: ClassVar[int] = 0  # of a source image, in one sequence with the text
    unused_components: ClassVar[tuple[str, ...]] = ()  # components that are never loaded
    unused_by_encoders: ClassVar[tuple[str, ...]] = ("vae",)  # besides the transformer
    optional_components: ClassVar[tuple[str, ...]] = ()  # components that a pipeline may lack
    processors: ClassVar[tuple[str, ...]] = ()  # components of which only the tokenizer is used and loaded
    text_mask: ClassVar[str | None] = None  # the text argument that marks padding
    text_length: ClassVar[TextLength | None] = None  # None if it cannot be set
    text_multiple: ClassVar[int] = 1  # the transformer pads texts to a multiple of this
    guidance_argument: ClassVar[str] = "guidance_scale"  # of the diffusers pipeline
    takes_shift: ClassVar[bool] = True  # False if its noise levels are fixed

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        self.pipeline_class = type(pipeline)
        self.transformer: nn.Module = self._transformer_of(pipeline)
        self.vae = pipeline.vae
        self._graphed: GraphedForwards | None = None
        self._text_tokens: int | None = None
        for component in (self.vae, *self.encoding_modules()):
            if component is not None:
                component.requires_grad_(False).eval()
        if self.transformer is not None:  # None if only the text encoders are loaded
            self.transformer.eval()
            self.check_denoising()
        prepare_attention()

    @classmethod
    def denoisers(cls) -> tuple[str, ...]:
        """The pipeline components that predict velocities; a pipeline may lack the second."""
        return EXPERTS["both"] if cls.may_have_experts else (cls.denoiser,)

    def _transformer_of(self, pipeline: Any) -> Any:
        first, *second = (getattr(pipeline, name) for name in self.denoisers())
        if first is None or not second or second[0] is None:
            return first
        return Experts(first, second[0], pipeline.config.boundary_ratio * TRAINED_TIMESTEPS)

    @classmethod
    def check_index(cls, index: Mapping[str, Any]) -> None:
        """Raises ConfigError if the family does not take a pipeline with this `model_index.json`."""

    def check_denoising(self) -> None:
        """Raises ConfigError if the pipeline's scheduler or transformer is of a kind that is not supported."""
        scheduler = self.pipeline.scheduler
        name, config = type(scheduler).__name__, scheduler.config
        if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
            if config.get("invert_sigmas"):
                raise ConfigError(
                    f"{self.family}: {name} with `invert_sigmas`, from data to noise, is not supported"
                )
        elif not config.get("use_flow_sigmas") or config.get("prediction_type") != "flow_prediction":
            raise ConfigError(
                f"{self.family}: the pipeline's {name} has no noise levels of a flow (`use_flow_sigmas` and "
                "`prediction_type: flow_prediction`); save the pipeline with a FlowMatchEulerDiscreteScheduler"
            )

    def pipeline_arguments(self, guidance: float) -> dict[str, Any]:
        """Arguments with which the diffusers pipeline samples as this model does with this guidance.

        They do not include prompt, negative_prompt, num_frames, `step_arguments` and `sample_arguments`.
        """
        length = {} if self.text_length is None else {"max_sequence_length": self.text_tokens}
        return {self.guidance_argument: guidance, **length}

    def step_arguments(self, steps: int) -> dict[str, Any]:
        """Arguments with which the diffusers pipeline takes this number of steps."""
        return {"num_inference_steps": steps}

    def own_components(self) -> dict[str, Any]:
        """Our components in place of the pipeline's, by name: some of those are never loaded, some modified."""
        return {}

    def whole_pipeline(self) -> Any:
        """The pipeline with our own components, to be called and not to be saved."""
        pipeline = copy(self.pipeline)
        vars(pipeline).update(self.own_components())
        return pipeline

    def sample_arguments(self, latents_BL: Tensor, size: SampleSize) -> dict[str, Any]:
        """Arguments with which the diffusers pipeline starts from these latents, for samples of this size."""
        return {"latents": latents_BL, "height": size.height, "width": size.width}

    def prepare_pipeline(self, pipeline: Any, guidance: float, size: SampleSize) -> None:
        """Sets what the diffusers pipeline does not take as an argument."""

    def negative_arguments(self, negative_prompts: Sequence[str]) -> dict[str, Any]:
        """Arguments with which the diffusers pipeline uses these negative prompts, one per prompt."""
        return {"negative_prompt": list(negative_prompts)}

    def source_arguments(self, images: Sequence[Image.Image], size: SampleSize) -> dict[str, Any]:
        """Arguments with which the diffusers pipeline edits these source images of one prompt, as they are."""
        raise ConfigError(f"{self.family} takes no source images; use a family that edits images")

    def pipeline_source_size(self, size: SampleSize) -> SampleSize:
        """A size of source images that the diffusers pipeline does not resize."""
        return SampleSize(size.height, size.width)

    def pipeline_latents(self, latents_BL: Tensor, size: SampleSize) -> Tensor:
        """The latents as the diffusers pipeline returns them instead of pixels."""
        return latents_BL

    def audio_tokens(self, size: SampleSize) -> int:
        """The tokens of an audio track beside those of the video."""
        return 0

    def encoding_modules(self) -> list[nn.Module]:
        """The loaded text and image encoders, without the VAE."""
        parts = [getattr(self.pipeline, name) for name in (*self.text_encoders, *self.vision_components)]
        return [part for part in parts if isinstance(part, nn.Module)]

    def drop_text_encoders(self) -> None:
        for name in (*self.text_encoders, *self.vision_components):
            setattr(self.pipeline, name, None)

    def compact(self, conditioning: Conditioning) -> Conditioning:
        """Cuts texts to the longest row, and drops the mask if all rows have that length.

        Samples of one prompt then run without padding and without a mask, as in the diffusers pipeline.
        """
        negative = None if conditioning.negative is None else self.compact_text(conditioning.negative)
        return replace(conditioning, positive=self.compact_text(conditioning.positive), negative=negative)

    def compact_text(self, text: Text) -> Text:
        """One side of `compact`."""
        least = 1 if self.exchange is None else self.exchange.ranks  # every rank has a token of the text
        return text if self.text_mask is None else without_padding(text, self.text_mask, least)

    def shortened_prompt(self, row: Conditioning) -> Conditioning:
        mask_1T = None if self.text_mask is None else row.positive[self.text_mask]
        if mask_1T is None or self.text_mask is None:
            return row
        shorter_1T = mask_1T.clone()
        shorter_1T[0, int(mask_1T.sum()) - 1] = 0
        return replace(row, positive={**row.positive, self.text_mask: shorter_1T})

    def text_device(self) -> torch.device:
        """The device of the text encoders; raises RuntimeError if they are not loaded."""
        needed = [name for name in self.text_encoders if name not in self.optional_components]
        encoders = [getattr(self.pipeline, name) for name in needed]
        if any(encoder is None for encoder in encoders):
            raise RuntimeError(
                f"{self.family}: the text encoders are not loaded (dropped, left out, or the model has random "
                "weights); encode all prompts before drop_text_encoders(), or load a pipeline directory"
            )
        device: torch.device = encoders[0].device
        return device

    @property
    def text_tokens(self) -> int:
        """The number of tokens to which the text is padded or cut, as set or by default."""
        assert self.text_length is not None, f"{self.family}: its text length cannot be set"
        wanted = self.text_length.default if self._text_tokens is None else self._text_tokens
        return min(wanted, self._most_text_tokens())

    def set_text_tokens(self, tokens: int | None) -> None:
        """Pads and cuts texts to this length, None for the default; raises ConfigError if it is too long."""
        if tokens is not None:
            source = getattr(self.pipeline.config, "_name_or_path", self.family)
            check_tokenizer_allows(tokens, self._most_text_tokens(), source)
        self._text_tokens = tokens

    def _most_text_tokens(self) -> int:
        assert self.text_length is not None, f"{self.family}: its text length cannot be set"
        tokenizer = getattr(self.pipeline, self.text_length.tokenizer)
        most = self.text_length.most
        return most if tokenizer is None else min(most, int(tokenizer.model_max_length))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most of the transformer's weights, not counting adapters: inputs are cast to it."""
        layer, name = self._typical_weight
        dtype: torch.dtype = layer.dtype if isinstance(layer, QuantizedLinear) else getattr(layer, name).dtype
        return dtype

    @cached_property
    def _typical_weight(self) -> tuple[nn.Module, str]:
        # Cached: every forward asks for the dtype, and a transformer has thousands of weights.
        return typical_weight(self.transformer)

    @cached_property
    def _attention_switch(self) -> AttentionSwitch:
        return AttentionSwitch(self.transformer)

    def use_attention(self, kernels: Kernels) -> None:
        self._attention_switch.use(kernels)
        self.release_rollout_memory()  # captured graphs hold the old kernels

    def initial_latents(self, noise_B: Tensor, size: SampleSize) -> Tensor:
        return noise_B.to(self.device)

    def rollout_velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        """Uses the attention kernels of rollouts, and CUDA graphs for small batches without a mask."""
        masked = self._masks_text(conditioning)
        if self._graphed is None:  # created late, after adapters have been added
            self._graphed = GraphedForwards(self)
        # Neither collectives nor a choice of experts are captured.
        captures = not masked and self.exchange is None and not isinstance(self.transformer, Experts)
        velocity = self._graphed.velocity if captures else self.velocity
        with self._attention_switch.rollout(masked=masked):
            return velocity(latents_BL, timesteps_B, conditioning, guidance, size)

    def _masks_text(self, conditioning: Conditioning) -> bool:
        """Whether a text of either branch is padded."""
        sides = (conditioning.positive, conditioning.negative or {})
        return self.text_mask is not None and any(side.get(self.text_mask) is not None for side in sides)

    def decode_in_tiles(self) -> bool:
        if getattr(self.vae, "use_tiling", True):  # a VAE without this attribute has no tiling
            return False
        self.vae.enable_tiling()
        logger.warning("a sample does not fit in memory while it is decoded: decoding in tiles from now on")
        return True

    def release_rollout_memory(self) -> None:
        self._graphed = None

    def fresh_scheduler(self, **changes: Any) -> Any:
        """A new scheduler with the configuration of the pipeline's, so that no state is shared between calls."""
        scheduler = self.pipeline.scheduler
        return type(scheduler).from_config(scheduler.config, **changes)

    def pipeline_scheduler(self) -> Any:
        """A scheduler with which the diffusers pipeline takes the steps of a rollout without noise."""
        scheduler = self.fresh_scheduler()
        return scheduler if isinstance(scheduler, FlowMatchEulerDiscreteScheduler) else EulerSteps(scheduler)

    def shifted_schedule(self, steps: int, shift: float) -> Schedule:
        """Even levels with this shift, or those of a solver for flows, such as UniPC."""
        scheduler = self.pipeline.scheduler
        if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
            even = {"use_dynamic_shifting": False, "shift_terminal": None, **dict.fromkeys(UNEVEN_LEVELS, False)}
            scheduler = self.fresh_scheduler(shift=shift, **even)
            scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps))
        elif "flow_shift" in scheduler.config:
            scheduler = self.fresh_scheduler(flow_shift=shift)
            scheduler.set_timesteps(steps)
        else:
            raise ConfigError(
                f"sample.shift: the pipeline's {type(scheduler).__name__} has no `flow_shift`; leave it out"
            )
        return schedule_of(scheduler)


class EulerSteps:
    """Euler steps over the noise levels of another scheduler, in place of a multistep solver.

    Rollouts take Euler steps, whatever the scheduler of the pipeline.
    """

    order = 1

    def __init__(self, levels: Any) -> None:
        self._levels, self.config = levels, levels.config
        self._steps_taken = 0

    def set_timesteps(self, *arguments: Any, **named: Any) -> None:
        self._levels.set_timesteps(*arguments, **named)
        self.timesteps, self.sigmas, self._steps_taken = self._levels.timesteps, self._levels.sigmas, 0

    def set_begin_index(self, begin_index: int) -> None:
        self._steps_taken = begin_index

    def step(self, velocity: Tensor, _time: Tensor, latents: Tensor, **_named: Any) -> tuple[Tensor]:
        here, self._steps_taken = self._steps_taken, self._steps_taken + 1
        return (latents + (self.sigmas[here + 1] - self.sigmas[here]) * velocity,)


def schedule_of(scheduler: Any) -> Schedule:
    """The schedule of a diffusers scheduler after `set_timesteps`, in fp32 on the CPU.

    Raises ConfigError unless its noise levels decrease, with one more than there are steps.
    """
    levels = scheduler.sigmas
    decreases = bool((levels.diff() < 0).all()) and float(levels[-1]) >= 0 and float(levels[0]) <= HIGHEST_LEVEL
    if not decreases or len(levels) != len(scheduler.timesteps) + 1:
        raise ConfigError(
            f"model.source: the noise levels of its {type(scheduler).__name__} do not decrease from 1 to 0 in the "
            "steps asked for; save the pipeline with a FlowMatchEulerDiscreteScheduler"
        )
    return Schedule(
        sigmas=scheduler.sigmas.detach().to(device="cpu", dtype=torch.float32).clone(),
        timesteps=scheduler.timesteps.detach().to(device="cpu", dtype=torch.float32).clone(),
    )


class TwoBranchModel(PipelineModel):
    """A model with classifier-free guidance, whose branches are encoded alike and are separate forwards.

    Texts that differ in length would need a mask in one batch.
    """

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], negative_prompts: Sequence[str] | None = None) -> Conditioning:
        negatives = paired_negatives(prompts, negative_prompts)
        return Conditioning(self.encode_side(list(prompts)), self.encode_side(negatives))

    @abstractmethod
    def encode_side(self, prompts: list[str]) -> Text:
        """The text arguments of one branch of the guidance."""

    def velocity(
        self,
        latents_BL: Tensor,
        timesteps_B: Tensor,
        conditioning: Conditioning,
        guidance: float,
        size: SampleSize,
    ) -> Tensor:
        branch = partial(self.branch, latents_BL, timesteps_B, images=conditioning.images, size=size)
        conditional_BL = branch(conditioning.positive)
        if guidance <= 1:
            return at_least_fp32(conditional_BL)
        return at_least_fp32(self.guided(conditional_BL, branch(negative_side(conditioning)), guidance))

    @abstractmethod
    def branch(
        self, latents_BL: Tensor, timesteps_B: Tensor, text: Text, images: Mapping[str, Tensor], size: SampleSize
    ) -> Tensor:
        """The velocity of one branch of the guidance."""

    def guided(self, conditional_BL: Tensor, unconditional_BL: Tensor, guidance: float) -> Tensor:
        """The velocity of both branches together."""
        return unconditional_BL + guidance * (conditional_BL - unconditional_BL)


def negative_side(conditioning: Conditioning) -> Text:
    """The unconditional rows; raises ValueError if there are none."""
    if conditioning.negative is None:
        raise ValueError(
            "a guidance above 1 needs the unconditional rows of the conditioning, got none; "
            "encode the prompts with this model, or set guidance to 1"
        )
    return conditioning.negative


def at_least_fp32(value: Tensor) -> Tensor:
    """The value in fp32, or in fp64 if the model computes in fp64, where gradients are compared."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def paired_negatives(prompts: Sequence[str], negative_prompts: Sequence[str] | None) -> list[str]:
    """One negative prompt per prompt, empty by default."""
    negatives = [""] * len(prompts) if negative_prompts is None else list(negative_prompts)
    if len(negatives) != len(prompts):
        raise ValueError(f"expected one negative prompt per prompt, got {len(negatives)} for {len(prompts)}")
    return negatives


def without_padding(text: Text, mask_name: str, least: int = 1) -> Text:
    """Text arguments without the columns that are padding in every row; the mask is None if no row is padded.

    At least `least` columns remain.
    """
    mask_BT = text[mask_name]
    if mask_BT is None:
        return text
    mask_BT = mask_BT.to(torch.bool)
    length_B = mask_BT.sum(dim=1)
    padded_at_the_end = mask_BT == (torch.arange(mask_BT.shape[1], device=mask_BT.device) < length_B[:, None])
    if not bool(padded_at_the_end.all()):
        return text
    longest = max(int(length_B.max()), least)
    cut = {
        name: value[:, :longest] if value is not None and (value.ndim == 3 or name == mask_name) else value
        for name, value in text.items()
    }
    return cut | {mask_name: None} if int(length_B.min()) == longest else cut


def typical_weight(transformer: nn.Module) -> tuple[nn.Module, str]:
    """A weight with the most common dtype, not counting adapters, as the layer and the parameter's name.

    Some families keep a few weights in fp32. Sharding replaces parameters, hence not the parameter itself.
    """
    elements_per_dtype: Counter[torch.dtype] = Counter()
    found: dict[torch.dtype, tuple[nn.Module, str]] = {}
    for path, layer in transformer.named_modules():
        if "lora_" in path:
            continue
        if isinstance(layer, QuantizedLinear):
            elements_per_dtype[layer.dtype] += layer.weight_count
            found.setdefault(layer.dtype, (layer, "weight"))
        for name, parameter in layer.named_parameters(recurse=False):
            elements_per_dtype[parameter.dtype] += parameter.numel()
            found.setdefault(parameter.dtype, (layer, name))
    return found[elements_per_dtype.most_common(1)[0][0]]
