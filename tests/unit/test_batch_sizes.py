"""What is calibrated, and which slice size and kind of schedule are chosen from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_workers import fake_recipe

from digenrl.driver.batch_sizes import colocated_choices
from digenrl.driver.calibration import (
    Calibration,
    calibrate,
    calibrate_remaining_sizes,
    choose_slice_size,
    choose_terms,
)
from digenrl.driver.placement import place
from digenrl.records import Calibrate, Calibrated, Job, PromptRow
from digenrl.worker.assignment import Machine

CPU, CARDS = Machine(tuple(range(8))), Machine(tuple(range(8)), cuda_devices=2)


class FakeDriver:
    """As much of a dispatcher as calibration needs. Slices take what `seconds_of` says of their size."""

    def __init__(self, machine: Machine, seconds_of: Any = float, held_out: int = 0, **changes: Any) -> None:
        recipe = fake_recipe(**{"mode": "colocated", "lanes": {"generators": 1}, **changes})
        workers = place(recipe, machine, Path("exchange"))
        helps = workers.generators and "generate" in workers.trainer.duties
        names = [*workers.generator_names, *(["helper-0"] if helps else [])]
        prompt = PromptRow("prompt-0", "a cat", {})
        prompts = SimpleNamespace(row=lambda step, group: prompt, held_out=(prompt,) * held_out)
        lanes = SimpleNamespace(names=names)
        self.stores = SimpleNamespace(recipe=recipe, workers=workers, prompts=prompts, lanes=lanes)
        self.seconds_of = seconds_of
        self.jobs: list[tuple[str, Calibrate]] = []

    def own_job_id(self) -> int:
        return -1

    def ask(self, requests: list[tuple[str, Job]]) -> list[Any]:
        self.jobs += [(worker, job) for worker, job in requests if isinstance(job, Calibrate)]
        return [self._result(job) for _, job in requests]

    def _result(self, job: Any) -> Calibrated:
        if isinstance(job, Calibrate) and job.task == "generate":
            return Calibrated(0, job, {size: self.seconds_of(size) for size in job.sizes})
        return Calibrated(0, job, {1: 1.0 if getattr(job, "task", "") == "train" else 0.0}, pack_size=4)

    def calibrated(self) -> tuple[int, Calibration]:
        driver: Any = self
        calibration = calibrate(driver, 0.0)
        size = choose_slice_size(driver, calibration)
        return size, calibrate_remaining_sizes(driver, calibration, size)

    def generated_sizes(self) -> dict[str, list[int]]:
        sizes: dict[str, list[int]] = {}
        for worker, job in self.jobs:
            if job.task == "generate":
                sizes.setdefault(worker, []).extend(job.sizes)
        return sizes


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
    run = FakeDriver(CARDS, lambda size: per_sample[size] * size, batch=batch(16))
    assert run.calibrated()[0] == settled
    assert run.generated_sizes() == {"trainer": [8, 16]}


@pytest.mark.parametrize(
    ("devices", "compile_", "announced"),
    [
        (
            CARDS,
            True,
            ["slices of 8 and 16 samples", "training", "rewards"],
        ),
        (CARDS, False, ["slices of 8 and 16 samples", "training", "rewards"]),
        (CPU, False, []),
    ],
)
def test_slow_parts_of_calibration_are_announced(devices: Any, compile_: bool, announced: list[str]) -> None:
    model = {"family": "sd3", "source": "tiny", "compile": compile_}
    run: Any = FakeDriver(devices, lambda size: 1.0 * size, batch=batch(16), model=model)
    said: list[str] = []
    calibrate(run, 0.0, notify=said.append)
    assert len(said) == len(announced)
    for line, beginning in zip(said, announced, strict=True):
        assert line.startswith(f"calibrating: {beginning}")
        assert ("compiling" in line) == (compile_ and "rewards" not in line)


def test_on_a_cpu_two_small_slices_determine_the_cost_of_all_sizes() -> None:
    run = FakeDriver(CPU, lambda size: 1.0 + size, batch=batch(16))
    assert run.calibrated()[0] == 16
    assert run.generated_sizes() == {"trainer": [1, 4]}


def test_training_is_calibrated_with_slices_of_a_size_that_was_generated_before() -> None:
    for machine, at_once in ((CARDS, 8), (CPU, None)):
        run = FakeDriver(machine, batch=batch(8, 8))
        run.calibrated()
        assert [job.at_once for _, job in run.jobs if job.task == "train"] == [at_once]


def test_on_gpus_every_lane_generates_the_chosen_size_before_the_run() -> None:
    run = FakeDriver(CARDS, lambda size: 10.0 + size / 100, mode="local", batch=batch(16))
    settled, calibration = run.calibrated()
    assert settled not in (1, 4)
    assert run.generated_sizes() == {"generator-0": [1, 4, settled], "trainer": [1, 4, settled]}
    assert [seconds[settled] for seconds in calibration.slices] == [10.0 + settled / 100] * 2
    pools = [{"name": "large", "slice": 6}]
    run = FakeDriver(CARDS, mode="ray", batch=batch(12, 2), cluster={"generators": pools})
    run.stores.workers = replace(
        run.stores.workers, generators=tuple(replace(each, pool="large") for each in run.stores.workers.generators)
    )
    run.calibrated()
    assert run.generated_sizes() == {"generator-0": [2, 6, 4], "trainer": [2]}


def test_a_compiled_model_meets_the_batches_of_an_evaluation_too() -> None:
    evaluation = {"prompts": {"path": "held_out.txt"}, "batch": 3}
    for compiled, expected in ((False, ()), (True, (3, 1))):
        model = {"family": "sd3", "source": "demo", "compile": compiled}
        run = FakeDriver(CARDS, batch=batch(8, 8), held_out=7, evaluation=evaluation, model=model)
        run.calibrated()
        made = [job for _, job in run.jobs if job.task == "generate"]
        assert tuple(size for job in made for size in job.held_out) == expected


@pytest.mark.parametrize(
    ("tag", "publish_s", "assist"),
    [("auto", 0.0, "both"), ("auto", 1000.0, "trainer"), ("search", 1000.0, "both")],
)
def test_auto_shares_training_only_if_that_pays(tag: str, publish_s: float, assist: str) -> None:
    """Sending gradients takes about as long as loading weights."""
    run: Any = FakeDriver(CPU, mode="local", batch=batch(4, 2), techniques={"assist": "both", "tag": tag})
    terms = choose_terms(run, calibrate(run, publish_s), 2)
    assert terms.assist == assist
    timed = [worker for worker, job in run.jobs if job.task == "train"]
    assert timed == ["trainer", "generator-0", "trainer"], "the second time, all of them are busy"
