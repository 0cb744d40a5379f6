"""Sites: links between them, publication per pool, and where to train."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import Any

import pytest

from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.spec import ScheduleRules
from digenrl.planning.candidates import PlanOptions, candidates, splits
from digenrl.planning.facts.cluster import CardPool, Cluster
from digenrl.planning.facts.workload import Workload, workload_for
from digenrl.planning.layout import Layout, best_trainer, generator_layout
from digenrl.planning.planner import plan
from digenrl.planning.publication import (
    earliest_publication_seconds,
    publication_seconds,
    remote_publication_seconds,
    slowest_link,
)
from digenrl.planning.sites.groups import SiteLink, site_gbit_s
from digenrl.planning.sites.stages import best_stages, link_bytes_s
from digenrl.planning.sites.trainer_places import compare_places, places_words
from digenrl.planning.spec_builder import build_spec
from digenrl.simulation.makespan import predict_makespan

SLOW = SiteLink(between=("east", "west"), gbit_s=0.1)
FLUX = workload_for("flux.1", prompts=2, samples_per_prompt=4)


def pool(card: str, site: str, cards: int = 2, **more: Any) -> CardPool:
    return CardPool.model_validate({"card": card, "per_node": cards, "network_gbit_s": 10, "site": site, **more})


EAST, WEST = pool("H100", "east", 4), pool("RTX 4090", "west", 4)
CLUSTER = Cluster(pools=(EAST, WEST), sites=(SLOW,))


def two_sites(gbit_s: float) -> Cluster:
    link = SiteLink(between=("east", "west"), gbit_s=gbit_s)
    return Cluster(pools=(pool("H100", "east"), pool("RTX 4090", "west")), sites=(link,))


def layout(workload: Workload = FLUX, west: CardPool = WEST) -> Layout:
    trainer = best_trainer(workload, EAST, 2, workload.samples_per_prompt)
    lanes = (generator_layout(workload, EAST, 2), generator_layout(workload, west, west.cards))
    assert trainer is not None and lanes[0] is not None and lanes[1] is not None
    return Layout((lanes[0], lanes[1]), trainer, 1, site_links=(SLOW,))


# --- The cluster file --------------------------------------------------------------------------------------------


def test_a_link_serves_both_directions_and_a_site_has_no_link_to_itself() -> None:
    assert site_gbit_s((SLOW,), "west", "east") == site_gbit_s((SLOW,), "east", "west") == 0.1
    assert site_gbit_s((), "east", "east") == inf


@pytest.mark.parametrize(
    ("sites", "of_pools", "noun"),
    [
        ([], ("east", "west"), "east"),
        ([{"between": ["east", "west"], "gbit_s": 1}] * 2, ("east", "west"), "2"),
        ([{"between": ["east", "west"], "gbit_s": 1}], ("east", "east"), "west"),
        ([{"between": ["east", "west"], "gbit_s": 1}], ("east", ""), "RTX 4090"),
        ([{"between": ["east", "east"], "gbit_s": 1}], ("east", "west"), "east"),
        ([{"between": ["east", "west"], "gbit_s": 0}], ("east", "west"), "gbit_s"),
    ],
)
def test_sites_and_links_have_to_match(sites: Any, of_pools: tuple[str, str], noun: str) -> None:
    pools = [{"card": card, "site": site} for card, site in zip(("H100", "RTX 4090"), of_pools, strict=True)]
    with pytest.raises(ConfigError, match=noun):
        parse_model(Cluster, {"pools": pools, "sites": sites})


# --- Publication -------------------------------------------------------------------------------------------------


def test_a_pool_in_another_site_gets_versions_later_and_the_local_one_does_not_wait() -> None:
    spec = build_spec(FLUX, layout(), 1, ScheduleRules(), steps=2)
    local, remote = spec.generators
    assert local.publish is None and float(spec.publish) < 1
    # The adapters as a patch, over 0.1 Gbit/s, and the time to make it.
    patch_s = 0.37 * FLUX.published_bytes / 12.5e6 + FLUX.published_bytes / 140e6 + 0.05
    assert float(remote.publish or 0) == pytest.approx(patch_s, rel=0.01)


def test_over_a_fast_link_whole_versions_are_faster_than_patches() -> None:
    fast = Layout(
        layout().generators, layout().trainer, 1, site_links=(SiteLink(between=("east", "west"), gbit_s=8),)
    )
    seconds = remote_publication_seconds(FLUX, fast, fast.generators[1])
    assert seconds == pytest.approx(FLUX.published_bytes / 1e9 + 0.05, rel=0.01)


def test_weights_in_bfloat16_arrive_earlier() -> None:
    in_float32 = FLUX.model_copy(update={"published_in_bf16": False})
    here = layout()
    seconds = [remote_publication_seconds(each, here, here.generators[1]) for each in (in_float32, FLUX)]
    assert seconds[0] is not None and seconds[1] is not None and seconds[0] > 3 * seconds[1]


def test_adapters_cross_the_link_once_for_all_machines_of_another_site() -> None:
    one, two = layout(), layout(west=pool("RTX 4090", "west", 2, nodes=2))
    alone, both = (remote_publication_seconds(FLUX, each, each.generators[1]) for each in (one, two))
    assert alone is not None and alone == both


def test_a_measured_time_of_publishing_counts() -> None:
    measured = pool("RTX 4090", "west", 4, measured={"publish_seconds": 3.0})
    here = layout(west=measured)
    assert remote_publication_seconds(FLUX, here, here.generators[1]) == 3.0
    assert earliest_publication_seconds(FLUX, here) == publication_seconds(FLUX, here) < 3.0
    assert slowest_link(here) == 12.5e6


def test_no_plan_over_two_sites_beats_its_bound() -> None:
    options = PlanOptions(steps=3, stale_shares=(0.0, 0.5), streams=("group",))
    found = list(candidates(FLUX, splits(FLUX, CLUSTER, EAST, 2, options), options))
    assert {len(each.layout.generators) for each in found} == {1, 2}
    for candidate in found[::7]:
        assert predict_makespan(candidate.spec(FLUX, 3)) >= candidate.bound_s


# --- Where to train ----------------------------------------------------------------------------------------------


def test_stages_are_laid_site_by_site() -> None:
    here = two_sites(SLOW.gbit_s)
    cluster = Cluster(pools=(*here.pools, pool("H200", "east", 1, name="more")), sites=here.sites)
    staged = best_stages(FLUX, cluster, PlanOptions())
    assert staged is not None
    assert sum(first.site != second.site for first, second in pairwise(staged.cards)) == 1
    assert sum(staged.cut.blocks) == FLUX.facts.blocks


def test_faster_cards_get_more_blocks() -> None:
    staged = best_stages(FLUX, two_sites(10), PlanOptions())
    assert staged is not None
    blocks = dict(zip((card.name for card in staged.cards), staged.cut.blocks, strict=True))
    assert blocks["H100"] > blocks["RTX 4090"]


def test_a_link_is_that_of_the_node_the_network_or_the_sites() -> None:
    cards = (EAST, EAST, EAST, EAST, WEST)
    assert link_bytes_s(CLUSTER, cards, 3) == 12.5e6
    assert link_bytes_s(CLUSTER, cards, 0) == EAST.card.card_link_gb_s * 1e9
    small = pool("H100", "east", 1, nodes=2)
    assert link_bytes_s(CLUSTER, (small, small), 0) == pytest.approx(1e9)


def test_over_a_slow_link_training_stays_in_one_site() -> None:
    places = compare_places(FLUX, two_sites(0.008), PlanOptions())
    assert places[0].kind == "one site" and "H100" in places[0].cards
    assert {place.kind for place in places} == {"one site", "stages", "data parallel"}
    seconds = {place.kind: place.step_s for place in places}
    assert seconds["data parallel"] is None or seconds["data parallel"] > 10 * (seconds["one site"] or inf)
    assert "fastest" in places_words(places) and "east" in places_words(places)


def test_a_model_that_fits_no_pool_trains_in_stages() -> None:
    """Two sites with one small card each, and bf16 weights of 24 GB."""
    cluster = Cluster(
        pools=(pool("RTX 4090", "east", 1, name="a"), pool("RTX 4090", "west", 1, name="b")),
        sites=(SiteLink(between=("east", "west"), gbit_s=1),),
    )
    places = compare_places(FLUX, cluster, PlanOptions())
    assert places[0].kind == "stages" and places[0].step_s is not None
    assert [place.kind for place in places if place.step_s is None][:1] == ["one site"]


def test_without_sites_nothing_is_compared() -> None:
    assert compare_places(FLUX, Cluster(pools=(EAST.model_copy(update={"site": ""}),)), PlanOptions()) == ()
    assert places_words(()) == ""


def test_a_plan_says_where_to_train() -> None:
    options = PlanOptions(steps=2, keep=1, max_evaluations=5, stale_shares=(0.25,), helps=("none",), ranks=2)
    result = plan(FLUX, CLUSTER, options)
    assert {place.kind for place in result.trainer_places} == {"one site", "stages", "data parallel"}
    remote = [pool for pool in result.best.spec.generators if pool.publish is not None]
    assert all(float(pool.publish or 0) > float(result.best.spec.publish) for pool in remote)
