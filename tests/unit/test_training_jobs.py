"""Jobs: the samples of a group that are replayed together, and fixed-point sums of their gradients."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from scored_groups import (
    DRAW_NOISE,
    Rollout,
    lively,
    relative_difference,
    scored_groups,
    serial_gradient,
    serial_of,
    toy,
    trainer_of,
)

from digenrl.algorithms.registry import ALGORITHMS, build_algorithm
from digenrl.config.reading import ConfigError
from digenrl.config.recipes.files import read_recipe
from digenrl.config.recipes.training import TrainerSettings
from digenrl.training.gradients.fixed_point_sums import FixedPointSums
from digenrl.training.gradients.job_sums import JobSums
from digenrl.training.gradients.sums import GradientSums
from digenrl.training.metrics import Tally
from digenrl.training.open_batch import BatchShape
from digenrl.training.packing.packed_passes import PassResult
from digenrl.training.sample_jobs import SampleJob
from digenrl.training.trainer import Trainer

NARROW = {"flow_grpo_fast": {"kind": "fast", "width": 2}}  # the default of three steps is too wide for five
SINGLE = [name for name in ALGORITHMS if name != "flow_dpo"]


@pytest.mark.parametrize(("name", "lora"), [*((name, True) for name in SINGLE), ("flow_grpo", False)])
def test_jobs_of_single_samples_give_the_serial_gradient(name, lora):
    algorithm, model = lively(name), toy(lora=lora)
    groups = scored_groups(model, algorithm, Rollout(groups=2), window=NARROW.get(name))
    expected = serial_gradient(serial_of(model, algorithm), groups)
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(pack_size=3, job_samples=1))
    for group in reversed(groups):
        trainer.add_group(group)
    assert relative_difference(trainer.gradient(), expected) < 1e-9


@pytest.mark.parametrize(("job_samples", "rows"), [("auto", [5, 5, 5, 1]), (2, [5, 3, 5, 3]), (1, [4, 4, 4, 4])])
def test_packs_never_mix_samples_of_two_jobs(job_samples, rows, monkeypatch):
    algorithm, model = build_algorithm("flow_grpo", {"updates_per_batch": 1, "kl_weight": 0}), toy()
    groups, seen = scored_groups(model, algorithm, Rollout(groups=2)), []
    velocity = model.velocity
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(pack_size=5, job_samples=job_samples))
    monkeypatch.setattr(model, "velocity", lambda *given: seen.append(len(given[0])) or velocity(*given))
    trainer.add_group(groups[0])
    assert seen == rows
    seen.clear()
    assert trainer.calibrate(groups[0]) == 1, "it replays the same jobs"
    assert seen == rows


def test_several_updates_of_samples_train_each_job_once_per_update():
    algorithm, model = build_algorithm("mix_grpo", {"updates_per_batch": 2, "updates_of": "samples"}), toy()
    groups = scored_groups(model, algorithm, Rollout(groups=2))
    outcomes = []
    for job_samples in ("auto", 1):
        settings = TrainerSettings(pack_size=4, learning_rate=1e-2, adam_eps=1e-3, job_samples=job_samples)
        trained = toy()
        trainer = trainer_of(trained, algorithm, groups, settings)
        for group in groups:
            trainer.add_group(group)
        reports = [trainer.commit(), trainer.commit()]
        outcomes.append((dict(trained.transformer.named_parameters()), [each.terms for each in reports]))
    assert outcomes[0][1] == outcomes[1][1]
    assert relative_difference(outcomes[0][0], outcomes[1][0]) < 1e-9


def test_a_job_of_a_single_term_has_a_pack_size_after_calibration():
    algorithm, model = build_algorithm("dance_grpo"), toy()
    groups = scored_groups(model, algorithm, Rollout(steps=3), window={"kind": "fast", "width": 1})
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(job_samples=1))
    trainer.calibrate(groups[0])
    assert trainer.plan.pack_size == 1


def test_job_samples_must_divide_the_group_and_pairs_need_the_whole_group():
    with pytest.raises(ConfigError, match=r"training.job_samples.* 5 does not divide .* 12"):
        read_recipe("demo", ["training.job_samples=5"])
    assert read_recipe("demo", ["training.job_samples=6"]).training.job_samples == 6
    with pytest.raises(ConfigError, match=r"job_samples.*0"):
        read_recipe("demo", ["training.job_samples=0"])
    pairs, shape = build_algorithm("flow_dpo"), BatchShape(groups=2, group_size=4)
    with pytest.raises(ConfigError, match=r"training.job_samples: 2.* group of 4"):
        Trainer(toy(), pairs, TrainerSettings(job_samples=2), shape, DRAW_NOISE)
    Trainer(toy(), pairs, TrainerSettings(job_samples=4), shape, DRAW_NOISE)
    with pytest.raises(ConfigError, match=r"training.job_samples: 3"):
        Trainer(toy(), lively("flow_grpo"), TrainerSettings(job_samples=3), shape, DRAW_NOISE)


# --- Fixed-point sums -----------------------------------------------------------------------------------------

PARAMETERS = {"w": torch.nn.Parameter(torch.zeros(2))}


def sums_of(*values, over_batch=False):
    sums = FixedPointSums(PARAMETERS, over_batch=over_batch)
    for place, value in enumerate(values):
        add(sums, place, value)
    return sums


def add(sums, place, value):
    job = SampleJob(place, 0)
    added = sums.of_job(job, PassResult(GradientSums(final={"w": torch.tensor([value, 0.0])}), Tally()))
    sums.add(place, added)


def total(sums):
    return sums.gradient(1.0, JobSums())["w"].tolist()


def test_fixed_point_sums_lose_nothing_in_any_order():
    values = (1e4, 2.0**-48, -1e4, 0.1)
    found = {tuple(total(sums_of(*order))) for order in itertools.permutations(values)}
    assert found == {(float(torch.tensor(0.1) + 2.0**-48), 0.0)}
    assert total(sums_of(2.0**-50)) == [0.0, 0.0], "below the resolution"


def test_both_parts_are_summed_and_one_is_scaled():
    sums = sums_of(over_batch=True)
    parts = GradientSums({"w": torch.tensor([0.5, 1.0])}, {"w": torch.tensor([0.25, 0.0])})
    sums.add(0, sums.of_job(SampleJob(0, 0), PassResult(parts, Tally())))
    correction = sums.of_job(SampleJob(0, 0), PassResult(GradientSums({"w": torch.tensor([0.0, 2.0])}), Tally()))
    assert sums.gradient(3.0, correction)["w"].tolist() == [1.75, 9.0]
    assert sums.gradient(3.0, JobSums())["w"].tolist() == [1.75, 3.0], "corrections are not kept"
    assert {value.dtype for value in sums.tensors().values()} == {torch.int64} and len(sums.tensors()) == 2


def test_jobs_without_some_gradients_give_the_same_bits_in_any_order_and_split():
    parameters = {name: torch.nn.Parameter(torch.zeros(3)) for name in "abc"}
    jobs = [
        ({"a": 0.1, "b": 0.2}, {"a": 0.3}),
        ({"b": 0.7}, {}),
        ({}, {"b": 1e-9, "a": 1e4}),
        ({"a": -0.1}, {"a": -1e4}),
    ]

    def add_jobs(sums, numbers):
        for number in numbers:
            parts = ({name: torch.full((3,), value) for name, value in part.items()} for part in jobs[number])
            sums.add(number, sums.of_job(SampleJob(number, 0), PassResult(GradientSums(*parts), Tally())))

    found = []
    for order in itertools.permutations(range(len(jobs))):
        sums, others = (FixedPointSums(parameters, over_batch=True) for _ in range(2))
        add_jobs(sums, order[:2])
        add_jobs(others, order[2:])
        sums.add_share(*others.take())
        found.append({name: value.tolist() for name, value in sums.gradient(0.3, JobSums()).items()})
    assert all(each == found[0] and list(each) == ["a", "b"] for each in found)
    assert found[0]["b"][0] == pytest.approx(0.3 * 0.9 + 1e-9, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**14, -(2.0**14)])
def test_a_value_out_of_range_is_refused_when_the_sums_are_used_here_or_elsewhere(bad):
    sums = sums_of(1.0, bad)  # does not wait for a GPU
    advice = "16384.*sum_in_order" if math.isfinite(bad) else "check the algorithm's loss"
    with pytest.raises(FloatingPointError, match=f"samples 0 and up at place 1.*{advice}"):
        total(sums)
    others = sums_of(1.0)
    others.add_share(*sums.take())
    with pytest.raises(FloatingPointError, match="the weights are unchanged"):
        total(others)
    assert sums.gradient(1.0, JobSums()) == {}, "they start over"


def test_sums_that_could_overflow_are_refused():
    sums = sums_of(16383.0, 16383.0)
    assert total(sums) == [32766.0, 0.0]
    sums.add_share(*sums_of(16383.0).take())
    with pytest.raises(FloatingPointError, match="add up to"):
        total(sums)
    add(alone := sums_of(16383.0, 16383.0), 2, 2.0)
    with pytest.raises(FloatingPointError, match="add up to"):
        total(alone)
