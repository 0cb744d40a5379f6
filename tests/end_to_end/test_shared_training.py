"""If every lane generates and trains, the weights equal those of one card, even if workers are killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Container
from dataclasses import replace
from pathlib import Path

import pytest
from live_runs import (
    Gates,
    LiveRuns,
    Meanwhile,
    assert_nothing_is_left,
    lines_of,
    metric,
    prompts_of_step,
    steps_done,
    trained,
    wait_for,
    workers_of,
)
from replaying import initial_state_of, replayed

from digenrl.config.reading import ConfigError
from digenrl.driver.calibration import InitialWeights
from digenrl.driver.dispatcher import Dispatcher
from digenrl.records import (
    NO_LANE,
    Committed,
    GradientsSent,
    SendGradients,
    Train,
    Trained,
    UpdateTaken,
    WorkerLost,
)
from digenrl.run_folder.folder import RunFolder, Status
from digenrl.run_folder.journal import read_journal
from digenrl.run_folder.reading import read_run
from digenrl.runs import training

JOBS = "training.job_samples=2"
ONE_CARD = ("mode=colocated", JOBS)
BOTH = ("techniques.assist=both", JOBS)
PLANNED = (*BOTH, "techniques.tag=search")  # who does what is planned
GREEDY = ("techniques.tag=greedy",)  # idle lanes take any available work, so that all of them train
FOUR_CARDS = (*BOTH, *GREEDY, "lanes.generators=[cpu,cpu,cpu]", "lanes.rewards=0")
TASKS = {
    "one update": ("algorithm.options={updates_per_batch: 1, kl_weight: 0.01, advantage: {clamp: 0.5}}",),
    "two updates of samples": (
        "algorithm.options={updates_per_batch: 2, updates_of: samples, advantage: {clamp: 0.5}}",
        "training.old_log_probs=recomputed",
    ),
    "two updates of groups": ("algorithm={name: dance_grpo, options: {updates_per_batch: 2}}",),
}


def train_jobs(run: RunFolder) -> list[Train]:
    actions = (action for decision in read_journal(run.journal) for action in decision.actions)
    return [action for action in actions if isinstance(action, Train)]


def held_samples(run: Path, lanes: Container[int], update: int) -> int:
    """The samples of an update whose gradients these lanes hold and have not sent."""
    held = 0
    for decision in read_journal(run / "journal.jsonl"):
        event = decision.event
        if isinstance(event, Committed | UpdateTaken) or (
            isinstance(event, GradientsSent) and event.job.lane in lanes
        ):
            held = 0
        elif isinstance(event, Trained) and event.job.lane in lanes and event.job.update == update:
            held += event.job.slice.size
        if any(isinstance(action, SendGradients) and action.lane in lanes for action in decision.actions):
            held = 0
    return held


def kill_with_gradients(run: Path, worker: str, lanes: Container[int], update: int, gates: Gates) -> None:
    """Kills the worker when gradients are held of a step whose last group cannot be scored yet."""
    wait_for(lambda: steps_done(run) >= 1 and held_samples(run, lanes, update), "gradients")
    os.kill(workers_of(run)[worker], signal.SIGKILL)
    lost = wait_for(
        lambda: [each.event for each in read_journal(run / "journal.jsonl") if isinstance(each.event, WorkerLost)],
        "the loss",
    )
    assert len(lost) == 1
    gates.open()


@pytest.mark.parametrize(("way", "task"), [(PLANNED, "one update"), (FOUR_CARDS, "two updates of samples")])
def test_two_and_four_cards_give_the_weights_of_one(way: tuple[str, ...], task: str, live: LiveRuns) -> None:
    run = live.finished(*way, *TASKS[task])
    assert trained(run, 3) == trained(live.finished(*ONE_CARD, *TASKS[task]), 3)
    jobs = train_jobs(run)
    assert {job.slice.size for job in jobs} == {2} and NO_LANE not in {job.lane for job in jobs}
    if way == FOUR_CARDS:
        assert len({job.lane for job in jobs}) > 1, "nothing was shared"


def test_all_weights_can_be_trained_by_every_card(live: LiveRuns) -> None:
    two, four = (live.finished(*way, "training.lora=null", "steps=2") for way in (PLANNED, FOUR_CARDS))
    assert trained(two, 2) == trained(four, 2)


def test_the_journal_of_shared_training_can_be_replayed(live: LiveRuns) -> None:
    run = live.finished(*FOUR_CARDS, *TASKS["two updates of samples"])
    initial = initial_state_of(json.loads(run.run.read_text())["initial_state"])
    for recorded, decided in replayed(initial, run.journal):
        assert recorded.actions == decided.actions
    spans = {(span["work"], span["lane"]) for span in lines_of(run.spans) if span["lane"].startswith("generator")}
    generating, training = ({lane for work, lane in spans if work == kind} for kind in ("generate", "train"))
    assert generating & training, "no generator trained"
    assert metric(run, "step") == [0, 1, 2]


@pytest.mark.parametrize(
    ("worker", "lanes", "task", "update"),
    [
        ("generator-0", [0], "one update", 0),
        # Either lane may be the first to train for the second update; the trainer alone has taken the first.
        ("trainer", [0, 1], "two updates of groups", 1),
    ],
)
def test_a_worker_killed_before_its_gradients_are_used_changes_no_bit(
    worker: str, lanes: list[int], task: str, update: int, live: LiveRuns, tmp_path: Path
) -> None:
    gates, path = Gates(tmp_path / "gates"), live.new_path()
    (live.root / "twelve.txt").write_text("".join(f"{number} cats\n" for number in range(12)))
    # A slice is a whole group, and one reward lane waits at the gate: the other scores what came later.
    scoring = ("batch.samples_per_prompt=2", "lanes.rewards=2")
    options = ("steps=2", "batch.prompts=4", f"prompts.path={live.root / 'twelve.txt'}", *scoring, *TASKS[task])
    gates.close(prompts_of_step(live, 1, 4, "twelve.txt")[-1])
    with Meanwhile(path, lambda: kill_with_gradients(path, worker, lanes, update, gates)):
        status, run = live.run(*options, *BOTH, *GREEDY, gates.rewards, out=path)
    assert status is Status.FINISHED
    assert trained(run, 2) == trained(live.finished(*options, *ONE_CARD), 2)
    assert metric(run, "step") == [0, 1]
    pieces = [job.slice for job in train_jobs(run)]
    assert len(pieces) > len(set(pieces)), "what was lost is trained again"
    assert_nothing_is_left(path)


def test_several_cards_in_mode_colocated_are_lanes_that_do_everything(live: LiveRuns) -> None:
    run = live.finished("mode=colocated", "lanes.cards=2", JOBS, "lanes.generators=[cpu]")
    assert run.recipe.mode == "local" and run.recipe.techniques.assist == "both" and run.recipe.lanes.rewards == 0
    assert trained(run, 3) == trained(live.finished(*ONE_CARD), 3)


def test_a_run_of_one_card_goes_on_with_two(live: LiveRuns) -> None:
    """Also if the published versions follow the trained weights slowly: generators then get both."""
    options = (
        *ONE_CARD,
        "algorithm={name: diffusion_nft, options: {updates_per_batch: 2, old_decay_growth: 0.1}}",
    )
    path = live.new_path()
    live.run(*options, "steps=1", out=path)
    assert live.resume(path, "steps=3", "mode=local", *BOTH, *GREEDY) is Status.FINISHED
    run = RunFolder.open(path)
    assert trained(run, 3) == trained(live.finished(*options), 3)
    assert len({job.lane for job in train_jobs(run) if job.lane != NO_LANE}) > 1, "no generator trained"


def test_auto_does_without_shared_training_if_that_is_predicted_to_be_faster(
    live: LiveRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading weights seems to take minutes, and so does sending gradients."""
    publish = training.publish_initial_weights

    def publish_slowly(driver: Dispatcher, version: int, *, one_behind: bool) -> InitialWeights:
        return replace(publish(driver, version, one_behind=one_behind), publish_s=100.0)

    monkeypatch.setattr(training, "publish_initial_weights", publish_slowly)
    options = TASKS["two updates of groups"]
    _, run = live.run(*BOTH, *options)
    assert {job.lane for job in train_jobs(run)} == {NO_LANE}
    assert trained(run, 3) == trained(live.finished(*ONE_CARD, *options), 3)
    assert not read_run(run.path).trace.shares_work


def test_what_cannot_be_shared_is_refused(live: LiveRuns) -> None:
    for override, message in {
        "lanes.ranks=2": "both, where every card trains alone, but lanes.ranks is 2",
        "mode=colocated": "both, but mode colocated is one card",
    }.items():
        with pytest.raises(ConfigError, match=message):
            live.run(*BOTH, override)
