"""Which kernel computes attention: flash, where there is no mask, and in rollouts on Hopper cards cuDNN's.

cuDNN's is the fastest forward there, but its backward crashed (torch 2.11), so it is off wherever there is a
gradient. diffusers' attention asks its processor for the kernel, which compiled graphs are told apart by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName

from digenrl.models.contract import DiffusionModel

HOPPER = (9, 0)  # compute capability


def forbid_cudnn_attention() -> None:
    """For the whole process, not around a forward: checkpointing runs forwards again, from within a backward."""
    torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def rollout_attention(processors: Sequence[Any]) -> Iterator[None]:
    """Inside, forwards without gradient and without a mask take the fastest kernel that there is for them.

    Of a model with these `choosing_processors`.
    """
    for processor in processors:
        processor._attention_backend = AttentionBackendName._NATIVE_CUDNN
    try:
        yield
    finally:
        for processor in processors:
            processor._attention_backend = None


def choosing_processors(model: DiffusionModel) -> list[Any]:
    """Those of a model's attention that take another kernel in rollouts; none where no other is faster."""
    if not _is_hopper(model.device) or model.dtype not in (torch.bfloat16, torch.float16):
        return []
    found = (getattr(module, "processor", None) for module in model.transformer.modules())
    return list({id(each): each for each in found if hasattr(each, "_attention_backend")}.values())


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER
