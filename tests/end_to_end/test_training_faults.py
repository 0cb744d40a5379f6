"""Killed workers, failing rewards, broken invariants: runs continue or report why not, and clean up."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from fake_workers import with_reserve
from live_runs import (
    SPARE_REWARDS,
    Gates,
    LiveRuns,
    Meanwhile,
    ask_to_stop,
    assert_nothing_is_left,
    exchange_of,
    harm_with_open_gradient,
    lines_of,
    metric,
    open_gradient,
    prompts_of_step,
    steps_done,
    trained,
    wait_for,
    workers_of,
)

from digenrl.config.reading import ConfigError
from digenrl.driver import backends
from digenrl.driver.placement import place
from digenrl.records import (
    Calibrate,
    Calibrated,
    Committed,
    Generate,
    Generated,
    LaneJob,
    Quarantine,
    WorkerJoined,
    WorkerLost,
)
from digenrl.report.page import write_report
from digenrl.run_folder.folder import RunFolder, Status
from digenrl.run_folder.journal import read_journal
from digenrl.run_folder.reading import read_run
from digenrl.runs import training
from digenrl.runs.stopping import RunFailedError
from digenrl.scheduling.invariants import Auditor, BrokenPromiseError


class WorkerKiller:
    """Kills workers of a run that is driven here, and remembers its exchange folder."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.exchange: Path | None = None

    def after(self, steps: int) -> dict[str, int]:
        """Waits until `steps` steps are done, and returns the workers."""
        self.exchange = exchange_of(os.getpid())
        wait_for(lambda: steps_done(self.run) >= steps, f"step {steps}")
        return workers_of(self.run)

    def kill(self, worker: str, steps: int = 1) -> None:
        os.kill(self.after(steps)[worker], signal.SIGKILL)

    def kill_inside_a_slice(self, worker: str, gates: Gates) -> None:
        """Kills a worker whose slice of the second step cannot be scored, since a gate is closed."""
        pid = self.after(1)[worker]
        wait_for(lambda: open_slices(self.run, lane=0), "a slice")
        os.kill(pid, signal.SIGKILL)
        gates.open()

    def kill_and_see_replaced(self, *workers: str) -> None:
        """Kills workers during the second step, and waits until there are others of their names."""
        killed = self.after(1)
        for worker in workers:
            os.kill(killed[worker], signal.SIGKILL)
        wait_for(
            lambda: all(workers_of(self.run).get(worker, killed[worker]) != killed[worker] for worker in workers),
            f"others than {killed}",
        )

    def assert_nothing_is_left(self) -> None:
        assert self.exchange is not None
        assert_nothing_is_left(self.run, self.exchange)


def open_slices(run: Path, lane: int) -> set[int]:
    """The ids of a lane's unfinished Generate jobs."""
    given: set[int] = set()
    for decision in read_journal(run / "journal.jsonl"):
        if isinstance(decision.event, Generated):
            given.discard(decision.event.job.id)
        for action in decision.actions:
            if isinstance(action, Generate) and action.lane == lane:
                given.add(action.id)
    return given


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path / "gates")


def test_a_generator_killed_inside_a_slice_is_replaced_and_the_weights_are_the_same(
    live: LiveRuns, gates: Gates
) -> None:
    path = live.new_path()
    killer = WorkerKiller(path)
    gates.close(*prompts_of_step(live, 1))
    with Meanwhile(path, lambda: killer.kill_inside_a_slice("generator-0", gates)):
        status, run = live.run("techniques.tag=none", "lanes.rewards=0", gates.rewards, out=path)
    assert status is Status.FINISHED
    assert trained(run, 3) == trained(live.finished("mode=colocated"), 3)
    assert metric(run, "step") == [0, 1, 2]
    events = [decision.event for decision in read_journal(run.journal)]
    lost = next(event for event in events if isinstance(event, WorkerLost))
    joined = next(event for event in events if isinstance(event, WorkerJoined))
    lanes = {lane.name: lane for lane in run.info.lanes}
    assert lanes["generator-0"].left_ns == lost.at_ns
    assert lanes["generator-0 (2)"].joined_ns == joined.at_ns > lost.at_ns
    assert "generator-0 (2)" in {span["lane"] for span in lines_of(run.spans)}
    assert write_report(read_run(run.path)).exists(), "the report knows the lane that joined"
    killer.assert_nothing_is_left()


def test_a_lane_that_joins_is_calibrated_by_the_scheduler_and_the_weights_are_the_same(
    live: LiveRuns, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mode `ray` lanes join when a machine does; here there is room for one as soon as the run has begun."""
    undisturbed = trained(live.finished("mode=colocated"), 3)
    monkeypatch.setattr(backends, "place", lambda *placed: with_reserve(place(*placed), 1))
    path = live.new_path()
    gates.close(*prompts_of_step(live, 1))

    def wait_for_calibration() -> None:
        wait_for(lambda: steps_done(path) >= 1, "a step")
        journal = path / "journal.jsonl"
        wait_for(lambda: any(isinstance(each.event, Calibrated) for each in read_journal(journal)), "the lane")
        gates.open()

    with Meanwhile(path, wait_for_calibration):
        status, run = live.run("techniques.tag=none", gates.rewards, out=path)
    assert status is Status.FINISHED and trained(run, 3) == undisturbed
    decisions = list(read_journal(run.journal))
    (calibrated,) = [each.event for each in decisions if isinstance(each.event, Calibrated)]
    jobs = [job for each in decisions for job in each.actions if isinstance(job, LaneJob) and job.lane == 1]
    assert jobs[0] == calibrated.job and isinstance(jobs[0], Calibrate) and calibrated.offer.slice_ns > 1
    spans = [span["work"] for span in lines_of(run.spans) if span["lane"] == "generator-1"]
    assert spans[0] == "calibrate" and set(spans[1:]) <= {"generate"}


def test_a_reward_worker_and_an_encoder_that_are_killed_are_replaced(live: LiveRuns, gates: Gates) -> None:
    path = live.new_path()
    killer = WorkerKiller(path)
    gates.close(*prompts_of_step(live, 1))

    def kill() -> None:
        killer.kill_and_see_replaced("encoder", "reward-0")
        gates.open()

    with Meanwhile(path, kill):
        status, run = live.run(gates.rewards, out=path)
    assert status is Status.FINISHED
    assert trained(run, 3) == trained(live.finished("mode=colocated"), 3)
    killer.assert_nothing_is_left()


def test_a_killed_trainer_is_replaced_by_one_that_goes_on_from_the_last_commit(
    live: LiveRuns, gates: Gates
) -> None:
    options, path = ("algorithm.options.updates_per_batch=2",), live.new_path()
    gates.close(prompts_of_step(live, 1)[1])
    with Meanwhile(path, lambda: harm_with_open_gradient(path, "trainer", gates)):
        status, run = live.run(*options, gates.rewards, SPARE_REWARDS, out=path)
    assert status is Status.FINISHED
    assert trained(run, 3) == trained(live.finished("mode=colocated", *options), 3)
    assert metric(run, "step") == [0, 1, 2]
    assert_nothing_is_left(path)


def test_a_killed_trainer_whose_state_is_not_in_memory_goes_on_from_the_last_checkpoint(
    live: LiveRuns, gates: Gates
) -> None:
    path = live.new_path()
    killer = WorkerKiller(path)
    (third, _), (_, fourth) = prompts_of_step(live, 2), prompts_of_step(live, 3)
    gates.close(third)

    def kill_in_the_fourth_step() -> None:
        killer.after(2)
        gates.close(fourth)  # no prompt of the third step, but one of the second
        gates.open(third)
        killer.kill("trainer", steps=3)
        gates.open()

    with Meanwhile(path, kill_in_the_fourth_step):
        options = ("steps=4", "checkpoint.in_memory=false", "checkpoint.every=2", "checkpoint.keep=99")
        status, run = live.run(*options, gates.rewards, out=path)
    assert status is Status.FINISHED
    assert trained(run, 4) == trained(live.finished("steps=4", "mode=colocated"), 4)
    assert metric(run, "step") == list(range(4))
    killer.assert_nothing_is_left()


def test_a_stopped_worker_is_taken_for_dead_and_replaced(live: LiveRuns) -> None:
    path = live.new_path()
    killer = WorkerKiller(path)
    with Meanwhile(path, lambda: os.kill(killer.after(1)["generator-0"], signal.SIGSTOP)):
        status, run = live.run("steps=4", "techniques.tag=none", "lanes.patience_s=3", out=path)
    assert status is Status.FINISHED
    assert trained(run, 4) == trained(live.finished("steps=4", "mode=colocated"), 4)
    killer.assert_nothing_is_left()


def test_a_reward_that_hangs_on_a_prompt_costs_that_group_and_not_the_run(live: LiveRuns, gates: Gates) -> None:
    path = live.new_path()
    gates.close(prompts_of_step(live, 1)[0])
    status, run = live.run("steps=2", "lanes.patience_s=3", "lanes.restarts=0", gates.rewards, out=path)
    assert status is Status.FINISHED and metric(run, "step") == [0, 1]
    actions = [action for decision in read_journal(run.journal) for action in decision.actions]
    reasons = {action.reason for action in actions if isinstance(action, Quarantine)}
    assert reasons and all("reward-0 did not finish Score" in reason for reason in reasons)
    assert_nothing_is_left(path)


def test_a_trainer_killed_too_often_ends_the_run_and_the_message_says_how_to_go_on(live: LiveRuns) -> None:
    path = live.new_path()
    killer = WorkerKiller(path)
    with Meanwhile(path, lambda: killer.kill("trainer", steps=2)), pytest.raises(RunFailedError) as caught:
        live.run("steps=500", "checkpoint.every=1", "checkpoint.keep=1", "lanes.restarts=0", out=path)
    message = str(caught.value).splitlines()
    assert message[0].startswith("trainer ended by signal 9 (SIGKILL, ")
    assert message[0].endswith("; see its file in the run's logs")
    checkpoint = max((path / "checkpoints").glob("step_*"))  # the one before it may not be removed yet
    assert message[1] == f"{checkpoint} is complete; resume with: digenrl train --resume {path}"
    assert RunFolder.open(path).info.status is Status.FAILED
    killer.assert_nothing_is_left()


@pytest.mark.parametrize("lanes", ["lanes.rewards=1", "mode=colocated"])
def test_a_prompt_that_cannot_be_scored_is_replaced_by_the_same_other_one_wherever_it_is_scored(
    lanes: str, live: LiveRuns
) -> None:
    refusing = {"name": "function", "target": "live_rewards:refuses", "arguments": {"prompt": "a dog"}}
    rewards = f"rewards={json.dumps(refusing)}"
    run = live.finished(rewards, lanes)
    quarantined = [
        action
        for decision in read_journal(run.journal)
        for action in decision.actions
        if isinstance(action, Quarantine)
    ]
    assert quarantined
    assert {(action.step, action.group, action.replaced_by) for action in quarantined} <= {
        (step, group, 2) for step in range(3) for group in range(2)
    }
    assert all("nothing to see in 'a dog'" in action.reason for action in quarantined)
    assert metric(run, "step") == [0, 1, 2]
    assert trained(run, 3) == trained(live.finished(rewards, "mode=colocated"), 3)


def test_a_reward_that_always_fails_ends_the_run_with_its_reason(live: LiveRuns) -> None:
    path = live.new_path()
    message = r"5 groups in a row failed .*: reward 'broken', .*: ConnectionError: the scorer is away"
    with pytest.raises(RunFailedError, match=message):
        live.run("rewards=live_rewards:broken", "mode=colocated", "sample.denoising_steps=2", out=path)
    assert RunFolder.open(path).info.status is Status.FAILED


def test_a_broken_invariant_ends_a_live_run_and_its_workers(
    live: LiveRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Strict(Auditor):
        def observe(self, event: Any, actions: Any, state: Any) -> None:
            super().observe(event, actions, state)
            if isinstance(event, Committed):
                raise BrokenPromiseError("promise 0: no commits today")

    monkeypatch.setattr(training, "Auditor", Strict)
    path = live.new_path()
    killer = WorkerKiller(path)
    with Meanwhile(path, lambda: killer.after(0)), pytest.raises(BrokenPromiseError, match="no commits today"):
        live.run(out=path)
    assert RunFolder.open(path).info.status is Status.FAILED
    killer.assert_nothing_is_left()


def test_a_model_that_cannot_be_loaded_is_reported_in_one_line(live: LiveRuns, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    for part in (live.root / "model").rglob("*"):
        target = broken / part.relative_to(live.root / "model")
        target.mkdir() if part.is_dir() else target.write_bytes(part.read_bytes())
    (weights,) = (broken / "transformer").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    for mode in ("local", "colocated"):
        path = live.new_path()
        with pytest.raises(ConfigError, match=f"^{weights}: not a safetensors file, or damaged") as caught:
            live.run(f"model.source={broken}", f"mode={mode}", out=path)
        assert "\n" not in str(caught.value)
        assert_nothing_is_left(path)


def test_a_run_stopped_in_the_middle_of_a_batch_of_two_updates_goes_on_before_it(
    live: LiveRuns, gates: Gates
) -> None:
    """A resumed run repeats the committed updates of an unfinished batch."""
    path = live.new_path()
    two_updates = "algorithm.options.updates_per_batch=2"
    gates.close(prompts_of_step(live, 1)[1])

    def stop_in_the_middle() -> None:
        wait_for(lambda: open_gradient(path), "an open gradient")
        for worker in workers_of(path).values():  # a terminal interrupts every process of a run
            os.kill(worker, signal.SIGINT)
        ask_to_stop(signal.SIGINT)
        wait_for(lambda: (path / "checkpoints").exists() and any((path / "checkpoints").iterdir()), "a checkpoint")
        gates.open()

    with Meanwhile(path, stop_in_the_middle):
        status, run = live.run(two_updates, gates.rewards, SPARE_REWARDS, out=path)
    assert status is Status.INTERRUPTED
    assert run.info.status is Status.INTERRUPTED
    assert [checkpoint.name for checkpoint in run.checkpoints.iterdir()] == ["step_000001"]
    assert_nothing_is_left(path)
    assert live.resume(path) is Status.FINISHED
    assert trained(run, 3) == trained(live.finished("mode=colocated", two_updates), 3)
    assert metric(run, "step") == [0, 1, 2]
