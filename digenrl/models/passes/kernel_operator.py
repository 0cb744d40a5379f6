"""Operators that call Triton kernels on a GPU and torch's operators elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.library import triton_op
from torch.utils._triton import has_triton_package

Function = TypeVar("Function", bound=Callable[..., Any])
HAS_TRITON = has_triton_package()


def kernel_operator(name: str) -> Callable[[Function], Function]:
    """Registers a function that mutates nothing. Without Triton it stays a function.

    The compiler launches the kernels inside by itself, which takes the host far less time than a call of an opaque
    operator. Kernels have to be global names: torch finds them by these, and compiles again if they change.
    """
    return triton_op(name, mutates_args=()) if HAS_TRITON else lambda function: function
