"""The weights are bitwise equal, whichever worker does which job and when."""

from __future__ import annotations

import json

import pytest
from live_runs import NAIVE, LiveRuns, lines_of, metric, trained
from replaying import initial_state_of, replayed
from rounding import ROUNDS_ALIKE

from digenrl.records import Generate
from digenrl.run_folder.journal import read_journal

PIPELINED = ("techniques.tag=auto",)
COLOCATED = ("mode=colocated",)
WAYS = {
    "naive": NAIVE,
    "pipelined": PIPELINED,
    "two generators that score": ("lanes.generators=[cpu,cpu]", "techniques.tag=none", "lanes.rewards=0"),
}
TASKS = {
    "flow_grpo, all weights": ("training.lora=null", "algorithm.options.kl_weight=0.01"),
    "diffusion_nft": ("algorithm={name: diffusion_nft, options: {}}",),
    "flow_grpo, quantized base": ("model.base=nf4",),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_weights_do_not_depend_on_who_does_what(way: str, live: LiveRuns) -> None:
    assert trained(live.finished(*WAYS[way]), 3) == trained(live.finished(*COLOCATED), 3)


@pytest.mark.parametrize("task", TASKS)
def test_the_weights_do_not_depend_on_the_schedule_whatever_is_trained(task: str, live: LiveRuns) -> None:
    pipelined, colocated = live.finished(*TASKS[task], *PIPELINED), live.finished(*TASKS[task], *COLOCATED)
    assert trained(pipelined, 3) == trained(colocated, 3)


def test_samples_of_another_precision_are_weighed(live: LiveRuns) -> None:
    weighed = "algorithm.options={stale: decoupled, weighted: all, stale_weight_cap: 1.5}"
    recomputed = "training.old_log_probs=recomputed"
    run = live.finished("sample.precision=fp8", weighed, recomputed, "techniques.tag=none", "steps=1")
    assert all(mismatch > 1e-6 for mismatch in metric(run, "log_prob_mismatch")), "the generator rounds to fp8"
    assert metric(run, "ratio_max") == [1.0], "the ratio is to the trainer's own policy"
    assert all(0 < weight <= 1.5 and weight != 1 for weight in metric(run, "stale_weight"))
    assert all(0 <= share <= 1 for share in metric(run, "stale_weight_capped"))


def test_different_tasks_give_different_weights(live: LiveRuns) -> None:
    runs = [live.finished(*COLOCATED), *(live.finished(*task, *COLOCATED) for task in TASKS.values())]
    weights = [trained(run, 3)["weights.safetensors"] for run in runs]
    assert len(set(weights)) == len(weights)


def test_stale_samples_are_at_most_the_share_and_one_version_old(live: LiveRuns) -> None:
    share = 0.5
    run = live.finished(f"techniques.tcss={share}", "steps=5", "lanes.generators=[cpu,cpu]")
    shares = metric(run, "stale_share")
    assert max(shares) <= share
    assert any(shares), "nothing was stale: the run shows nothing"
    assert shares[0] == 0
    actions = [action for decision in read_journal(run.journal) for action in decision.actions]
    jobs = [action for action in actions if isinstance(action, Generate)]
    assert all(job.slice.step - 1 <= job.version <= job.slice.step for job in jobs)
    assert len({job.id for job in jobs}) == len(jobs)


def test_replaying_a_journal_gives_the_same_decisions(live: LiveRuns) -> None:
    for run in (
        live.finished(*PIPELINED),
        live.finished(*COLOCATED),
        live.finished(*WAYS["two generators that score"]),
    ):
        initial = initial_state_of(json.loads(run.run.read_text())["initial_state"])
        for recorded, decided in replayed(initial, run.journal):
            assert recorded.actions == decided.actions


def test_metrics_have_every_step_once_and_spans_name_known_lanes(live: LiveRuns) -> None:
    run = live.finished(*PIPELINED)
    assert metric(run, "step") == [0, 1, 2]
    assert metric(run, "version") == [1, 2, 3]
    rounding = 0 if ROUNDS_ALIKE else 1e-6
    assert all(mismatch <= rounding for mismatch in metric(run, "log_prob_mismatch")), (
        "generated as it is replayed"
    )
    lanes = {lane.name for lane in run.info.lanes}
    spans = lines_of(run.spans)
    assert {span["lane"] for span in spans} <= lanes
    assert {"generate", "score", "train", "commit"} <= {span["work"] for span in spans}
    made = [span for span in spans if span["work"] in ("generate", "help")]
    assert sum(span["size"] for span in made) == 3 * 2 * 4
