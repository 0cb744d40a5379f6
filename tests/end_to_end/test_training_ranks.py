"""A trainer with two ranks gives the weights of one rank, and the run survives the loss of each rank."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from live_runs import (
    SPARE_REWARDS,
    Gates,
    LiveRuns,
    Meanwhile,
    assert_nothing_is_left,
    cut_connections,
    harm_with_open_gradient,
    kill,
    lines_of,
    metric,
    prompts_of_step,
    steps_done,
    wait_for,
    weights,
    workers_of,
)
from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.run_folder.folder import RunFolder, Status

# The learning rate bounds the effect of Adam on gradients that consist of rounding errors.
ADAPTERS = ("training.learning_rate=3e-5",)
EVERYTHING = (*ADAPTERS, "training.lora=null")
KINDS = {"adapters": ADAPTERS, "all weights": EVERYTHING}
STEPS = 3
CLOSE = 3e-6  # weights of ranks that add up gradients in another order
MORE_STEPS = STEPS + 2
EVALUATION = "evaluation={prompts: {name: scenes}, count: 3, every: 2, denoising_steps: 2, shown: 2, batch: 3}"
TWO_BASES = ("model.base=int8", "evaluation.base=unquantized")
TWO_RANKS = (f"steps={STEPS}", "lanes.ranks=2")
RANKS = {"adapters": (*ADAPTERS, *TWO_RANKS, "techniques.tag=greedy"), "all weights": (*EVERYTHING, *TWO_RANKS)}


def of_one_rank(live: LiveRuns, kind: str) -> RunFolder:
    """A run with a checkpoint of every step."""
    every_step = ("checkpoint.every=1", f"checkpoint.keep={MORE_STEPS}")
    return live.finished(*KINDS[kind], "mode=colocated", f"steps={MORE_STEPS}", *every_step)


def furthest(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def run_losing_a_rank(
    live: LiveRuns, gates: Gates, *overrides: str, harm: Callable[[int], None] = kill
) -> RunFolder:
    """A run whose second trainer process is killed or harmed when it has trained some of the second step."""
    path = live.new_path()
    gates.close(prompts_of_step(live, 1)[1])
    with Meanwhile(path, lambda: harm_with_open_gradient(path, "trainer-1", gates, harm)):
        status, run = live.run(*overrides, gates.rewards, SPARE_REWARDS, out=path)
    assert status is Status.FINISHED
    assert_nothing_is_left(path)
    return run


@pytest.fixture
def gates(tmp_path: Path) -> Gates:
    return Gates(tmp_path / "gates")


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_give_the_weights_of_one(kind: str, live: LiveRuns) -> None:
    one, two = of_one_rank(live, kind), live.finished(*RANKS[kind])
    assert furthest(weights(one, STEPS), weights(two, STEPS)) < CLOSE
    assert furthest(weights(one, 1), weights(one, 3)) > 2e-5, "they have moved by more than that"
    assert metric(two, "reward_mean") == pytest.approx(metric(one, "reward_mean")[:STEPS], rel=1e-5)
    assert metric(two, "gradient_norm") == pytest.approx(metric(one, "gradient_norm")[:STEPS], rel=1e-3)


def test_ranks_of_adapters_help_to_generate_each_on_its_own(live: LiveRuns) -> None:
    run = live.finished(*RANKS["adapters"])
    assert {"helper-0", "helper-1"} <= {lane.name for lane in run.info.lanes}
    assert furthest(weights(of_one_rank(live, "adapters"), STEPS), weights(run, STEPS)) < CLOSE


def test_a_lost_rank_is_replaced_with_all_others_from_the_last_commit(live: LiveRuns, gates: Gates) -> None:
    """Of all weights; further tests lose ranks of adapters."""
    run = run_losing_a_rank(live, gates, *RANKS["all weights"])
    lost, undisturbed = weights(run, STEPS), weights(live.finished(*RANKS["all weights"]), STEPS)
    assert all(torch.equal(lost[name], undisturbed[name]) for name in undisturbed)
    assert metric(run, "step") == list(range(STEPS))


def test_ranks_that_are_alive_but_lost_their_connection_are_replaced(live: LiveRuns, gates: Gates) -> None:
    impossible: list[OSError] = []

    def cut(pid: int) -> None:
        try:
            cut_connections(pid)
        except OSError as error:
            impossible.append(error)

    run = run_losing_a_rank(live, gates, *RANKS["adapters"], harm=cut)
    if impossible:
        pytest.skip(f"connections cannot be cut here: {impossible[0]}")
    assert any(line["event"]["type"] == "WorkerLost" for line in lines_of(run.journal))
    lost, undisturbed = weights(run, STEPS), weights(live.finished(*RANKS["adapters"]), STEPS)
    assert all(torch.equal(lost[name], undisturbed[name]) for name in undisturbed)


def test_ranks_that_share_the_frozen_weights_survive_a_loss_with_the_weights_of_ranks_with_copies(
    live: LiveRuns, gates: Gates
) -> None:
    run = run_losing_a_rank(live, gates, *ADAPTERS, *TWO_RANKS, "lanes.shard_base=true")
    shared, copies = weights(run, STEPS), weights(live.finished(*RANKS["adapters"]), STEPS)
    assert all(torch.equal(shared[name], copies[name]) for name in copies)


def test_a_trainer_in_stages_gives_the_weights_of_one_rank_to_the_last_bit_even_if_a_stage_is_lost(
    live: LiveRuns, gates: Gates
) -> None:
    run = run_losing_a_rank(live, gates, *ADAPTERS, *TWO_RANKS, "training.stages=auto")
    one = of_one_rank(live, "adapters")
    expected = weights(one, STEPS)
    assert all(torch.equal(weights(run, STEPS)[name], value) for name, value in expected.items())
    assert metric(run, "reward_mean") == metric(one, "reward_mean")[:STEPS]


def test_stages_that_train_all_weights_give_those_of_one_rank_even_if_a_stage_is_lost_and_others_go_on(
    live: LiveRuns, gates: Gates
) -> None:
    run = run_losing_a_rank(live, gates, *EVERYTHING, *TWO_RANKS, "training.stages=auto")
    assert live.resume(run.path, f"steps={STEPS + 1}", "lanes.ranks=1", "training.stages=null") is Status.FINISHED
    one = of_one_rank(live, "all weights")
    assert furthest(weights(run, STEPS + 1), weights(one, STEPS + 1)) < CLOSE
    assert metric(run, "gradient_norm") == pytest.approx(metric(one, "gradient_norm")[: STEPS + 1], rel=1e-3)


def test_a_run_of_two_ranks_goes_on_with_one_and_back(live: LiveRuns, tmp_path: Path) -> None:
    path = Path(shutil.copytree(live.finished(*RANKS["all weights"]).path, tmp_path / "run"))
    assert live.resume(path, f"steps={STEPS + 1}", "lanes.ranks=1") is Status.FINISHED
    assert live.resume(path, f"steps={MORE_STEPS}", "lanes.ranks=2") is Status.FINISHED
    expected = weights(of_one_rank(live, "all weights"), MORE_STEPS)
    assert furthest(weights(RunFolder.open(path), MORE_STEPS), expected) < CLOSE


def test_cards_that_compute_each_sample_together_give_the_weights_of_one_even_if_one_is_lost(
    live: LiveRuns, gates: Gates
) -> None:
    nine_tokens = (
        *ADAPTERS,
        "steps=2",
        "sample.height=48",
        "sample.width=48",
        "lanes.rewards=0",
        EVALUATION,
        *TWO_BASES,
    )
    gates.close(prompts_of_step(live, 1)[1])
    together = ("lanes.ranks=2", "lanes.cards_per_replica=2", "lanes.cards_per_generator=2")
    one, path = live.finished(*nine_tokens, "mode=colocated"), live.new_path()

    def kill() -> None:
        wait_for(lambda: steps_done(path) >= 1, "a step")
        os.kill(workers_of(path)["generator-0-1"], signal.SIGKILL)
        gates.open()

    with Meanwhile(path, kill):
        status, several = live.run(*nine_tokens, *together, gates.rewards, out=path)
    assert status is Status.FINISHED
    assert {lane.name for lane in several.info.lanes} == {"generator-0", "generator-0 (2)", "trainer"}, "one lane"
    assert furthest(weights(one, 2), weights(several, 2)) < CLOSE
    for ours, expected in zip(lines_of(several.evaluations), lines_of(one.evaluations), strict=True):
        assert ours["reward_mean"] == pytest.approx(expected["reward_mean"], rel=1e-4)
    assert_nothing_is_left(path)


def test_more_cards_than_heads_are_refused_before_anything_is_loaded(live: LiveRuns) -> None:
    with pytest.raises(ConfigError, match=r"3 cards per sample .* 2 attention heads") as caught:
        live.run("lanes.cards_per_generator=3")
    assert str(caught.value).startswith("lanes.cards_per_generator: ")
