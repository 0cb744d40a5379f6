"""A training workload: the model, the size of its samples, the batch, and the trained parameters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from digenrl.config.generator_pools import slice_sizes
from digenrl.config.reading import Frozen, parse_model
from digenrl.config.recipes.base_precision import UNQUANTIZED, BasePrecision, stored_bytes
from digenrl.planning.facts.model_facts import (
    BYTES_BF16,
    BYTES_FP32,
    ForwardWork,
    ModelFacts,
    Tokens,
    Whole,
    WholeOrZero,
    find_model,
)

Tuning = Literal["lora", "full"]


class Workload(Frozen):
    """The settings of a training job that affect its costs.

    `trained_per_prompt` samples of each group are trained, all by default, in `parts_per_group` parts: several if
    every update trains samples of every group. `old_policy_forward` is the share of (sample, time-step) pairs that
    also need a forward of the policy before the update. `renoised` training noises final latents again: it needs
    no guidance, and no level is excluded. `pairs` of images are encoded and not generated. `held_out_size` is the
    height, width and frames of an evaluation's samples, if they differ. `weight_copies` are what a trainer keeps
    in fp32, as large as the trained weights, besides these, their moments and one gradient. Weights are
    `published_in_bf16` unless generators compute in float32. Without `model_facts` only measured costs are
    available.
    """

    model: str
    model_facts: ModelFacts | None = Field(default=None, exclude=True, repr=False)
    tuning: Tuning = "lora"
    lora_rank: Whole = 32
    height: Whole
    width: Whole
    frames: Whole = 1
    text_tokens: Whole | None = None
    held_out_size: tuple[Whole, Whole, Whole] | None = None
    denoise_steps: Whole
    trained_share: Annotated[float, Field(gt=0, le=1)]
    prompts: Whole
    samples_per_prompt: Whole
    trained_per_prompt: Whole | None = None
    updates_per_batch: Whole = 1
    parts_per_group: Whole = 1
    guidance: bool = True
    renoised: bool = False
    pairs: bool = False
    reference_forward: bool = False
    old_policy_forward: Annotated[float, Field(ge=0, le=1)] = 0.0
    weight_copies: WholeOrZero = 0
    float32_weights: bool = False
    base: BasePrecision = UNQUANTIZED
    generating_base: BasePrecision | None = None
    float32_vae: bool = False
    published_in_bf16: bool = True
    compiled: bool = False
    reward_lanes: WholeOrZero = 0
    reward_seconds: Annotated[float, Field(ge=0)] = 0.0
    whole_groups: bool = False
    held_out_weights: bool = False

    @model_validator(mode="after")
    def _sample_size_fits_the_model(self) -> Workload:
        if self.has_cost_model:
            self.forward_work  # noqa: B018  raises if the model cannot generate such samples
            self.held_out_tokens  # noqa: B018
        return self

    @model_validator(mode="after")
    def _trains_at_most_the_generated_samples(self) -> Workload:
        if self.trained_per_prompt is not None and self.trained_per_prompt > self.samples_per_prompt:
            raise ValueError(
                f"trained_per_prompt: {self.trained_per_prompt} is more than samples_per_prompt = "
                f"{self.samples_per_prompt}; lower it"
            )
        return self

    @property
    def has_cost_model(self) -> bool:
        """Whether costs can be modeled where none were measured."""
        return self.model_facts is not None

    @property
    def facts(self) -> ModelFacts:
        assert self.model_facts is not None, "a workload without model facts has measured costs only"
        return self.model_facts

    @property
    def tokens(self) -> Tokens:
        return self.facts.tokens(self.height, self.width, self.frames, self.text_tokens)

    @property
    def held_out_tokens(self) -> Tokens:
        height, width, frames = self.held_out_size or (self.height, self.width, self.frames)
        return self.facts.tokens(height, width, frames, self.text_tokens)

    @property
    def forward_work(self) -> ForwardWork:
        return self.facts.forward_work(self.tokens, self.compiled)

    @property
    def activations_per_block(self) -> float:
        """Activations that a block saves for its backward, in hidden states of a sample."""
        return self.facts.execution(self.compiled).activations

    @property
    def decode_flop(self) -> float:
        return self.facts.decode_flop(self.height, self.width, self.frames)

    @property
    def branches(self) -> int:
        """Rows of a rollout's batch per sample: two if guidance needs an unconditional forward."""
        return 2 if self.guidance and self.facts.guidance == "batched" else 1

    @property
    def trained_branches(self) -> int:
        """Rows of a training pass per (sample, time-step) pair."""
        return 1 if self.renoised else self.branches

    @property
    def pairs_per_sample(self) -> int:
        """Trained time-steps of one sample; the last denoising step itself is never trained."""
        most = self.denoise_steps if self.renoised else self.denoise_steps - 1
        return max(1, min(round(self.trained_share * self.denoise_steps), most))

    @property
    def samples_per_step(self) -> int:
        return self.prompts * self.samples_per_prompt

    def trained_samples(self, samples: int) -> int:
        """How many of `samples` generated samples are trained."""
        share = self.trained_per_prompt or self.samples_per_prompt
        return max(1, samples * share // self.samples_per_prompt)

    @property
    def weight_bytes(self) -> float:
        """The size of all weights in their storage type, on a card that only generates."""
        return self._stored_bytes(trains=False)

    @property
    def training_weight_bytes(self) -> float:
        """The size of all weights in their storage type, on a card that trains."""
        return self._stored_bytes(trains=True)

    def _stored_bytes(self, *, trains: bool) -> float:
        facts, value_bytes = self.facts, BYTES_FP32 if self.float32_weights else BYTES_BF16
        base = self.base if trains else self.generating_base or self.base
        unquantized = float(facts.parameters * BYTES_FP32) if self.float32_weights else facts.weight_bytes
        if base == UNQUANTIZED:
            return unquantized
        quantized = stored_bytes(base, facts.block_weights, trains=trains)
        return unquantized - facts.block_weights * value_bytes + quantized

    @property
    def vae_value_bytes(self) -> int:
        """The size of one number in the VAE's storage type."""
        return BYTES_FP32 if self.float32_vae else BYTES_BF16

    @property
    def trained_parameters(self) -> int:
        if self.tuning == "full":
            return self.facts.parameters
        return self.facts.lora_parameters(self.lora_rank)

    @property
    def published_bytes(self) -> float:
        """The size of a new weight version for one generator: all weights, or adapters."""
        return float(self.trained_parameters * (BYTES_BF16 if self.published_in_bf16 else BYTES_FP32))

    def slice_sizes(self) -> tuple[int, ...]:
        """Every slice size that cuts a group into equal slices, in ascending order.

        Only the group itself, if a reward compares all samples of a group (`whole_groups`).
        """
        return (self.samples_per_prompt,) if self.whole_groups else slice_sizes(self.samples_per_prompt)


WORKLOAD_KEYS = [key for key in Workload.model_fields if key not in ("model", "model_facts", "held_out_size")]


def workload_for(model: str, **overrides: Any) -> Workload:
    """A model of the catalog with its published settings and `overrides`; None keeps the published value.

    Raises ConfigError for an unknown model, an unknown key, or a sample size that the model cannot generate.
    """
    entry = find_model(model)
    given = {key: value for key, value in overrides.items() if value is not None}
    settings = {**entry.published.model_dump(), **given}
    return parse_model(Workload, {"model": entry.name, "model_facts": entry, **settings})
