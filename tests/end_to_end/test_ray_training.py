"""Whole runs on a real Ray cluster of several nodes: the weights of a run on one machine, whatever is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from live_runs import PATIENCE_S, LiveRuns, Meanwhile, lines_of, metric, steps_done, trained, wait_for, workers_of
from ray_clusters import SeveralNodes, nodes_alone
from torch import Tensor

from digenrl.cli import INTERRUPTED
from digenrl.config.reading import ConfigError
from digenrl.records import WorkerJoined, WorkerLost
from digenrl.runs.folder import RunFolder, Status
from digenrl.runs.journal import read_journal
from digenrl.training.checkpoints import read_checkpoint

pytest.importorskip("ray")

LORA = ("training.learning_rate=3e-5",)
FULL = (*LORA, "training.lora=null")
FEW_WORKERS = ("lanes.rewards=0",)  # every actor loads torch


@pytest.fixture(scope="module")
def nodes() -> Iterator[SeveralNodes]:
    """A head with room for the trainer and all others, and one machine for generators."""
    with nodes_alone(num_cpus=1, resources={"home": 8}) as cluster:  # Ray starts a process for every CPU
        cluster.add(num_cpus=1, resources={"away": 2})
        yield cluster


def on(nodes: SeveralNodes, *pools: str) -> tuple[str, ...]:
    """Overrides that put a run on the cluster: all at home, and generators in these pools."""
    home = "{cpus: 0, resources: {home: 1}}"
    places = tuple(f"cluster.{who}={home}" for who in ("trainer", "rewards", "encoder"))
    return (
        "mode=ray",
        f"cluster.address={nodes.address}",
        "cluster.start_timeout_s=120",  # a machine's first process takes its time where others work, too
        f"cluster.generators=[{', '.join(pools) or '{cpus: 0, resources: {away: 1}}'}]",
        "lanes.generators=1",
        *places,
    )


def weights(run: RunFolder, step: int) -> Mapping[str, Tensor]:
    state: Mapping[str, Tensor] = read_checkpoint(run.checkpoint(step)).trainer_state["policies"]["current"]
    return state


@pytest.mark.parametrize("kind", [LORA, FULL], ids=["lora", "full"])
def test_a_cluster_gives_the_weights_of_one_machine(
    kind: tuple[str, ...], live: LiveRuns, nodes: SeveralNodes
) -> None:
    options = (*kind, *FEW_WORKERS, "lanes.ranks=2")
    here, there = live.finished(*options), live.finished(*options, *on(nodes))
    one, other = weights(here, 3), weights(there, 3)
    assert all(torch.equal(one[name], other[name]) for name in one), "the same shapes: to the last bit"
    assert metric(there, "step") == [0, 1, 2]
    assert sum(metric(there, "wire_bytes")) >= 2 * metric(there, "publish_bytes")[0], "two versions were needed"


def kill(run: Path, *workers: str, steps: int) -> None:
    wait_for(lambda: steps_done(run) >= steps, f"step {steps}")
    found = wait_for(lambda: workers_of(run).keys() >= set(workers) and workers_of(run), f"{workers}")
    for worker in workers:
        os.kill(found[worker], signal.SIGKILL)


def test_a_generator_a_machine_and_a_trainer_may_be_lost(live: LiveRuns, nodes: SeveralNodes) -> None:
    quiet = live.finished(*LORA, "steps=14", "mode=colocated")
    doomed = nodes.add(num_cpus=1, resources={"doomed": 1})
    path = live.new_path()

    def hurt() -> None:
        kill(path, "generator-0", steps=1)
        wait_for(lambda: steps_done(path) >= 3, "step 3")
        nodes.kill(doomed)
        kill(path, "trainer", steps=5)

    pools = ("{name: home, cpus: 0, resources: {away: 1}}", "{name: far, cpus: 0, resources: {doomed: 1}}")
    with Meanwhile(path, hurt):
        status, run = live.run(*LORA, *FEW_WORKERS, "steps=14", *on(nodes, *pools), out=path)
    assert status is Status.FINISHED
    assert trained(run, 14) == trained(quiet, 14)
    assert metric(run, "step") == list(range(14))
    events = [type(decision.event) for decision in read_journal(run.journal)]
    assert events.count(WorkerLost) == 2 and events.count(WorkerJoined) == 1, "one lane found no room again"


def test_a_lane_joins_with_a_machine_that_is_added(live: LiveRuns, nodes: SeveralNodes) -> None:
    path = live.new_path()
    first = nodes.add(num_cpus=1, resources={"pasture": 1})
    elastic = on(nodes, "{cpus: 0, resources: {pasture: 1}, count: 1, up_to: 2}")
    run = live.command("tiny.yaml", *LORA, "steps=2000", *FEW_WORKERS, *elastic, "--out", str(path))
    wait_for(lambda: steps_done(path) >= 1 or run.poll() is not None, "step 1")
    assert run.poll() is None, run.communicate()
    added = nodes.add(num_cpus=1, resources={"pasture": 1})

    def made_by() -> set[str]:
        assert run.poll() is None, "the run is over"
        return {span["lane"] for span in lines_of(path / "spans.jsonl") if span["work"] == "generate"}

    wait_for(lambda: {"generator-0", "generator-1"} <= made_by(), "a slice of the lane that joined")
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == INTERRUPTED, errors
    steps = steps_done(path)
    here = live.finished(*LORA, f"steps={steps}", "mode=colocated")
    assert trained(RunFolder.open(path), steps) == trained(here, steps)
    for node in (first, added):
        nodes.kill(node)


@pytest.mark.parametrize(
    ("pool", "told"),
    [
        ("{accelerator: H100}", "H100"),
        ("{labels: {room: cold}}", "room"),
        ("{resources: {unicorns: 1}}", "unicorns"),
        ("{resources: {away: 1}, count: 9}", "away"),
    ],
)
def test_what_the_cluster_has_not_is_told_before_anything_is_written(
    pool: str, told: str, live: LiveRuns, nodes: SeveralNodes
) -> None:
    path = live.new_path()
    with pytest.raises(ConfigError, match=told) as caught:
        live.run(*on(nodes, pool), out=path)
    assert "\n" not in str(caught.value)
    assert not path.exists()
