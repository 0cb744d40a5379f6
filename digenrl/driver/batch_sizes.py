"""How many samples are generated at once: what calibration tries, and what a run will use. Needs no torch.

On a GPU every size that a run uses is calibrated: this shows whether it fits into memory, and a compiled model,
which has a graph per size, compiles then. On a CPU a line through two small sizes is enough.
"""

from __future__ import annotations

from digenrl.config.recipes.recipe import BatchSettings, Recipe
from digenrl.worker.assignment import Assignment, Workers, own_slice

LARGEST_PART = 8  # of a group, when parts are compared with the whole
LARGEST_WHOLE = 16  # the largest group that is tried as a whole
SMALL = 4  # with 1, the second point of the line


def calibrates_all_sizes(recipe: Recipe, workers: Workers) -> bool:
    """Whether every size is calibrated: on GPUs, and for compiled models."""
    devices = [each.device for each in workers.generators or (workers.trainer,)]
    return any(device != "cpu" or recipe.model.compiles(device) for device in devices)


def colocated_choices(batch: BatchSettings) -> tuple[int, ...]:
    """The slice sizes worth comparing on a single device, smallest first: a part of a group, and all of it.

    >>> colocated_choices(BatchSettings(prompts=1, samples_per_prompt=12))
    (6, 12)
    """
    whole = batch.samples_per_prompt
    part = max(size for size in batch.slice_sizes() if size <= LARGEST_PART)
    return (part, whole) if part < whole <= LARGEST_WHOLE else (part,)


def sizes_to_try(recipe: Recipe, all_of_them: bool) -> tuple[int, ...]:
    """The sizes to calibrate before the slice size is chosen, or that size if the recipe sets it."""
    if isinstance(recipe.batch.slice, int):
        return (recipe.batch.slice,)
    if recipe.topology.shares_cards and all_of_them:
        return colocated_choices(recipe.batch)
    small = max(size for size in recipe.batch.slice_sizes() if size <= SMALL)
    return tuple(dict.fromkeys((1, small)))


def sizes_of_lane(assignment: Assignment, slice_size: int) -> tuple[int, ...]:
    """The sizes of a lane's jobs: one slice, up to as many as its pool takes at once."""
    own = own_slice(assignment, slice_size)
    return tuple(range(slice_size, own + 1, slice_size))


def sizes_held_out(recipe: Recipe, prompts: int) -> tuple[int, ...]:
    """The batch sizes of an evaluation: full ones, and the remainder."""
    if recipe.evaluation is None:
        return ()
    batch = recipe.evaluation.batch
    return tuple(size for size in dict.fromkeys((min(batch, prompts), prompts % batch)) if size)
