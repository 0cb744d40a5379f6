"""The parts of a run, each with real files and workers without models."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fake_workers
import pytest
from fake_workers import FakeRun, fake_recipe
from PIL import Image
from rich.console import Console
from watched_runs import KeptNumbers, initial_state_of, watch

from digenrl.checksums import file_checksum
from digenrl.commands.train import resume_run
from digenrl.config.reading import ConfigError
from digenrl.loop import drive
from digenrl.records import (
    AbandonEvaluation,
    Commit,
    Committed,
    CostsMeasured,
    HeldOutChunk,
    Job,
    JobFailed,
    LaneOffer,
    SampleId,
    Save,
    Score,
    Scores,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from digenrl.run_folder.folder import LaneEntry, RunFolder, RunLines
from digenrl.run_folder.grids import GAP, HeldOutScore, write_grid
from digenrl.run_folder.lane_entries import LaneRecorder, lanes_of_whole_run
from digenrl.run_folder.lines import located_lines
from digenrl.run_folder.metric_lines import EvaluationRecord, read_evaluations, read_steps
from digenrl.runs.checkpointer import Checkpointer, RunPosition
from digenrl.runs.held_out import HeldOut, unfinished_evaluations
from digenrl.runs.resuming import find_resume_point, kept_positions, repair_logs
from digenrl.runs.step_time_prediction import FIRST_AT, StepTimePrediction, predicted_step_s
from digenrl.runs.stopping import Stopper
from digenrl.simulation.virtual_cluster import VirtualCluster
from digenrl.training.checkpoint.format import STATE_FILE, WHOLE, CheckpointContent, read_content
from digenrl.worker.rollouts import shuffled

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def folder_of(tmp_path: Path, **changes: Any) -> RunFolder:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\na dog\na fish\n")
    return RunFolder.create(tmp_path / "run", fake_recipe(prompts={"path": str(prompts)}, **changes), NOW)


# --- Grids -------------------------------------------------------------------------------------------------------


def test_a_grid_shows_pictures_row_by_row_with_their_words(tmp_path: Path) -> None:
    folder, pictures = folder_of(tmp_path), tmp_path / "pictures"
    pictures.mkdir()
    colors = [(200, 0, 0), (0, 200, 0), (0, 0, 200), (200, 200, 0), (0, 200, 200)]
    for index, color in enumerate(colors):
        Image.new("RGB", (6, 4), color).save(pictures / f"{index:04d}.png")
    scores = [HeldOutScore(f"prompt {index}", index / 2, {"ocr": 1.0}) for index in range(9)]
    grid = write_grid(folder, 20, pictures, scores)
    assert grid == folder.grid(20)
    image = Image.open(grid)
    assert image.size == (2 * (6 + GAP) + GAP, 3 * (4 + GAP) + GAP)
    for index, color in enumerate(colors):
        row, column = divmod(index, 2)
        assert image.getpixel((GAP + column * (6 + GAP), GAP + row * (4 + GAP))) == color
    words = json.loads(folder.grid_captions(20).read_text())
    assert words["columns"] == 2
    assert [item["prompt"] for item in words["items"]] == [f"prompt {index}" for index in range(5)]
    assert words["items"][3] == {"prompt": "prompt 3", "reward": 1.5, "parts": {"ocr": 1.0}}
    assert not pictures.exists()


# --- Stopping ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_remembered_until_the_run_can_be_left(number: signal.Signals) -> None:
    stopper = Stopper()
    before = signal.getsignal(number)
    with stopper.listening():
        assert stopper.take_request() is None
        os.kill(os.getpid(), number)
        assert stopper.take_request() == number.name
        assert stopper.take_request() is None, "a request is handled once: saving is not interrupted"
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_the_run_at_once(second: signal.Signals) -> None:
    clock = [0.0]
    stopper, before = Stopper(lambda: clock[0]), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), stopper.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        clock[0] = 2.0
        os.kill(os.getpid(), second)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_that_is_sent_twice_is_one_request() -> None:
    """`timeout` signals the process that it started, and then its process group."""
    stopper = Stopper(lambda: 0.0)
    with stopper.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopper.take_request() == "SIGTERM"
        assert stopper.take_request() is None


CLOSED_TERMINAL = """
import sys, time
from digenrl.runs.stopping import Stopper
stopper = Stopper()
with stopper.listening():
    print("listening", flush=True)
    while (name := stopper.take_request()) is None:
        time.sleep(0.01)
    for _ in range(1000):
        print("a dashboard", flush=True)
    open(sys.argv[1], "w").write(name)
"""


def test_a_run_whose_terminal_is_closed_can_still_save(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    take_terminal = "import fcntl, termios; fcntl.ioctl(1, termios.TIOCSCTTY, 0)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", take_terminal + CLOSED_TERMINAL, str(tmp_path / "saved")],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    assert b"listening" in os.read(ours, 100)
    os.close(ours)  # the kernel sends SIGHUP, and writing fails from now on
    assert process.wait(60) == 0
    assert (tmp_path / "saved").read_text() == "SIGHUP"


# --- StepTimePrediction ------------------------------------------------------------------------------------------


def test_predictions_come_with_the_costs_of_a_commit_and_match_a_run_of_those_costs() -> None:
    opening = initial_state_of(steps=12)
    predicted: dict[int, float] = {}
    prediction = StepTimePrediction(lambda step, seconds: predicted.update({step: seconds}))
    numbers = KeptNumbers()

    class MeasuredAfterCommits:
        """Reports the true costs after every commit, as a live run does."""

        def observe(self, event: Any, actions: Any, state: Any) -> None:
            prediction.observe(event, actions, state)
            if isinstance(event, Committed):
                c = state.costs
                costs = CostsMeasured(
                    event.at_ns, c.train_sample_ns, c.commit_ns, c.publish_ns, c.switch_in_ns, c.switch_out_ns, 0
                )
                prediction.observe(costs, (), state)

    watch(opening, [numbers], cluster=VirtualCluster(opening), after=[MeasuredAfterCommits()])
    assert sorted(predicted) == [3, 10]
    measured = [step["step_s"] for step in numbers.steps[4:9]]
    assert predicted[3] == pytest.approx(sum(measured) / len(measured), rel=0.1)
    assert predicted_step_s(opening) == pytest.approx(predicted[3], rel=0.1)


def test_nothing_is_predicted_while_no_generator_is_present() -> None:
    opening = initial_state_of(steps=12)
    helpers = tuple(lane.index for lane in opening.lanes if lane.helper)
    steps: list[int] = []
    prediction = StepTimePrediction(lambda step, seconds: steps.append(step))
    c, committed = opening.costs, FIRST_AT
    costs = CostsMeasured(0, c.train_sample_ns, c.commit_ns, c.publish_ns, c.switch_in_ns, c.switch_out_ns, 0)
    for present, reported in ((helpers, []), (opening.present, [committed])):
        state = replace(opening, present=present, committed=committed)
        prediction.observe(Committed(0, Commit(0, 0, step=committed - 1)), (), state)
        prediction.observe(costs, (), state)
        assert not steps, "no event waits for a whole simulation"
        for _ in range(1000):
            prediction.observe(Tick(0), (), state)
        assert steps == reported


def test_only_evaluations_and_checkpoints_of_every_step_count_in_its_predicted_time() -> None:
    opening = initial_state_of(steps=12)
    costs = replace(opening.costs, evaluate_ns=10**9, save_ns=10**10)

    def predicted_s(every: int) -> float:
        terms = replace(opening.terms, evaluate_every=every, evaluation_chunks=1, save_every=every)
        return predicted_step_s(replace(opening, terms=terms, costs=costs))

    assert predicted_s(5) == predicted_s(0) < predicted_s(1)


# --- Shuffled rewards --------------------------------------------------------------------------------------------


def test_shuffled_rewards_are_the_same_numbers_in_an_order_that_ignores_them() -> None:
    rewards = tuple(float(index) for index in range(24))
    once = shuffled(rewards, 3, SampleId(5, 2, 0))
    assert sorted(once) == list(rewards)
    assert once != rewards
    assert once == shuffled(rewards, 3, SampleId(5, 2, 7)), "the order depends on the group, not on the sample"
    others = [shuffled(rewards, *key) for key in ((4, SampleId(5, 2, 0)), (3, SampleId(5, 3, 0)))]
    assert once not in others
    reversed_rewards = shuffled(rewards[::-1], 3, SampleId(5, 2, 0))
    assert reversed_rewards == tuple(23 - reward for reward in once), "the order does not depend on the rewards"


# --- Checkpoints and evaluations ---------------------------------------------------------------------------------


class RecordedRun:
    """A fake run in a real folder, with what a run records about checkpoints and evaluations."""

    def __init__(self, tmp_path: Path, fails: Any = lambda job: None, prompts: int = 3, **changes: Any) -> None:
        held_out = tmp_path / "held_out.txt"
        held_out.write_text("".join(f"prompt {index}\n" for index in range(prompts)))
        evaluation = {"prompts": {"path": str(held_out)}, "every": 2, "batch": 1}
        self.folder = folder_of(tmp_path, evaluation=evaluation, **changes)
        self.lines = RunLines(self.folder)
        root = tmp_path / "exchange"
        root.mkdir()
        self.checkpointer = Checkpointer(self.folder, self.lines, RunPosition(0, 0, 0, self.lines.positions()))
        hooks = {"checkpoint_facts": self.checkpointer.facts}
        self.run = FakeRun(root, self.folder.recipe, held_out=prompts, hooks=hooks, fails=fails)
        self.evaluations: list[EvaluationRecord] = []
        self.failed: dict[int, str] = {}  # versions that were not evaluated, and why
        self.held_out = self.held_out_of(0)

    def held_out_of(self, first_version: int) -> HeldOut:
        """The observer of evaluations in a run that begins with this version."""
        rows = self.run.driver.stores.prompts.held_out
        return HeldOut(self.folder, rows, first_version, self.evaluations.append, self.failed.__setitem__)

    def unfinished(self, step: int, *earlier: int) -> tuple[int, ...]:
        """The versions to evaluate where the run resumes after `step` steps; `earlier` ones were not finished."""
        position = RunPosition(step, 0, 0, {}, evaluations=earlier)
        return unfinished_evaluations(self.folder, self.folder.recipe, position)

    def drive(self) -> Any:
        state = self.run.prepare(evaluations=self.unfinished(0))
        self.run.driver.begin()
        return drive(state, self.run.driver, (self.held_out, self.checkpointer))


def test_a_checkpoint_has_the_length_of_every_file_at_its_commit(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, steps=1, checkpoint={"every": 1})
    run.lines.metrics.append({"step": 0})
    run.drive()
    (save,) = run.run.transport.jobs(Save)
    assert save.facts["positions"] == {"journal": 0, "spans": 0, "metrics": 11, "evaluations": 0}
    assert save.facts["jobs_issued"] > 6
    assert save.facts["fingerprint"]


def test_a_run_is_evaluated_before_the_first_step_every_few_steps_and_after_the_last(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.drive()
    assert [each.steps_done for each in run.evaluations] == [0, 2, 3]
    assert run.evaluations[0].values == {"reward_mean": 1.0, "reward/size": 1.0}
    assert run.evaluations[0].count == 3
    assert run.evaluations[0].grid == "samples/step_000000.png"
    assert not list(run.folder.samples.glob(".step_*"))


def test_parts_that_only_some_chunks_have_are_averaged_over_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward may explain scores differently by prompt, and chunks have different prompts: 4 and 1."""

    def scores(count: int, first: int = 0) -> Scores:
        return Scores((1.0,) * count, {f"of_{count}": (float(count),) * count, "all": (2.0,) * count})

    monkeypatch.setattr(fake_workers, "_scores", scores)
    run = RecordedRun(tmp_path, prompts=5, steps=1)
    run.drive()
    expected = {"reward_mean": 1.0, "reward/all": 2.0, "reward/of_1": 1.0, "reward/of_4": 4.0}
    assert [each.values for each in run.evaluations] == [expected] * 2


def test_a_resumed_run_evaluates_versions_only_if_they_are_due_and_missing(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    left_over = run.folder.samples / ".step_000002"
    left_over.mkdir()
    run.lines.evaluations.append({"step": 0, "at_s": 1.0, "count": 3})
    HeldOut(run.folder, (), 2, run.evaluations.append, lambda version, line: None)
    assert [run.unfinished(step) for step in range(4)] == [(), (), (2,), (3,)]
    assert [run.unfinished(1, 0), run.unfinished(3, 2)] == [(), (2, 3)]
    assert not left_over.exists()


def scores_held_out(job: Job) -> bool:
    return isinstance(job, Score) and isinstance(job.piece, HeldOutChunk)


def test_an_initial_evaluation_that_fails_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path, lambda job: "no reader" if scores_held_out(job) else None)
    with pytest.raises(ConfigError, match=r"evaluation of the initial policy .*no reader.*evaluation=off"):
        run.drive()
    assert not run.run.transport.jobs(Commit)


def test_a_later_evaluation_that_fails_is_reported_and_the_run_continues(tmp_path: Path) -> None:
    def fails(job: Job) -> str | None:
        return "server is away" if scores_held_out(job) and job.piece.version else None  # type: ignore[attr-defined]

    run = RecordedRun(tmp_path, fails)
    assert run.drive().finished
    assert [each.steps_done for each in run.evaluations] == [0]
    assert list(run.failed) == [2, 3]
    for version, line in run.failed.items():
        assert "server is away" in line and str(version) in line
        assert ("--resume" in line) == (version == 3), "only the last checkpoint is still there to be evaluated"


@pytest.mark.parametrize(("version", "ends"), [(2, False), (3, True)])
def test_a_failed_evaluation_ends_a_resumed_run_only_if_that_has_nothing_else_to_do(
    tmp_path: Path, version: int, ends: bool
) -> None:
    run, job = RecordedRun(tmp_path), Score(0, 0, HeldOutChunk(version, 0), scorer=0)
    failure = JobFailed(1, job, "server is away", user_error=True)
    state = replace(initial_state_of(steps=3), committed=version)
    with pytest.raises(ConfigError, match="--resume") if ends else nullcontext():
        run.held_out_of(version).observe(failure, [AbandonEvaluation(version, failure.reason)], state)
    assert (version in run.failed) != ends


# --- Lanes in run.json -------------------------------------------------------------------------------------------


def test_lanes_that_leave_and_join_are_written_down(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    state = initial_state_of()
    entries = [LaneEntry(name=lane.name, pool="generator", device="cpu") for lane in state.lanes]
    folder.update_info(lanes=(*entries, LaneEntry(name="trainer", pool="trainer", device="cpu")))
    book = LaneRecorder(folder, {"new": "cuda:3"})
    book.observe(WorkerLost(70, lane=1), (), state)
    book.observe(WorkerJoined(90, LaneOffer("new", 5)), (), state)
    book.observe(Committed(95, Commit(0, 90, step=0)), (), state)
    lanes = {lane.name: lane for lane in RunFolder.open(folder.path).info.lanes}
    assert lanes[state.lanes[1].name].left_ns == 70
    assert lanes[state.lanes[0].name].left_ns is None
    assert lanes["new"] == LaneEntry(name="new", pool="generator", device="cuda:3", joined_ns=90)
    assert list(lanes)[-1] == "trainer", "pools stay together"
    folder.update_info(lanes=(LaneEntry(name="new", pool="generator", device="cpu", joined_ns=10, left_ns=20),))
    book.observe(WorkerJoined(90, LaneOffer("new", 5)), (), state)
    (again,) = RunFolder.open(folder.path).info.lanes
    assert (again.joined_ns, again.left_ns) == (10, None), "one row, whatever its name was used for"


def test_only_lost_generators_leave_their_lane(tmp_path: Path) -> None:
    folder, state = folder_of(tmp_path), initial_state_of()
    entries = tuple(LaneEntry(name=lane.name, pool="generator", device="cpu") for lane in state.lanes)
    folder.update_info(lanes=entries)
    recorder, beyond = LaneRecorder(folder, {}), len(state.lanes)
    recorder.observe(WorkerLost(70, 0, "trainer"), (), state)
    recorder.observe(WorkerLost(70, 0, "encoder"), (), state)
    recorder.observe(WorkerLost(70, beyond, "reward"), (), state)
    assert RunFolder.open(folder.path).info.lanes == entries


def test_a_resumed_run_knows_its_earlier_lanes() -> None:
    def lane(name: str, joined_ns: int = 0, left_ns: int | None = None) -> LaneEntry:
        return LaneEntry(name=name, pool="generator", device="cpu", joined_ns=joined_ns, left_ns=left_ns)

    trainer = LaneEntry(name="trainer", pool="trainer", device="cpu")
    before = [lane("a", left_ns=40), lane("a (2)", 45), lane("b", left_ns=130), lane("b (2)", 140), trainer]
    lanes = lanes_of_whole_run([*before, lane("d", 50)], [lane("a"), lane("c"), lane("d"), trainer], at_ns=100)
    gone = (lane("a (2)", 45, 100), lane("b", left_ns=100))
    assert lanes == (lane("a"), lane("c", 100), lane("d", 50), *gone, trainer)


# --- Resuming ----------------------------------------------------------------------------------------------------


def write_checkpoint(folder: RunFolder, step: int, **facts: Any) -> None:
    from digenrl.config.recipes.files import fingerprint

    known = {"at_ns": 5, "jobs_issued": 6, "positions": {}, "fingerprint": fingerprint(folder.recipe)}
    path = folder.checkpoint(step)
    path.mkdir(exist_ok=True)
    CheckpointContent(WHOLE, step, {}, {**known, **facts}, {}).write(path)


def test_a_run_resumes_from_its_newest_checkpoint(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    assert find_resume_point(folder) is None
    for step in (999_999, 1_000_000, 20):
        write_checkpoint(folder, step)
    (folder.checkpoints / ".saving-step_1000001").mkdir()
    folder.checkpoint(1_000_000).rename(folder.checkpoints / ".replaced-step_1000000")
    resume_point = find_resume_point(folder)
    assert resume_point is not None
    assert resume_point.checkpoint == folder.checkpoint(1_000_000)
    assert resume_point.position == RunPosition(1_000_000, 5, 6, {})


def test_a_run_without_a_checkpoints_folder_has_nothing_to_resume(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    folder.checkpoints.rmdir()
    assert find_resume_point(folder) is None
    folder.checkpoints.touch()
    assert find_resume_point(folder) is None


@pytest.mark.parametrize("damage", ["missing", "cut", "changed", "no state"])
def test_the_newest_whole_checkpoint_is_taken_and_damage_is_told_in_one_line(damage: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    told: list[str] = []
    for step in (1, 2):
        write_checkpoint(folder, step)
        weights = folder.checkpoint(step) / "weights.safetensors"
        weights.write_bytes(b"weights")
        record = {"bytes": 7, "checksum": file_checksum(weights)}
        content = read_content(folder.checkpoint(step))
        replace(content, files={weights.name: record}).write(folder.checkpoint(step))
    found = find_resume_point(folder, told.append)
    assert found is not None and found.position.step == 2 and not told
    if damage == "missing":
        weights.unlink()
    elif damage == "no state":
        (folder.checkpoint(2) / STATE_FILE).unlink()
    else:
        weights.write_bytes(b"weight" if damage == "cut" else b"Weights")
    found = find_resume_point(folder, told.append)
    assert found is not None and found.position.step == 1
    (line,) = told
    assert "step_000002" in line and "\n" not in line


def test_a_run_whose_only_checkpoint_is_damaged_can_start_over(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    write_checkpoint(folder, 3)
    (folder.checkpoint(3) / STATE_FILE).unlink()
    with pytest.raises(ConfigError, match=r"step_000003: .*--restart"):
        find_resume_point(folder)


def test_steps_are_never_discarded_without_being_asked_to(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    folder.metrics.write_text('{"step":0}\n')
    folder.checkpoints.rmdir()
    with pytest.raises(ConfigError, match=r"no checkpoint; .*--restart"):
        resume_run(folder.path, [], Console(file=io.StringIO()), False)
    assert folder.metrics.read_text() == '{"step":0}\n'
    folder.checkpoints.mkdir()
    write_checkpoint(folder, 3)
    with pytest.raises(ConfigError, match="nowhere: no such directory"):
        resume_run(folder.path, [], Console(file=io.StringIO()), False, restart=True)
    assert find_resume_point(folder) is not None, "an error changes nothing"
    assert folder.set_checkpoints_aside() == folder.path / "checkpoints.old-1"
    assert find_resume_point(folder) is None and folder.set_checkpoints_aside() is None


def test_damaged_logs_are_mended_before_a_run_resumes(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    told: list[str] = []
    positions = {"journal": 16, "spans": 8, "metrics": 8, "evaluations": 0}
    write_checkpoint(folder, 1, positions=positions)
    folder.journal.write_bytes(b'{"a":0}\n{"a":')
    folder.spans.write_bytes(b'{"a":0}\n{"a":1}\n')
    folder.metrics.write_bytes(b"garbage\n")
    found = find_resume_point(folder)
    assert found is not None
    repaired = repair_logs(folder, found, told.append)
    assert repaired.position.positions == {"journal": 8, "spans": 8, "metrics": 0, "evaluations": 0}
    assert [line.partition(":")[0] for line in told] == [str(folder.journal), str(folder.metrics)]
    lines = RunLines(folder)
    lines.truncate(kept_positions(folder, repaired.position))
    lines.close()
    assert (folder.journal.read_bytes(), folder.metrics.read_bytes()) == (b'{"a":0}\n', b"")


def test_lines_that_are_no_metrics_are_set_aside_before_a_run_resumes(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    told: list[str] = []
    folder.metrics.write_text('{"step":0}\n{"step":"one"}\n')
    folder.evaluations.write_text('{"steps_done":0}\n{"step":1,"count":3}\n')
    sizes = {"metrics": folder.metrics.stat().st_size, "evaluations": folder.evaluations.stat().st_size}
    write_checkpoint(folder, 1, positions={"journal": 0, "spans": 0, **sizes})
    found = find_resume_point(folder)
    assert found is not None
    repaired = repair_logs(folder, found, told.append)
    assert [line.partition(":")[0] for line in told] == [str(folder.metrics), str(folder.evaluations)]
    ends = kept_positions(folder, repaired.position)
    assert [step.step for step in read_steps(folder.metrics, ends["metrics"])] == [0]
    assert [each.steps_done for each in read_evaluations(folder.evaluations, ends["evaluations"])] == [1]


def test_damaged_and_foreign_checkpoints_are_reported_in_one_line(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    write_checkpoint(folder, 3, fingerprint="another")
    with pytest.raises(ConfigError, match=r"step_000003: was saved by another run: seed, model"):
        find_resume_point(folder)
    for content in ("{", "[]", '{"format": 3, "step": 3}'):
        (folder.checkpoint(3) / STATE_FILE).write_text(content)
        with pytest.raises(ConfigError, match="step_000003: ") as caught:
            find_resume_point(folder)
        assert "\n" not in str(caught.value)
    CheckpointContent(WHOLE, 3, {}, {"at_ns": 1}, {}).write(folder.checkpoint(3))
    with pytest.raises(ConfigError, match=r"step_000003: .*jobs_issued"):
        find_resume_point(folder)


def test_evaluations_of_versions_that_are_kept_are_kept_wherever_they_stand(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    lines = RunLines(folder)
    lines.evaluations.append({"step": 0})
    positions = lines.positions()
    for step in (10, 20, 30):
        lines.evaluations.append({"step": step})
    lines.truncate(kept_positions(folder, RunPosition(20, 0, 0, positions)))
    assert [line.content["step"] for line in located_lines(folder.evaluations)] == [0, 10, 20]
    folder.evaluations.write_bytes(b'{"step":0}\n{"step"')
    assert kept_positions(folder, RunPosition(20, 0, 0, positions)) == positions
    folder.evaluations.write_bytes(b'{"step":0}\nrubbish\n')
    assert kept_positions(folder, RunPosition(20, 0, 0, positions)) == positions
