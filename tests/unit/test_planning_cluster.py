"""CLUSTER files and workloads: valid contents, and errors of one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from digenrl.config.reading import ConfigError, parse_model
from digenrl.planning.facts.cluster import Cluster, read_cluster
from digenrl.planning.facts.workload import workload_for

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(("name", "cards"), [("cluster_mixed.yaml", 32), ("cluster_small.yaml", 8)])
def test_the_example_clusters_are_valid(name, cards):
    assert read_cluster(EXAMPLES / name).cards == cards


def test_a_cluster_can_define_a_card_and_a_price():
    custom = {
        "name": "lab card",
        "bf16_tflops": 200,
        "memory_gib": 60,
        "memory_gb_s": 1000,
        "host_gb_s": 31.5,
        "card_link_gb_s": 31.5,
    }
    cluster = parse_model(Cluster, {"pools": [{"card": custom}, {"card": "h100", "usd_per_hour": 9.5}]})
    assert cluster.pools[0].usd_per_card_hour == 0
    assert cluster.pools[1].usd_per_card_hour == 9.5


@pytest.mark.parametrize(
    ("pools", "complaint"),
    [
        ([{"card": "H10"}], r"pools\[0\].card: .*'H10'.*'H100'"),
        ([{"card": "H100", "node": 2}], r"pools\[0\].node: .*'nodes'"),
        ([{"card": "H100", "per_node": 0}], r"pools\[0\].per_node: .*got 0"),
        ([{"card": {"name": "x", "bf16_tflop": 1}}], "'bf16_tflops'"),
        ([{"card": "H100"}, {"card": "h100"}], "'H100'.*twice"),
        ([], "no pools"),
    ],
)
def test_an_invalid_cluster_is_an_error_of_one_line(pools, complaint):
    with pytest.raises(ConfigError, match=complaint) as error:
        parse_model(Cluster, {"pools": pools})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("model", "overrides", "complaint"),
    [
        ("hunyan", {}, "'hunyan'.*'HunyuanVideo'"),
        ("flux", {"height": 500}, "multiples of 16.*500x512"),
        ("flux", {"frames": 5}, "5 frames"),
        ("flux", {"tuning": "lorra"}, "tuning: .*'lora'"),
        ("flux", {"prompts": 0}, "prompts: .*got 0"),
        ("flux", {"promts": 4}, "promts: .*'prompts'"),
    ],
)
def test_an_invalid_workload_is_an_error_of_one_line(model, overrides, complaint):
    with pytest.raises(ConfigError, match=complaint) as error:
        workload_for(model, **overrides)
    assert "\n" not in str(error.value)


def test_an_override_of_none_keeps_the_published_setting():
    assert workload_for("flux", height=None, denoise_steps=None) == workload_for("FLUX.1")
