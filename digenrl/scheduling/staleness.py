"""TCSS: which slices may start on which weights.

A slice of step k nominally uses version k. It may start on version k - 1 while the stale samples of its step
stay within the budget; it keeps the version it started with. Nothing is ever more than one version behind.
"""

from __future__ import annotations


def may_start(step: int, version: int, stale_so_far: int, samples: int, stale_budget: int) -> bool:
    """Whether `samples` of `step` may start on weights of `version`."""
    if version >= step:
        return True
    return version == step - 1 and stale_so_far + samples <= stale_budget
