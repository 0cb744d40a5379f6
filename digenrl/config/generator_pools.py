"""What a recipe's cluster and a SPEC both say about a pool of equal generator lanes."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from digenrl.config.limits import Lanes
from digenrl.config.reading import Frozen

Count = Annotated[int, Field(ge=1)]


def _is_free(name: str) -> str:
    """Lanes are named after their pool, with a number."""
    if name == "reward":
        raise ValueError(f"'{name}' is the name of the reward lanes; choose another one")
    return name


class GeneratorPool(Frozen):
    """`count` equal generator lanes.

    `slice` is how many samples a lane of this pool generates together: a multiple of the run's slice size, which
    is the default. A lane takes fewer if its group has fewer left, still in multiples of the run's slice size.
    """

    name: Annotated[str, AfterValidator(_is_free)] = "generator"
    count: Lanes = 1
    slice: Count | None = None


def slice_sizes(group: int) -> tuple[int, ...]:
    """Every slice size that cuts a group into equal slices, in ascending order.

    >>> slice_sizes(12)
    (1, 2, 3, 4, 6, 12)
    """
    return tuple(size for size in range(1, group + 1) if group % size == 0)


def check_slice(size: int, group: int) -> None:
    """Raises ValueError if slices of this size do not cut a group evenly."""
    if group % size:
        divisors = ", ".join(map(str, slice_sizes(group)))
        raise ValueError(f"{size} does not divide samples_per_prompt = {group}; choose one of {divisors}, or auto")


def check_pool_slice(size: int, unit: int, group: int) -> None:
    """Raises ValueError if a pool's own slice is not a multiple of the run's (`unit`) that divides a group."""
    fitting = [each for each in slice_sizes(group) if each % unit == 0]
    if size not in fitting:
        multiple = f"is a multiple of slice = {unit} and " if unit > 1 else ""
        raise ValueError(
            f"expected a number that {multiple}divides samples_per_prompt = {group}, got {size}; "
            f"choose one of {', '.join(map(str, fitting))}"
        )
