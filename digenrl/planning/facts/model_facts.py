"""The size of a model and the work of one forward: from the catalog (catalog/models.yaml) or derived.

Catalog entries are fitted to measurements. The facts of any other model are counted from its layers, outside
this package because that needs torch, and completed here with default efficiencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal

from pydantic import Field

from digenrl.config.reading import ConfigError, Frozen, parse_model
from digenrl.planning.facts.cards import CatalogEntry, Positive, find_entry, read_catalog

Whole = Annotated[int, Field(ge=1)]
WholeOrZero = Annotated[int, Field(ge=0)]

BYTES_BF16 = 2
BYTES_FP32 = 4


class Execution(Frozen):
    """What the blocks cost in addition to their matrix products, eager or compiled."""

    activations: Positive
    traffic_passes: Positive
    launch_ms_per_block: Positive
    masked_attention: bool = False


class PublishedSettings(Frozen):
    """The model's published training settings: the defaults of `digenrl plan --model`."""

    height: Whole
    width: Whole
    frames: Whole = 1
    denoise_steps: Whole
    trained_share: Annotated[float, Field(gt=0, le=1)]
    prompts: Whole
    samples_per_prompt: Whole


@dataclass(frozen=True, slots=True)
class Tokens:
    """The sequence length of one sample."""

    image: int
    text: int


@dataclass(frozen=True, slots=True)
class ForwardWork:
    """One forward of one sample; `launch_s` is per pass, regardless of its number of samples."""

    matmul_flop: float
    attention_flop: float
    traffic_bytes: float
    launch_s: float
    masked_attention: bool
    compiled: bool


class ModelFacts(Frozen):
    """One model. The comments in catalog/models.yaml define each number.

    `fitted` is False for numbers that were counted from the layers and not fitted to measurements.
    """

    name: str
    family: str
    fitted: bool = True
    parameters: Whole
    float32_parameters: WholeOrZero = 0
    vae_parameters: WholeOrZero = 0
    block_weights: WholeOrZero = 0
    hidden: Whole
    blocks: Whole
    image_weights: Whole
    text_weights: WholeOrZero
    joint_attention_blocks: WholeOrZero = 0
    image_attention_blocks: WholeOrZero = 0
    cross_attention_blocks: WholeOrZero = 0
    block_tokens: Literal["joint", "image"] = "joint"
    text_tokens: Whole
    clip_text_tokens: WholeOrZero = 0
    cuts_padding: bool = False
    pixels_per_token: Whole = 16
    source_images: WholeOrZero = 0
    frames_per_latent: Whole | None = None
    guidance: Literal["batched", "embedded"]
    lora_linears: Positive
    decode_gflop_per_pixel: Positive
    eager: Execution
    compiled: Execution

    @property
    def weight_bytes(self) -> float:
        """The size of the transformer as loaded in bf16, which leaves some of its weights in fp32."""
        return float(self.parameters * BYTES_BF16 + self.float32_parameters * (BYTES_FP32 - BYTES_BF16))

    def sequence_text_tokens(self, text_tokens: int | None) -> int:
        """The text tokens in the transformer's sequence if a recipe's `model.text_tokens` is this."""
        if text_tokens is None:
            return self.text_tokens
        longest = self.clip_text_tokens + text_tokens
        return min(self.text_tokens, longest) if self.cuts_padding else longest

    def tokens(self, height: int, width: int, frames: int = 1, text: int | None = None) -> Tokens:
        """The sequence length of one sample of this size; a video of 4n+1 frames has n+1 latent frames.

        Source images in the sequence have as many tokens as a frame.
        """
        side = self.pixels_per_token
        if height % side or width % side:
            raise ConfigError(f"{self.name}: height and width must be multiples of {side}, got {height}x{width}")
        if self.frames_per_latent is None and frames != 1:
            raise ConfigError(f"{self.name} generates images, got {frames} frames; leave frames at 1")
        latent_frames = 1
        if self.frames_per_latent is not None:
            latent_frames += (frames - 1) // self.frames_per_latent
        per_frame = (height // side) * (width // side)
        frames_in_sequence = latent_frames + self.source_images
        return Tokens(image=frames_in_sequence * per_frame, text=self.text_tokens if text is None else text)

    def forward_work(self, tokens: Tokens, compiled: bool = False) -> ForwardWork:
        """The work of one forward of one sample, without guidance's second branch."""
        execution = self.execution(compiled)
        matmul = 2.0 * (tokens.image * self.image_weights + tokens.text * self.text_weights)
        scored = (
            self.joint_attention_blocks * (tokens.image + tokens.text) ** 2
            + self.image_attention_blocks * tokens.image**2
            + self.cross_attention_blocks * tokens.image * tokens.text
        )
        hidden_bytes = self.block_hidden_bytes(tokens) * self.blocks
        return ForwardWork(
            matmul_flop=matmul,
            attention_flop=4.0 * self.hidden * scored,
            traffic_bytes=execution.traffic_passes * hidden_bytes,
            launch_s=execution.launch_ms_per_block * 1e-3 * self.blocks,
            masked_attention=execution.masked_attention,
            compiled=compiled,
        )

    def execution(self, compiled: bool) -> Execution:
        return self.compiled if compiled else self.eager

    def block_hidden_bytes(self, tokens: Tokens) -> float:
        """The size of one sample's hidden state between two blocks."""
        through_blocks = tokens.image + (tokens.text if self.block_tokens == "joint" else 0)
        return float(through_blocks * self.hidden * BYTES_BF16)

    def decode_flop(self, height: int, width: int, frames: int = 1) -> float:
        """The VAE decoder's work for one sample."""
        return self.decode_gflop_per_pixel * 1e9 * height * width * frames

    def lora_parameters(self, rank: int) -> int:
        """Trainable parameters of adapters of this rank on the family's target layers."""
        return round(self.lora_linears * rank * 2 * self.hidden)


class CatalogModel(ModelFacts, CatalogEntry):
    """A model of the catalog. `sources` are words in the names of its published pipelines."""

    sources: tuple[str, ...]
    published: PublishedSettings


@cache
def known_models() -> tuple[CatalogModel, ...]:
    """All models of the catalog, in file order."""
    return tuple(parse_model(CatalogModel, entry) for entry in read_catalog("models.yaml"))


@cache
def find_model(name: str) -> CatalogModel:
    """The model with this name or alias; raises ConfigError with the nearest name."""
    return find_entry("model", name, known_models())


# Where nothing was measured: typical values of the catalog's models.
TYPICAL_EAGER = {"traffic_passes": 208.0, "launch_ms_per_block": 0.66}
TYPICAL_COMPILED = {"traffic_passes": 90.0, "launch_ms_per_block": 0.38}
TYPICAL_DECODE_GFLOP = {"image": 0.032, "video": 0.04}
# The compiler recomputes part of what eager blocks save: 74 to 91 % is left in the catalog's models.
COMPILED_ACTIVATIONS = 0.9


def typical_costs(activations: float, kind: Literal["image", "video"]) -> dict[str, object]:
    """The fields of ModelFacts that cannot be counted; `activations` is what an eager block saves."""
    return {
        "fitted": False,
        "decode_gflop_per_pixel": TYPICAL_DECODE_GFLOP[kind],
        "eager": {"activations": activations, **TYPICAL_EAGER},
        "compiled": {"activations": activations * COMPILED_ACTIVATIONS, **TYPICAL_COMPILED},
    }
