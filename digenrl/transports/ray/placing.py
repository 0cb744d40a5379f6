"""The workers of a run on a cluster, and the resources that each takes. Needs neither Ray nor torch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from digenrl.config.recipes.cluster import ClusterGeneratorPool, WorkerResources
from digenrl.config.recipes.recipe import Recipe
from digenrl.transports.ray.capacity import ClusterResources, ResourceRequest, check_capacity
from digenrl.transports.ray.sites import check_site_labels
from digenrl.worker.assignment import ENCODER, TRAINER, Assignment, Duty, Workers


def place_on_cluster(
    recipe: Recipe, cluster: ClusterResources, checkpoint: Path | None = None, run: Path | None = None
) -> Workers:
    """The assignments of all workers. Raises ConfigError if the cluster lacks resources for them.

    The machine of a worker is chosen when it starts.
    """
    workers = _assign(recipe, cluster.has_gpus, checkpoint, run)
    requests: dict[str, ResourceRequest] = {}
    for request in map(resource_request, workers.initial()):
        before = requests.get(request.key)
        requests[request.key] = request if before is None else replace(before, count=before.count + request.count)
    check_capacity(requests.values(), cluster)
    check_site_labels(map(resource_request, (workers.trainer, *workers.generators, *workers.reserve)), cluster)
    return workers


def total_cpus(recipe: Recipe) -> int:
    """CPUs that all workers take together, including those that may join later."""
    workers = _assign(recipe, False, None, None)
    requests = map(resource_request, (*workers.initial(), *workers.reserve))
    return math.ceil(sum(request.count * request.resources.get("CPU", 0) for request in requests))


def resource_request(assignment: Assignment) -> ResourceRequest:
    """What a worker takes; for a trainer that is not split into its ranks yet, what all of them take."""
    key, wanted = _resources_of(assignment)
    gpus = wanted.gpus if wanted.gpus is not None else float(assignment.device != "cpu")
    amounts = {"GPU": gpus, "CPU": wanted.cpus, **wanted.resources}
    count = assignment.recipe.lanes.ranks if assignment.commits and assignment.rank is None else 1
    needed = {kind: amount for kind, amount in amounts.items() if amount}
    return ResourceRequest(key, count, needed, wanted.accelerator, wanted.labels)


def torch_threads(assignment: Assignment) -> int:
    """The recipe's number of threads or, by default, one per CPU that the worker takes."""
    threads = assignment.recipe.lanes.threads
    return threads if isinstance(threads, int) else max(1, int(_resources_of(assignment)[1].cpus))


def _assign(recipe: Recipe, has_gpus: bool, checkpoint: Path | None, run: Path | None) -> Workers:
    scores: set[Duty] = {"score"} if recipe.lanes.rewards == 0 else set()
    makes: set[Duty] = {"generate", *scores}
    helps: set[Duty] = makes if recipe.trainer_helps else set()
    shares: set[Duty] = makes | {"train"} if recipe.shares_work else makes
    generators, reserve = _generators(recipe)
    rewards = recipe.lanes.rewards
    assert isinstance(rewards, int), "mode ray has no list of devices"
    cluster, device = recipe.cluster, recipe.lanes.device
    default_gpus = float(device == "cuda" or (device == "auto" and has_gpus))

    def assign(
        name: str, duties: set[Duty], resources: WorkerResources, pool: ClusterGeneratorPool | None = None
    ) -> Assignment:
        gpus = default_gpus if resources.gpus is None else resources.gpus
        return Assignment(
            name=name,
            duties=frozenset(duties),
            device="cuda" if gpus > 0 else "cpu",
            recipe=recipe,
            exchange=None,
            checkpoint=checkpoint if name == TRAINER else None,
            pool=pool.name if pool is not None and cluster.generators else None,
            slowdown=1.0 if pool is None else pool.slowdown,
            run=run,
        )

    return Workers(
        trainer=assign(TRAINER, {"train", *helps}, cluster.trainer),
        generators=tuple(assign(name, shares, pool, pool) for name, pool in generators),
        rewards=tuple(assign(f"reward-{index}", {"score"}, cluster.rewards) for index in range(rewards)),
        encoder=assign(ENCODER, {"encode"}, cluster.encoder),
        reserve=tuple(assign(name, shares, pool, pool) for name, pool in reserve),
    )


def _generators(
    recipe: Recipe,
) -> tuple[list[tuple[str, ClusterGeneratorPool]], list[tuple[str, ClusterGeneratorPool]]]:
    """The initial generators and those that may join, each as name and pool, with consecutive numbers."""
    pools = recipe.cluster.generators
    if not pools:
        count = recipe.lanes.generators
        assert isinstance(count, int), "mode ray has no list of devices"
        pools = (ClusterGeneratorPool(count=count),)
    initial = [pool for pool in pools for _ in range(pool.count)]
    later = [pool for pool in pools for _ in range((pool.up_to or pool.count) - pool.count)]
    named = [(f"generator-{index}", pool) for index, pool in enumerate((*initial, *later))]
    return named[: len(initial)], named[len(initial) :]


def _resources_of(assignment: Assignment) -> tuple[str, WorkerResources]:
    """The recipe's key for a worker's resources, and the resources."""
    cluster = assignment.recipe.cluster
    if assignment.commits:
        return "cluster.trainer", cluster.trainer
    if "generate" in assignment.duties:
        pool = next((pool for pool in cluster.generators if pool.name == assignment.pool), None)
        if pool is None:
            return "lanes.generators", WorkerResources()
        return f"cluster.generators: pool '{pool.name}'", pool
    if "encode" in assignment.duties:
        return "cluster.encoder", cluster.encoder
    return "cluster.rewards", cluster.rewards
