"""What a trainer can be told."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

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

    Without `lora` all weights of the transformer are trained.
    `pack_size` counts the terms of one forward and backward; `auto` measures the largest that fits
    `memory_share` of the free memory. `old_log_probs` are the rollout's own, or recomputed by the trainer where
    forwards of another shape or device would not give the same bits. With `sum_in_order` the gradients of groups
    are added up in the order of their places: the weights are the same to the last bit whatever order groups come
    in, and a group that is early holds a gradient of its own until then.
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
    gradient_checkpointing: bool = False
    sum_in_order: bool = True
    ema: EmaSettings | None = None
    lora: LoraSettings | None = None

    @field_validator("pack_size")
    @classmethod
    def _a_pack_holds_a_term(cls, size: int | str) -> int | str:
        if isinstance(size, int) and size < 1:
            raise ValueError(f"pack_size must be at least 1 or 'auto', got {size}")
        return size
