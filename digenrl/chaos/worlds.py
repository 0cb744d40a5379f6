"""Seeded worlds: a recipe, workers with their speeds, and the faults that hit them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from digenrl.chaos.faults import KINDS, Fault, Targets, draw_faults
from digenrl.chaos.themes import PLAIN, Theme, draw_theme
from digenrl.config.reading import parse_model
from digenrl.config.recipes.cluster import ClusterGeneratorPool, ClusterSettings
from digenrl.config.recipes.recipe import Recipe
from digenrl.driver.placement import place
from digenrl.units import NS_PER_SECOND
from digenrl.worker.assignment import Machine, Workers

PATIENCE_S = 30.0
EVERY_KIND = tuple(KINDS)


@dataclass(frozen=True, slots=True)
class World:
    """Everything that a simulated run depends on. Times are seconds of the virtual clock."""

    seed: int
    recipe: Recipe
    workers: Workers
    nodes: Mapping[str, int]  # the machine of each worker
    slice_s: Mapping[str, float]  # by worker: the time of one slice
    train_sample_s: float
    score_sample_s: float
    publish_s: float
    look_s: float  # messages that arrive within this time are received together
    start_s: float
    prompts: int  # in the prompt file
    kept_prompts: int  # encoded ones of closed steps
    held_out: int
    search_budget: int
    faults: tuple[Fault, ...]

    @property
    def samples(self) -> int:
        batch = self.recipe.batch
        return self.recipe.steps * batch.prompts * batch.samples_per_prompt

    @property
    def slice_size(self) -> int:
        """Samples of a slice."""
        assert isinstance(self.recipe.batch.slice, int), "a world's slice size is fixed"
        return self.recipe.batch.slice

    def slice_seconds(self, worker: str) -> float:
        """The time of one slice on a worker, or on one of its ranks."""
        return self.slice_s[worker.partition("/")[0]]

    def node(self, worker: str) -> int:
        """The machine of a worker, or of one of its ranks."""
        return self.nodes[worker.partition("/")[0]]


def draw_world(seed: int, kinds: Sequence[str] = EVERY_KIND, large: bool = False) -> World:
    """The world of a seed. The kinds of faults do not change anything else."""
    dice = Random(f"world {seed} {large}")
    theme = PLAIN if large else draw_theme(dice)
    content = _large_recipe(dice) if large else _small_recipe(dice, theme)
    recipe = _parsed(json.dumps(content))
    workers = _with_reserve(_in_pool(place(recipe, Machine((0, 1)), Path())), dice.choice(theme.reserve))
    names = [each.name for each in (*workers.initial(), *workers.reserve)]
    nodes = dice.randint(1, 4)
    base_s = dice.choice((0.2, 1.0, 3.0))
    world = World(
        seed=seed,
        recipe=recipe,
        workers=workers,
        nodes={name: dice.randrange(nodes) for name in names},
        slice_s={name: base_s * dice.choice((1, 1, 1, 2, 5)) for name in names},
        train_sample_s=base_s * dice.choice((0.05, 0.3, 1)),
        score_sample_s=base_s * dice.choice((0.01, 0.2, 1)),
        publish_s=base_s * dice.choice(theme.publish_slices),
        look_s=base_s * dice.choice((0, 0, 0.3, 1)),
        start_s=dice.choice((0.1, 5.0)),
        prompts=dice.randint(recipe.batch.prompts, 3 * recipe.batch.prompts),
        kept_prompts=dice.choice((0, 2 * recipe.batch.prompts)),
        held_out=dice.randint(1, 8) if recipe.evaluation else 0,
        search_budget=dice.choice((1, 50)),
        faults=(),
    )
    dice = Random(f"faults {seed} {large} {','.join(sorted(kinds))}")
    themed = tuple(kind for kind in theme.kinds if kind in kinds) or kinds
    return replace(world, faults=draw_faults(dice, targets_of(world, most=12 if large else 5), themed))


def targets_of(world: World, most: int) -> Targets:
    """The possible targets of faults in a world, and the time range."""
    workers, batch = world.workers, world.recipe.batch
    names = [each.name for each in workers.generators]
    slices = batch.prompts * batch.samples_per_prompt / world.slice_size
    rate = sum(1 / world.slice_s[name] for name in (names or [workers.trainer.name]))
    samples = world.samples / world.recipe.steps
    step_s = slices / rate + samples * (world.train_sample_s + world.score_sample_s) + world.publish_s
    return Targets(
        generators=names or [workers.trainer.name],
        rewards=workers.reward_names,
        trainer=workers.trainer.name,
        encoders=[] if workers.encoder is None else [workers.encoder.name],
        reserve=[each.name for each in workers.reserve],
        nominal_ns=int(world.recipe.steps * step_s * NS_PER_SECOND) + 1,
        decisions=10 + int(8 * world.recipe.steps * (slices + batch.prompts + 3)),
        most_faults=most,
    )


def _small_recipe(dice: Random, theme: Theme) -> dict[str, Any]:
    at_once = 2 if theme.wide_slices else 1
    group = dice.choice([size for size in (2, 3, 4, 6) if size % at_once == 0])
    slice_size = dice.choice([size for size in range(1, group + 1) if group % (at_once * size) == 0])
    mode = "colocated" if theme is PLAIN and dice.random() < 0.2 else "local"
    both = mode == "local" and dice.random() < 0.25 if theme.shares_work is None else theme.shares_work
    generators = dice.randint(theme.least_generators, 4)
    techniques = {
        "gap": both or dice.random() < 0.75,
        "tag": "greedy" if both else dice.choice(("none", "greedy", "search", "auto")),
        "assist": "both" if both else "trainer",
        "tcss": dice.choice(theme.stale_shares) if mode == "local" else 0.0,
        "dispatch": dice.choice(("eager", "earliest_finish")),
    }
    content = _recipe(dice, mode, generators, techniques, group, slice_size)
    content["lanes"]["rewards"] = dice.choice(theme.scorers)
    content["batch"]["prompts"] = dice.randint(1, 4)
    content["steps"] = dice.randint(theme.least_steps, 4)
    if both:
        content["training"] = {"job_samples": dice.choice((slice_size, group))}
        if dice.random() < 0.3 and content["batch"]["prompts"] > 1:
            content["algorithm"] = {"name": "flow_grpo", "options": {"updates_per_batch": 2}}
    wide = theme.wide_slices or dice.random() < 0.8
    if mode == "local" and not both and group % (2 * slice_size) == 0 and wide:
        content["pool"] = {"name": "wide", "slice": 2 * slice_size}
    if theme.evaluates or dice.random() < 0.3:
        every = 1 if theme.evaluates else dice.randint(1, 3)
        content["evaluation"] = {"prompts": {"path": "held_out.txt"}, "every": every, "batch": 1}
    if mode == "local" and not both and dice.random() < 0.2:
        content["lanes"]["ranks"] = 2
        content["training"] = {"lora": {"rank": 4}}
    return content


def _large_recipe(dice: Random) -> dict[str, Any]:
    """64 lanes and 512 samples per step."""
    techniques = {"tag": dice.choice(("none", "greedy", "auto")), "tcss": dice.choice((0.0, 0.5))}
    content = _recipe(dice, "local", 64, techniques, group=16, slice_size=dice.choice((2, 4)))
    content["batch"]["prompts"] = 32
    content["steps"] = 2
    return content


def _recipe(
    dice: Random, mode: str, generators: int, techniques: dict[str, Any], group: int, slice_size: int
) -> dict[str, Any]:
    return {
        "model": {"family": "sd3", "source": "nowhere"},
        "prompts": {"path": "prompts.txt"},
        "rewards": "jpeg_compressibility",
        "sample": {"height": 16, "width": 16},
        "batch": {"samples_per_prompt": group, "slice": slice_size},
        "algorithm": {"name": "flow_grpo"},
        "mode": mode,
        "lanes": {
            "generators": ["cpu"] * generators,
            "rewards": 8,
            "restarts": 99,
            "patience_s": PATIENCE_S,
            "hedge_after": dice.choice((0.0, 1.5, 3.0)),
            "threads": 1,
        },
        "techniques": techniques,
        "checkpoint": {"every": dice.randint(1, 3)},
    }


@lru_cache(maxsize=4096)
def _parsed(content: str) -> Recipe:
    """The recipe, with its pool, if any: simulated workers have pools in mode local, too."""
    settings = json.loads(content)
    pool = settings.pop("pool", None)
    recipe = parse_model(Recipe, settings)
    pools = () if pool is None else (parse_model(ClusterGeneratorPool, pool),)
    return recipe.model_copy(update={"cluster": ClusterSettings(generators=pools)})


def _in_pool(workers: Workers) -> Workers:
    """The first generator belongs to the pool of the recipe, if any, and generates several slices in parallel."""
    pools = workers.trainer.recipe.cluster.generators
    if not pools or not workers.generators:
        return workers
    first, *others = workers.generators
    return replace(workers, generators=(replace(first, pool=pools[0].name), *others))


def _with_reserve(workers: Workers, count: int) -> Workers:
    """The workers, and generators that may join. A single card has none."""
    if not workers.generators:
        return workers
    names = (f"generator-{len(workers.generators) + index}" for index in range(count))
    return replace(workers, reserve=tuple(replace(workers.generators[-1], name=name) for name in names))
