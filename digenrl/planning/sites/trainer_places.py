"""Where to train if a cluster has several sites: in one of them, in stages over all, or data parallel over all."""

from __future__ import annotations

from digenrl.planning.candidates import PlanOptions
from digenrl.planning.colocated import joint_trainer
from digenrl.planning.costs import TrainerLayout, commit_seconds, gather_seconds, unit_seconds
from digenrl.planning.facts.cluster import CardPool, Cluster
from digenrl.planning.facts.workload import Workload
from digenrl.planning.results.plans import TrainerPlace
from digenrl.planning.sites.stages import MOST_STAGES, StagedTrainer, best_stages


def compare_places(workload: Workload, cluster: Cluster, options: PlanOptions) -> tuple[TrainerPlace, ...]:
    """The three ways, fastest first; none if there is one site, or if the times of a card are not modeled."""
    pools = cluster.pools
    modeled = workload.has_cost_model and all(pool.card.described for pool in pools)
    if len(cluster.site_names) == 1 or not modeled:
        return ()
    places = [
        _one_site(workload, cluster, options),
        _stages(workload, cluster, options),
        _data_parallel(workload, cluster, options),
    ]
    return tuple(sorted(places, key=lambda place: (place.step_s is None, place.step_s or 0.0)))


def places_words(places: tuple[TrainerPlace, ...]) -> str:
    """Which way wins, by how much and why; empty without a comparison."""
    if not places or (best_s := places[0].step_s) is None:
        return ""
    best, *others = places
    words = f"Training in {_name(best)} is fastest: {best.cards}, {best_s:.3g} s a step, {best.why}."
    for other in others:
        if other.step_s is None:
            words += f" {_name(other).capitalize()}: impossible, {other.why}."
        else:
            slower = other.step_s / best_s
            words += (
                f" {_name(other).capitalize()}: {other.step_s:.3g} s, {slower:.3g} times as long, {other.why}."
            )
    return words


def _name(place: TrainerPlace) -> str:
    return {"stages": "stages over all sites", "data parallel": "data parallel over all sites"}.get(
        place.kind, place.kind
    )


def _one_site(workload: Workload, cluster: Cluster, options: PlanOptions) -> TrainerPlace:
    """The fastest site; a trainer uses cards of one pool."""
    found: list[tuple[float, CardPool]] = []
    for pool in cluster.pools:
        trainer = joint_trainer(workload, cluster, [pool], options)
        if trainer is not None:
            found.append((_step_seconds(workload, trainer), pool))
    if not found:
        return TrainerPlace("one site", "", None, "the model does not fit on the cards of any pool")
    step_s, pool = min(found, key=lambda each: each[0])
    why = "and no training crosses the link to another site"
    return TrainerPlace("one site", f"{pool.cards} {pool.name} in {pool.site}", step_s, why)


def _stages(workload: Workload, cluster: Cluster, options: PlanOptions) -> TrainerPlace:
    staged = best_stages(workload, cluster, options)
    if staged is None:
        most = min(MOST_STAGES, workload.facts.blocks)
        why = f"it has {cluster.cards} cards, and stages are compared up to {most}"
        if cluster.cards <= most:
            why = "no cut of the model fits in memory"
        return TrainerPlace("stages", "", None, why)
    cards = " + ".join(
        f"{blocks} blocks on {pool.name}" for blocks, pool in zip(staged.cut.blocks, staged.cards, strict=True)
    )
    return TrainerPlace("stages", cards, staged.step_s, _why_stages(staged))


def _why_stages(staged: StagedTrainer) -> str:
    (stage, link_s), stage_s = staged.slowest_link, max(staged.cut.stage_s)
    first, second = staged.cards[stage], staged.cards[stage + 1]
    ends = f"{first.site} to {second.site}" if first.site != second.site else f"inside {first.site}"
    slowest = "the link sets the pace" if link_s > stage_s else "the stages set the pace"
    return (
        f"as a pack takes {stage_s:.2g} s on the slowest stage and {link_s:.2g} s on the slowest link ({ends}): "
        f"{slowest}"
    )


def _data_parallel(workload: Workload, cluster: Cluster, options: PlanOptions) -> TrainerPlace:
    trainer = joint_trainer(workload, cluster, list(cluster.pools), options)
    if trainer is None:
        return TrainerPlace("data parallel", "", None, "the model does not fit on the smallest cards")
    commit_s = commit_seconds(workload, trainer)
    why = f"as adding up gradients takes {commit_s:.2g} s"
    if trainer.shard_cards > 1:
        why = f"as gathering sharded weights takes {gather_seconds(workload, trainer):.2g} s per pass"
    return TrainerPlace("data parallel", f"{trainer.cards} cards", _step_seconds(workload, trainer), why)


def _step_seconds(workload: Workload, trainer: TrainerLayout) -> float:
    samples = workload.samples_per_step
    return unit_seconds(workload, trainer, samples) + commit_seconds(workload, trainer)
