"""Model families: how large they are and how much work one forward is. Numbers: catalogue/models.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal

from pydantic import Field

from digenrl.config.reading import ConfigError, Frozen, parse_model
from digenrl.planning.cards import Positive
from digenrl.planning.lookup import find, read_catalogue

Whole = Annotated[int, Field(ge=1)]
WholeOrNone = Annotated[int, Field(ge=0)]

BYTES_BF16 = 2
PIXELS_PER_TOKEN_SIDE = 16  # an 8x VAE, then 2x2 patches: the same in all five families


class Execution(Frozen):
    """What running the blocks costs beside their matrix products, eagerly or compiled."""

    activations: Positive
    traffic_passes: Positive
    launch_ms_per_block: Positive
    masked_attention: bool = False


class Recipe(Frozen):
    """The family's published training recipe: what a plan assumes where the user says nothing."""

    height: Whole
    width: Whole
    frames: Whole = 1
    denoise_steps: Whole
    trained_share: Annotated[float, Field(gt=0, le=1)]
    prompts: Whole
    samples_per_prompt: Whole


@dataclass(frozen=True, slots=True)
class Tokens:
    """The length of one sample's sequence."""

    image: int
    text: int


@dataclass(frozen=True, slots=True)
class ForwardWork:
    """One forward of one sample; `launch_s` is per pass, however many samples share it."""

    matmul_flop: float
    attention_flop: float
    traffic_bytes: float
    launch_s: float
    masked_attention: bool
    compiled: bool


class ModelFamily(Frozen):
    """One family. The comments on top of catalogue/models.yaml say what each number counts."""

    name: str
    aliases: tuple[str, ...] = ()
    family: str
    sources: tuple[str, ...]
    parameters: Whole
    hidden: Whole
    blocks: Whole
    image_weights: Whole
    text_weights: Whole
    joint_attention_blocks: WholeOrNone = 0
    image_attention_blocks: WholeOrNone = 0
    cross_attention_blocks: WholeOrNone = 0
    block_tokens: Literal["joint", "image"] = "joint"
    text_tokens: Whole
    frames_per_latent: Whole | None = None
    guidance: Literal["batched", "embedded"]
    lora_linears: Whole
    lora_text_linears: WholeOrNone = 0
    decode_gflop_per_pixel: Positive
    eager: Execution
    compiled: Execution
    recipe: Recipe

    @property
    def makes_video(self) -> bool:
        return self.frames_per_latent is not None

    @property
    def weight_bytes(self) -> float:
        """The transformer in bf16."""
        return float(self.parameters * BYTES_BF16)

    def tokens(self, height: int, width: int, frames: int = 1, text: int | None = None) -> Tokens:
        """The sequence of one sample of that size; a video of 4n+1 frames has n+1 latent frames."""
        if height % PIXELS_PER_TOKEN_SIDE or width % PIXELS_PER_TOKEN_SIDE:
            raise ConfigError(
                f"{self.name}: height and width must be multiples of {PIXELS_PER_TOKEN_SIDE}, got {height}x{width}"
            )
        if self.frames_per_latent is None and frames != 1:
            raise ConfigError(f"{self.name} makes images, got {frames} frames; leave frames at 1")
        latent_frames = 1
        if self.frames_per_latent is not None:
            latent_frames += (frames - 1) // self.frames_per_latent
        per_frame = (height // PIXELS_PER_TOKEN_SIDE) * (width // PIXELS_PER_TOKEN_SIDE)
        return Tokens(image=latent_frames * per_frame, text=self.text_tokens if text is None else text)

    def forward_work(self, tokens: Tokens, compiled: bool = False) -> ForwardWork:
        """What one forward of one sample asks of a card, without guidance's second branch."""
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
        """How its blocks run."""
        return self.compiled if compiled else self.eager

    def block_hidden_bytes(self, tokens: Tokens) -> float:
        """The hidden state of one sample between two blocks."""
        through_blocks = tokens.image + (tokens.text if self.block_tokens == "joint" else 0)
        return float(through_blocks * self.hidden * BYTES_BF16)

    def decode_flop(self, height: int, width: int, frames: int = 1) -> float:
        """The VAE decoder's work for one sample, by the time that it takes."""
        return self.decode_gflop_per_pixel * 1e9 * height * width * frames

    def lora_parameters(self, rank: int, text_stream: bool = True) -> int:
        """Trainable parameters of adapters of that rank on every attention projection."""
        linears = self.lora_linears + (self.lora_text_linears if text_stream else 0)
        return linears * rank * 2 * self.hidden


@cache
def known_models() -> tuple[ModelFamily, ...]:
    """Every family of the catalogue, in its order."""
    return tuple(parse_model(ModelFamily, entry) for entry in read_catalogue("models.yaml"))


@cache
def find_model(name: str) -> ModelFamily:
    """The catalogue's family of that name; raises ConfigError naming the nearest one."""
    return find("model", name, known_models())
