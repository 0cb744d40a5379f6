"""Keys of `sample` that a blueprint resolves with the algorithm, and refusals before anything is loaded."""

from __future__ import annotations

import pytest
import torch

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.files import read_recipe
from digenrl.records import Slice
from digenrl.worker.blueprint import load_model, load_text_encoders, read_blueprint
from digenrl.worker.checks.memory import check_host_memory
from digenrl.worker.checks.preflight import inspect_here
from digenrl.worker.rollouts import plan, roll_out


def blueprint_of(*overrides: str):
    return read_blueprint(read_recipe("demo", overrides))


@pytest.fixture(scope="module")
def model_and_row():
    blueprint = blueprint_of()
    row = load_text_encoders(blueprint, "cpu").encode(["2024"])
    return load_model(blueprint, "cpu"), row


@pytest.mark.parametrize(
    ("algorithm", "key", "shared"),
    [
        ("flow_grpo", "null", False),
        ("mix_grpo", "null", True),
        ("dance_grpo", "null", True),
        ("mix_grpo", "false", False),
        ("flow_grpo", "true", True),
    ],
)
def test_samples_of_a_group_share_their_noise_as_the_recipe_or_else_the_algorithm_says(algorithm, key, shared):
    blueprint = blueprint_of(f"algorithm={{name: {algorithm}}}", f"sample.same_initial_noise={key}")
    assert blueprint.same_initial_noise is shared


@pytest.mark.parametrize("override", ["model.source=demo", "model.source=random"])
def test_a_model_that_is_not_on_the_hub_has_no_revision(override):
    with pytest.raises(ConfigError) as caught:
        blueprint_of(override, "model.revision=main")
    assert caught.value.where == "model.revision"


def test_a_rollout_starts_from_the_shared_noise_and_ends_with_noise(model_and_row):
    model, row = model_and_row
    overrides = ("algorithm={name: flow_grpo}", "sample.same_initial_noise=true", "sample.last_step_noise=true")
    blueprint = blueprint_of(*overrides, "sample.denoising_steps=3")
    generated = roll_out(blueprint, model, row, Slice(0, 0, 0, 2), version=0)
    first, second = generated.trajectories
    assert torch.equal(first.latents_KL[0], second.latents_KL[0])
    assert not torch.equal(first.latents_KL[1], second.latents_KL[1])
    assert first.plan.stochastic_steps == (0, 1, 2) and first.plan.kept_steps == (0, 1)


def test_logit_normal_levels_come_from_a_schedule_of_a_thousand(model_and_row):
    model, _ = model_and_row
    samples = tuple(Slice(0, 0, 0, 2).samples())
    drawn = plan(blueprint_of("algorithm={name: flow_dpo, options: {levels: logit_normal}}"), model, samples)
    assert drawn[0].training_schedule.steps == 1000
    assert plan(blueprint_of("algorithm={name: flow_dpo}"), model, samples)[0].training_schedule is None


@pytest.mark.parametrize(
    ("overrides", "where", "noun"),
    [
        (["sample.last_step_noise=true"], "sample.last_step_noise", "'fast'"),
        (
            ["sample.same_initial_noise=true", "algorithm={name: diffusion_nft, options: {}}"],
            "sample.same_initial_noise",
            "all samples of a group would be equal",
        ),
        (
            ["sample.noise.log_prob=squared_error", "algorithm={name: grpo_guard}"],
            "sample.noise.log_prob",
            "grpo_guard",
        ),
        (
            ["sample.noise={kind: cps, level: 0.8}", "algorithm={name: flash_grpo}"],
            "sample.noise.kind",
            "flash_grpo",
        ),
        (
            ["sample.noise.log_prob=squared_error", "algorithm.options.stale=decoupled"],
            "sample.noise.log_prob",
            "decoupled",
        ),
        (["sample.window={kind: none}"], "sample.window", "no step to train"),
        (
            ["algorithm={name: diffusion_nft, options: {trained_fraction: 0.01}}"],
            "algorithm.options.trained_fraction",
            "leaves none to train",
        ),
        (
            ["algorithm={name: awm, options: {levels: stratified, drawn_fraction: 0.5}}"],
            "algorithm.options.drawn_fraction",
            "raise the first",
        ),
        (
            ["algorithm.options={updates_per_batch: 30, updates_of: samples}"],
            "algorithm.options.updates_per_batch",
            "fewer updates",
        ),
    ],
)
def test_combinations_that_make_no_sense_are_refused_in_one_line(overrides, where, noun):
    with pytest.raises(ConfigError, match=noun) as error:
        blueprint_of(*overrides)
    assert str(error.value).startswith(f"{where}: ") and "\n" not in str(error.value)


def test_groups_that_may_be_stale_follow_from_the_stale_share():
    assert blueprint_of("techniques.tcss=0.3").shape.stale_groups == 3  # of 8 prompts
    assert blueprint_of().shape.stale_groups == 0


@pytest.mark.parametrize(("updates", "warned"), [(1, True), (2, False)])
def test_a_run_that_is_too_short_for_its_moving_average_starts_with_a_warning(updates, warned, caplog):
    options = f"algorithm={{name: flow_grpo, options: {{updates_per_batch: {updates}}}}}"
    inspect_here(read_recipe("demo", ["steps=4", options, "training.ema={every_updates: 8}"]))
    assert ("every_updates: 8, but the run takes 4 optimizer updates" in caplog.text) is warned


@pytest.mark.parametrize(
    ("overrides", "gigabytes"),
    [
        (["mode=colocated"], "23.8"),
        ([], "47.6"),  # each of two processes has its own random weights
        (["mode=colocated", "model.base=nf4"], "6.3"),
    ],
)
def test_a_model_whose_weights_exceed_the_memory_of_the_machine_is_refused(overrides, gigabytes):
    recipe = read_recipe("flux_flow_grpo", ["model.source=random", *overrides], without_prompts=True)
    with pytest.raises(ConfigError, match=rf"take {gigabytes} GB.* has 6.0 GB") as error:
        check_host_memory(read_blueprint(recipe), 6_000_000_000)
    assert error.value.where == "model.source"
    check_host_memory(read_blueprint(recipe), 48_000_000_000)
