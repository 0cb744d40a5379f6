"""The live view of a run."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from watched_runs import BOTH, SPEC, AfterEach, KeptNumbers, initial_state_of, watch

from digenrl.console.dashboard import DashboardState, TerminalSize, render_dashboard
from digenrl.console.lane_activity import lane_activity
from digenrl.console.live_view import Clocks, JsonView, PlainView, RunTitle, TerminalView, choose_view
from digenrl.console.progress import Progress
from digenrl.console.text_symbols import duration
from digenrl.records import TakeUpdate
from digenrl.run_folder.metric_lines import EvaluationRecord, StepRecord
from digenrl.scheduling import SchedulerState
from digenrl.scheduling.state import Busy
from digenrl.simulation.virtual_cluster import VirtualCluster
from digenrl.telemetry.recorder import Recorder
from digenrl.telemetry.trace import Work

SECOND = 1_000_000_000
TITLE = RunTitle("demo", Path("runs/demo-1"), steps=4)
SHOW_CURSOR = "\x1b[?25h"


class SetClock:
    """A clock that a test sets; drawing takes as much processor time as the test says."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.draw_cost_s = 0.0
        self._processor_s = 0.0

    def clocks(self) -> Clocks:
        return Clocks(lambda: self.now_s, self._processor)

    def _processor(self) -> float:
        self._processor_s += self.draw_cost_s
        return self._processor_s


class CountingConsole(Console):
    """A terminal that keeps what is written to it, and counts the dashboards drawn."""

    def __init__(self, width: int = 100, height: int = 30, encoding: str = "utf-8") -> None:
        self.written = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
        super().__init__(file=self.written, force_terminal=True, width=width, height=height, legacy_windows=False)

    def text(self) -> str:
        raw = self.written.buffer
        assert isinstance(raw, io.BytesIO)
        return raw.getvalue().decode()

    def drawn(self) -> int:
        return self.text().count("runs/demo-1")


def _rendered(state: DashboardState, size: TerminalSize) -> list[str]:
    console = Console(width=size.width, color_system=None, file=io.StringIO())
    lines = console.render_lines(render_dashboard(state, size), console.options)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


def _dashboard(progress: Progress, state: SchedulerState | None = None, **changes: Any) -> DashboardState:
    shown = () if state is None else lane_activity(state)
    given: dict[str, Any] = {"now_ns": 0, "since_last_step_s": 0.0, "message": "", **changes}
    return DashboardState(name="demo", folder=Path("runs/demo-1"), progress=progress, lane_activity=shown, **given)


def _step(step: int, **numbers: float) -> Mapping[str, float]:
    return {"step": step, "version": step + 1, "step_s": 2.0, **numbers}


def test_the_dashboard_shows_progress_rewards_and_speed() -> None:
    progress = Progress(steps=100)
    progress.evaluation(EvaluationRecord(0, 0.0, 200, {"reward_mean": 0.25}))
    for step, reward in enumerate([0.2, 0.7, 0.6]):
        shares = {"stale_share": 0.25, "helped_share": 0.0, "samples_per_s": 48.0, "predicted_step_s": 1.9}
        progress.step(_step(step, reward_mean=reward, **shares))
    progress.evaluation(EvaluationRecord(3, 6.0, 200, {"reward_mean": 0.5, "reward/ocr.exact": 0.125}))
    lines = _rendered(_dashboard(progress, now_ns=75 * SECOND, message="saving"), TerminalSize(110, 30))
    assert lines[0] == "demo  runs/demo-1"
    assert lines[1].startswith("steps     3 of 100  [█")
    assert lines[1].endswith("] 3 %   1 min 15 s, 3 min 14 s left")
    assert lines[2] == "reward    0.6000   best 0.7000 in step 2   ▁█▇"
    held_out = "held-out  0.5000   after 3 steps   first 0.2500   best 0.5000   ocr.exact 0.1250"
    assert lines[3] == held_out
    assert lines[4] == "speed     2.0 s per step (predicted 1.9 s)   48 samples/s   25 % stale"
    assert lines[5] == "saving"


def test_before_the_first_step_the_dashboard_shows_only_the_run_and_its_steps() -> None:
    lines = _rendered(_dashboard(Progress(4), message="loading the model"), TerminalSize(80, 30))
    assert [line.split()[0] for line in lines if line] == ["demo", "steps", "reward", "loading"]
    assert "left" not in lines[1]


def test_every_lane_has_a_row_with_its_work() -> None:
    opening, seen = initial_state_of(), set[str]()
    progress = Progress(4)
    recorder = Recorder(opening)
    names = [lane.name for lane in recorder.trace().lanes]

    def look(event: Any, actions: Any, state: SchedulerState) -> None:
        lines = _rendered(_dashboard(progress, state, now_ns=event.at_ns), TerminalSize(100, 40))
        rows = lines[4:] if progress.steps_done == 0 else lines[5:]
        assert [row.split()[0] for row in rows if row] == names
        for lane in state.lanes:
            row = next(row for row in rows if row.startswith(lane.name))
            if lane.job is not None:
                assert f"step {lane.job.slice.step} group {lane.job.slice.group}" in row
                assert ("stale" in row) == lane.job.stale
        seen.update(row.split()[1] for row in rows if row)

    class Feed(KeptNumbers):
        def step(self, numbers: Any) -> None:
            progress.step(numbers)

    watch(opening, [Feed()], after=(AfterEach(look),))
    assert seen == {"generate", "score", "train", "commit", "switch", "help", "idle", "card", "cards"}


def test_an_update_inside_a_step_shows_as_a_commit() -> None:
    state = replace(initial_state_of(**BOTH), trainer=Busy(TakeUpdate(0, 0, step=3, update=0)))
    (trainer,) = (each for each in lane_activity(state) if each.lane.name == "trainer")
    assert (trainer.work, trainer.description) == (Work.COMMIT, "step 3")


def test_lanes_that_do_both_show_what_they_train_and_send() -> None:
    opening = initial_state_of(**BOTH)
    opening = replace(opening, costs=replace(opening.costs, send_ns=SECOND // 10))
    seen = set[tuple[str, str]]()

    def look(event: Any, actions: Any, state: SchedulerState) -> None:
        for each in lane_activity(state):
            words = re.sub(r"\d+", "N", each.description)
            seen.add((each.lane.name.partition("-")[0], f"{each.work or ''} {words}".strip()))

    watch(opening, [], after=(AfterEach(look),))
    does_both = {"train step N group N", "send gradients of step N", "idle"}
    generates = {"generate step N group N", "generate step N group N stale"}
    words = {words for lane, words in seen if lane == "a100"}
    assert words - generates == does_both and words & generates
    assert {words for lane, words in seen if lane == "l40s"} == generates | {"idle"}
    assert ("trainer", "commit step N") in seen
    assert {("trainer", f"cards are {words}") for words in ("generating", "training")} <= seen
    helper = {"help step N group N", "train step N group N", "card is training"}
    assert helper <= {words for lane, words in seen if lane == "helper"}


def test_what_generators_trained_is_in_the_speed_line_and_in_logs() -> None:
    progress = Progress(steps=4)
    progress.step(_step(0, helped_share=0.25, assisted_share=0.5))
    speed = _rendered(_dashboard(progress), TerminalSize(110, 30))[3]
    assert speed.endswith("25 % generated by the trainer   50 % trained by generators")
    narrow = _rendered(_dashboard(progress), TerminalSize(70, 30))
    assert "25 % generated by the trainer" in narrow[3]
    assert narrow[4].strip() == "50 % trained by generators"
    out = io.StringIO()
    PlainView(TITLE, Console(file=out, width=40)).step(_step(0, helped_share=0.25, assisted_share=0.5))
    assert "helped 25 %, assisted 50 %" in out.getvalue()


def test_skipped_updates_are_in_the_speed_line_and_in_logs() -> None:
    progress, out = Progress(steps=4), io.StringIO()
    progress.step(_step(0, skipped_updates=2))
    assert "2 updates skipped" in _rendered(_dashboard(progress), TerminalSize(110, 30))[3]
    PlainView(TITLE, Console(file=out, width=40)).step(_step(0, skipped_updates=1))
    assert "1 update skipped" in out.getvalue()


def test_a_lane_shows_its_busy_share_over_ten_steps_and_the_elapsed_time_of_its_slice() -> None:
    opening, states = initial_state_of(), list[SchedulerState]()
    watch(opening, [], after=(AfterEach(lambda event, actions, state: states.append(state)),))
    progress = Progress(100)
    for step in range(20):
        progress.step(_step(step, **{"busy/a100-0": 0.0 if step < 10 else 0.5}))
    lines = _rendered(_dashboard(progress, states[0], now_ns=3 * SECOND), TerminalSize(100, 40))
    row = next(line for line in lines if line.startswith("a100-0"))
    assert row.split() == ["a100-0", "generate", "step", "0", "group", "0", "3.0", "s", "██████", "50", "%"]


def test_many_lanes_are_folded_to_fit_the_terminal_and_no_row_is_too_wide() -> None:
    generators = [{"name": "a100", "count": 100, "seconds": {1: 1.0, 2: 1.7}}]
    opening = initial_state_of(generators=generators)
    progress = Progress(4)
    progress.step(_step(0, **{f"busy/a100-{index}": 0.5 for index in range(100)}))
    lines = _rendered(_dashboard(progress, opening, message="a long message " * 10), TerminalSize(60, 24))
    assert max(len(line) for line in lines) == 60
    labels = [line.split()[0] for line in lines if line]
    lanes = ["a100-0", "a100-1", "a100-2", "...", "reward-0", "reward-1", "trainer", "helper-0", "helper-1"]
    assert labels == ["demo", "steps", "reward", "speed", *lanes, "a"]
    (folded,) = (line for line in lines if "97 more like these, 0 working" in line)
    progress.step(_step(1, **{"busy/generator": 0.5}))  # with that many lanes, a run has only the mean
    assert folded in _rendered(_dashboard(progress, opening), TerminalSize(60, 24))


def test_a_short_terminal_folds_lanes_that_a_tall_one_shows() -> None:
    opening = initial_state_of(generators=[{"name": "a100", "count": 10, "seconds": {1: 1.0, 2: 1.7}}])
    assert len(_rendered(_dashboard(Progress(4), opening), TerminalSize(100, 30))) == 4 + 15
    low = _rendered(_dashboard(Progress(4), opening), TerminalSize(100, 16))
    assert len(low) <= 16 and any("7 more like these" in line for line in low)


def test_an_ascii_terminal_gets_ascii_only() -> None:
    console, clock = CountingConsole(encoding="ascii"), SetClock()
    view = TerminalView(TITLE, console, clock.clocks())
    with view:
        view.step(_step(0, reward_mean=0.5, **{"busy/a100-0": 0.5}))
    assert console.text().isascii()


def test_the_dashboard_is_drawn_at_most_four_times_a_second_and_only_after_changes() -> None:
    console, clock = CountingConsole(), SetClock()
    view = TerminalView(TITLE, console, clock.clocks())
    with view:
        drawn = console.drawn()
        for tenth in range(1, 101):
            clock.now_s = tenth / 100
            view.step(_step(tenth, reward_mean=0.5))
            view.tick()
        assert console.drawn() - drawn == 4
        clock.now_s, drawn = 1.3, console.drawn()
        view.tick()
        assert console.drawn() == drawn
        clock.now_s = 2.01  # durations grow although nothing happens
        view.tick()
        assert console.drawn() == drawn + 1


def test_an_expensive_dashboard_is_drawn_less_often() -> None:
    console, clock = CountingConsole(), SetClock()
    view = TerminalView(TITLE, console, clock.clocks())
    clock.draw_cost_s = 0.02
    with view:
        drawn = console.drawn()
        for tenth in range(1, 400):
            clock.now_s = tenth / 10
            view.step(_step(tenth))
            view.tick()
        assert 8 <= console.drawn() - drawn <= 10  # half a percent of 40 s, at 0.02 s each


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_the_terminal_is_clean_after_an_exception(error: type[BaseException]) -> None:
    console, clock = CountingConsole(), SetClock()
    opening = initial_state_of()
    view = TerminalView(TITLE, console, clock.clocks())

    def stop(event: Any, actions: Any, state: SchedulerState) -> None:
        if state.committed == 1:
            raise error

    with pytest.raises(error), view:
        watch(opening, [view], after=(view, AfterEach(stop)))
    assert console.text().rstrip("\n").endswith(SHOW_CURSOR)
    assert "1 of 4" in console.text()
    written = console.text()
    view.tick()
    view.notify("too late")
    assert console.text() == written


def test_a_whole_run_on_a_terminal_ends_with_all_steps_done() -> None:
    console, clock = CountingConsole(), SetClock()
    opening = initial_state_of()
    cluster = VirtualCluster(opening)
    view = TerminalView(TITLE, console, Clocks(lambda: cluster.now_ns / SECOND, clock.clocks().processor))
    with view:
        watch(opening, [view], after=(view,), cluster=cluster)
    assert "4 of 4" in console.text().rsplit("runs/demo-1", 1)[1]


def test_a_resumed_run_shows_its_history() -> None:
    console, clock = CountingConsole(), SetClock()
    view = TerminalView(TITLE, console, clock.clocks())
    view.load_history(
        [StepRecord(0, {"version": 1, "reward_mean": 0.9})], [EvaluationRecord(0, 0.0, 4, {"reward_mean": 0.125})]
    )
    with view:
        pass
    assert "best 0.9000 in step 1" in console.text()
    assert "1 of 4" in console.text()
    assert "0.1250" in console.text()


def test_without_a_terminal_a_run_prints_one_line_per_step() -> None:
    out = io.StringIO()
    view = choose_view(TITLE, Console(file=out, width=40), SetClock().clocks())
    assert isinstance(view, PlainView)
    with view:
        view.evaluation(EvaluationRecord(0, 0.0, 200, {"reward_mean": 0.25, "reward/ocr": 0.25}))
        watch(initial_state_of(), [view], after=(view,))
    evaluation, *steps = out.getvalue().splitlines()
    assert evaluation == "evaluation after 0 steps: reward_mean 0.2500, reward/ocr 0.2500"
    assert len(steps) == SPEC["steps"]
    assert steps[0].startswith("step 1/4, ") and "samples/s" in steps[0] and steps[0].endswith(" left")
    assert steps[3].startswith("step 4/4, ") and "left" not in steps[3]


def test_json_output_is_one_object_per_step_as_in_the_file() -> None:
    out, kept = io.StringIO(), KeptNumbers()
    view = choose_view(TITLE, Console(file=out, force_terminal=True), SetClock().clocks(), as_json=True)
    assert isinstance(view, JsonView)
    with view:
        watch(initial_state_of(), [view, kept], after=(view,))
        view.step({**_step(4), "kl": float("nan")})
        view.evaluation(EvaluationRecord(5, 1.0, 200, {"reward_mean": 0.5}))
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert lines[:4] == kept.steps
    assert lines[4]["kl"] is None
    assert lines[5] == {"evaluation": {"step": 5, "at_s": 1.0, "count": 200, "reward_mean": 0.5}}


def test_on_a_terminal_the_dashboard_is_chosen() -> None:
    assert isinstance(choose_view(TITLE, CountingConsole(), SetClock().clocks()), TerminalView)


def test_the_time_left_is_based_on_recent_steps_minus_the_elapsed_time_of_the_current_one() -> None:
    progress = Progress(100)
    for step in range(50):
        progress.step({"step": step, "version": step + 1, "step_s": 100.0 if step < 30 else 2.0})
    assert progress.left_s(0.0) == 100.0
    assert progress.left_s(1.5) == 98.5
    assert progress.left_s(60.0) == 98.0
    assert duration(progress.left_s(0.0) or 0) == "1 min 40 s"


def test_a_nan_reward_is_never_the_best_and_leaves_a_gap_in_the_curve() -> None:
    progress = Progress(4)
    for step, reward in enumerate([0.25, float("nan"), 0.5]):
        progress.step(_step(step, reward_mean=reward))
    assert progress.best_reward == (0.5, 2)
    assert _rendered(_dashboard(progress), TerminalSize(80, 30))[2].endswith("▁ █")
