"""Sites proposed from measured links."""

from __future__ import annotations

from itertools import combinations

import pytest
import yaml

from digenrl.config.reading import parse_model
from digenrl.planning.facts.cluster import Cluster
from digenrl.planning.sites.proposal import Links, ProbedMachine, proposal_text, propose_sites, proposed_cluster
from digenrl.transports.ray import link_probe
from digenrl.transports.ray.capacity import NodeResources


def links(groups: list[list[str]], inside: list[float], between: float) -> Links:
    """Links of groups of machines, each group with its own rate."""
    rates = {}
    names = [name for group in groups for name in group]
    for first, second in combinations(names, 2):
        same = [rate for group, rate in zip(groups, inside, strict=True) if {first, second} <= set(group)]
        rates[frozenset((first, second))] = same[0] if same else between
    return rates


@pytest.mark.parametrize(
    ("groups", "inside", "between"),
    [
        ([["a", "b"], ["c", "d"]], [10, 10], 5),
        ([["a", "b"], ["c", "d"], ["e", "f"]], [10, 10, 10], 0.008),
        ([["a", "b", "c"], ["d", "e"]], [10, 1], 0.9),
        ([["a"], ["b"], ["c"]], [0, 0, 0], 0.1),  # lone machines at home
        ([["a", "b", "c"], ["d"]], [25, 0], 0.05),
    ],
)
def test_machines_with_fast_links_are_a_site(groups: list[list[str]], inside: list[float], between: float) -> None:
    names = [name for group in groups for name in group]
    assert propose_sites(names, links(groups, inside, between)) == groups


def test_links_that_hardly_differ_make_one_site() -> None:
    assert propose_sites(list("abcd"), links([["a", "b"], ["c", "d"]], [10, 9.9], 9.5)) == [list("abcd")]
    assert propose_sites(["a"], {}) == [["a"]]


def test_the_proposed_file_is_a_cluster_file() -> None:
    machines = [ProbedMachine(name, "H100", 8, {"site": "lab"}) for name in "ab"]
    machines += [ProbedMachine("c", "H100", 4), ProbedMachine("d", "RTX-4090", 2)]
    rates = links([["a", "b"], ["c", "d"]], [40, 9], 0.2)
    text = proposal_text(machines, rates)
    cluster = parse_model(Cluster, yaml.safe_load(text))
    assert [(pool.card.name, pool.nodes, pool.per_node, pool.site) for pool in cluster.pools] == [
        ("H100", 2, 8, "lab"),
        ("H100", 1, 4, "site-2"),
        ("RTX 4090", 1, 2, "site-2"),
    ]
    assert [pool.network_gbit_s for pool in cluster.pools] == [40, 9, 9]
    assert cluster.pools[0].labels == {"site": "lab"} and not cluster.pools[1].labels
    assert [(link.between, link.gbit_s) for link in cluster.sites] == [(("lab", "site-2"), 0.2)]
    assert "a - b: 40 Gbit/s" in text


def test_machines_without_cards_are_named_and_one_machine_has_no_sites() -> None:
    text = proposal_text([ProbedMachine("alone")], {})
    assert "Without cards: alone" in text and "One machine" in text
    assert proposed_cluster([ProbedMachine("alone")], {}) == {
        "pools": [{"name": "machines", "nodes": 1, "per_node": 1}]
    }


def test_a_link_is_as_fast_as_its_slower_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    home, lab = (NodeResources(name, name, {}, {}) for name in ("home", "lab"))

    def transfer_s(sender: NodeResources, receiver: NodeResources, size: int) -> float:
        return size * 8 / (0.02e9 if sender is home else 0.2e9)

    monkeypatch.setattr(link_probe, "_transfer_s", transfer_s)
    for nodes in ((home, lab), (lab, home)):
        assert list(link_probe.measure_links(nodes).values()) == [pytest.approx(0.02)]
