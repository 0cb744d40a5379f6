"""Which sizes of slices are rehearsed, and which one a single device works with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from digenrl.worker.orders import (
    EncodedPrompt,
    LearningRehearsed,
    MakingRehearsed,
    Order,
    RehearseLearning,
    RehearseMaking,
    ScoreRehearsal,
    ScoringRehearsed,
    SwitchingRehearsed,
)
from fake_crew import fake_recipe

from digenrl.driver.batch_sizes import colocated_choices
from digenrl.driver.calibration import Calibration, calibrate, calibrate_rest, choose_slice_size
from digenrl.driver.placement import place
from digenrl.worker.assignment import Machine, Workers

CPU, CARDS = Machine(tuple(range(8))), Machine(tuple(range(8)), cuda_devices=2)


class Rehearsing:
    """As much of a runtime as a rehearsal needs. Slices take what `seconds_of` says of their size."""

    def __init__(self, machine: Machine, seconds_of: Any = float, **changes: Any) -> None:
        self.recipe = fake_recipe(**{"mode": "colocated", "lanes": {"generators": 1}, **changes})
        self.crew: Workers = place(self.recipe, machine, Path("exchange"))
        self.desk = self
        self.seconds_of = seconds_of
        self.orders: list[tuple[str, Order]] = []

    def prompt(self, step: int, group: int) -> EncodedPrompt:
        return EncodedPrompt("prompt-0", "a cat", {})

    def generator_workers(self) -> list[str]:
        return [each.name for each in self.crew.generators] or ["trainer"]

    def reward_workers(self) -> list[str]:
        return [each.name for each in self.crew.rewards]

    def lane_names(self) -> list[str]:
        helps = self.crew.generators and "generate" in self.crew.trainer.duties
        return [*self.generator_workers(), *(["helper-0"] if helps else [])]

    def ask(self, orders: list[tuple[str, Order]]) -> list[Any]:
        self.orders += orders
        return [self._answered(order) for _, order in orders]

    def _answered(self, order: Order) -> Any:
        if isinstance(order, RehearseMaking):
            return MakingRehearsed({size: self.seconds_of(size) for size in order.sizes})
        if isinstance(order, RehearseLearning):
            return LearningRehearsed(1.0, 4)
        return ScoringRehearsed(0.0) if isinstance(order, ScoreRehearsal) else SwitchingRehearsed(0.0, 0.0, 0)

    def opened(self) -> tuple[int, Calibration]:
        runtime: Any = self
        rehearsal = calibrate(runtime, 0.0)
        size = choose_slice_size(runtime, rehearsal)
        return size, calibrate_rest(runtime, rehearsal, size)

    def sizes_made(self) -> dict[str, list[int]]:
        made: dict[str, list[int]] = {}
        for worker, order in self.orders:
            if isinstance(order, RehearseMaking):
                made.setdefault(worker, []).extend(order.sizes)
        return made


def batch(group: int, size: int | str = "auto") -> dict[str, Any]:
    return {"prompts": 2, "samples_per_prompt": group, "slice": size}


@pytest.mark.parametrize(
    ("group", "choices"), [(4, (4,)), (12, (6, 12)), (16, (8, 16)), (24, (8,)), (13, (1, 13))]
)
def test_a_single_device_compares_a_part_of_a_group_with_all_of_it(group: int, choices: tuple[int, ...]) -> None:
    assert colocated_choices(fake_recipe(batch=batch(group)).batch) == choices


@pytest.mark.parametrize(("per_sample", "settled"), [({8: 1.0, 16: 0.9}, 16), ({8: 1.0, 16: 1.2}, 8)])
def test_on_a_card_the_slice_with_which_a_sample_takes_least_was_measured(
    per_sample: dict[int, float], settled: int
) -> None:
    run = Rehearsing(CARDS, lambda size: per_sample[size] * size, batch=batch(16))
    assert run.opened()[0] == settled
    assert run.sizes_made() == {"trainer": [8, 16]}


@pytest.mark.parametrize(
    ("devices", "compile_", "told"),
    [
        (
            CARDS,
            True,
            ["slices of 8 and 16 samples, which compiles the model", "training, which compiles", "rewards"],
        ),
        (CARDS, False, ["slices of 8 and 16 samples", "training", "rewards"]),
        (CPU, False, []),
    ],
)
def test_what_may_take_minutes_is_told_part_by_part(devices: Any, compile_: bool, told: list[str]) -> None:
    model = {"family": "sd3", "source": "tiny", "compile": compile_}
    run: Any = Rehearsing(devices, lambda size: 1.0 * size, batch=batch(16), model=model)
    said: list[str] = []
    calibrate(run, 0.0, say=said.append)
    assert len(said) == len(told)
    for line, beginning in zip(said, told, strict=True):
        assert line.startswith(f"rehearsing {beginning}")
        assert ("compiles" in line) == (compile_ and "rewards" not in line)


def test_on_a_cpu_two_small_slices_tell_about_all() -> None:
    run = Rehearsing(CPU, lambda size: 1.0 + size, batch=batch(16))
    assert run.opened()[0] == 16
    assert run.sizes_made() == {"trainer": [1, 4]}


def test_a_trainer_rehearses_with_slices_of_a_size_that_was_made_before() -> None:
    for machine, at_once in ((CARDS, 8), (CPU, None)):
        run = Rehearsing(machine, batch=batch(8, 8))
        run.opened()
        assert [order.at_once for _, order in run.orders if isinstance(order, RehearseLearning)] == [at_once]


def test_on_cards_every_lane_makes_what_it_will_be_asked_for_before_the_run() -> None:
    run = Rehearsing(CARDS, lambda size: 10.0 + size / 100, mode="local", batch=batch(16))
    settled, rehearsal = run.opened()
    assert settled not in (1, 4)
    assert run.sizes_made() == {"generator-0": [1, 4, settled], "trainer": [1, 4, settled]}
    assert [seconds[settled] for seconds in rehearsal.slices] == [10.0 + settled / 100] * 2
    pools = [{"name": "large", "slice": 6}]
    run = Rehearsing(CARDS, mode="local", batch=batch(12, 2), cluster={"generators": pools})
    run.crew = replace(run.crew, generators=tuple(replace(each, pool="large") for each in run.crew.generators))
    run.opened()
    assert run.sizes_made() == {"generator-0": [2, 6, 4], "trainer": [2]}


def test_a_compiled_model_meets_the_batches_of_an_evaluation_too(tmp_path: Path) -> None:
    (tmp_path / "held_out.txt").write_text("a\nb\nc\nd\ne\nf\ng\n")
    evaluation = {"prompts": {"path": str(tmp_path / "held_out.txt")}, "batch": 3}
    for compiled, expected in ((False, ()), (True, (3, 1))):
        model = {"family": "sd3", "source": "demo", "compile": compiled}
        run = Rehearsing(CARDS, batch=batch(8, 8), evaluation=evaluation, model=model)
        run.opened()
        made = [order for _, order in run.orders if isinstance(order, RehearseMaking)]
        assert tuple(size for order in made for size in order.held_out) == expected
