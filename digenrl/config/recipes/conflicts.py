"""Settings of a recipe that contradict each other, as functions of a Recipe that raise ConfigError."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.cluster import ClusterSettings

if TYPE_CHECKING:
    from digenrl.config.recipes.recipe import Recipe

LANES_OF_ONE_MACHINE = ("generators", "rewards", "trainer", "encoder", "exchange")


def check_mode(recipe: Recipe) -> None:
    """Lanes on devices of this machine are for the modes of one machine, `cluster` is for mode ray."""
    if recipe.topology.uses_ray:
        _check_lanes_on_a_cluster(recipe)
        return
    for key, default in ClusterSettings():
        if getattr(recipe.cluster, key) != default:
            why = f"describes a Ray cluster, which mode {recipe.mode} does not use"
            raise conflict(f"cluster.{key}", f"{why}; set mode to ray, or leave it out")


def _check_lanes_on_a_cluster(recipe: Recipe) -> None:
    for key in LANES_OF_ONE_MACHINE:
        given: Any = getattr(recipe.lanes, key)
        if isinstance(given, int) or given in ("auto", None):
            continue
        named = f"[{', '.join(given)}]" if isinstance(given, tuple) else given
        instead = "give a number of lanes" if isinstance(given, tuple) else "leave it out"
        why = f"{named} is on one machine, and mode ray places workers by the keys of cluster"
        raise conflict(f"lanes.{key}", f"{why}; {instead}, or set mode to local")


def conflict(where: str, why: str) -> ConfigError:
    return ConfigError(f"{where}: {why}", where)
