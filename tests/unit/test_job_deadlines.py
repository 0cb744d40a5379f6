"""Workers that hang: their jobs have deadlines, they are replaced, and what always hangs is given up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_workers import FakeRun, fake_recipe

from digenrl.driver.job_deadlines import FACTOR, UNTIMED_FACTOR, JobDeadlines
from digenrl.driver.job_inputs import prompts_of
from digenrl.driver.supervisor import WorkerFailedError
from digenrl.loop import RunGaveUpError, drive
from digenrl.records import Encode, Evaluate, Generate, Job, Publish, Score, Slice, Train, WeightsReference
from digenrl.scheduling.invariants import Auditor

PATIENCE_S = 10.0


class Seconds:
    """A clock that advances by `step_s` whenever it is read."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.now_s, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s

    def pass_by(self, deadlines: JobDeadlines, seconds: float) -> None:
        """Time passes while the driver looks every second."""
        for _ in range(round(seconds)):
            self.now_s += 1.0
            deadlines.overdue({})


def score(job_id: int = 0) -> Score:
    return Score(job_id, 0, Slice(0, 0, 0, 2), scorer=0)


def train(job_id: int = 1) -> Train:
    return Train(job_id, 0, Slice(0, 0, 0, 4))


def test_a_deadline_follows_the_longest_job_of_its_kind_but_is_never_shorter_than_the_patience() -> None:
    clock = Seconds()
    deadlines = JobDeadlines(PATIENCE_S, clock)
    assert deadlines.allowed_s(score()) == UNTIMED_FACTOR * PATIENCE_S
    deadlines.begin("reward-0")
    deadlines.finish("reward-0", score())
    assert deadlines.allowed_s(score()) == PATIENCE_S
    clock.pass_by(deadlines, 4)
    deadlines.finish("reward-0", score())
    assert deadlines.allowed_s(score()) == FACTOR * 4.0
    deadlines.finish("trainer", train())
    assert deadlines.allowed_s(train()) == FACTOR * 4.0, "it may wait for any other worker"


def test_the_first_weights_of_a_worker_may_cross_a_slow_link() -> None:
    clock = Seconds()
    deadlines = JobDeadlines(PATIENCE_S, clock, link_bytes_per_s=1e6)
    large, small = (Publish(1, 0, 1, (0,), WeightsReference("w", size, 0)) for size in (15 * 10**9, 10**6))
    for worker in ("generator-0", "generator-1"):
        deadlines.begin(worker)
    assert deadlines.allowed_s(small, "generator-0") == UNTIMED_FACTOR * PATIENCE_S
    deadlines.finish("generator-0", small)
    assert deadlines.allowed_s(large, "generator-0") == PATIENCE_S, "a patch"
    clock.pass_by(deadlines, 10_000)
    assert deadlines.overdue({"generator-1": [large]}) is None
    clock.pass_by(deadlines, 5_001)
    assert deadlines.overdue({"generator-1": [large]}) is not None
    deadlines.forget("generator-0")
    assert deadlines.allowed_s(large, "generator-0") == 15_000, "its replacement has no weights"


@pytest.mark.parametrize(
    ("rewards", "limit_s"),
    [
        ("jpeg_compressibility", 0),
        ([{"name": "a:b", "isolated": True, "timeout_s": 600}], 600),
        ([{"name": "http", "url": "http://x", "timeout_s": 50, "retries": 2, "max_backoff_s": 5}, "a:b"], 160),
    ],
)
def test_a_job_that_scores_may_take_as_long_as_its_rewards_may_wait(rewards: Any, limit_s: float) -> None:
    deadlines = JobDeadlines(PATIENCE_S, Seconds(), fake_recipe(rewards=rewards).scoring_limit_s)
    for job in (score(), train()):
        deadlines.begin("worker")
        deadlines.finish("worker", job)
    assert deadlines.allowed_s(score()) == PATIENCE_S + limit_s
    assert deadlines.allowed_s(train()) == PATIENCE_S


def test_a_worker_is_overdue_without_any_result_in_time_and_only_while_it_has_a_job() -> None:
    clock = Seconds()
    deadlines = JobDeadlines(PATIENCE_S, clock)
    deadlines.begin("trainer")
    deadlines.finish("trainer", train())
    clock.pass_by(deadlines, PATIENCE_S + 1)
    assert deadlines.overdue({"trainer": [], "reward-0": [score()]}) is None, "reward-0 is still loading"
    overdue = deadlines.overdue({"trainer": [], "trainer/1": [train(7)]})
    assert overdue is not None and (overdue.worker, overdue.job) == ("trainer", train(7))
    deadlines.finish("trainer/0", train())
    assert deadlines.overdue({"trainer/1": [train(7)]}) is None, "another rank has made progress"
    clock.pass_by(deadlines, PATIENCE_S + 1)
    deadlines.begin("reward-0")
    deadlines.forget("reward-0")
    assert deadlines.overdue({"trainer": [train(7)]}) is None, "it may have waited for the lost worker"


def test_frequent_losses_of_other_workers_do_not_hide_a_job_that_hangs() -> None:
    clock = Seconds()
    deadlines = JobDeadlines(PATIENCE_S, clock)
    for job in (score(), train()):
        deadlines.begin("worker")
        deadlines.finish("worker", job)
    overdue = []
    for _ in range(2):
        clock.pass_by(deadlines, PATIENCE_S - 1)
        deadlines.forget("generator-0")
        overdue += [deadlines.overdue({"worker": [train(7)]}), deadlines.overdue({"worker": [score(7)]})]
    *early, hanging = overdue
    assert early == [None] * 3, "a job that may wait for others gets its whole time again"
    assert hanging is not None and hanging.job == score(7)


def test_a_pause_of_the_driver_makes_no_worker_overdue() -> None:
    for patience_s in (PATIENCE_S, 1.0):
        clock = Seconds()
        deadlines = JobDeadlines(patience_s, clock)
        deadlines.begin("reward-0")
        deadlines.finish("reward-0", score())
        clock.now_s += 1000.0
        assert deadlines.overdue({"reward-0": [score()]}) is None


def hanging_run(tmp_path: Path, hangs: Any, **changes: Any) -> FakeRun:
    hooks = {"monotonic": Seconds(0.2)}
    lanes = {"patience_s": PATIENCE_S, **changes.pop("lanes", {})}
    return FakeRun(tmp_path, fake_recipe(lanes=lanes, **changes), hooks=hooks, hangs=hangs, prompts=7, held_out=4)


def driven(run: FakeRun, **initial: Any) -> Auditor:
    state = run.prepare(**initial)
    auditor = Auditor(state)
    run.driver.begin()
    drive(state, run.driver, (auditor,))
    return auditor


def test_a_worker_that_never_gets_ready_is_replaced_after_a_notice_each_minute(tmp_path: Path) -> None:
    def pass_a_second() -> None:
        clock.now_s += 1.0
        if any("was not ready" in message for message in run.messages):
            run.transport.loads_forever.clear()

    clock, limit_s = Seconds(), UNTIMED_FACTOR * PATIENCE_S
    hooks = {"monotonic": clock, "poll": pass_a_second}
    run = FakeRun(tmp_path, fake_recipe(lanes={"patience_s": PATIENCE_S}), hooks=hooks)
    run.transport.loads_forever.add("reward-0")
    run.driver.start_workers()
    notices = [message for message in run.messages if "reward-0 has been loading" in message]
    assert len(notices) == limit_s // 60
    assert clock.now_s > limit_s and "reward-0" in run.transport.workers


def texts_of(job: Job) -> set[str]:
    return {prompt.text for prompt in (job.prompts if isinstance(job, Score) else prompts_of(job))}


@pytest.mark.parametrize("kind", [Generate, Score])
def test_a_prompt_on_which_workers_hang_is_quarantined(kind: type[Job], tmp_path: Path) -> None:
    run = hanging_run(tmp_path, lambda job: isinstance(job, kind) and "prompt 1" in texts_of(job))
    auditor = driven(run)
    assert auditor.quarantined_groups
    assert len(run.transport.trained) == 3 * 3
    lost = [message for message in run.messages if "starting a replacement" in message]
    assert lost and all(f"did not finish {kind.__name__}#" in message for message in lost)


def test_a_job_that_hangs_once_is_repeated_without_quarantine(tmp_path: Path) -> None:
    seen: set[int] = set()

    def hangs(job: Job) -> bool:
        if isinstance(job, Score | Encode) and (not seen or job.id in seen) and job.id > 0:
            seen.add(job.id)
        return job.id in seen

    run = hanging_run(tmp_path, hangs)
    auditor = driven(run)
    assert seen and not auditor.quarantined_groups and len(run.transport.trained) == 3 * 3


def test_a_reward_that_always_hangs_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(RunGaveUpError, match=r"5 groups in a row .* did not finish Score"):
        driven(hanging_run(tmp_path, lambda job: isinstance(job, Score)))


def test_a_trainer_that_always_hangs_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailedError, match=r"trainer did not finish Train.* after 2 restarts"):
        driven(hanging_run(tmp_path, lambda job: isinstance(job, Train), lanes={"restarts": 2}))


def test_an_evaluation_that_hangs_is_abandoned(tmp_path: Path) -> None:
    evaluation = {"prompts": {"path": "held_out.txt"}, "every": 1, "batch": 1}
    run = hanging_run(tmp_path, lambda job: isinstance(job, Evaluate), evaluation=evaluation)
    driven(run, evaluations=[0])
    assert len(run.transport.trained) == 3 * 3


def test_failures_are_reported_at_once_and_the_same_error_five_times_ends_the_run(tmp_path: Path) -> None:
    quoted = ("a cat", "two dogs", "nothing at all")

    def fails(job: Job) -> str | None:
        sample = f"sample {job.id} is '{quoted[job.id % 3]}' at {0x7F5 + 11 * job.id:#x}"
        return f"{sample} and broken" if isinstance(job, Score) else None

    run = FakeRun(tmp_path, fake_recipe(), fails=fails)
    with pytest.raises(RunGaveUpError, match=r"5 groups in a row .*: sample \d+ is '.*' at 0x\w+ and broken"):
        driven(run)
    told = [message for message in run.messages if "so far" in message]
    assert "(1 so far)" in told[0] and "and broken" in told[0]
