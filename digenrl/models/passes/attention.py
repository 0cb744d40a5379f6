"""The attention kernels of a loaded model, by kind of pass.

diffusers' attention reads the kernel from its processor, and compiled graphs are specialized on it. Until kernels
are set, torch chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from digenrl.config.recipes.attention import Kernels, fixed_kernels
from digenrl.records import Kernel, PassKind

BACKENDS: dict[Kernel, AttentionBackendName | None] = {
    "flash": AttentionBackendName._NATIVE_FLASH,
    "cudnn": AttentionBackendName._NATIVE_CUDNN,
    "efficient": AttentionBackendName._NATIVE_EFFICIENT,
    "math": AttentionBackendName._NATIVE_MATH,
    "native": None,
}


def prepare_attention() -> None:
    """Makes cuDNN's backward safe, and keeps torch from choosing cuDNN unless it is asked for.

    torch builds a plan of cuDNN's backward for the layout of the first gradient, and uses it for later gradients
    of any layout (seen in 2.11). It then reads the wrong memory. So all gradients get the same layout here.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    functions = _AttentionBackendRegistry._backends
    cudnn = functions[AttentionBackendName._NATIVE_CUDNN]
    if not hasattr(cudnn, "__wrapped__"):
        functions[AttentionBackendName._NATIVE_CUDNN] = without_copies(cudnn)


def without_copies(attention: Callable[..., Any]) -> Callable[..., Any]:
    """cuDNN's attention on B x tokens x heads x width as they are; diffusers' own copies them to another order."""

    @wraps(attention)
    def wrapped(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *,
        return_lse: bool = False,
        _parallel_config: Any = None,
        **settings: Any,
    ) -> Any:
        if return_lse or _parallel_config is not None:
            return attention(
                query, key, value, attn_mask, return_lse=return_lse, _parallel_config=_parallel_config, **settings
            )
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            output: Tensor = scaled_dot_product_attention(
                query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask, **settings
            )
        return _ContiguousGradient.apply(output.transpose(1, 2))  # type: ignore[no-untyped-call]

    return wrapped


class _ContiguousGradient(torch.autograd.Function):
    """The identity, with a contiguous gradient."""

    @staticmethod
    def forward(_context: Any, output: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


class AttentionCalls(TorchFunctionMode):
    """Inside, torch's attention is computed by `attend`."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *further: Any, **named: Any) -> Tensor:
        """Takes and returns what torch's attention does, which it is by default."""
        return scaled_dot_product_attention(query, key, value, *further, **named)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = self.attend if func is scaled_dot_product_attention else func
        return function(*args, **(kwargs or {}))


class AttentionProcessor:
    """What diffusers expects of an attention processor: a kernel, which `AttentionSwitch` may set.

    If `fused` is set, a processor may use kernels of this package where it is compiled.
    """

    fused = False
    _attention_backend: Any = None
    _parallel_config: Any = None


class AttentionSwitch:
    """Sets the kernel of all attention processors of a transformer. The one of replays is set between rollouts."""

    def __init__(self, transformer: nn.Module) -> None:
        found: list[Any] = [getattr(module, "processor", None) for module in transformer.modules()]
        self._processors = list({id(each): each for each in found if hasattr(each, "_attention_backend")}.values())
        self.kernels: dict[PassKind, Kernel] = fixed_kernels("native")

    def use(self, kernels: Kernels) -> None:
        """Uses these kernels from now on."""
        self.kernels = fixed_kernels(kernels)
        self._set("replay")

    @contextmanager
    def rollout(self, *, masked: bool) -> Iterator[None]:
        """Inside, attention uses the kernel of forwards without gradient."""
        self._set("masked" if masked else "rollout")
        try:
            yield
        finally:
            self._set("replay")

    def _set(self, kind: PassKind) -> None:
        backend = BACKENDS[self.kernels[kind]]
        for processor in self._processors:
            processor._attention_backend = backend
