"""Runs on a Ray cluster of several nodes give the weights of a run on one machine, whatever is lost."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from edit_runs import EditRuns
from live_runs import (
    PATIENCE_S,
    LiveRuns,
    Meanwhile,
    ask_to_stop,
    lines_of,
    metric,
    steps_done,
    wait_for,
    weights,
    workers_of,
)
from ray_clusters import SeveralNodes, nodes_alone

from digenrl.cli import INTERRUPTED
from digenrl.config.reading import ConfigError
from digenrl.records import WorkerJoined, WorkerLost
from digenrl.run_folder.folder import RunFolder, Status
from digenrl.run_folder.journal import read_journal

pytest.importorskip("ray")

OPTIONS = (
    "training.learning_rate=3e-5",
    "training.lora=null",
    "lanes.ranks=2",
    "training.stages=auto",
    "lanes.rewards=0",  # few workers, since every actor loads torch
    "rewards=beside_the_recipe:closeness",
    "lanes.patience_s=600",  # a gate is closed while a node starts
    "evaluation=null",
)
GATED_CLOSENESS = """
import time
from pathlib import Path
from live_rewards import closeness as ungated

def closeness(pixels, prompts, metadata):
    while (Path(__file__).parent / "gate").exists():
        time.sleep(0.05)
    return ungated(pixels, prompts, metadata)
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[SeveralNodes]:
    """A head node for the trainer and other workers, and one node for generators."""
    with nodes_alone(num_cpus=1, resources={"home": 8}) as cluster:  # Ray starts one process per CPU
        cluster.add(num_cpus=1, resources={"away": 2})
        yield cluster


@pytest.fixture(scope="module")
def edits(tmp_path_factory: pytest.TempPathFactory) -> EditRuns:
    return EditRuns(tmp_path_factory.mktemp("edits"))


def on(nodes: SeveralNodes, *pools: str) -> tuple[str, ...]:
    """Overrides that run on the cluster: generators in these pools, everything else on the head."""
    home = "{cpus: 0, resources: {home: 1}}"
    places = tuple(f"cluster.{who}={home}" for who in ("trainer", "rewards", "encoder"))
    return (
        "mode=ray",
        f"cluster.address={nodes.address}",
        "cluster.start_timeout_s=120",  # the first process of a node is slow on a busy machine
        f"cluster.generators=[{', '.join(pools) or '{cpus: 0, resources: {away: 1}}'}]",
        "lanes.generators=1",
        "cluster.weight_patches=always",  # `auto` sends full weights whole over a fast link
        *places,
    )


def assert_same_weights(there: RunFolder, here: RunFolder, step: int) -> None:
    one, other = weights(here, step), weights(there, step)
    assert all(torch.equal(one[name], other[name]) for name in one), "weights differ"


def assert_weights_were_transferred(run: RunFolder) -> None:
    assert sum(metric(run, "wire_whole_bytes")) >= 2 * metric(run, "publish_bytes")[0], "two versions were needed"
    assert sum(metric(run, "wire_bytes")) < sum(metric(run, "wire_whole_bytes")), "no patch was sent"


class WatchedRun:
    """A run on a cluster, whose workers are killed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def wait(self, true: Callable[[], Any], what: str) -> Any:
        return wait_for(true, what)

    def kill(self, *workers: str) -> None:
        found = self.wait(
            lambda: workers_of(self._path).keys() >= set(workers) and workers_of(self._path), f"{workers} to start"
        )
        for worker in workers:
            os.kill(found[worker], signal.SIGKILL)

    def after(self, steps: int) -> None:
        self.wait(lambda: steps_done(self._path) >= steps, f"step {steps}")

    def count(self, event: type) -> int:
        return sum(isinstance(decision.event, event) for decision in read_journal(self._path / "journal.jsonl"))

    def lanes_that_generated(self) -> set[str]:
        spans = lines_of(self._path / "spans.jsonl")
        return {span["lane"] for span in spans if span["work"] == "generate"}


class WatchedCommand(WatchedRun):
    """A run in its own process, on a cluster that changes: Ray adds nodes in the main thread only."""

    def __init__(self, command: subprocess.Popen[str], path: Path) -> None:
        super().__init__(path)
        self._command = command

    def wait(self, true: Callable[[], Any], what: str) -> Any:
        found = wait_for(lambda: self._command.poll() is not None or true(), what)
        assert self._command.poll() is None, self._command.communicate()
        return found

    def interrupt(self) -> None:
        self._command.send_signal(signal.SIGINT)
        _, errors = self._command.communicate(timeout=PATIENCE_S)
        assert self._command.returncode == INTERRUPTED, errors


@contextmanager
def watched_command(live: LiveRuns, path: Path, *overrides: str) -> Iterator[WatchedCommand]:
    command = live.command("tiny.yaml", *overrides, "--out", str(path))
    try:
        yield WatchedCommand(command, path)
    finally:
        command.kill()
        command.communicate()


def test_a_run_in_stages_that_loses_a_node_and_gains_another_gives_the_weights_of_one_machine(
    edits: EditRuns, nodes: SeveralNodes
) -> None:
    """Prompts have source images, which the reward compares with the samples."""
    (edits.root / "beside_the_recipe.py").write_text(GATED_CLOSENESS, encoding="utf-8")
    gate, path = edits.root / "gate", edits.new_path()
    machine = {"num_cpus": 1, "resources": {"pasture": 1}}
    doomed = nodes.add(**machine)
    home = "{name: home, cpus: 0, resources: {away: 1}}"
    elastic = "{name: far, cpus: 0, resources: {pasture: 1}, count: 1, up_to: 2}"
    with watched_command(edits, path, *OPTIONS, "steps=2000", *on(nodes, home, elastic)) as run:
        run.after(steps=1)
        gate.touch()  # no steps while nodes change, since another run repeats them
        nodes.kill(doomed)
        run.wait(lambda: run.count(WorkerLost) == 1, "a lost generator in the journal")
        assert run.count(WorkerJoined) == 0, "the lane of the lost node has no room"
        added = nodes.add(**machine)
        run.wait(lambda: run.count(WorkerJoined) == 1, "a lane that joins")
        gate.unlink()
        run.wait(lambda: "generator-2" in run.lanes_that_generated(), "a slice from the lane that joined")
        run.after(steps=2)
        run.interrupt()
    nodes.kill(added)
    folder, steps = RunFolder.open(path), steps_done(path)
    assert metric(folder, "step") == list(range(steps))
    assert_same_weights(folder, edits.finished(*OPTIONS, f"steps={steps}"), steps)
    assert_weights_were_transferred(folder)


def test_lanes_that_do_both_lose_gradients_with_the_trainer_and_give_the_weights_of_one_card(
    live: LiveRuns, nodes: SeveralNodes
) -> None:
    updates = "algorithm.options={updates_per_batch: 2, updates_of: samples, kl_weight: 0}"
    options = ("training.job_samples=2", "lanes.rewards=0", updates)
    path, pool = live.new_path(), "{name: home, cpus: 0, resources: {away: 1}}"
    both = ("techniques.assist=both", "techniques.tag=greedy", *options, "steps=2000", *on(nodes, pool))
    watched = WatchedRun(path)

    def kill_and_stop() -> None:
        watched.after(steps=2)
        watched.kill("trainer")
        watched.wait(lambda: watched.count(WorkerLost) == 1, "a lost trainer in the journal")
        watched.after(steps=4)
        ask_to_stop(signal.SIGINT)

    with Meanwhile(path, kill_and_stop):
        status, folder = live.run(*both, out=path)
    assert status is Status.INTERRUPTED
    steps = steps_done(path)
    assert metric(folder, "step") == list(range(steps))
    assert_same_weights(folder, live.finished("mode=colocated", *options, f"steps={steps}"), steps)
    assert_weights_were_transferred(folder)
    trained = {span["lane"] for span in lines_of(path / "spans.jsonl") if span["work"] == "train"}
    assert len(trained) > 1, "nothing was shared"


@pytest.mark.parametrize(
    ("pool", "named"),
    [
        ("{accelerator: H100}", "H100"),
        ("{labels: {room: cold}}", "room"),
        ("{resources: {unicorns: 1}}", "unicorns"),
        ("{resources: {away: 1}, count: 9}", "away"),
    ],
)
def test_missing_resources_are_reported_before_anything_is_written(
    pool: str, named: str, live: LiveRuns, nodes: SeveralNodes
) -> None:
    path = live.new_path()
    with pytest.raises(ConfigError, match=named) as caught:
        live.run(*on(nodes, pool), out=path)
    assert "\n" not in str(caught.value)
    assert not path.exists()
