"""Settings of the trainer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool, StrictInt, field_validator, model_validator

from digenrl.config.reading import Frozen


class LoraSettings(Frozen):
    """Low-rank adapters on the family's attention layers; everything else is frozen."""

    rank: int = Field(default=32, ge=1)
    alpha: float = Field(default=64, gt=0)


class EmaSettings(Frozen):
    """A moving average of the trained weights: average <- decay * average + (1 - decay) * weights."""

    decay: float = Field(default=0.9, gt=0, lt=1)
    every_updates: int = Field(default=8, ge=1)


class TrainerSettings(Frozen):
    """What is trained, the optimizer, and how pairs are replayed.

    - Without `lora`, all weights of the transformer are trained.
    - `pack_size` is the number of loss terms in one forward and backward. `gradient_checkpointing` recomputes
      activations in the backward: of all blocks, of none, or of a number of blocks. With `auto`, memory and time
      are measured, and the fastest choice that fits `memory_share` of the free memory is used.
    - `old_log_probs` are those of the rollout, or recomputed by the trainer if forwards of another shape or device
      would not give the same bits.
    - With `sum_in_order`, the gradients of groups are added in a fixed order: the weights are bitwise the same for
      every order of arrival, and a group that arrives early keeps its gradient separate until its turn.
    - `offload` is for a process that both generates and trains: tensors that only training needs move to host
      memory during generation. `auto` offloads if all weights are trained on a CUDA card. Adapters and sharded
      weights are never offloaded.
    """

    learning_rate: float = Field(default=3e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(default=1e-4, ge=0)
    adam_eps: float = Field(default=1e-8, gt=0)
    gradient_norm: float = Field(default=1.0, gt=0)
    pack_size: int | Literal["auto"] = Field(default="auto")
    largest_pack: int = Field(default=64, ge=1)
    memory_share: float = Field(default=0.9, gt=0, le=1)
    old_log_probs: Literal["rollout", "recomputed"] = "rollout"
    autocast: Literal["off", "bf16"] = "off"
    gradient_checkpointing: StrictBool | Annotated[StrictInt, Field(ge=0)] | Literal["auto"] = "auto"
    sum_in_order: bool = True
    offload: bool | Literal["auto"] = "auto"
    ema: EmaSettings | None = None
    lora: LoraSettings | None = None

    @field_validator("pack_size")
    @classmethod
    def _pack_size_is_positive(cls, size: int | str) -> int | str:
        if isinstance(size, int) and size < 1:
            raise ValueError(f"pack_size must be at least 1 or 'auto', got {size}")
        return size

    @model_validator(mode="after")
    def _adapters_are_not_offloaded(self) -> TrainerSettings:
        if self.offload is True and self.lora is not None:
            raise ValueError(
                "offload: true, but adapters are small and stay on the card; set it to auto, "
                "or train all weights (lora: null)"
            )
        return self

    def offloads(self, device: str) -> bool:
        """Whether a process that generates and trains on this device, as `cuda:0`, offloads training state."""
        if self.lora is not None:
            return False
        return device.partition(":")[0] == "cuda" if self.offload == "auto" else self.offload
