"""The dispatcher with workers that have no models: nothing is lost, nothing hangs, nothing is left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_workers import FakeRun, begun, fake_recipe, is_slice

from digenrl.config.reading import ConfigError
from digenrl.driver.supervisor import LONGEST_WAIT_S, TrainerLostError, WorkerFailedError
from digenrl.loop import RunGaveUpError, drive
from digenrl.records import (
    AbandonEvaluation,
    Calibrate,
    Calibrated,
    Commit,
    Committed,
    Encode,
    Evaluate,
    Evaluated,
    Generate,
    HeldOutChunk,
    Job,
    JobFailed,
    LaneOffer,
    Publish,
    Save,
    Score,
    Scored,
    SendGradients,
    Slice,
    SwitchRole,
    WorkerJoined,
    WorkerLost,
)
from digenrl.scheduling.invariants import Auditor
from digenrl.telemetry.recorder import Recorder
from digenrl.transports.contract import Gone, Message
from digenrl.worker.assignment import TRAINER, DeviceFailed, Ready, StartFailed

LAYOUTS: dict[str, dict[str, Any]] = {
    "all techniques": {"techniques": {"tcss": 0.5}},
    "no helper": {"techniques": {"tag": "none"}},
    "whole batches": {"techniques": {"gap": False, "tag": "none"}},
    "scored by generators": {"lanes": {"rewards": 0}},
    "three reward lanes": {"lanes": {"rewards": 3}, "techniques": {"tcss": 1.0}},
    "colocated": {"mode": "colocated"},
}
SEPARATE = [name for name in LAYOUTS if name != "colocated"]
EVALUATION = {"prompts": {"path": "held_out.txt"}, "every": 1, "batch": 1}


class Watch:
    """An observer made of a function."""

    def __init__(self, observe: Callable[[Any, Any, Any], None]) -> None:
        self.observe = observe


class Evaluations:
    """Which chunks of each version were scored, and which evaluations were abandoned."""

    def __init__(self) -> None:
        self.scored: dict[int, list[int]] = {}
        self.abandoned: list[int] = []

    def observe(self, event: Any, actions: Any, state: Any) -> None:
        chunk = None
        if isinstance(event, Evaluated) and event.scores is not None:
            chunk = event.job.chunk
        elif isinstance(event, Scored) and isinstance(event.job.piece, HeldOutChunk):
            chunk = event.job.piece
        if chunk is not None:
            self.scored.setdefault(chunk.version, []).append(chunk.index)
        self.abandoned += [action.version for action in actions if isinstance(action, AbandonEvaluation)]


def driven(run: FakeRun, *observers: Any, **initial: Any) -> Auditor:
    """The run, driven to its end with every promise checked."""
    state = run.prepare(**initial)
    auditor = Auditor(state)
    run.driver.begin()
    drive(state, run.driver, (Recorder(state), auditor, *observers))
    return auditor


def recipe_of(layout: str, restarts: int = 99, **changes: Any) -> Any:
    settings = LAYOUTS[layout]
    return fake_recipe(**{**settings, "lanes": {**settings.get("lanes", {}), "restarts": restarts}, **changes})


def assert_every_group_was_trained_once(run: FakeRun) -> None:
    recipe = run.driver.stores.recipe
    samples = tuple(range(recipe.batch.samples_per_prompt))
    whole = [(step, (place, *samples)) for step in range(recipe.steps) for place in range(recipe.batch.prompts)]
    assert sorted(run.transport.trained) == whole


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_group_is_trained_once_and_only_the_last_version_is_left(layout: str, tmp_path: Path) -> None:
    for seed in range(5):
        root = tmp_path / str(seed)
        root.mkdir()
        run = FakeRun(root, fake_recipe(steps=4, **LAYOUTS[layout]), seed=seed)
        auditor = driven(run)
        assert_every_group_was_trained_once(run)
        assert auditor.trained_samples == 4 * 3 * 4
        assert [summary.step for summary in run.steps] == [0, 1, 2, 3]
        assert [job.step for job in run.transport.jobs(Save)] == [2, 4]
        left = {name for name in run.exchange.names() if not name.startswith("prompt-")}
        assert left == ({"weights-4"} if layout == "colocated" else {"weights-4", "state-4-0"})


@pytest.mark.parametrize("layout", SEPARATE)
def test_workers_and_machines_can_be_lost_at_any_moment_of_a_run(layout: str, tmp_path: Path) -> None:
    for seed in range(6):
        root = tmp_path / str(seed)
        root.mkdir()
        recipe = recipe_of(layout, evaluation=EVALUATION)
        faults = {"kills": 8, "vanishing": 6, "mortal_trainer": seed % 2 == 1}
        run = FakeRun(root, recipe, seed=seed, prompts=5 + seed, held_out=7, **faults)
        evaluations = Evaluations()
        auditor = driven(run, evaluations, evaluations=[0])
        assert_every_group_was_trained_once(run)
        assert auditor.trained_samples == recipe.steps * 3 * 4
        assert [summary.step for summary in run.steps] == list(range(recipe.steps))
        whole = {version for version, chunks in evaluations.scored.items() if sorted(set(chunks)) == [0, 1]}
        assert whole | set(evaluations.abandoned) == {0, 1, 2, 3}
        assert not any(is_slice(name) for name in run.exchange.names())


def test_failed_slices_and_scores_are_issued_again_or_replaced(tmp_path: Path) -> None:
    for seed in range(20):
        root = tmp_path / str(seed)
        root.mkdir()
        bad_prompts: set[str] = {"prompt 1"} if seed % 2 else set()
        failed: set[int] = set()

        def fails(job: Job, bad: set[str] = bad_prompts, failed: set[int] = failed) -> str | None:
            if isinstance(job, Generate) and job.id % 7 == 0 and job.id not in failed:
                failed.add(job.id)
                return "no memory"
            if isinstance(job, Score) and job.prompts[0].text in bad:
                return "cannot be scored"
            return None

        run = FakeRun(root, fake_recipe(techniques={"tcss": 0.5}), seed=seed, fails=fails, prompts=5 + seed // 4)
        auditor = driven(run)
        assert_every_group_was_trained_once(run)
        assert bool(auditor.quarantined_groups) == bool(bad_prompts)
        while any(worker.jobs for worker in run.transport.workers.values()):
            run.driver.receive()  # what was still under way for quarantined groups
        assert not any(is_slice(name) for name in run.exchange.names())


def test_a_reward_that_always_fails_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    fails = lambda job: "out of order" if isinstance(job, Score) else None  # noqa: E731
    with pytest.raises(RunGaveUpError, match="out of order"):
        driven(FakeRun(tmp_path, fake_recipe(), fails=fails))


def test_the_exchange_does_not_grow_with_the_run(tmp_path: Path) -> None:
    files: list[int] = []
    recipe = fake_recipe(steps=40, techniques={"tcss": 0.5})
    count = {"on_step": lambda summary: files.append(len(run.exchange.names()))}
    run = FakeRun(tmp_path, recipe, prompts=200, kept_rows=8, hooks=count)
    driven(run)
    assert max(files[20:]) < max(files[2:20]) + 10 and max(files) < 60


# --- Losses, one at a time ---------------------------------------------------------------------------------------


def generate(lane: int, group: int = 0, job_id: int = 0) -> Generate:
    return Generate(job_id, 0, Slice(0, group, 0, 2), lane, version=0)


def test_a_worker_lost_while_it_starts_is_started_again(tmp_path: Path) -> None:
    for name in ("generator-0", "reward-0", "encoder"):
        root = tmp_path / name
        root.mkdir()
        runs: list[FakeRun] = []

        def kill_once(name: str = name, runs: list[FakeRun] = runs) -> None:
            if runs and name in runs[0].transport.workers:
                runs.pop().transport.kill(name)

        run = FakeRun(root, fake_recipe(), hooks={"poll": kill_once})
        runs.append(run)
        run.driver.start_workers()
        assert not runs and name in run.transport.workers


def test_a_generator_that_is_still_being_replaced_when_the_run_begins_keeps_its_lane(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, fake_recipe())
    state = run.prepare()
    run.transport.kill("generator-0")
    run.driver.receive()
    joined: list[Any] = []
    run.driver.begin()
    drive(
        state,
        run.driver,
        (Auditor(state), Watch(lambda event, actions, state: joined.append(isinstance(event, WorkerJoined)))),
    )
    assert not any(joined)
    assert run.driver.stores.lanes.lanes_of("generator-0") == [0]
    assert_every_group_was_trained_once(run)


def test_a_generator_lost_before_the_run_begins_is_replaced_with_the_weights_of_the_others(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, fake_recipe())
    run.transport.trainer_version = 3  # as in a resumed run
    state = run.prepare(committed=3)
    run.transport.kill("generator-1")
    while "generator-1" not in run.transport.workers or run.transport.workers["generator-1"].jobs:
        run.driver.receive()
    assert run.transport.workers["generator-1"].version == 3
    assert len(state.lanes) == len(run.driver.stores.lanes.names) == 3


def test_a_generator_lost_twice_in_a_row_still_joins(tmp_path: Path) -> None:
    run = begun(tmp_path)
    for _ in range(2):
        run.transport.kill("generator-0")
        run.driver.receive()
    run.transport.answer("generator-0")
    run.driver.receive()
    events = [run.driver.next_event() for _ in range(2)]
    assert [type(event) for event in events] == [WorkerLost, WorkerJoined]
    assert run.driver.stores.lanes.names[-1] == "generator-0 (2)"
    assert run.driver.stores.lanes.devices["generator-0 (2)"] == "cpu"


def test_a_lost_lane_gets_no_job_before_the_scheduler_hears_of_it(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.transport.kill("generator-0")
    run.driver.receive()
    run.driver.submit(generate(lane=0))
    run.driver.submit(Publish(1, 0, 0, (0,)))
    assert run.transport.kinds_of_jobs("generator-0") == [None]


def test_a_slice_that_waits_for_its_prompt_is_dropped_with_its_lost_lane(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.driver.submit(Encode(0, 0, 0, (3,)))  # a replacement group
    run.driver.submit(generate(lane=0, group=3, job_id=1))
    assert run.transport.kinds_of_jobs("encoder") == [Encode]
    assert run.transport.kinds_of_jobs("generator-0") == []
    run.transport.kill("generator-0")
    run.driver.receive()
    run.transport.answer("encoder")
    run.driver.receive()
    assert Generate not in run.transport.kinds_of_jobs("generator-0")


def test_a_score_that_waits_for_its_source_image_is_dropped_with_its_own_worker_only(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, fake_recipe(), prompts=20, edits=True)
    run.prepare()
    run.driver.begin()
    run.driver.submit(generate(lane=0))
    run.transport.answer("generator-0")
    run.driver.receive()
    prompt = run.driver.stores.prompts.row(0, 0).row
    for lost, issued_again in ((TRAINER, 0), ("reward-0", 1)):
        run.driver.stores.prompts.forget(prompt)
        run.driver.submit(Encode(2, 0, 0, (0,)))
        run.driver.submit(Score(3, 0, Slice(0, 0, 0, 2), 0))
        run.transport.kill(lost)
        run.driver.receive()
        while Score not in run.transport.kinds_of_jobs("reward-0") and run.transport.workers["encoder"].jobs:
            run.transport.answer("encoder")
            run.driver.receive()
        sent = run.transport.kinds_of_jobs("reward-0").count(Score)
        assert sent == 1 - issued_again, "the scheduler issues again what the lost worker had"


def test_a_reserve_that_never_found_room_is_awaited_only_once_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("digenrl.driver.supervisor.POLL_INTERVAL_S", 0.0)
    now = [0.0]
    recipe = fake_recipe(lanes={"generators": ["cpu"]}, techniques={"tag": "none"})
    run = FakeRun(tmp_path, recipe, reserve=1, hooks={"monotonic": lambda: now[0]})
    run.transport.no_room_for = {"generator-1"}
    run.prepare()
    run.driver.begin()
    now[0] = 10 * LONGEST_WAIT_S
    run.driver.next_event()
    run.transport.no_room_for = {"generator-0", "generator-1"}
    run.transport.kill("generator-0")
    run.driver.receive()
    now[0] += LONGEST_WAIT_S
    run.transport.waiting.append(Message("encoder", None, Ready()))
    run.driver.receive()
    now[0] += 1
    run.transport.waiting.append(Message("encoder", None, Ready()))
    with pytest.raises(WorkerFailedError, match=r"generator-[01]: no resources .* 601 s"):
        run.driver.receive()


@pytest.mark.parametrize("worker, job", [("reward-0", Score), (TRAINER, SwitchRole), ("encoder", Encode)])
def test_what_a_lost_worker_held_is_issued_again(worker: str, job: type[Job], tmp_path: Path) -> None:
    for seed in range(4):
        root = tmp_path / str(seed)
        root.mkdir()
        run = FakeRun(root, fake_recipe(steps=4), seed=seed, prompts=50)
        lost: list[bool] = []

        def lose(event: Any, actions: Any, state: Any, run: FakeRun = run, lost: list[bool] = lost) -> None:
            if not lost and job in run.transport.kinds_of_jobs(worker):
                lost.append(True)
                run.transport.kill(worker)

        driven(run, Watch(lose))
        assert_every_group_was_trained_once(run)
        if lost:
            return
    raise AssertionError(f"{worker} never held {job}")


def test_a_worker_whose_device_has_failed_is_replaced_and_its_slice_issued_again(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, fake_recipe(steps=4), prompts=50)
    failed: list[int] = []

    def fail_once(event: Any, actions: Any, state: Any) -> None:
        held = run.transport.workers["generator-0"].jobs
        if not failed and any(isinstance(job, Generate) for job in held.values()):
            failed.extend(job_id for job_id in held if job_id is not None)
            run.transport.waiting.append(Message("generator-0", failed[0], DeviceFailed("cannot use its device")))

    auditor = driven(run, Watch(fail_once))
    assert failed and not auditor.quarantined_groups
    assert any("cannot use its device; starting a replacement" in message for message in run.messages)
    assert "generator-0 (2)" in run.driver.stores.lanes.names
    assert_every_group_was_trained_once(run)


def test_a_generator_on_which_every_job_fails_is_replaced_before_the_run_gives_up(tmp_path: Path) -> None:
    fails = lambda job: "broken" if isinstance(job, Generate) and job.lane == 0 else None  # noqa: E731
    run = FakeRun(tmp_path, fake_recipe(steps=6), prompts=50, fails=fails)
    auditor = driven(run)
    assert auditor.quarantined_groups <= 1
    assert any("generator-0 failed several jobs in a row" in message for message in run.messages)
    assert "generator-0 (2)" in run.driver.stores.lanes.names
    assert_every_group_was_trained_once(run)


def test_a_worker_that_is_lost_too_often_ends_the_run(tmp_path: Path) -> None:
    run = begun(tmp_path, lanes={"restarts": 1})
    run.transport.kill("reward-0")
    run.driver.receive()
    run.transport.kill("reward-0")
    with pytest.raises(WorkerFailedError, match=r"reward-0 .*1 restart"):
        run.driver.receive()


def test_a_trainer_whose_state_is_not_kept_cannot_be_replaced(tmp_path: Path) -> None:
    run = begun(tmp_path, checkpoint={"in_memory": False})
    run.transport.kill(TRAINER)
    with pytest.raises(TrainerLostError, match="trainer"):
        run.driver.receive()


def test_a_lost_trainer_continues_from_the_last_commit_and_trains_the_open_step_again(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, fake_recipe(techniques={"tag": "none"}))
    before: list[Any] = []

    def lose(event: Any, actions: Any, state: Any) -> None:
        if not before and state.committed == 1 and len(run.transport.trained) == 5:
            before.extend(run.transport.trained)
            run.transport.kill(TRAINER)

    driven(run, Watch(lose))
    assert before
    assert run.transport.trained[:3] == before[:3]
    assert_every_group_was_trained_once(run)


def test_losses_that_are_not_a_workers_fault_do_not_count(tmp_path: Path) -> None:
    run = begun(tmp_path, lanes={"restarts": 0})
    for _ in range(3):
        del run.transport.workers["reward-0"]
        run.transport.waiting.append(Message("reward-0", None, Gone("lost its machine", fault=False)))
        run.driver.receive()
        run.transport.answer("reward-0")
        run.driver.receive()
    run.transport.kill("reward-0")
    with pytest.raises(WorkerFailedError, match="reward-0"):
        run.driver.receive()


def test_a_run_continues_without_a_generator_that_is_lost_too_often_and_not_without_the_last(
    tmp_path: Path,
) -> None:
    run = begun(tmp_path, lanes={"restarts": 1})
    for _ in range(2):
        run.transport.kill("generator-0")
        run.driver.receive()
    assert run.messages[-1].endswith("after 1 restart; the run continues without it")
    assert "generator-0" not in run.transport.workers
    run.transport.kill("generator-1")
    run.driver.receive()
    run.transport.kill("generator-1")
    with pytest.raises(WorkerFailedError, match=r"generator-1 .*1 restart"):
        run.driver.receive()


def test_faults_are_forgotten_after_many_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("digenrl.driver.supervisor.FORGOTTEN_AFTER_STEPS", 2)
    run = FakeRun(tmp_path, fake_recipe(steps=9, lanes={"restarts": 1}), prompts=50)
    losses: list[int] = []

    def lose(event: Any, actions: Any, state: Any) -> None:
        if state.committed in (1, 4, 7) and state.committed not in losses and "reward-0" in run.transport.workers:
            losses.append(state.committed)
            run.transport.kill("reward-0")

    driven(run, Watch(lose))
    assert losses == [1, 4, 7]


@pytest.mark.parametrize(
    "job",
    [Calibrate(900, 0, "generate", sizes=(2,), lane=0), Publish(900, 0, 0, (0,)), SendGradients(900, 0, 0, 0)],
)
def test_a_generator_that_fails_a_job_that_is_not_tried_again_is_replaced(job: Job, tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.driver.submit(job)
    run.transport.waiting.append(Message("generator-0", 900, JobFailed(0, job, "no memory")))
    run.driver.receive()
    assert isinstance(run.driver.next_event(), WorkerLost)
    assert "no memory; starting a replacement" in run.messages[-1]
    assert run.transport.kinds_of_jobs("generator-0") == [None]


def test_the_user_is_notified_of_a_lost_trainer_and_of_missing_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("digenrl.driver.supervisor.POLL_INTERVAL_S", 0.0)
    run = begun(tmp_path)
    run.transport.no_room_for = {TRAINER}
    run.transport.kill(TRAINER)
    run.driver.receive()
    assert [TRAINER in message for message in run.messages] == [True, True]
    run.transport.no_room_for = set()
    run.transport.waiting.append(Message("encoder", None, Gone("lost its machine", fault=False)))
    run.transport.workers.pop("encoder")
    run.driver.receive()
    run.transport.answer(TRAINER)
    run.driver.receive()
    assert run.messages[-1] == ""


def test_a_user_error_is_shown_as_it_is_and_anything_else_with_its_details(tmp_path: Path) -> None:
    run, job = begun(tmp_path), Commit(7, 0, 0)
    run.driver.submit(job)
    run.transport.waiting.append(Message(TRAINER, 7, JobFailed(0, job, "no such layer", user_error=True)))
    with pytest.raises(ConfigError, match=r"^no such layer$"):
        run.driver.receive()
    save = Save(8, 0, 0)
    run.driver.submit(save)
    run.transport.waiting.append(Message(TRAINER, 8, JobFailed(0, save, "the disk is full", user_error=True)))
    with pytest.raises(WorkerFailedError, match=r"^the disk is full$"):
        run.driver.receive()
    run.driver.submit(job)
    failed = JobFailed(0, job, "KeyError: 'x'", details="Traceback ...")
    run.transport.waiting.append(Message(TRAINER, 7, failed))
    with pytest.raises(WorkerFailedError, match=r"trainer .*KeyError: 'x'\nTraceback"):
        run.driver.receive()


# --- Lanes that join ---------------------------------------------------------------------------------------------


def test_a_lane_joins_when_there_is_room_and_only_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("digenrl.driver.supervisor.POLL_INTERVAL_S", 0.0)
    run = FakeRun(tmp_path, fake_recipe(steps=6), reserve=2)
    run.transport.no_room_for = {"generator-2", "generator-3"}

    def make_room(event: Any, actions: Any, state: Any) -> None:
        if state.committed == 2:
            run.transport.no_room_for = {"generator-3"}

    timed: list[LaneOffer] = []

    def watch_calibration(event: Any, actions: Any, state: Any) -> None:
        timed.extend([event.offer] if isinstance(event, Calibrated) else [])

    driven(run, Watch(make_room), Watch(watch_calibration))
    assert "generator-2" in run.driver.stores.lanes.names and "generator-3" not in run.transport.workers
    assert timed == [LaneOffer("generator-2", 10_000_000)], "the scheduler hears of its calibration"
    log = run.transport.log
    steps = {job.slice.step for name, job in log if name == "generator-2" and isinstance(job, Generate)}
    assert steps and min(steps) >= 2
    assert_every_group_was_trained_once(run)


def test_a_lane_that_cannot_start_when_it_joins_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("digenrl.driver.supervisor.POLL_INTERVAL_S", 0.0)
    run = FakeRun(tmp_path, fake_recipe(steps=2), reserve=1)
    failure = StartFailed("reward 'ocr' needs the package 'rapidocr'", user_error=True)
    run.transport.fails_to_start = {"generator-2": failure}
    driven(run)
    assert any("generator-2" in message and "rapidocr" in message for message in run.messages)
    assert "generator-2" not in run.transport.workers
    assert_every_group_was_trained_once(run)


def test_lanes_that_join_may_be_lost_while_they_are_calibrated(tmp_path: Path) -> None:
    lost_in_calibration = 0
    for seed in range(24):
        root = tmp_path / str(seed)
        root.mkdir()
        run = FakeRun(root, fake_recipe(lanes={"restarts": 99}), seed=seed, reserve=2, kills=6, vanishing=2)
        open_calibrations: Counter[int] = Counter()  # by lane

        def watch(event: Any, actions: Any, state: Any, counter: Counter[int] = open_calibrations) -> None:
            counter.update(job.lane for job in actions if isinstance(job, Calibrate))
            if isinstance(event, Calibrated):
                del counter[event.job.lane]

        driven(run, Watch(watch))
        assert_every_group_was_trained_once(run)
        lost_in_calibration += bool(open_calibrations)
    assert lost_in_calibration


@pytest.mark.parametrize("rewards", [0, 2])
def test_lanes_of_a_pool_take_several_slices_at_once_and_lose_none(rewards: int, tmp_path: Path) -> None:
    pools = {"generators": [{"name": "big", "slice": 4}, {"name": "small"}]}
    sizes: set[tuple[str, int]] = set()
    for seed in range(20):
        root = tmp_path / str(seed)
        root.mkdir()
        lanes = {"generators": 2, "rewards": rewards, "restarts": 99}
        recipe = fake_recipe(mode="ray", cluster=pools, lanes=lanes, techniques={"tcss": 0.5 * (seed % 2)})
        run = FakeRun(root, recipe, seed=seed, kills=4, vanishing=2, mortal_trainer=True, pools=("big", "small"))
        driven(run)
        assert_every_group_was_trained_once(run)
        sizes |= {(name, job.slice.size) for name, job in run.transport.log if isinstance(job, Generate)}
    assert ("generator-0", 4) in sizes and ("generator-1", 4) not in sizes


# --- Evaluation and stopping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_due_version_is_evaluated_by_all_generators_and_leaves_nothing(layout: str, tmp_path: Path) -> None:
    recipe = recipe_of(layout, evaluation={**EVALUATION, "every": 2})
    run, evaluations = FakeRun(tmp_path, recipe, held_out=7), Evaluations()
    driven(run, evaluations, evaluations=[0])
    assert {version: sorted(chunks) for version, chunks in evaluations.scored.items()} == {
        0: [0, 1],
        2: [0, 1],
        3: [0, 1],
    }
    jobs = run.transport.jobs(Evaluate)
    assert sorted((job.first, len(job.prompts)) for job in jobs if job.chunk.version == 2) == [(0, 4), (4, 3)]
    assert not left_of_evaluations(run)


def left_of_evaluations(run: FakeRun) -> list[str]:
    return [name for name in run.exchange.names() if name.startswith("held-out-") and "prompt" not in name]


def test_held_out_samples_are_scored_again_if_their_reward_lane_is_lost(tmp_path: Path) -> None:
    run, evaluations = FakeRun(tmp_path, fake_recipe(evaluation=EVALUATION), held_out=7), Evaluations()
    lost: list[int] = []

    def lose(event: Any, actions: Any, state: Any) -> None:
        reward = run.transport.workers.get("reward-0")
        for job in list(reward.jobs.values()) if reward is not None and len(lost) < 3 else ():
            if isinstance(job, Score) and isinstance(job.piece, HeldOutChunk) and job.piece.version not in lost:
                lost.append(job.piece.version)
                run.transport.kill("reward-0")

    driven(run, evaluations, Watch(lose), evaluations=[0])
    assert lost == [0, 1, 2] and not evaluations.abandoned
    assert {version: sorted(set(chunks)) for version, chunks in evaluations.scored.items()} == {
        version: [0, 1] for version in range(4)
    }
    assert not left_of_evaluations(run)


def test_a_failed_evaluation_is_abandoned_and_the_run_continues(tmp_path: Path) -> None:
    def fails(job: Job) -> str | None:
        held_out = isinstance(job, Score) and isinstance(job.piece, HeldOutChunk)
        return "broken" if held_out and job.piece.version == 2 else None

    run, evaluations = (
        FakeRun(tmp_path, fake_recipe(evaluation=EVALUATION), held_out=7, fails=fails),
        Evaluations(),
    )
    driven(run, evaluations)
    assert evaluations.abandoned == [2] and set(evaluations.scored) >= {1, 3}
    assert not left_of_evaluations(run)
    assert_every_group_was_trained_once(run)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stop_request_saves_the_last_version_and_ends_the_run(layout: str, tmp_path: Path) -> None:
    for seed in range(12):
        root = tmp_path / str(seed)
        root.mkdir()
        run = FakeRun(root, recipe_of(layout, steps=6, checkpoint={"every": 100}), seed=seed)
        state, events = run.prepare(), 0
        run.driver.begin()

        def ask(event: Any, actions: Any, state: Any, run: FakeRun = run, seed: int = seed) -> None:
            nonlocal events
            events += 1
            if events == 5 + 7 * seed:
                run.driver.request_stop()

        state = drive(state, run.driver, (Auditor(state), Watch(ask)))
        assert [job.step for job in run.transport.jobs(Save)] == [state.committed]
        assert state.stopping == (not state.all_committed)


def test_a_version_is_dropped_once_no_pending_job_loads_it(tmp_path: Path) -> None:
    seen: list[set[str]] = []

    def look(event: Any, actions: Any, state: Any) -> None:
        if isinstance(event, Committed):
            seen.append({name for name in run.exchange.names() if name.startswith("weights")})

    run = FakeRun(tmp_path, fake_recipe(steps=8))
    driven(run, Watch(look))
    assert all(f"weights-{step + 1}" in names and len(names) <= 3 for step, names in enumerate(seen))
