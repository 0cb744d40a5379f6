"""How many samples are made at once: what a rehearsal tries, and what a run will ask for. No torch.

On a card every size that a run uses is rehearsed: whether it fits in memory shows there, and a compiled model,
which has a graph for each size, compiles there. On a CPU a line through two small sizes does for all of them.
"""

from __future__ import annotations

from digenrl.config.recipe import BatchSettings, Recipe
from digenrl.prompts.sources import read_prompts
from digenrl.worker.assignment import Assignment, Workers, own_slice

LARGEST_PART = 8  # of a group, when whole groups are compared with parts of them
LARGEST_WHOLE = 16  # group that is tried as a whole
SMALL = 4  # through 1 and this goes the line


def met_beforehand(recipe: Recipe, crew: Workers) -> bool:
    """Whether every size is to be made before the run: on cards, and by compiled models."""
    devices = [each.device for each in crew.generators or (crew.trainer,)]
    return any(device != "cpu" or recipe.model.compiles(device) for device in devices)


def colocated_choices(batch: BatchSettings) -> tuple[int, ...]:
    """The slices of a single device that are worth comparing, smallest first: parts of a group, and all of it.

    >>> colocated_choices(BatchSettings(prompts=1, samples_per_prompt=12))
    (6, 12)
    """
    whole = batch.samples_per_prompt
    part = max(size for size in batch.slice_sizes() if size <= LARGEST_PART)
    return (part, whole) if part < whole <= LARGEST_WHOLE else (part,)


def sizes_to_try(recipe: Recipe, all_of_them: bool) -> tuple[int, ...]:
    """What is rehearsed before the size of a slice is known, or that size if the recipe names it."""
    if isinstance(recipe.batch.slice, int):
        return (recipe.batch.slice,)
    if recipe.topology.shares_cards and all_of_them:
        return colocated_choices(recipe.batch)
    small = max(size for size in recipe.batch.slice_sizes() if size <= SMALL)
    return tuple(dict.fromkeys((1, small)))


def sizes_of_lane(assignment: Assignment, slice_size: int) -> tuple[int, ...]:
    """What a lane will be asked for: one slice, or as many at once as its pool takes."""
    own = own_slice(assignment, slice_size)
    return tuple(range(slice_size, own + 1, slice_size))


def sizes_held_out(recipe: Recipe) -> tuple[int, ...]:
    """The batches of an evaluation: whole ones, and what the prompts leave for the last."""
    if recipe.evaluation is None:
        return ()
    batch = recipe.evaluation.batch
    prompts = len(read_prompts(recipe.evaluation.prompts)[: recipe.evaluation.count])
    return tuple(size for size in dict.fromkeys((min(batch, prompts), prompts % batch)) if size)
