"""Kernels that round in the same way in every run, on every GPU of one kind."""

from __future__ import annotations

import os

import torch
import torch.utils.deterministic as settings

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def use_deterministic_kernels() -> None:
    """Uses them in this process from now on. An operation that has none raises RuntimeError.

    By default, attention adds gradients in the order in which blocks finish, and the compiler times several
    versions of a kernel, which round differently, and takes the fastest.
    """
    os.environ.setdefault(WORKSPACE, ":4096:8")  # torch wants it to be set; this is its size on Hopper
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a debugging aid, which takes time

    from torch._inductor import config as compiler  # imports the compiler, which takes seconds

    compiler.deterministic = True  # affects reductions
    compiler.triton.autotune_pointwise = False
