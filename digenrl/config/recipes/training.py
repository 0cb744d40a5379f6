"""Settings of the trainer, and of how its weights are published."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, StrictBool, StrictInt, field_validator, model_validator

from digenrl.config.limits import Rank, Text
from digenrl.config.reading import Frozen

CodecName = Literal["none", "bf16", "int8", "int4", "top_k", "sampled"]
CodecChoice = CodecName | Literal["auto"]
Beta = Annotated[float, Field(ge=0, lt=1)]  # of Adam


class LoraSettings(Frozen):
    """Low-rank adapters on linear layers of the transformer; everything else is frozen.

    - `targets` names the layers as peft does: a list of names, each of which matches the end of a layer's path, or
      a regular expression that matches whole paths. By default the family's attention layers.
    - `init` is the distribution of the initial A matrices: uniform with bound 1 / sqrt(inputs), or Gaussian with
      standard deviation 1 / rank. B is zero.
    - `start_from` is a LoRA file or folder that training continues from instead, with the same targets and rank.
    """

    rank: Rank = 32
    alpha: float = Field(default=64, gt=0)
    targets: tuple[str, ...] | str | None = None
    init: Literal["uniform", "gaussian"] = "uniform"
    start_from: Text | None = None

    @field_validator("targets")
    @classmethod
    def _targets_can_match(cls, targets: tuple[str, ...] | str | None) -> tuple[str, ...] | str | None:
        if targets is not None and not (targets and all(targets)):
            raise ValueError("names no layer; give names such as [to_q, to_v], or leave it out")
        if isinstance(targets, str):
            try:
                re.compile(targets)
            except re.error as error:
                raise ValueError(f"{targets!r} is not a regular expression: {error}") from None
        return targets


class EmaSettings(Frozen):
    """A moving average of the trained weights: average <- decay * average + (1 - decay) * weights.

    With `warmup`, the decay after t optimizer updates is at most (1 + t) / (10 + t).
    """

    decay: float = Field(default=0.9, gt=0, lt=1)
    every_updates: int = Field(default=8, ge=1)
    warmup: bool = False

    def decay_after(self, updates: int) -> float:
        """The decay of an update of the average that follows this number of optimizer updates."""
        return min(self.decay, (1 + updates) / (10 + updates)) if self.warmup else self.decay


class StageLinkSettings(Frozen):
    """How the stages of a model send each other activations and gradients: as they are, or coded in fewer bytes.

    `ratio` is for `top_k`, which with 10 sends the largest tenth of the values, and for `sampled`, which takes as
    many bytes. With `auto`, links are measured in the first batch, and each gets the mildest codec with which it
    is no slower than the slowest stage; that codec chooses its own ratio. With a codec, the trained policy is not
    quite the one that generates: while `log_prob_mismatch` exceeds a tenth of the clip range, milder codecs are
    used. `auto` instead of all these keys stands for `auto` in both directions.
    """

    activations: CodecChoice = "none"
    gradients: CodecChoice = "none"
    ratio: float = Field(default=10.0, ge=1)
    deadline_s: float = Field(
        default=60.0, gt=0, le=1e6, description="a link over which nothing arrives for this long is lost"
    )

    @model_validator(mode="before")
    @classmethod
    def _auto_is_both(cls, content: Any) -> Any:
        if not isinstance(content, str):
            return content
        if content != "auto":
            raise ValueError(f"got '{content}'; use auto, or name codecs, as in {{activations: int8}}")
        return {"activations": "auto", "gradients": "auto"}

    @property
    def measures(self) -> bool:
        """Whether a codec is chosen by measurements."""
        return "auto" in (self.activations, self.gradients)


class TrainerSettings(Frozen):
    """What is trained, the optimizer, and how pairs are replayed.

    - Without `lora`, all weights of the transformer are trained.
    - `learning_rate_warmup` is the number of optimizer updates over which the learning rate grows linearly from 0.
    - `pack_size` is the number of loss terms in one forward and backward. `gradient_checkpointing` recomputes
      activations in the backward: of all blocks, of none, or of a number of blocks. With `auto`, memory and time
      are measured, and the fastest choice that fits `memory_share` of the free memory is used.
    - `job_samples` is the number of samples of a group that are replayed together: packs never mix samples of two
      jobs. It must divide the group size; `auto` is the whole group, or less of it if every card trains alone.
    - `old_log_probs` are those of the rollout, or recomputed by the trainer if forwards of another shape or device
      would not give the same bits.
    - With `sum_in_order`, the weights are bitwise the same for every order in which groups arrive. The gradients
      of adapters are added as 64-bit integers, which gives the same sum in any order. Those of all weights are
      added in a fixed order: a group that arrives early keeps its gradient separate until its turn. Gradients that
      several trainers share are always added as integers.
    - `stages` cuts the model into stages, one on each of the trainer's ranks (`lanes.ranks`), with these numbers
      of blocks; `auto` chooses them by the work of each block, and the measured speed and free memory of each
      rank's device. Ranks then hold their own blocks and all adapters, and packs travel from stage to stage.
      `links` says how.
    - `offload` is for a process that both generates and trains: tensors that only training needs move to host
      memory during generation. `auto` offloads if all weights are trained on a CUDA card. Adapters and sharded
      weights are never offloaded.
    """

    learning_rate: float = Field(default=3e-4, gt=0)
    learning_rate_warmup: int = Field(default=0, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    weight_decay: float = Field(default=1e-4, ge=0)
    adam_eps: float = Field(default=1e-8, gt=0)
    gradient_norm: float = Field(default=1.0, gt=0)
    skipped_steps: int = Field(
        default=3, ge=0, description="steps in a row that may have a gradient that is not finite"
    )
    pack_size: PositiveInt | Literal["auto"] = "auto"
    largest_pack: int = Field(default=64, ge=1)
    memory_share: float = Field(default=0.9, gt=0, le=1)
    job_samples: PositiveInt | Literal["auto"] = "auto"
    old_log_probs: Literal["rollout", "recomputed"] = "rollout"
    autocast: Literal["off", "bf16"] = "off"
    gradient_checkpointing: StrictBool | Annotated[StrictInt, Field(ge=0)] | Literal["auto"] = "auto"
    sum_in_order: bool = True
    stages: tuple[PositiveInt, ...] | Literal["auto"] | None = None
    links: StageLinkSettings = StageLinkSettings()
    offload: bool | Literal["auto"] = "auto"
    ema: EmaSettings | None = None
    lora: LoraSettings | None = None

    @model_validator(mode="after")
    def _adapters_are_not_offloaded(self) -> TrainerSettings:
        if self.offload is True and self.lora is not None:
            raise ValueError(
                "offload: true, but adapters are small and stay on the card; set it to auto, "
                "or train all weights (lora: null)"
            )
        return self

    def learning_rate_after(self, updates: int) -> float:
        """The learning rate of the optimizer update that follows this number of them."""
        warmup = self.learning_rate_warmup
        return self.learning_rate * updates / warmup if updates < warmup else self.learning_rate

    def offloads(self, device: str) -> bool:
        """Whether a process that generates and trains on this device, as `cuda:0`, offloads training state."""
        if self.lora is not None:
            return False
        return device.partition(":")[0] == "cuda" if self.offload == "auto" else self.offload


class PublishSettings(Frozen):
    """The precision of weights that are sent to generators.

    With `auto`, weights that the model rounds to bfloat16 before every use are sent in bfloat16, which changes
    nothing. With `bfloat16`, all adapters are: a version has half the bytes, or a fifth as a patch. The trainer
    keeps float32 and recomputes the old log-probs, so the importance ratio is 1 before the first update; samples
    come from a slightly different policy.
    """

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
