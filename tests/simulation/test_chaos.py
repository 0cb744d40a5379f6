"""Deterministic simulation testing: seeded worlds with faults, replay, shrinking, and deliberate breaks."""

from __future__ import annotations

from dataclasses import replace

import mutants
import pytest
from doc_pages import DOCS, DocPage
from typer.testing import CliRunner

from digenrl.chaos.campaign import Campaign, run_campaign, run_seed
from digenrl.chaos.faults import KINDS, Fault
from digenrl.chaos.run import run_world
from digenrl.chaos.shrinking import shrink
from digenrl.chaos.worlds import draw_world
from digenrl.cli import app
from digenrl.driver.supervisor import Supervisor, WorkerFailedError
from digenrl.transports.contract import Gone

SEEDS = 100
EARLIER_KINDS = tuple(
    kind for kind in KINDS if kind not in ("broken", "stuck_start")
)  # the seeds of rare worlds were found with these


def test_no_promise_is_broken_in_any_small_world() -> None:
    result = run_campaign(Campaign(SEEDS), processes=1)
    assert not result.failures, result.failures[0]
    assert set(result.struck) == set(KINDS), "every kind of fault strikes"
    assert result.hedged and result.quarantined and result.resumed and result.at_once > SEEDS / 4


def test_no_promise_is_broken_in_a_large_world() -> None:
    result = run_campaign(Campaign(2, large=True), processes=1)
    assert not result.failures, result.failures[0]


def test_a_seed_always_gives_the_same_run() -> None:
    for seed in range(5):
        assert run_world(draw_world(seed)) == run_world(draw_world(seed))


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(10290, id="a resumed run quarantines another group"),
        pytest.param(27843, id="jobs stall while a driver starts"),
        pytest.param(32634, id="five rewards fail in a row"),
        pytest.param(44021, id="an evaluation is abandoned that waits for prompts"),
        pytest.param(70707, id="a generator is still being replaced when the run begins"),
        pytest.param(78459, id="a slice without scores arrives after its replacement was issued"),
    ],
)
def test_no_promise_is_broken_in_rare_worlds(seed: int) -> None:
    assert run_seed(Campaign(1, kinds=EARLIER_KINDS), seed).failures == []


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(6, id="several lanes"),
        pytest.param(429, id="evaluations that are not finished when the next version is saved"),
    ],
)
def test_a_driver_killed_after_any_decision_loses_and_doubles_nothing(seed: int) -> None:
    world = draw_world(seed)
    for number in range(run_world(world, ()).decisions):
        assert run_world(world, (Fault(0, "driver_kill", amount=number),)).drivers <= 2


def test_a_failure_names_the_least_faults_and_the_command_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here no worker may be replaced, so that any crash ends a run."""
    monkeypatch.setattr(Supervisor, "count_loss", _refuse)
    campaign = Campaign(20, kinds=("crash", "slow"))
    failure = run_campaign(campaign, processes=1).failures[0]
    assert [fault.split()[2] for fault in failure.faults] == ["crash"]
    assert "ended by signal 9" in failure.error
    only = tuple(int(number) for number in failure.command.rpartition(" ")[2].split(","))
    (again,) = run_seed(replace(campaign, only=only), failure.seed).failures
    assert again.faults == failure.faults


def _refuse(supervisor: Supervisor, worker: str, gone: Gone, is_spare: bool) -> bool:
    raise WorkerFailedError(f"{worker} {gone.reason}")


def test_faults_are_shrunk_to_those_that_matter() -> None:
    assert shrink(12, lambda kept: {3, 8} <= set(kept)) == [3, 8]
    assert shrink(5, lambda kept: True) == []


def test_every_deliberate_break_still_applies() -> None:
    assert len(mutants.MUTANTS) >= 40 and len(mutants.BY_NAME) == len(mutants.MUTANTS)
    for mutant in mutants.MUTANTS:
        assert mutant.mutated(mutants.source_of(mutant)) != mutants.source_of(mutant)


@pytest.mark.parametrize("name", ["lost lane's job forgotten"])
def test_deliberate_breaks_are_caught(name: str) -> None:
    assert mutants.seeds_until_caught(name, seeds=60) is not None


def test_the_documentation_lists_every_kind_of_fault() -> None:
    table = DocPage(DOCS / "simulating.md").table("`--faults`")
    assert {name.strip("`"): what for name, what in table} == {name: kind.what for name, kind in KINDS.items()}


def test_the_command_prints_what_was_injected() -> None:
    assert "\n1 seed, " in CliRunner().invoke(app, ["simulate", "--chaos", "1"]).stdout
    result = CliRunner().invoke(app, ["simulate", "--chaos", "5", "--faults", "crash,slow"])
    assert result.exit_code == 0 and "crash" in result.output and "5 seeds" in result.output
    assert "reward_nan" not in result.output


def test_only_some_faults_of_a_seed_can_be_replayed() -> None:
    campaign = Campaign(1, first_seed=3, only=(0,))
    world = campaign.world(3)
    assert campaign.faults(world) == world.faults[:1]
    assert run_seed(campaign, 3).failures == []
    assert campaign.replay_command(3, [0]) == "digenrl simulate --chaos 1 --first-seed 3 --only 0"
