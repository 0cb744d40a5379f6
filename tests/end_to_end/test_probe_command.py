"""`digenrl probe` on a Ray cluster of one node, and then of two nodes, of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ray_clusters import nodes_alone
from typer.testing import CliRunner

from digenrl.cli import app
from digenrl.commands.probe import probe_cluster, read_address
from digenrl.config.reading import ConfigError


def test_links_are_measured_if_there_are_several_machines(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    with nodes_alone() as nodes:
        alone = probe_cluster(read_address(nodes.address), pytest.fail)
        assert alone.links == {} and "one machine" in alone.summary()
        nodes.add()
        written = CliRunner().invoke(app, ["probe", "--out", str(path), "--address", nodes.address])
        assert written.exit_code == 0, written.output
    content = yaml.safe_load(path.read_text())
    assert sum(pool["nodes"] for pool in content["pools"]) == 2
    assert all(pool["network_gbit_s"] > 0 for pool in content["pools"])


def test_a_file_that_exists_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("mine")
    refused = CliRunner().invoke(app, ["probe", "--out", str(path)])
    assert isinstance(refused.exception, ConfigError) and "--force" in str(refused.exception)
    assert path.read_text() == "mine"
