"""Decides from which worker others receive a weight version: it crosses the link to another site once. No Ray."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightReceiver:
    """A worker that lacks a version, and the newest one that it holds, if any.

    `site` is empty for a worker in the trainer's site or in none.
    """

    name: str
    pool: str
    site: str
    held: str


@dataclass(frozen=True, slots=True)
class Route:
    """A sender, and the receivers to which it sends one version. All of them hold `held`.

    `link` names what is between them: its rate is measured. `site` is that of the receivers, as in WeightReceiver.
    """

    sender: str
    link: str
    site: str
    held: str
    receivers: tuple[str, ...]


def choose_routes(
    receivers: Iterable[WeightReceiver], trainer: str, forwarders: Mapping[str, str], arriving: Collection[str]
) -> list[Route]:
    """Routes for receivers of one version; those that are left out have to wait.

    Workers without a site receive from the trainer, each pool separately. A site receives from its forwarder, a
    worker there that has the version. The first transfer to a site is from the trainer, to workers that hold the
    same version, so that it can be a patch. Others wait for it, as do all in sites where the version is arriving.
    """
    pools: dict[tuple[str, str], list[str]] = {}
    sites: dict[str, dict[str, list[str]]] = {}
    for each in receivers:
        if each.site:
            sites.setdefault(each.site, {}).setdefault(each.held, []).append(each.name)
        else:
            pools.setdefault((each.pool, each.held), []).append(each.name)
    routes = [Route(trainer, f"pool {pool}", "", held, tuple(names)) for (pool, held), names in pools.items()]
    for site, by_held in sites.items():
        if site in forwarders:
            names = [name for group in by_held.values() for name in group]
            routes.append(Route(forwarders[site], f"inside {site}", site, "", tuple(names)))
        elif site not in arriving:
            held = max(by_held, key=lambda held: (bool(held), len(by_held[held])))
            routes.append(Route(trainer, f"site {site}", site, held, tuple(by_held[held])))
    return routes
