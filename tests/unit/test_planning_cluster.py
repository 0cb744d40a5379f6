"""CLUSTER files and workloads: what they accept, and the one line they answer a mistake with."""

from __future__ import annotations

from pathlib import Path

import pytest

from digenrl.config.reading import ConfigError, parse_model
from digenrl.planning.cluster import Cluster, read_cluster
from digenrl.planning.workload import workload_for

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(("name", "cards"), [("cluster_mixed.yaml", 32), ("cluster_small.yaml", 8)])
def test_the_example_clusters_read(name, cards):
    assert read_cluster(EXAMPLES / name).cards == cards


def test_a_cluster_may_define_its_own_card_and_its_own_price():
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
        ([{"card": "H10"}], r"pools\[0\].card: unknown card 'H10'; did you mean 'H100'\? known: RTX A6000"),
        ([{"card": "H100", "node": 2}], r"pools\[0\].node: unknown key; did you mean 'nodes'"),
        ([{"card": "H100", "per_node": 0}], r"pools\[0\].per_node: .*got 0"),
        ([{"card": {"name": "x", "bf16_tflop": 1}}], "did you mean 'bf16_tflops'"),
        ([{"card": "H100"}, {"card": "h100"}], "'H100' stands twice"),
        ([], "no pools; give at least one"),
    ],
)
def test_a_wrong_cluster_is_told_in_one_line(pools, complaint):
    with pytest.raises(ConfigError, match=complaint) as told:
        parse_model(Cluster, {"pools": pools})
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("model", "overrides", "complaint"),
    [
        ("hunyan", {}, "unknown model 'hunyan'; did you mean 'HunyuanVideo'"),
        ("flux", {"height": 500}, "multiples of 16, got 500x512"),
        ("flux", {"frames": 5}, "makes images, got 5 frames"),
        ("flux", {"tuning": "lorra"}, "tuning: .*'lora' or 'full'"),
        ("flux", {"prompts": 0}, "prompts: .*got 0"),
        ("flux", {"promts": 4}, "promts: unknown key; did you mean 'prompts'"),
    ],
)
def test_a_wrong_workload_is_told_in_one_line(model, overrides, complaint):
    with pytest.raises(ConfigError, match=complaint) as told:
        workload_for(model, **overrides)
    assert "\n" not in str(told.value)


def test_overrides_left_out_keep_the_recipe():
    assert workload_for("flux", height=None, denoise_steps=None) == workload_for("FLUX.1")
