"""Which model families a test needs, if it is about their transformers."""

from __future__ import annotations

from digenrl.models.registry import FAMILIES

# The first family of each transformer class.
ONE_PER_TRANSFORMER = sorted(
    {
        next(iter(family.sizes.values())).transformer.cls: name for name, family in reversed(FAMILIES.items())
    }.values(),
    key=list(FAMILIES).index,
)
