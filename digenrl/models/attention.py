"""The choice of attention kernel: flash if there is no mask, and cuDNN's for rollouts on Hopper GPUs.

cuDNN has the fastest forward there, but its backward crashed (torch 2.11), so it is disabled wherever there is a
gradient. diffusers' attention reads the kernel from its processor, and compiled graphs are specialized on it.
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
    """Disables cuDNN attention in the whole process: checkpointing reruns forwards from within a backward."""
    torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def rollout_attention(processors: Sequence[Any]) -> Iterator[None]:
    """Inside, these processors use cuDNN; for forwards without gradient and without a mask.

    `processors` are a model's `switchable_processors`.
    """
    for processor in processors:
        processor._attention_backend = AttentionBackendName._NATIVE_CUDNN
    try:
        yield
    finally:
        for processor in processors:
            processor._attention_backend = None


def switchable_processors(model: DiffusionModel) -> list[Any]:
    """The attention processors that use another kernel in rollouts; none if no other kernel is faster."""
    if not _is_hopper(model.device) or model.dtype not in (torch.bfloat16, torch.float16):
        return []
    found = (getattr(module, "processor", None) for module in model.transformer.modules())
    return list({id(each): each for each in found if hasattr(each, "_attention_backend")}.values())


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER
