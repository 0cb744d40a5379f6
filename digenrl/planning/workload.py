"""What is trained: the model, the size of its samples, the batch, and what of it gets gradients."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from digenrl.config.generator_pools import slice_sizes
from digenrl.config.reading import Frozen, parse_model
from digenrl.planning.model_catalogue import ForwardWork, ModelFamily, Tokens, Whole, WholeOrNone, find_model

Tuning = Literal["lora", "full"]


class Workload(Frozen):
    """One training job, as far as its costs go. `workload_for` fills in the family's recipe.

    `trained_per_prompt` samples of each group are trained, all of them by default. `old_policy_forward` is the
    share of pairs that also get a forward of the policy before the update. A model that is not `catalogued` has no
    costs but measured ones.
    """

    model: str
    catalogued: bool = True
    tuning: Tuning = "lora"
    lora_rank: Whole = 32
    height: Whole
    width: Whole
    frames: Whole = 1
    text_tokens: Whole | None = None
    denoise_steps: Whole
    trained_share: Annotated[float, Field(gt=0, le=1)]
    prompts: Whole
    samples_per_prompt: Whole
    trained_per_prompt: Whole | None = None
    updates_per_batch: Whole = 1
    guidance: bool = True
    reference_forward: bool = False
    old_policy_forward: Annotated[float, Field(ge=0, le=1)] = 0.0
    float32_weights: bool = False
    compiled: bool = False
    reward_lanes: WholeOrNone = 0
    reward_seconds: Annotated[float, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _the_family_can_do_it(self) -> Workload:
        if self.catalogued:
            self.forward_work  # noqa: B018  raises where the family cannot make such samples
        return self

    @model_validator(mode="after")
    def _trains_what_it_generates(self) -> Workload:
        if self.trained_per_prompt is not None and self.trained_per_prompt > self.samples_per_prompt:
            raise ValueError(
                f"trained_per_prompt: {self.trained_per_prompt} is more than samples_per_prompt = "
                f"{self.samples_per_prompt}; lower it"
            )
        return self

    @property
    def family(self) -> ModelFamily:
        return find_model(self.model)

    @property
    def tokens(self) -> Tokens:
        return self.family.tokens(self.height, self.width, self.frames, self.text_tokens)

    @property
    def forward_work(self) -> ForwardWork:
        return self.family.forward_work(self.tokens, self.compiled)

    @property
    def activations_per_block(self) -> float:
        """What a block keeps for its backward, in hidden states of a sample."""
        return self.family.execution(self.compiled).activations

    @property
    def decode_flop(self) -> float:
        return self.family.decode_flop(self.height, self.width, self.frames)

    @property
    def branches(self) -> int:
        """Rows of the batch per sample: two where guidance needs an unconditional forward."""
        return 2 if self.guidance and self.family.guidance == "batched" else 1

    @property
    def pairs_per_sample(self) -> int:
        """Trained time-steps of one sample; the last step is never trained."""
        return max(1, min(round(self.trained_share * self.denoise_steps), self.denoise_steps - 1))

    @property
    def samples_per_step(self) -> int:
        return self.prompts * self.samples_per_prompt

    def trained_samples(self, samples: int) -> int:
        """How many of so many generated samples are trained."""
        share = self.trained_per_prompt or self.samples_per_prompt
        return max(1, samples * share // self.samples_per_prompt)

    @property
    def weight_bytes(self) -> float:
        """All weights, in the type that they are kept in."""
        return self.family.weight_bytes * (2 if self.float32_weights else 1)

    @property
    def trained_parameters(self) -> int:
        if self.tuning == "full":
            return self.family.parameters
        return self.family.lora_parameters(self.lora_rank)

    @property
    def published_bytes(self) -> float:
        """What a new version sends to every generator: all weights, or fp32 adapters."""
        if self.tuning == "full":
            return self.weight_bytes
        return 4.0 * self.trained_parameters

    def slice_sizes(self) -> tuple[int, ...]:
        """Every slice size that cuts a group into equal slices, in ascending order."""
        return slice_sizes(self.samples_per_prompt)


WORKLOAD_KEYS = [key for key in Workload.model_fields if key not in ("model", "catalogued")]


def workload_for(model: str, **overrides: Any) -> Workload:
    """The family's published recipe, with `overrides`; None leaves the recipe's value.

    Raises ConfigError for an unknown family, an unknown key, or a sample the family cannot make.
    """
    family = find_model(model)
    given = {key: value for key, value in overrides.items() if value is not None}
    return parse_model(Workload, {"model": family.name, **family.recipe.model_dump(), **given})
