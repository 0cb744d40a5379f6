"""A plan as recipe keys: the file that `digenrl train RECIPE --plan plan.yaml` applies to the recipe."""

from __future__ import annotations

import re
from typing import Any

import yaml

from digenrl.config.plan_files import work_of
from digenrl.config.reading import ConfigError
from digenrl.config.recipes.conflicts import lanes_of_one_machine
from digenrl.config.recipes.recipe import LaneSettings, Recipe, technique_keys
from digenrl.planning.results.plan_tables import rate_words
from digenrl.planning.results.plans import Plan


def overlay(plan: Plan, recipe: Recipe, recipe_name: str) -> dict[str, Any]:
    """The content of the plan file.

    Raises ConfigError if no key selects a pool's machines in a Ray cluster, or if a key selects those of two.
    """
    trainer = plan.layout.trainer
    pools = list(dict.fromkeys((trainer.pool, *(generator.pool for generator in plan.layout.generators))))
    for index, pool in enumerate(pools):
        if len(pools) > 1 and not pool.place:
            raise ConfigError(
                f"{pool.name}: no key selects the machines of this pool in a Ray cluster; give it accelerator, "
                "labels or resources in the cluster file"
            )
        alike = next((other for other in pools[:index] if other.place == pool.place), None)
        if alike is not None:
            raise ConfigError(
                f"{alike.name} and {pool.name}: the same keys select the machines of both pools in a Ray cluster; "
                "give them different labels or resources in the cluster file"
            )
    return {
        "plan": {
            "recipe": recipe_name,
            "work": work_of(recipe).model_dump(mode="json"),
            "predicted": {
                "samples_per_second": float(f"{plan.samples_per_second:.4g}"),
                "step_seconds": float(f"{plan.step_s:.4g}"),
            },
        },
        "mode": "ray",
        "lanes": {
            **_defaults_of_one_machine(recipe),
            "ranks": trainer.cards,
            **_sharding(plan, recipe),
            "rewards": plan.spec.reward.lanes,
        },
        "cluster": {"trainer": trainer.pool.place, "generators": _generators(plan)},
        "batch": {"slice": plan.spec.slice},
        "techniques": technique_keys(plan.spec.policy),
    }


def _defaults_of_one_machine(recipe: Recipe) -> dict[str, Any]:
    """The defaults of what the recipe places on one machine, which mode ray refuses."""
    return {key: getattr(LaneSettings(), key) for key in lanes_of_one_machine(recipe)}


def overlay_text(content: dict[str, Any], plan: Plan) -> str:
    """The plan file: split and prediction as comments, then the content."""
    predicted = f"{rate_words(plan.samples_per_second)} samples/s, {rate_words(plan.step_s)} s a step"
    lines = [
        f"# {plan.layout.split}: {predicted} predicted.",
        f"# digenrl train {content['plan']['recipe']} --plan THIS_FILE",
    ]
    return "\n".join(lines) + "\n" + yaml.safe_dump(content, sort_keys=False)


def _sharding(plan: Plan, recipe: Recipe) -> dict[str, Any]:
    """Whether ranks that train adapters share the frozen weights, unless each of them has a copy by default."""
    if recipe.training.lora is None:
        return {}
    shards = plan.layout.trainer.shard_cards > 1
    return {"shard_base": shards} if shards or recipe.lanes.shard_base else {}


def _generators(plan: Plan) -> list[dict[str, Any]]:
    """One pool of lanes per card pool, with its own slice size if that is larger than the unit."""
    pools = []
    for generator, own in zip(plan.layout.generators, plan.slices, strict=True):
        pool: dict[str, Any] = {"name": _plain_name(generator.pool.name), "count": generator.lanes}
        if own != plan.spec.slice:
            pool["slice"] = own
        pools.append({**pool, **generator.pool.place})
    names = [pool["name"] for pool in pools]
    return [
        {**pool, "name": name if names.count(name) == 1 else f"{name}-{index}"}
        for index, (pool, name) in enumerate(zip(pools, names, strict=True))
    ]


def _plain_name(name: str) -> str:
    """A valid name for a pool of lanes: rtx-pro-6000-blackwell for 'RTX PRO 6000 Blackwell'."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "generator"
