"""The driver's parts, each with real files and workers without models."""

from __future__ import annotations

import json
import os
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from digenrl.driver.evaluation import HeldOutScore
from digenrl.worker.orders import Order, SaveCheckpoint, ScoreEvaluation
from fake_crew import FakeRun, fake_recipe
from PIL import Image
from watched_runs import KeptNumbers, initial_state_of, watch

from digenrl.config.reading import ConfigError
from digenrl.driver.supervisor import WorkerFailedError
from digenrl.loop import drive
from digenrl.records import Committed, LaneOffer, SampleId, WorkerJoined, WorkerLost
from digenrl.run_folder.folder import LaneEntry, RunFolder, RunLines
from digenrl.run_folder.grids import GAP, write_grid
from digenrl.run_folder.lane_entries import LaneRecorder, lanes_of_whole_run
from digenrl.run_folder.lines import JsonLines, read_lines
from digenrl.run_folder.metric_lines import EvaluationRecord
from digenrl.run_folder.spans import SpanWriter
from digenrl.runs.checkpointer import Checkpointer, RunPosition
from digenrl.runs.held_out import HeldOut
from digenrl.runs.resuming import find_resume_point, kept_positions
from digenrl.runs.step_time_prediction import StepTimePrediction, predicted_step_s
from digenrl.runs.stopping import Stopper, StopRequested
from digenrl.simulation.virtual_cluster import VirtualCluster
from digenrl.telemetry.trace import Span, Work
from digenrl.worker import stages

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def folder_of(tmp_path: Path, **changes: Any) -> RunFolder:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\na dog\na fish\n")
    return RunFolder.create(tmp_path / "run", fake_recipe(prompts={"path": str(prompts)}, **changes), NOW)


# --- Grids -------------------------------------------------------------------------------------------------------


def test_a_grid_shows_pictures_row_by_row_with_their_words(tmp_path: Path) -> None:
    folder, pictures = folder_of(tmp_path), tmp_path / "pictures"
    pictures.mkdir()
    colours = [(200, 0, 0), (0, 200, 0), (0, 0, 200), (200, 200, 0), (0, 200, 200)]
    for index, colour in enumerate(colours):
        Image.new("RGB", (6, 4), colour).save(pictures / f"{index:04d}.png")
    scores = [HeldOutScore(f"prompt {index}", index / 2, {"ocr": 1.0}) for index in range(9)]
    grid = write_grid(folder, 20, pictures, scores)
    assert grid == folder.grid(20)
    image = Image.open(grid)
    assert image.size == (2 * (6 + GAP) + GAP, 3 * (4 + GAP) + GAP)
    for index, colour in enumerate(colours):
        row, column = divmod(index, 2)
        assert image.getpixel((GAP + column * (6 + GAP), GAP + row * (4 + GAP))) == colour
    words = json.loads(folder.grid_captions(20).read_text())
    assert words["columns"] == 2
    assert [item["prompt"] for item in words["items"]] == [f"prompt {index}" for index in range(5)]
    assert words["items"][3] == {"prompt": "prompt 3", "reward": 1.5, "parts": {"ocr": 1.0}}
    assert not pictures.exists()


# --- Spans -------------------------------------------------------------------------------------------------------


def test_a_lane_is_never_shown_at_two_things_at_once(tmp_path: Path) -> None:
    handed_on: list[Span] = []
    lines = JsonLines(tmp_path / "spans.jsonl")
    book = SpanWriter(lines, handed_on.append)
    book.add(Span("generator-0", Work.EVALUATE, 10, 50, step=1))
    book.add(Span("generator-0", Work.GENERATE, 20, 70, step=1, group=0, size=2))
    book.add(Span("generator-1", Work.GENERATE, 20, 60, step=1, group=1, size=2))
    book.add(Span("generator-0", Work.GENERATE, 30, 40, step=1, group=2, size=2))
    book.add(Span("trainer", Work.TRAIN, 0, 40, step=1))
    book.add(Span("trainer", Work.PUBLISH, 5, 90, step=1))
    book.add(Span("trainer", Work.COMMIT, 40, 80, step=1))
    times = [(line["start_ns"], line["end_ns"]) for line in read_lines(tmp_path / "spans.jsonl")]
    assert times == [(10, 50), (50, 70), (20, 60), (40, 40), (0, 40), (5, 90), (40, 80)]
    assert [(span.start_ns, span.end_ns) for span in handed_on] == times


# --- Stopping ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_remembered_until_the_run_can_be_left(number: signal.Signals) -> None:
    stopper = Stopper()
    before = signal.getsignal(number)
    with stopper.listening():
        stopper.check()
        os.kill(os.getpid(), number)
        with pytest.raises(StopRequested, match=number.name):
            stopper.check()
        stopper.check()  # asked once, raised once: what follows, as saving, is not interrupted
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_the_run_at_once(second: signal.Signals) -> None:
    stopper, before = Stopper(), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), stopper.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), second)
    assert signal.getsignal(signal.SIGTERM) == before


# --- StepTimePrediction ------------------------------------------------------------------------------------------


def test_predictions_come_with_the_costs_of_a_commit_and_match_a_run_of_those_costs() -> None:
    from digenrl.records import CostsMeasured

    opening = initial_state_of(steps=12)
    told: dict[int, float] = {}
    foresight = StepTimePrediction(lambda step, seconds: told.update({step: seconds}))
    numbers = KeptNumbers()

    class MeasuredAfterCommits:
        """Reports the true costs after every commit, as a live run does."""

        def observe(self, event: Any, actions: Any, state: Any) -> None:
            foresight.observe(event, actions, state)
            if isinstance(event, Committed):
                c = state.costs
                costs = CostsMeasured(
                    event.at_ns, c.train_sample_ns, c.commit_ns, c.publish_ns, c.switch_in_ns, c.switch_out_ns, 0
                )
                foresight.observe(costs, (), state)

    watch(opening, [numbers], cluster=VirtualCluster(opening), after=[MeasuredAfterCommits()])
    assert sorted(told) == [3, 10]
    measured = [step["step_s"] for step in numbers.steps[4:9]]
    assert told[3] == pytest.approx(sum(measured) / len(measured), rel=0.1)
    assert predicted_step_s(opening) == pytest.approx(told[3], rel=0.1)


# --- Shuffled rewards --------------------------------------------------------------------------------------------


def test_shuffled_rewards_are_the_same_numbers_in_an_order_of_their_own() -> None:
    rewards = tuple(float(index) for index in range(24))
    once = stages.shuffled(rewards, 3, SampleId(5, 2, 0))
    assert sorted(once) == list(rewards)
    assert once != rewards
    assert once == stages.shuffled(rewards, 3, SampleId(5, 2, 7)), "of a group, whichever sample names it"
    others = [stages.shuffled(rewards, *key) for key in ((4, SampleId(5, 2, 0)), (3, SampleId(5, 3, 0)))]
    assert once not in others
    reversed_rewards = stages.shuffled(rewards[::-1], 3, SampleId(5, 2, 0))
    assert reversed_rewards == tuple(23 - reward for reward in once), "the order does not look at the rewards"


# --- Keeping -----------------------------------------------------------------------------------------------------


class Kept:
    """A fake run in a real folder with a keeper."""

    def __init__(self, tmp_path: Path, **changes: Any) -> None:
        self.folder = folder_of(tmp_path, **changes)
        self.lines = RunLines(self.folder)
        root = tmp_path / "exchange"
        root.mkdir()
        self.run = FakeRun(root, self.folder.recipe)
        self.state = self.run.open()
        self.run.runtime.begin()
        self.spans: list[Span] = []
        opening = RunPosition(0, 0, 0, self.lines.positions())
        self.keeper = Checkpointer(
            self.folder, self.lines, self.run.runtime, opening, lambda b: b.facts("print"), self.spans.append
        )

    def saved(self) -> list[int]:
        """The steps that the trainer saved."""
        return [order.step for _, order in self.run.crew.log if isinstance(order, SaveCheckpoint)]


def test_every_nth_version_and_the_last_are_saved(tmp_path: Path) -> None:
    kept = Kept(tmp_path, steps=5, checkpoint={"every": 2})
    drive(kept.state, kept.run.runtime, (kept.keeper,))
    kept.keeper.save_now()
    assert kept.saved() == [2, 4, 5]
    assert kept.keeper.saved_step == 5
    assert [span.work for span in kept.spans] == [Work.SAVE] * 3


def test_what_is_saved_already_is_not_saved_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.keeper.save_now()
    kept.keeper.save_now()
    assert kept.saved() == [0]


def test_a_newer_version_is_saved_although_an_older_one_is_still_being_saved(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.keeper.save()
    kept.run.runtime.receive = lambda: None  # type: ignore[method-assign]  the trainer takes its time
    assert kept.run.crew.orders_of("trainer") == [SaveCheckpoint]
    kept.keeper.position = RunPosition(1, 5, 9, kept.lines.positions())
    del kept.run.runtime.receive
    kept.run.crew.answer("trainer")
    kept.run.crew._batch = 1
    kept.keeper.save_now()
    assert kept.saved() == [0, 1]
    assert kept.keeper.saved_step == 1


def test_a_bookmark_has_the_length_of_every_file_at_the_commit(tmp_path: Path) -> None:
    kept = Kept(tmp_path, steps=1, checkpoint={"every": 1})
    kept.lines.metrics.append({"step": 0})
    drive(kept.state, kept.run.runtime, (kept.keeper,))
    kept.keeper.save_now()
    order = next(order for _, order in kept.run.crew.log if isinstance(order, SaveCheckpoint))
    assert order.facts["positions"] == {"journal": 0, "spans": 0, "metrics": 11, "evaluations": 0}
    assert order.facts["fingerprint"] == "print"
    assert order.facts["jobs_issued"] == 6


# --- Held-out prompts --------------------------------------------------------------------------------------------


class HeldOutRun(Kept):
    """With an evaluation every second step."""

    def __init__(self, tmp_path: Path, fails: Any = None) -> None:
        held_out = tmp_path / "held_out.txt"
        held_out.write_text("one\ntwo\nthree\n")
        super().__init__(tmp_path, evaluation={"prompts": {"path": str(held_out)}, "every": 2, "batch": 1})
        if fails is not None:
            self.run.crew._fails = fails
        self.numbers: list[EvaluationRecord] = []
        self.words: list[str] = []
        self.held_out = HeldOut(
            self.folder, self.run.runtime, self.run.clock, self._take, self.spans.append, self.words.append
        )
        evaluate = self.run.crew._evaluate

        def with_pictures(worker: Any, order: Any) -> Any:
            Path(order.pictures).mkdir(exist_ok=True)
            for row in range(len(order.prompts)):
                Image.new("RGB", (2, 2)).save(Path(order.pictures) / f"{order.first + row:04d}.png")
            return evaluate(worker, order)

        from digenrl.worker.orders import EvaluatePrompts

        self.run.crew._carry_out[EvaluatePrompts] = with_pictures

    def _take(self, evaluation: EvaluationRecord) -> None:
        self.numbers.append(evaluation)
        self.lines.evaluations.append({"step": evaluation.steps_done})


def test_a_run_is_evaluated_before_the_first_step_every_so_often_and_after_the_last(tmp_path: Path) -> None:
    run = HeldOutRun(tmp_path)
    run.held_out.prepare(0)
    drive(run.state, run.run.runtime, (run.held_out,))
    run.held_out.finish()
    assert [numbers.steps_done for numbers in run.numbers] == [0, 2, 3]
    assert run.numbers[0].values == {"reward_mean": 1.0, "reward/size": 1.0}
    assert run.numbers[0].count == 3
    assert run.numbers[0].grid == "samples/step_000000.png"
    assert not list(run.folder.samples.glob(".step_*"))
    assert {span.work for span in run.spans} == {Work.EVALUATE}


def test_a_run_that_goes_on_evaluates_what_is_due_and_not_there(tmp_path: Path) -> None:
    run = HeldOutRun(tmp_path)
    left_over = run.folder.samples / ".step_000002"
    left_over.mkdir()
    (left_over / "0009.png").touch()
    run.lines.evaluations.append({"step": 0})
    run.held_out.prepare(0)
    assert not run.numbers and not left_over.exists()
    run.run.crew._batch = 2
    run.run.runtime.take_weights(2, run.run.crew._laid_out())
    run.held_out.prepare(2)
    assert [numbers.steps_done for numbers in run.numbers] == [2]
    run.held_out.prepare(2)
    assert [numbers.steps_done for numbers in run.numbers] == [2]


def test_an_evaluation_that_cannot_work_ends_a_run_before_it_begins(tmp_path: Path) -> None:
    run = HeldOutRun(tmp_path, lambda order: "no reader" if isinstance(order, ScoreEvaluation) else None)
    with pytest.raises(ConfigError, match=r"^no reader$"):
        run.held_out.prepare(0)


def test_an_evaluation_that_fails_later_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    failing = False

    def fails(order: Order) -> str | None:
        return "server is away" if failing and isinstance(order, ScoreEvaluation) else None

    run = HeldOutRun(tmp_path, fails)
    run.held_out.prepare(0)
    failing = True
    state = drive(run.state, run.run.runtime, (run.held_out,))
    run.held_out.finish()
    assert state.finished
    assert [numbers.steps_done for numbers in run.numbers] == [0]
    assert run.words[1:] == [f"the evaluation after {step} steps failed: server is away" for step in (2, 3)]
    assert not list(run.folder.samples.glob(".step_*"))


def test_a_worker_that_breaks_in_the_first_evaluation_is_told_with_details(tmp_path: Path) -> None:
    run = HeldOutRun(tmp_path)
    run.run.exchange.drop("held-out-prompt-0")
    run.run.crew._encode = None  # type: ignore[assignment]
    from digenrl.worker.orders import EncodePrompts, PromptsEncoded

    run.run.crew._carry_out[EncodePrompts] = lambda worker, order: PromptsEncoded(())  # rows that never come
    with pytest.raises(WorkerFailedError, match="could not go on: FileNotFoundError"):
        run.held_out.prepare(0)


# --- Lanes in run.json -------------------------------------------------------------------------------------------


def test_lanes_that_leave_and_join_are_written_down(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    state = initial_state_of()
    entries = [LaneEntry(name=lane.name, pool="generator", device="cpu") for lane in state.lanes]
    folder.update_info(lanes=(*entries, LaneEntry(name="trainer", pool="trainer", device="cpu")))
    book = LaneRecorder(folder, {"new": "cuda:3"})
    book.observe(WorkerLost(70, lane=1), (), state)
    book.observe(WorkerJoined(90, LaneOffer("new", 5)), (), state)
    book.observe(Committed(95, step=0), (), state)
    lanes = {lane.name: lane for lane in RunFolder.open(folder.path).info.lanes}
    assert lanes[state.lanes[1].name].left_ns == 70
    assert lanes[state.lanes[0].name].left_ns is None
    assert lanes["new"] == LaneEntry(name="new", pool="generator", device="cuda:3", joined_ns=90)
    assert list(lanes)[-1] == "trainer", "pools stay together"


def test_a_run_that_goes_on_knows_the_lanes_that_it_had() -> None:
    def lane(name: str, joined_ns: int = 0, left_ns: int | None = None) -> LaneEntry:
        return LaneEntry(name=name, pool="generator", device="cpu", joined_ns=joined_ns, left_ns=left_ns)

    trainer = LaneEntry(name="trainer", pool="trainer", device="cpu")
    before = [lane("a", left_ns=40), lane("a (2)", 45), lane("b", left_ns=130), lane("b (2)", 140), trainer]
    lanes = lanes_of_whole_run(before, [lane("a"), lane("c"), trainer], at_ns=100)
    assert lanes == (lane("a"), lane("c", 100), lane("a (2)", 45, 100), lane("b", left_ns=100), trainer)


# --- Resuming ----------------------------------------------------------------------------------------------------


def write_checkpoint(folder: RunFolder, step: int, **facts: Any) -> None:
    from digenrl.config.recipe_files import fingerprint

    known = {"at_ns": 5, "jobs_issued": 6, "positions": {}, "fingerprint": fingerprint(folder.recipe)}
    path = folder.checkpoint(step)
    path.mkdir()
    (path / "state.json").write_text(json.dumps({"step": step, "facts": {**known, **facts}}))


def test_a_run_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    assert find_resume_point(folder) is None
    for step in (999_999, 1_000_000, 20):
        write_checkpoint(folder, step)
    (folder.checkpoints / ".saving-step_1000001").mkdir()
    standing = find_resume_point(folder)
    assert standing is not None
    assert standing.checkpoint == folder.checkpoint(1_000_000)
    assert standing.position == RunPosition(1_000_000, 5, 6, {})


def test_a_run_without_a_checkpoints_folder_begins_again(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    folder.checkpoints.rmdir()
    assert find_resume_point(folder) is None
    folder.checkpoints.touch()
    assert find_resume_point(folder) is None


def test_damaged_and_foreign_checkpoints_are_told_in_one_line(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    write_checkpoint(folder, 3, fingerprint="another")
    with pytest.raises(ConfigError, match=r"step_000003: was saved by another run: seed, model"):
        find_resume_point(folder)
    for content in ("{", "[]", '{"step": 3}', '{"step": 3, "facts": {"at_ns": 1}}'):
        (folder.checkpoint(3) / "state.json").write_text(content)
        with pytest.raises(ConfigError, match="step_000003: incomplete or damaged") as caught:
            find_resume_point(folder)
        assert "\n" not in str(caught.value)


def test_evaluations_of_versions_that_are_kept_are_kept_wherever_they_stand(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    lines = RunLines(folder)
    lines.evaluations.append({"step": 0})
    positions = lines.positions()
    for step in (10, 20, 30):
        lines.evaluations.append({"step": step})
    lines.truncate(kept_positions(folder, RunPosition(20, 0, 0, positions)))
    assert [line["step"] for line in read_lines(folder.evaluations)] == [0, 10, 20]
    folder.evaluations.write_bytes(b'{"step":0}\n{"step"')
    assert kept_positions(folder, RunPosition(20, 0, 0, positions)) == positions
    folder.evaluations.write_bytes(b'{"step":0}\nrubbish\n')
    assert kept_positions(folder, RunPosition(20, 0, 0, positions)) == positions
