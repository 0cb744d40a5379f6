"""TCSS: which slices may start on which weights.

A slice of step k nominally uses version k. It may start on version k - 1 while the stale samples of its step
stay within the budget; it keeps the version it started with. Nothing is ever more than one version behind.
"""

from __future__ import annotations

from digenrl.units import UNLIMITED


def admitted_samples(step: int, version: int, stale_so_far: int, stale_budget: int) -> int:
    """How many more samples of `step` may start on weights of `version`."""
    if version >= step:
        return UNLIMITED
    return stale_budget - stale_so_far if version == step - 1 else 0
