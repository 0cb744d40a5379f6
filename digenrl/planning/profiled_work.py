"""The work that a profile is of, read off a recipe, and whether a recipe's is the same. Needs no torch."""

from __future__ import annotations

from typing import Any

from digenrl.config.plan_files import work_of
from digenrl.config.profiles import Profile, ProfiledWork
from digenrl.config.reading import ConfigError
from digenrl.config.recipe import Recipe
from digenrl.config.recipe_paths import RANDOM
from digenrl.planning.cluster import Cluster
from digenrl.planning.recipe_workload import NO_GUIDANCE

NO_MATTER = {"recipe", "prompts", "samples_per_prompt", "slice"}  # costs are of a sample, or of a slice by size


def profiled_work(recipe: Recipe) -> ProfiledWork:
    """What of the recipe bears on a device's times."""
    algorithm, group = recipe.algorithm.settings(), recipe.batch.samples_per_prompt
    return ProfiledWork(
        **work_of(recipe).model_dump(),
        recipe=recipe.name,
        dtype=recipe.model.dtype,
        guidance=recipe.model.guidance,
        slice=recipe.batch.slice,
        trained_steps=algorithm.trained_steps(recipe.sample.denoising_steps, recipe.window),
        trained_share=algorithm.trained_samples(group) / group,
        updates_per_batch=algorithm.updates_per_batch,
        reference_forward=algorithm.needs.reference,
        old_log_probs=recipe.training.old_log_probs,
        autocast=recipe.training.autocast,
        packed=recipe.techniques.tsp,
    )


def check_profiles(cluster: Cluster, recipe: Recipe | None) -> None:
    """Refuses profiles of other work than the recipe's, or any where there is no recipe to compare them with."""
    for pool in cluster.pools:
        if pool.profile is None:
            continue
        if recipe is None:
            raise ConfigError(
                f"{pool.name}: its profile is of the recipe {pool.profile.work.recipe}; plan a recipe, not --model"
            )
        check_profiled(recipe, pool.profile, f"{pool.name}: its profile")


def check_profiled(recipe: Recipe, profile: Profile, where: str) -> None:
    """Refuses a profile of other work than the recipe's; the batch may be another."""
    measured, wanted = profile.work.model_dump(), profiled_work(recipe).model_dump()
    for key, value in wanted.items():
        if key not in NO_MATTER and not _costs_the_same(key, measured[key], value):
            raise ConfigError(
                f"{where} was measured for {key} = {_said(measured[key])} ({profile.work.recipe}), the recipe "
                f"has {_said(value)}; measure it with: digenrl profile RECIPE"
            )


def _costs_the_same(key: str, measured: Any, wanted: Any) -> bool:
    if key == "guidance":  # what counts is whether there is an unconditional forward
        return (measured is None or measured > NO_GUIDANCE) == (wanted is None or wanted > NO_GUIDANCE)
    if key == "model":
        return measured == wanted or _of_random_size(measured, wanted) or _of_random_size(wanted, measured)
    return bool(measured == wanted)


def _of_random_size(random: str, other: str) -> bool:
    """Whether one has random weights and, if its size is named (as 2.1-14b), the other's name has it (14b)."""
    source, _, size = random.partition(":")
    return source == RANDOM and size.rpartition("-")[2] in other.lower()


def _said(value: Any) -> str:
    return "none" if value is None else str(value)
