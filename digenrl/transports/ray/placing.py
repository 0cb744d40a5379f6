"""Who works on a cluster, and what each takes: from a recipe's pools to assignments. Needs no Ray and no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from digenrl.config.cluster import ClusterGeneratorPool, WorkerResources
from digenrl.config.reading import ConfigError
from digenrl.config.recipe import Recipe
from digenrl.transports.ray.capacity import ClusterFacts, Need, check_capacity
from digenrl.worker.assignment import ENCODER, TRAINER, Assignment, Duty, Workers


def place_on_cluster(
    recipe: Recipe, cluster: ClusterFacts, checkpoint: Path | None = None, run: Path | None = None
) -> Workers:
    """Everybody's assignment; raises ConfigError where the cluster has not enough of something.

    Which machine a worker is on is settled when it starts.
    """
    crew = _crew(recipe, cluster.has_gpus, checkpoint, run)
    check_capacity(needs_of(crew), cluster)
    return crew


def cpus_wanted(recipe: Recipe) -> int:
    """How many CPUs all workers of a run take together, those that may join later included."""
    crew = _crew(recipe, False, None, None)
    everybody = (*crew.initial(), *crew.reserve)
    needs = [need_of(assignment) for assignment in everybody]
    return math.ceil(sum(need.count * need.resources.get("CPU", 0) for need in needs))


def needs_of(crew: Workers) -> list[Need]:
    """What everybody who is there from the beginning takes, equal ones together."""
    needs: dict[str, Need] = {}
    for assignment in crew.initial():
        need = need_of(assignment)
        before = needs.get(need.who)
        needs[need.who] = need if before is None else replace(before, count=before.count + need.count)
    return list(needs.values())


def need_of(assignment: Assignment) -> Need:
    """What a worker takes; one of several ranks that are not told apart yet takes as much for each of them."""
    who, place = _place_of(assignment)
    gpus = place.gpus if place.gpus is not None else float(assignment.device != "cpu")
    resources = {"GPU": gpus, "CPU": place.cpus, **place.resources}
    together = assignment.recipe.lanes.ranks if "train" in assignment.duties and assignment.ranks is None else 1
    some = {kind: amount for kind, amount in resources.items() if amount}
    return Need(who, together, some, place.accelerator, place.labels)


def threads_of(assignment: Assignment) -> int:
    """Threads of a worker's computations: the recipe's or, for each CPU that it takes, one."""
    threads = assignment.recipe.lanes.threads
    return threads if isinstance(threads, int) else max(1, int(_place_of(assignment)[1].cpus))


def _crew(recipe: Recipe, has_gpus: bool, checkpoint: Path | None, run: Path | None) -> Workers:
    scores: set[Duty] = {"score"} if recipe.lanes.rewards == 0 else set()
    makes: set[Duty] = {"generate", *scores}
    helps: set[Duty] = makes if recipe.techniques.tag != "none" and not recipe.sharded else set()
    generators, reserve = _lanes(recipe)
    rewards = _number(recipe.lanes.rewards, "lanes.rewards")
    cluster = recipe.cluster

    def assign(
        name: str, duties: set[Duty], place: WorkerResources, pool: ClusterGeneratorPool | None = None
    ) -> Assignment:
        gpus = place.gpus if place.gpus is not None else _gpus_by_default(recipe, has_gpus)
        return Assignment(
            name=name,
            duties=frozenset(duties),
            device="cuda" if gpus > 0 else "cpu",
            recipe=recipe,
            exchange=None,
            checkpoint=checkpoint if "train" in duties else None,
            pool=pool.name if pool is not None and cluster.generators else None,
            slowdown=1.0 if pool is None else pool.slowdown,
            run=run,
        )

    return Workers(
        trainer=assign(TRAINER, {"train", *helps}, cluster.trainer),
        generators=tuple(assign(name, makes, pool, pool) for name, pool in generators),
        rewards=tuple(assign(f"reward-{index}", {"score"}, cluster.rewards) for index in range(rewards)),
        encoder=assign(ENCODER, {"encode"}, cluster.encoder),
        reserve=tuple(assign(name, makes, pool, pool) for name, pool in reserve),
    )


def _lanes(
    recipe: Recipe,
) -> tuple[list[tuple[str, ClusterGeneratorPool]], list[tuple[str, ClusterGeneratorPool]]]:
    """Generators by name and pool, those of the beginning and those that may join; all are numbered through."""
    pools = recipe.cluster.generators
    if not pools:
        pools = (ClusterGeneratorPool(count=_number(recipe.lanes.generators, "lanes.generators")),)
    now = [pool for pool in pools for _ in range(pool.count)]
    later = [pool for pool in pools for _ in range((pool.up_to or pool.count) - pool.count)]
    names = _numbered()
    return [(next(names), pool) for pool in now], [(next(names), pool) for pool in later]


def _numbered() -> Iterator[str]:
    index = 0
    while True:
        yield f"generator-{index}"
        index += 1


def _place_of(assignment: Assignment) -> tuple[str, WorkerResources]:
    """The recipe's key for a worker's place, and the place."""
    cluster = assignment.recipe.cluster
    if "train" in assignment.duties:
        return "cluster.trainer", cluster.trainer
    if "generate" in assignment.duties:
        pool = next((pool for pool in cluster.generators if pool.name == assignment.pool), None)
        return (
            ("lanes.generators", WorkerResources())
            if pool is None
            else (f"cluster.generators: pool '{pool.name}'", pool)
        )
    return (
        ("cluster.encoder", cluster.encoder)
        if "encode" in assignment.duties
        else ("cluster.rewards", cluster.rewards)
    )


def _gpus_by_default(recipe: Recipe, has_gpus: bool) -> float:
    device = recipe.lanes.device
    return float(device == "cuda" or (device == "auto" and has_gpus))


def _number(lanes: int | tuple[str, ...], key: str) -> int:
    if isinstance(lanes, int):
        return lanes
    raise ConfigError(
        f"{key}: [{', '.join(lanes)}] names devices of one machine, in mode ray numbers count; "
        "give a number, and say in cluster where"
    )
