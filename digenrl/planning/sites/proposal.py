"""Proposes sites from measured links, and writes the cluster file of a probed cluster.

It is a proposal to be corrected by people who know the machines: links measured once cannot tell a slow network
from one that is busy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import median
from typing import Any

import yaml

from digenrl.config.recipes.cluster import SITE_LABEL
from digenrl.planning.facts.cards import known_cards

# Two machines are in one site if their link has at least these rates: a share of the best link of each, and a
# rate below which the planner should know about the link in any case.
SHARE_OF_BEST = 0.6
LEAST_GBIT_S = 0.5

Links = Mapping[frozenset[str], float]  # the gbit/s between two machines, by their names


@dataclass(frozen=True, slots=True)
class ProbedMachine:
    """A machine of a Ray cluster: its address, Ray's name of its cards, how many it has, and its labels."""

    name: str
    accelerator: str | None = None
    cards: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)


def propose_sites(names: Sequence[str], links: Links) -> list[list[str]]:
    """Groups of machines with fast links between them, in the order of the machines."""
    best = {name: max((rate for pair, rate in links.items() if name in pair), default=0.0) for name in names}
    site = {name: name for name in names}
    for first, second in combinations(names, 2):
        rate = links[frozenset((first, second))]
        if rate >= max(LEAST_GBIT_S, SHARE_OF_BEST * best[first], SHARE_OF_BEST * best[second]):
            old, new = site[second], site[first]
            site = {name: new if own == old else own for name, own in site.items()}
    return [[name for name in names if site[name] == own] for own in dict.fromkeys(site.values())]


def proposed_cluster(machines: Sequence[ProbedMachine], links: Links) -> dict[str, Any]:
    """The content of the cluster file: a pool for equal machines of a site, and the links between sites."""
    names = [machine.name for machine in machines]
    sites = propose_sites(names, links)
    several = len(sites) > 1
    by_name = {machine.name: machine for machine in machines}
    titles = _site_names([[by_name[name] for name in site] for site in sites])
    pools = [
        _pool(members, links, title if several else "")
        for title, site in zip(titles, sites, strict=True)
        for members in _equal_machines([by_name[name] for name in site])
    ]
    content: dict[str, Any] = {"pools": _with_unique_names(pools)}
    if several:
        content["sites"] = [
            {"between": [titles[first], titles[second]], "gbit_s": _rate(sites[first], sites[second], links)}
            for first, second in combinations(range(len(sites)), 2)
        ]
    return content


def proposal_text(machines: Sequence[ProbedMachine], links: Links) -> str:
    """The cluster file, with what was measured as comments."""
    lines = ["# Proposed by digenrl probe from measured links. Correct sites, cards and rates before planning."]
    for pair, rate in sorted(links.items(), key=lambda entry: sorted(entry[0])):
        lines.append(f"# {' - '.join(sorted(pair))}: {rate:.3g} Gbit/s")
    if not links:
        lines.append("# One machine: there is no link to measure.")
    without = [machine.name for machine in machines if not machine.cards]
    if without:
        lines.append(f"# Without cards: {', '.join(without)}. Give their pools measured costs, or remove them.")
    return "\n".join(lines) + "\n" + yaml.safe_dump(proposed_cluster(machines, links), sort_keys=False)


def _site_names(sites: Sequence[Sequence[ProbedMachine]]) -> list[str]:
    """The label `site` that all machines of a site have, else site-1, site-2, ..."""
    names = []
    for number, machines in enumerate(sites, start=1):
        labels = {machine.labels.get(SITE_LABEL, "") for machine in machines}
        label = labels.pop() if len(labels) == 1 else ""
        names.append(label if label and label not in names else f"site-{number}")
    return names


def _equal_machines(machines: Sequence[ProbedMachine]) -> list[list[ProbedMachine]]:
    kinds: dict[tuple[str | None, int], list[ProbedMachine]] = {}
    for machine in machines:
        kinds.setdefault((machine.accelerator, machine.cards), []).append(machine)
    return list(kinds.values())


def _pool(machines: Sequence[ProbedMachine], links: Links, site: str) -> dict[str, Any]:
    first, names = machines[0], {machine.name for machine in machines}
    card = next((card.name for card in known_cards() if card.accelerator == first.accelerator), first.accelerator)
    pool: dict[str, Any] = {"card": card} if first.accelerator else {"name": "machines"}
    pool |= {"nodes": len(machines), "per_node": first.cards or 1}
    rates = [rate for pair, rate in links.items() if pair & names]
    if rates:
        pool["network_gbit_s"] = _rounded(max(rates))
    if site:
        pool["site"] = site
        if all(machine.labels.get(SITE_LABEL) == site for machine in machines):
            pool["labels"] = {SITE_LABEL: site}
    return pool


def _with_unique_names(pools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Names pools whose card, or default name, occurs more than once after their site."""
    names = [pool.get("name") or pool["card"] for pool in pools]
    return [
        {**pool, "name": f"{name} {pool.get('site', '')} {index + 1}".replace("  ", " ")}
        if names.count(name) > 1
        else pool
        for index, (pool, name) in enumerate(zip(pools, names, strict=True))
    ]


def _rate(first: Sequence[str], second: Sequence[str], links: Links) -> float:
    return _rounded(median(links[frozenset((one, other))] for one in first for other in second))


def _rounded(gbit_s: float) -> float:
    return float(f"{gbit_s:.3g}")
