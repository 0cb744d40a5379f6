"""Sites: groups of pools with slow links between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from pydantic import Field, field_validator

from digenrl.config.reading import Frozen
from digenrl.planning.facts.cards import Positive


class SiteLink(Frozen):
    """The bandwidth between two sites, the same in both directions."""

    between: tuple[str, str] = Field(description="the names of two sites")
    gbit_s: Positive

    @field_validator("between")
    @classmethod
    def _two_sites(cls, between: tuple[str, str]) -> tuple[str, str]:
        if between[0] == between[1]:
            raise ValueError(f"'{between[0]}' is named twice; a link has two different sites")
        return between


def site_gbit_s(links: Sequence[SiteLink], first: str, second: str) -> float:
    """The bandwidth between two sites; infinite inside a site, where the pools' networks are the limit."""
    if first == second:
        return inf
    return next(link.gbit_s for link in links if set(link.between) == {first, second})


def check_sites(site_of_pool: Mapping[str, str], links: Sequence[SiteLink]) -> None:
    """Raises ValueError unless every pool is in a site, and every two sites have exactly one link."""
    used, linked = sorted(set(site_of_pool.values())), [frozenset(link.between) for link in links]
    without = next((pool for pool, site in site_of_pool.items() if not site), None)
    if without is not None and len(used) + len(links) > 1:
        raise ValueError(
            f"pools: '{without}' has no site, but the cluster has several; give it one, as site: NAME"
        )
    unused = next((site for pair in linked for site in sorted(pair) if site not in used), None)
    if unused is not None:
        raise ValueError(f"sites: no pool is in '{unused}'; sites with pools: {', '.join(used) or 'none'}")
    for index, first in enumerate(used):
        for second in used[index + 1 :]:
            given = linked.count(frozenset((first, second)))
            if given != 1:
                raise ValueError(
                    f"sites: expected one link between '{first}' and '{second}', got {given}; "
                    f"give {{between: [{first}, {second}], gbit_s: 1.0}}"
                )
