"""Random SPECs whose pools may have their own slice size, as hypothesis strategies."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from random_specs import slice_tables, spec_contents

HELPS = ("none", "greedy", "search", "auto")
DISPATCHES = ("eager", "earliest_finish")


@st.composite
def mixed_contents(draw: st.DrawFn, helps: tuple[str, ...] = HELPS, **options: Any) -> dict[str, Any]:
    """One to three pools; each has the SPEC's slice, or a multiple of it that divides the group."""
    content = draw(spec_contents(helps=helps, dispatches=DISPATCHES, **options))
    if draw(st.booleans()):
        content["generators"].append({"name": "third", "count": 1, "seconds": draw(slice_tables())})
    group, unit = content["samples_per_prompt"], content["slice"]
    multiples = [size for size in range(unit, group + 1, unit) if group % size == 0]
    for pool in content["generators"]:
        own = draw(st.sampled_from([None, *multiples]))
        if own is not None:
            table = pool["seconds"]
            largest = max(table)
            if own > largest:
                table[own] = round(table[largest] + draw(st.sampled_from([0.001, 0.5, 2, 5])), 3)
            pool["slice"] = own
    return content
