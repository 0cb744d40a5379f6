"""Compiled reductions over the channels of a token: norms, and the largest value for fp8.

The compiler reads rows of more than 1,024 channels twice, once to reduce them and once to use the result. Here
rows stay in registers in between.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

LONGEST_ROW = 16384  # channels; a block of 1,024 threads holds 16 each


def keep_rows_in_registers() -> None:
    """Changes the compiler's choice for this process. Imports the compiler, which takes seconds."""
    from torch._inductor.choices import InductorChoices

    usual = InductorChoices.should_use_persistent_reduction
    if hasattr(usual, "__wrapped__"):
        return

    @wraps(usual)
    def choice(features: Any, cooperative_reduction: bool) -> bool:
        if not cooperative_reduction and is_row(features):
            return True
        return usual(features, cooperative_reduction)

    InductorChoices.should_use_persistent_reduction = staticmethod(choice)  # type: ignore[method-assign]


def is_row(features: Any) -> bool:
    """Whether a kernel reduces contiguous rows of a known length that fit in registers."""
    from torch._inductor.runtime.hints import ReductionHint

    length = features.reduction_numel
    known = isinstance(length, int) or bool(getattr(length, "is_number", False))
    return features.get_reduction_hint() == ReductionHint.INNER and known and int(length) <= LONGEST_ROW
