"""`digenrl probe` on a Ray cluster of two nodes of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ray_clusters import nodes_alone
from typer.testing import CliRunner

from digenrl.cli import app
from digenrl.commands.probe import probe_cluster
from digenrl.config.reading import ConfigError


def test_the_links_of_a_cluster_are_measured_and_a_file_is_kept(tmp_path: Path) -> None:
    path, messages = tmp_path / "cluster.yaml", list[str]()
    with nodes_alone(num_cpus=1) as nodes:
        nodes.add(labels={"site": "far"})
        probed = probe_cluster(nodes.address, messages.append)
        assert len(probed.machines) == 2 and len(messages) == 1
        (gbit_s,) = probed.links.values()
        assert gbit_s > 0.001
        written = CliRunner().invoke(app, ["probe", "--out", str(path), "--address", nodes.address])
        assert written.exit_code == 0, written.output
    content = yaml.safe_load(path.read_text())
    assert sum(pool["nodes"] for pool in content["pools"]) == 2
    assert all(pool["network_gbit_s"] > 0 for pool in content["pools"])
    before = path.read_text()
    again = CliRunner().invoke(app, ["probe", "--out", str(path)])
    assert isinstance(again.exception, ConfigError) and "--force" in str(again.exception)
    assert path.read_text() == before


def test_a_cluster_of_one_machine_has_no_links() -> None:
    with nodes_alone(num_cpus=1) as nodes:
        probed = probe_cluster(nodes.address, pytest.fail)
    assert probed.links == {} and "one machine" in probed.summary()
