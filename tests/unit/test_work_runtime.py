"""The runtime of real workers, with workers that have no models: nothing is lost, nothing hangs, nothing stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from digenrl.driver.evaluation import Evaluation, Evaluator
from digenrl.worker.orders import (
    EncodePrompts,
    LearnGroups,
    LoadWeights,
    MakeSlice,
    Order,
    OrderFailed,
    SaveCheckpoint,
    ScoreEvaluation,
    ScoreSamples,
    TakeStep,
)
from fake_crew import FakeRun, fake_recipe

from digenrl.config.reading import ConfigError
from digenrl.driver.prompt_store import as_encoded
from digenrl.driver.supervisor import TrainerLostError, WorkerFailedError
from digenrl.loop import RunGaveUpError, drive
from digenrl.prompts.sources import Prompt
from digenrl.records import Generate, Lease, Publish, Slice, WorkerJoined, WorkerLost
from digenrl.scheduling.invariants import Auditor
from digenrl.telemetry.recorder import Recorder
from digenrl.transports.contract import Gone, Message
from digenrl.worker.assignment import TRAINER

CREWS: dict[str, dict[str, Any]] = {
    "all techniques": {"techniques": {"tcss": 0.5}},
    "no helper": {"techniques": {"tag": "none"}},
    "whole batches": {"techniques": {"gap": False, "tag": "none"}},
    "scored by generators": {"lanes": {"rewards": 0}},
    "three reward lanes": {"lanes": {"rewards": 3}, "techniques": {"tcss": 1.0}},
    "colocated": {"mode": "colocated"},
}


def size_of(run: FakeRun) -> dict[str, int]:
    """How much a runtime remembers."""
    runtime: Any = run.runtime
    return {
        "groups": len(runtime._ledger._groups),
        "places": len(runtime._ledger._places) + len(runtime._ledger._retired),
        "expected": len(list(runtime._post.orders())),
        "weights": len(runtime._versions._laid_out),
        "learnt": len(runtime._repairs.learnt),
        "scores": len(runtime._lane_scores),
        "parked": len(runtime._parked),
        "updates": len(runtime._updates),
        "rows": len(runtime.desk._rows),
        "open steps": len(runtime.desk._open),
        "files": len(run.exchange.names()),
    }


def driven(run: FakeRun) -> Auditor:
    """The run, driven to its end with everybody watching."""
    state = run.open()
    auditor = Auditor(state)
    recorder = Recorder(state)
    run.runtime.begin()
    drive(state, run.runtime, (recorder, auditor))
    return auditor


def assert_every_group_was_trained_once(run: FakeRun) -> None:
    recipe = run.runtime.recipe
    samples = tuple(range(recipe.batch.samples_per_prompt))
    whole = [(step, (place, *samples)) for step in range(recipe.steps) for place in range(recipe.batch.prompts)]
    assert sorted(run.crew.trained) == whole


@pytest.mark.parametrize("name", CREWS)
def test_a_crew_trains_every_group_once_and_leaves_the_last_weights_alone(name: str, tmp_path: Path) -> None:
    for seed in range(10):
        root = tmp_path / str(seed)
        root.mkdir()
        run = FakeRun(root, fake_recipe(steps=4, **CREWS[name]), seed=seed)
        auditor = driven(run)
        assert_every_group_was_trained_once(run)
        assert auditor.trained_samples == 4 * 3 * 4
        assert [numbers.step for numbers in run.steps] == [0, 1, 2, 3]
        left = {name for name in run.exchange.names() if not name.startswith("prompt-")}
        assert left == ({"weights-4"} if name == "colocated" else {"weights-4", "state-4-0"})


@pytest.mark.parametrize("name", [name for name in CREWS if name != "colocated"])
def test_workers_may_be_lost_at_any_moment_of_a_run(name: str, tmp_path: Path) -> None:
    for seed in range(40):
        root = tmp_path / str(seed)
        root.mkdir()
        recipe = fake_recipe(**{**CREWS[name], "lanes": {**CREWS[name].get("lanes", {}), "restarts": 9}})
        run = FakeRun(root, recipe, seed=seed, kills=6, prompts=5 + seed)
        driven(run)
        assert_every_group_was_trained_once(run)
        assert not any(name.startswith("slice-") for name in run.exchange.names())


def test_failed_slices_and_scores_are_made_again_or_replaced(tmp_path: Path) -> None:
    for seed in range(20):
        root = tmp_path / str(seed)
        root.mkdir()
        bad_prompts: set[str] = {"prompt 1"} if seed % 2 else set()
        failed_epochs: set[int] = set()

        def fails(order: Order, bad: set[str] = bad_prompts, failed: set[int] = failed_epochs) -> str | None:
            if isinstance(order, MakeSlice) and order.lease.epoch % 7 == 0 and order.lease.epoch not in failed:
                failed.add(order.lease.epoch)
                return "no memory"
            if isinstance(order, ScoreSamples) and order.prompt.text in bad:
                return "cannot be scored"
            return None

        run = FakeRun(root, fake_recipe(techniques={"tcss": 0.5}), seed=seed, fails=fails, prompts=5 + seed // 4)
        auditor = driven(run)
        assert_every_group_was_trained_once(run)
        assert bool(auditor.quarantined_groups) == bool(bad_prompts)
        while any(run.crew.workers[name].orders for name in run.crew.workers):
            run.runtime.receive()  # what was still under way for groups in quarantine
        assert not any(name.startswith("slice-") for name in run.exchange.names())
        assert size_of(run)["groups"] == 0


def test_a_reward_that_always_fails_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    fails = lambda order: "out of order" if isinstance(order, ScoreSamples) else None  # noqa: E731
    with pytest.raises(RunGaveUpError, match="groups of step 0 failed: out of order"):
        driven(FakeRun(tmp_path, fake_recipe(), fails=fails))


def test_a_runtime_does_not_grow(tmp_path: Path) -> None:
    sizes: list[dict[str, int]] = []
    recipe = fake_recipe(steps=40, techniques={"tcss": 0.5})
    run = FakeRun(tmp_path, recipe, prompts=200, kept_rows=8)
    state = run.open()
    run.runtime._on_step = lambda numbers: sizes.append(size_of(run))  # type: ignore[method-assign]
    run.runtime.begin()
    drive(state, run.runtime, ())
    for what in sizes[0]:
        early, late = (max(size[what] for size in part) for part in (sizes[2:20], sizes[20:]))
        assert late < early + 10, f"{what}: from {early} to {late} in 20 steps"
    assert max(size["files"] for size in sizes) < 60


# --- One moment at a time ----------------------------------------------------------------------------------------


def opened(tmp_path: Path, **changes: Any) -> FakeRun:
    run = FakeRun(tmp_path, fake_recipe(**changes), prompts=20)
    run.open()
    run.runtime.begin()
    assert run.runtime.next_event()  # the first tick
    return run


def lease(lane: int, epoch: int = 0, group: int = 0, version: int = 0) -> Lease:
    return Lease(Slice(0, group, 0, 2), lane, epoch, version, started_ns=0)


def test_a_worker_lost_while_it_starts_is_started_again(tmp_path: Path) -> None:
    for name in ("generator-0", "reward-0", "encoder"):
        root = tmp_path / name
        root.mkdir()
        run = FakeRun(root, fake_recipe())
        for assignment in run.runtime.crew.initial():
            run.runtime._staff.seek(assignment.name)
        run.runtime._staff.fill()
        run.crew.kill(name)
        while list(run.runtime._post.orders()):
            run.runtime.receive()
        assert name in run.crew.workers
        assert not run.runtime._events, "the scheduler has not begun: no lane of its is lost"


def test_a_generator_lost_before_the_run_begins_is_replaced_with_the_weights_of_the_others(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, fake_recipe())
    run.crew._batch = 3  # as in a run that goes on
    state = run.open()
    run.crew.kill("generator-1")
    while "generator-1" not in run.crew.workers or run.crew.workers["generator-1"].orders:
        run.runtime.receive()
    assert run.crew.workers["generator-1"].version == 3
    assert len(state.lanes) == len(run.runtime.lane_names()) == 3
    assert not run.runtime._events


def test_a_generator_lost_twice_in_a_row_still_joins(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.crew.kill("generator-0")
    run.runtime.receive()
    run.crew.kill("generator-0")  # while it starts
    run.runtime.receive()
    run.crew.answer("generator-0")
    run.runtime.receive()
    events = list(run.runtime._events)
    assert [type(event) for event in events] == [WorkerLost, WorkerJoined]
    assert run.runtime.lane_names()[-1] == "generator-0 (2)"
    assert run.runtime.lane_devices["generator-0 (2)"] == "cpu"


def test_a_lost_lane_is_given_nothing_before_the_scheduler_hears_of_it(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.crew.kill("generator-0")
    run.runtime.receive()
    before = run.crew.orders_of("generator-0")
    run.runtime.submit(Generate(lease(lane=0)))
    run.runtime.submit(Publish(0, (0,)))
    assert run.crew.orders_of("generator-0") == before == [Order]


def test_a_slice_that_waits_for_its_prompt_goes_with_its_lost_lane(tmp_path: Path) -> None:
    run = opened(tmp_path)
    run.runtime.submit(Generate(lease(lane=0, group=3)))  # a replacement, whose prompt nobody encoded yet
    assert run.crew.orders_of("encoder") == [EncodePrompts]
    run.crew.kill("generator-0")
    run.runtime.receive()
    run.crew.answer("encoder")
    run.runtime.receive()
    assert MakeSlice not in run.crew.orders_of("generator-0")


def test_what_a_lost_reward_worker_held_is_scored_again(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, fake_recipe())
    state = run.open()
    run.runtime.begin()

    class LoseOnce:
        lost = False

        def observe(self, event: Any, actions: Any, state: Any) -> None:
            if not self.lost and ScoreSamples in run.crew.orders_of("reward-0"):
                self.lost = True
                run.crew.kill("reward-0")

    losing = LoseOnce()
    drive(state, run.runtime, (losing, Auditor(state)))
    assert losing.lost
    assert_every_group_was_trained_once(run)


def test_a_worker_that_is_lost_too_often_ends_the_run(tmp_path: Path) -> None:
    run = opened(tmp_path, lanes={"restarts": 1})
    run.crew.kill("reward-0")
    run.runtime.receive()
    run.crew.kill("reward-0")
    with pytest.raises(WorkerFailedError, match=r"reward-0 ended by signal 9 \(SIGKILL\), after 1 restart"):
        run.runtime.receive()


def test_a_trainer_whose_state_is_not_kept_cannot_be_replaced(tmp_path: Path) -> None:
    run = opened(tmp_path, checkpoint={"in_memory": False})
    run.crew.kill(TRAINER)
    with pytest.raises(TrainerLostError, match="trainer ended by signal 9"):
        run.runtime.receive()


@pytest.mark.parametrize("name", [name for name in CREWS if name != "colocated"])
def test_trainers_and_machines_may_be_lost_at_any_moment_of_a_run(name: str, tmp_path: Path) -> None:
    for seed in range(60):
        root = tmp_path / str(seed)
        root.mkdir()
        recipe = fake_recipe(**{**CREWS[name], "lanes": {**CREWS[name].get("lanes", {}), "restarts": 99}})
        run = FakeRun(root, recipe, seed=seed, kills=8, prompts=5 + seed, mortal_trainer=True, vanishing=6)
        auditor = driven(run)
        assert_every_group_was_trained_once(run)
        assert auditor.trained_samples == recipe.steps * 3 * 4
        assert [numbers.step for numbers in run.steps] == list(range(recipe.steps))


def test_a_trainer_goes_on_from_the_last_commit_with_the_groups_of_the_open_gradient(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, fake_recipe(techniques={"tag": "none"}))
    state = run.open()
    run.runtime.begin()

    class LoseOnce:
        before: list[Any] | None = None

        def observe(self, event: Any, actions: Any, state: Any) -> None:
            if self.before is None and state.committed == 1 and len(run.crew.trained) == 5:
                self.before = list(run.crew.trained)
                run.crew.kill(TRAINER)

    losing = LoseOnce()
    drive(state, run.runtime, (losing, Auditor(state)))
    assert losing.before is not None
    assert run.crew.trained[:5] == losing.before, "trained again in the same order"
    assert_every_group_was_trained_once(run)


# --- Lanes that join and leave -----------------------------------------------------------------------------------


def test_a_lane_joins_when_there_is_room_and_only_then(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, fake_recipe(steps=6), reserve=2)
    run.crew.no_room_for = {"generator-2", "generator-3"}
    state = run.open()
    run.runtime.begin()

    class MakeRoom:
        def observe(self, event: Any, actions: Any, state: Any) -> None:
            if state.committed == 2:
                run.crew.no_room_for = {"generator-3"}
            run.runtime._staff._looked_s = 0.0  # a second has passed

    auditor = Auditor(state)
    drive(state, run.runtime, (MakeRoom(), auditor))
    assert "generator-2" in run.runtime.lane_names() and "generator-3" not in run.crew.workers
    made = {
        order.lease.slice.step
        for name, order in run.crew.log
        if name == "generator-2" and type(order) is MakeSlice
    }
    assert made and min(made) >= 2
    assert_every_group_was_trained_once(run)


@pytest.mark.parametrize("rewards", [0, 2])
def test_lanes_of_a_pool_take_several_slices_at_once_and_lose_none(rewards: int, tmp_path: Path) -> None:
    pools = {"generators": [{"name": "big", "slice": 4}, {"name": "small"}]}
    sizes: set[tuple[str, int]] = set()
    for seed in range(20):
        root = tmp_path / str(seed)
        root.mkdir()
        lanes = {"rewards": rewards, "restarts": 99}
        recipe = fake_recipe(cluster=pools, lanes=lanes, techniques={"tcss": 0.5 * (seed % 2)})
        run = FakeRun(root, recipe, seed=seed, kills=4, vanishing=2, mortal_trainer=True, pools=("big", "small"))
        driven(run)
        assert_every_group_was_trained_once(run)
        leased = [(name, order.lease) for name, order in run.crew.log if isinstance(order, MakeSlice)]
        sizes |= {(name, lease.slice.size) for name, lease in leased if lease.lane >= 0}
    assert ("generator-0", 4) in sizes and ("generator-1", 4) not in sizes


def test_a_run_goes_on_without_lanes_whose_machine_is_gone(tmp_path: Path) -> None:
    for seed in range(20):
        root = tmp_path / str(seed)
        root.mkdir()
        run = FakeRun(root, fake_recipe(), seed=seed)
        state = run.open()
        evaluated = Evaluated(run)
        run.runtime.begin()

        class LoseMachine:
            lost = False

            def observe(
                self, event: Any, actions: Any, state: Any, run: FakeRun = run, evaluated: Any = evaluated
            ) -> None:
                if not self.lost and state.committed == 1:
                    self.lost = True
                    evaluated.evaluator.start(state.committed, tmp_path / "pictures")
                    run.crew.no_room_for = {"generator-0"}
                    run.crew.kill("generator-0")
                    run.crew.vanish(*(name for name in run.exchange.names() if "slice" in name or "held" in name))

        drive(state, run.runtime, (LoseMachine(), Auditor(state)))
        evaluated.evaluator.finish()
        assert len(evaluated.done) == 1 and not evaluated.failed
        assert "generator-0" not in run.crew.workers
        assert_every_group_was_trained_once(run)


def test_losses_that_are_not_a_workers_fault_do_not_count(tmp_path: Path) -> None:
    run = opened(tmp_path, lanes={"restarts": 0})
    for _ in range(3):
        del run.crew.workers["generator-0"]
        run.crew._waiting.append(Message("generator-0", None, Gone("lost its machine", fault=False)))
        run.runtime.receive()
        run.crew.answer("generator-0")
        run.runtime.receive()
    run.crew.kill("generator-0")
    with pytest.raises(WorkerFailedError, match=r"generator-0 ended by signal 9 \(SIGKILL\); see"):
        run.runtime.receive()


def test_a_trainer_that_finds_no_room_is_told_about_and_waited_for(tmp_path: Path) -> None:
    run = opened(tmp_path)
    said: list[str] = []
    run.runtime._staff._say = said.append  # type: ignore[method-assign]
    run.crew.no_room_for = {TRAINER}
    run.crew.kill(TRAINER)
    run.runtime.receive()
    run.runtime._staff.fill()
    lost = "trainer ended by signal 9 (SIGKILL); another takes its place"
    assert said == [lost, "waiting for room for trainer"]
    run.crew.no_room_for = set()
    run.runtime._staff.fill()
    assert TRAINER in run.crew.workers
    run.crew.answer(TRAINER)
    run.runtime.receive()
    assert said[2:] == [""], "nothing is wrong any more"


def test_a_users_mistake_is_told_as_one_and_anything_else_with_its_details(tmp_path: Path) -> None:
    run = opened(tmp_path)
    order = SaveCheckpoint("run", 0, {}, keep=1)
    run.runtime.send(TRAINER, order, lambda answered: None)
    run.crew._waiting.append(_answer_to_last(run, OrderFailed(order, "the disk is full", mistake=True)))
    with pytest.raises(ConfigError, match=r"^the disk is full$"):
        run.runtime.receive()
    run.runtime.send(TRAINER, order, lambda answered: None)
    run.crew._waiting.append(_answer_to_last(run, OrderFailed(order, "KeyError: 'x'", details="Traceback ...")))
    with pytest.raises(WorkerFailedError, match=r"trainer could not go on: KeyError: 'x'\nTraceback"):
        run.runtime.receive()


def _answer_to_last(run: FakeRun, report: OrderFailed) -> Message:
    return Message(TRAINER, next(reversed(run.crew.workers[TRAINER].orders)), report)


def test_a_batch_is_trained_group_by_group_so_that_saving_waits_for_one_at_most(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, fake_recipe(techniques={"gap": False, "tag": "none"}, steps=2))
    state = run.open()
    run.runtime.begin()
    drive(state, run.runtime, ())
    assert all(len(order.groups) == 1 for _, order in run.crew.log if isinstance(order, LearnGroups))


def test_an_optimizer_step_is_under_way_until_the_loop_hears_of_it(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, fake_recipe(steps=1))
    state = run.open()
    run.runtime.begin()
    seen: list[bool] = []

    class Watch:
        def observe(self, event: Any, actions: Any, state: Any) -> None:
            seen.append(run.runtime.committing)

    drive(state, run.runtime, (Watch(),))
    assert not any(seen[:-1])
    # Between the order and its event nobody may save: asked where a run looks around.
    run = FakeRun(tmp_path, fake_recipe(steps=1))
    state = run.open()
    run.runtime.begin()
    during: list[bool] = []

    def look_around() -> None:
        taking = TakeStep in run.crew.orders_of(TRAINER)
        assert run.runtime.committing or not taking
        during.append(taking)

    run.runtime._look_around = look_around  # type: ignore[method-assign]
    drive(state, run.runtime, ())
    assert any(during)


# --- Evaluation --------------------------------------------------------------------------------------------------


class Evaluated:
    """An evaluator over seven prompts in chunks of two, and what came of it."""

    def __init__(self, run: FakeRun) -> None:
        self.done: list[Evaluation] = []
        self.failed: list[tuple[int, str, str]] = []
        self.busy: list[str] = []
        self.evaluator = Evaluator(
            run.runtime,
            [as_encoded(Prompt(index, f"held out {index}"), "held-out-prompt") for index in range(7)],
            chunk=2,
            shown=3,
            on_done=self.done.append,
            on_failed=lambda version, worker, report: self.failed.append((version, worker, report.reason)),
            on_busy=lambda busy: self.busy.append(run.runtime.lane_of(busy.worker)),
        )
        self.evaluator.prepare()


def test_an_evaluation_is_spread_over_the_generators_and_put_together_in_order(tmp_path: Path) -> None:
    for seed in range(5):
        run = opened(tmp_path)
        run.crew._dice.seed(seed)
        evaluated = Evaluated(run)
        evaluated.evaluator.start(0, tmp_path / "pictures")
        evaluated.evaluator.finish()
        (evaluation,) = evaluated.done
        assert [score.prompt for score in evaluation.scores] == [f"held out {index}" for index in range(7)]
        assert [score.reward for score in evaluation.scores] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        assert evaluation.scores[5].parts == {"size": 5.0}
        assert {"generator-0", "generator-1", "reward-0"} == set(evaluated.busy)
        assert not any(name.startswith("held-out-0") for name in run.exchange.names())


def test_a_run_evaluates_the_version_it_says_whoever_is_lost_meanwhile(tmp_path: Path) -> None:
    for seed in range(12):
        for name, changes in CREWS.items():
            root = tmp_path / f"{name} {seed}"
            root.mkdir()
            lanes = {**changes.get("lanes", {}), "restarts": 9}
            kills = 0 if name == "colocated" else 5
            run = FakeRun(root, fake_recipe(steps=3, **{**changes, "lanes": lanes}), seed=seed, kills=kills)
            state = run.open()
            recorder = Recorder(state, sink=lambda span: None)
            evaluated = Evaluated(run)

            class Due:
                def observe(self, event: Any, actions: Any, state: Any, evaluated: Any = evaluated) -> None:
                    if type(event).__name__ == "Committed":
                        evaluated.evaluator.start(state.committed, tmp_path / "pictures")

            evaluated.evaluator.start(0, tmp_path / "pictures")
            evaluated.evaluator.finish()
            run.runtime.begin()
            drive(state, run.runtime, (recorder, Auditor(state), Due()))
            evaluated.evaluator.finish()
            assert sorted(evaluation.version for evaluation in evaluated.done) == [0, 1, 2, 3]
            assert not evaluated.failed
            assert not any(name.startswith("held-out-") and "prompt" not in name for name in run.exchange.names())


def test_rows_of_evaluations_are_known_to_the_recorder_before_they_are_used(tmp_path: Path) -> None:
    run = opened(tmp_path)
    evaluated = Evaluated(run)
    evaluated.evaluator.start(0, tmp_path / "pictures")
    run.crew.kill("generator-0")
    run.runtime.receive()
    run.crew.answer("generator-0", count=2)  # it is ready, and has evaluated: reported in one go
    run.runtime.receive()
    assert evaluated.busy == ["generator-0"], "the loop has not heard of the new lane"
    while run.runtime._events:
        run.runtime.next_event()
    evaluated.evaluator.finish()
    assert "generator-0 (2)" in evaluated.busy


def test_an_evaluation_that_fails_is_told_once_and_leaves_nothing(tmp_path: Path) -> None:
    run = FakeRun(
        tmp_path, fake_recipe(), fails=lambda order: "broken" if isinstance(order, ScoreEvaluation) else None
    )
    run.open()
    run.runtime.begin()
    evaluated = Evaluated(run)
    evaluated.evaluator.start(0, tmp_path / "pictures")
    evaluated.evaluator.finish()
    assert evaluated.failed == [(0, "reward-0", "broken")]
    assert not evaluated.done
    assert not evaluated.evaluator.busy
    assert not any(name.startswith("held-out-0") for name in run.exchange.names())


def test_old_weights_stay_while_somebody_is_about_to_load_them(tmp_path: Path) -> None:
    run = opened(tmp_path)
    evaluated = Evaluated(run)
    evaluated.evaluator.start(0, tmp_path / "pictures")
    run.crew._batch = 1
    run.runtime.take_weights(1, run.crew._laid_out())
    assert {"weights-0", "weights-1"} <= set(run.exchange.names())
    evaluated.evaluator.finish()
    run.crew._batch = 2
    run.runtime.take_weights(2, run.crew._laid_out())
    assert [name for name in run.exchange.names() if name.startswith("weights")] == ["weights-2"]
    assert not any(isinstance(order, LoadWeights) for _, order in run.crew.log[-3:])
