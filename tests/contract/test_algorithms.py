"""One suite for every algorithm, then each loss compared with values computed by hand."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from digenrl.algorithms.policy_loss import kl_to_reference_R
from digenrl.algorithms.registry import ALGORITHMS, build_algorithm
from digenrl.config.algorithms import ALGORITHM_SETTINGS
from digenrl.config.reading import ConfigError
from digenrl.config.recipes.windows import WINDOWS, Window, read_window
from digenrl.generation.windows import choose_steps
from digenrl.models.contract import SampleSize, Schedule
from digenrl.models.objective import PairBatch, RenoisedPairs, StepPairs
from digenrl.models.stochastic_step import StepTimes, stochastic_step
from digenrl.models.trajectory import RolloutPlan, StepNoise
from digenrl.records import SampleId
from digenrl.training.advantage_scale import AdvantageScale

EVERY = pytest.mark.parametrize("name", list(ALGORITHMS))
ROWS = 4


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def some_pairs(name: str, rows: int = ROWS) -> PairBatch:
    """Rows of three elements, all values drawn."""
    generator = torch.Generator().manual_seed(7)

    def latents() -> Tensor:
        return torch.randn(rows, 3, generator=generator, dtype=torch.float64)

    def numbers(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(rows, generator=generator, dtype=torch.float64)

    if build_algorithm(name).replays == "steps":
        log_prob_R = numbers(-1, 0)
        return StepPairs(
            advantage_R=numbers(-2, 2),
            log_prob_R=log_prob_R.clone().requires_grad_(),
            old_log_prob_R=log_prob_R + numbers(-2e-4, 2e-4),
            rollout_log_prob_R=log_prob_R,
            fresh_R=torch.ones(rows, dtype=torch.bool),
            std_R=numbers(0.1, 0.5),
            sigma_R=numbers(0.3, 0.9),
            step_size_R=numbers(0.05, 0.2),
            noise_time_R=numbers(0.05, 0.2),
            mean_RL=latents().requires_grad_(),
            velocity_RL=latents(),
            proximal_log_prob_R=log_prob_R,
            old_mean_RL=latents(),
            reference_mean_RL=latents(),
        )
    return RenoisedPairs(
        advantage_R=numbers(-2, 2),
        sigma_R=numbers(0.3, 0.9),
        final_RL=latents(),
        noise_RL=latents(),
        noised_RL=latents(),
        velocity_RL=latents().requires_grad_(),
        old_velocity_RL=latents(),
        reference_velocity_RL=latents(),
    )


def rows_of(pairs: PairBatch, rows: slice) -> PairBatch:
    return replace(pairs, **{f.name: getattr(pairs, f.name)[rows] for f in fields(pairs)})


def test_every_algorithm_has_settings_of_the_same_name():
    assert {name: algorithm.settings_type for name, algorithm in ALGORITHMS.items()} == ALGORITHM_SETTINGS


def test_settings_of_algorithms_import_without_torch():
    code = "import sys, digenrl.config.algorithms; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@EVERY
def test_its_scaled_part_is_homogeneous_in_the_advantages_and_its_fixed_part_independent(name):
    algorithm, pairs = build_algorithm(name), some_pairs(name)
    loss = algorithm.loss(pairs)
    tripled = algorithm.loss(replace(pairs, advantage_R=3 * pairs.advantage_R))
    assert (loss.scaled_M is None) == (name == "flow_dpo")
    if loss.scaled_M is not None:
        torch.testing.assert_close(tripled.scaled_M, 3 * loss.scaled_M, rtol=1e-12, atol=0)
    if loss.fixed_M is not None:
        assert torch.equal(tripled.fixed_M, loss.fixed_M)


@EVERY
def test_the_trainer_knows_how_many_parts_its_gradient_has(name):
    """Also without a KL to the reference."""
    for options in ({}, {"kl_weight": 0} if "kl_weight" in ALGORITHM_SETTINGS[name].model_fields else {}):
        algorithm = build_algorithm(name, {**options, "advantage": {"std_over": "batch"}} if options else {})
        scale = AdvantageScale(algorithm)
        needs, pairs = algorithm.needs, some_pairs(name)
        given = {"reference": needs.reference, "old_velocity": needs.old_policy, "old_mean": needs.step_means}
        absent = [
            f.name for f in fields(pairs) for start, has in given.items() if f.name.startswith(start) and not has
        ]
        parts = scale.loss_parts(algorithm.loss(replace(pairs, **dict.fromkeys(absent))))
        assert sum(part is not None for part in parts) <= scale.sums_per_parameter


@EVERY
def test_its_terms_are_independent_of_other_terms(name):
    algorithm, pairs = build_algorithm(name), some_pairs(name)
    width = algorithm.rows_per_term
    together = algorithm.loss(pairs).total_M()
    assert together.shape == (ROWS // width,)
    alone = [algorithm.loss(rows_of(pairs, slice(at, at + width))).total_M() for at in range(0, ROWS, width)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-14, atol=0)


@EVERY
def test_its_loss_has_a_gradient_for_the_policy(name):
    pairs = some_pairs(name)
    build_algorithm(name).loss(pairs).total_M().sum().backward()
    moved = pairs.log_prob_R if isinstance(pairs, StepPairs) else pairs.velocity_RL
    assert moved.grad is not None and moved.grad.abs().max() > 0


@EVERY
def test_its_measures_are_detached_and_one_per_term(name):
    algorithm = build_algorithm(name)
    loss = algorithm.loss(some_pairs(name))
    assert loss.measures
    for values in loss.measures.values():
        assert values.shape == (ROWS // algorithm.rows_per_term,)
        assert not values.requires_grad


@EVERY
def test_its_denominator_counts_chosen_samples(name):
    algorithm = build_algorithm(name)
    kept = () if algorithm.replays == "renoised" else (0, 1, 3)
    schedule = Schedule(sigmas=torch.linspace(1, 0, 6), timesteps=torch.linspace(1000, 200, 5))
    plan = RolloutPlan(schedule, SampleSize(8, 8), StepNoise("flow", 0.7), 1.0, kept, kept)
    steps = algorithm.trained_steps(plan)
    assert steps == (kept if kept else (0, 1, 2, 3)), "and never the last of five"
    chosen = algorithm.group_advantages([0.0, 1.0, 2.0, 3.0]).chosen
    assert algorithm.units_per_group(4) == len(chosen) // algorithm.rows_per_term


@EVERY
def test_its_default_window_keeps_steps_if_it_replays_them(name):
    algorithm = build_algorithm(name)
    algorithm.settings.window.check(10)
    assert (algorithm.settings.window.kind != "none") == (algorithm.replays == "steps")
    assert algorithm.needs.final_latents == (algorithm.replays == "renoised")


@EVERY
@pytest.mark.parametrize("steps", [8, 10, 25])
def test_its_settings_count_the_pairs_that_are_trained(name, steps):
    algorithm = build_algorithm(name)
    plan = rollout_plan(algorithm.settings.window, steps)
    counted = algorithm.settings.trained_samples(12) * algorithm.settings.trained_steps(steps)
    assert algorithm.units_per_group(12) * len(algorithm.trained_steps(plan)) * algorithm.rows_per_term == counted


@pytest.mark.parametrize("kind", [kind for kind in WINDOWS if kind != "none"])
@pytest.mark.parametrize("steps", [8, 10, 16])
def test_a_window_of_the_recipe_replaces_the_default_one(kind, steps):
    window = read_window({"kind": kind})
    counted = build_algorithm("flow_grpo").settings.trained_steps(steps, window)
    assert len(rollout_plan(window, steps).kept_steps) == counted


def rollout_plan(window: Window, steps: int) -> RolloutPlan:
    schedule = Schedule(sigmas=torch.linspace(1, 0, steps + 1), timesteps=torch.linspace(1000, 1, steps))
    choice = choose_steps(window, steps, 0, SampleId(0, 0, 0))
    return RolloutPlan(schedule, SampleSize(8, 8), StepNoise("flow", 0.7), 1.0, choice.stochastic, choice.kept)


@EVERY
def test_its_settings_are_frozen_and_the_error_for_an_unknown_key_names_the_nearest(name):
    settings = build_algorithm(name).settings
    with pytest.raises(ValidationError):
        settings.updates_per_batch = 3
    with pytest.raises(ConfigError, match="updates_per_batch") as error:
        build_algorithm(name, {"update_per_batch": 1})
    assert error.value.where == "algorithm.options.update_per_batch"


@pytest.mark.parametrize(
    ("name", "options", "where"),
    [
        ("flow_grpo", {"clip": 0}, "clip"),
        ("flow_grpo", {"kl_weight": -1}, "kl_weight"),
        ("flow_grpo", {"kl_form": "k3"}, "kl_form"),
        ("flow_grpo", {"advantage": {"std_over": "world"}}, "advantage.std_over"),
        ("dance_grpo", {"best_of_n": {"top": 0, "bottom": 1}}, "best_of_n.top"),
        ("diffusion_nft", {"old_decay_max": 1}, "old_decay_max"),
        ("flow_dpo", {"advantage": {"std_over": "batch"}}, "advantage"),
        ("grpo_guard", {"stale": "decoupled"}, "stale"),
        ("flow_dppo", {"clip": 1e-4}, "clip"),
        ("flash_grpo", {"mean_weight": 0}, "mean_weight"),
        ("awm", {"power": 0}, "power"),
        ("mix_grpo", {"updates_per_batch": 0}, "updates_per_batch"),
    ],
)
def test_a_wrong_value_fails_when_it_is_read(name, options, where):
    with pytest.raises(ConfigError) as error:
        build_algorithm(name, options)
    assert error.value.where == f"algorithm.options.{where}"


def test_the_error_for_an_unknown_algorithm_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"'flow_gpro'.*'flow_grpo'.*flow_dpo") as error:
        build_algorithm("flow_gpro")
    assert error.value.where == "algorithm.name"


# --- By hand --------------------------------------------------------------------------------------------------


def one_step(**changes: Tensor | None) -> StepPairs:
    """One row of one element: mu .5, mu_old and mu_ref .3, s .2, h .25."""
    row = StepPairs(
        advantage_R=column(1.0),
        log_prob_R=column(0.0),
        old_log_prob_R=column(0.0),
        rollout_log_prob_R=column(0.0),
        fresh_R=torch.tensor([True]),
        std_R=column(0.2),
        sigma_R=column(0.5),
        step_size_R=column(0.25),
        noise_time_R=column(0.25),
        mean_RL=column(0.5)[None],
        velocity_RL=column(0.0)[None],
        old_mean_RL=column(0.3)[None],
        reference_mean_RL=None,
    )
    return replace(row, **changes)


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "expected"),
    [
        (2.0, 0.1, -2.1),  # -2 clip(1.1052, .95, 1.05) is the larger
        (-2.0, 0.1, 2.2103418361512954),  # 2 exp(.1)
        (2.0, -0.1, -1.809674836071919),  # -2 exp(-.1)
        (-2.0, -0.1, 1.9),  # 2 * .95
        (2.0, 0.02, -2.0404026800535117),  # inside the band
    ],
)
def test_the_clipped_loss_is_the_larger_of_two(advantage, log_ratio, expected):
    flow = build_algorithm("flow_grpo", {"clip": 0.05, "kl_weight": 0})
    loss = flow.loss(one_step(advantage_R=column(advantage), log_prob_R=column(log_ratio)))
    assert loss.fixed_M is None
    assert loss.total_M().item() == pytest.approx(expected, rel=1e-12)
    assert loss.measures["ratio"].item() == pytest.approx(math.exp(log_ratio))
    assert loss.measures["clipped"].item() == (abs(log_ratio) > 0.05)


def test_the_kl_is_exact_or_flow_grpos_image_form_by_name():
    row = one_step(reference_mean_RL=column(0.3)[None])
    assert kl_to_reference_R(row, "exact").item() == pytest.approx(0.2**2 / (2 * 0.2**2))  # .5
    assert kl_to_reference_R(row, "flow_grpo_image").item() == pytest.approx(0.5 * 0.25)
    not_a_diffusion = replace(row, noise_time_R=column(1.0))  # as cps: Flow-GRPO divides by its whole std there
    assert kl_to_reference_R(not_a_diffusion, "flow_grpo_image").item() == pytest.approx(0.5)
    gaussian = torch.distributions.Normal
    kl = torch.distributions.kl_divergence(gaussian(0.5, 0.2), gaussian(0.3, 0.2))
    assert kl_to_reference_R(row, "exact").item() == pytest.approx(float(kl))


@pytest.mark.parametrize(("form", "kl"), [("exact", 0.5), ("flow_grpo_image", 0.125)])
def test_the_weighted_kl_is_the_fixed_part(form, kl):
    flow = build_algorithm("flow_grpo", {"kl_weight": 0.04, "kl_form": form})
    loss = flow.loss(one_step(reference_mean_RL=column(0.3)[None]))
    assert loss.scaled_M.item() == -1.0
    assert loss.fixed_M.item() == pytest.approx(0.04 * kl)
    assert flow.needs.reference


def test_decoupled_staleness_weighs_the_proximal_ratio_and_caps_the_weight():
    options = {"clip": 0.5, "kl_weight": 0, "stale": "decoupled", "stale_weight_cap": 1.5}
    flow = build_algorithm("flow_grpo", options)
    row = one_step(log_prob_R=column(0.3), proximal_log_prob_R=column(0.2), old_log_prob_R=column(0.1))
    assert flow.loss(row).total_M().item() == pytest.approx(-math.exp(0.1) * math.exp(0.1))
    far = replace(row, old_log_prob_R=column(-5.0))
    assert flow.loss(far).total_M().item() == pytest.approx(-1.5 * math.exp(0.1))
    assert flow.needs.recomputed_log_probs


def test_the_weight_of_stale_samples_corrects_for_the_policy_that_generated_them():
    """The mean of f(x') under the policy before the update, estimated from samples of an older one."""
    elements, samples, std, moved = 4, 40_000, 0.5, 0.15
    generator = torch.Generator().manual_seed(3)
    next_RL = std * torch.randn(samples, elements, generator=generator, dtype=torch.float64)  # older mean: 0
    f_R = next_RL.sum(1)  # its mean is 0 under the older policy, elements * moved under the newer one

    def log_prob_R(mean):
        return torch.distributions.Normal(mean, std).log_prob(next_RL).mean(1)

    newer_R = log_prob_R(moved)
    rows = {"log_prob_R": newer_R, "proximal_log_prob_R": newer_R, "old_log_prob_R": log_prob_R(0.0)}
    rows |= {"advantage_R": f_R, "mean_RL": torch.full((samples, elements), moved, dtype=torch.float64)}
    flow = build_algorithm("flow_grpo", {"kl_weight": 0, "stale": "decoupled", "stale_weight_cap": 1e9})
    loss = flow.loss(one_step(**rows))
    assert loss.measures["stale_weight"].mean().item() == pytest.approx(1, abs=0.02)
    assert -loss.total_M().mean().item() == pytest.approx(elements * moved, abs=0.03)
    assert abs(f_R.mean().item()) < 0.02, "without the weight it is the older policy's mean"
    capped = build_algorithm("flow_grpo", {"kl_weight": 0, "stale": "decoupled", "stale_weight_cap": 2.0})
    measures = capped.loss(one_step(**rows)).measures
    assert measures["stale_weight"].max() == 2.0
    assert measures["stale_weight_capped"].sum() == (loss.measures["stale_weight"] >= 2.0).sum() > 0
    by_element = build_algorithm("flow_grpo", {"kl_weight": 0, "stale": "decoupled", "stale_weight_of": "element"})
    weights_R = by_element.loss(one_step(**rows)).measures["stale_weight"]
    assert torch.allclose(weights_R**elements, loss.measures["stale_weight"])


def test_all_samples_are_weighed_if_another_precision_may_have_generated_them():
    options = {"clip": 0.5, "kl_weight": 0, "stale": "decoupled"}
    row = one_step(log_prob_R=column(0.3), proximal_log_prob_R=column(0.3), old_log_prob_R=column(0.3))
    row = replace(row, rollout_log_prob_R=column(0.2))
    stale, every = (build_algorithm("flow_grpo", {**options, "weighted": each}) for each in ("stale", "all"))
    assert stale.loss(row).total_M().item() == -1.0
    assert every.loss(row).total_M().item() == pytest.approx(-math.exp(0.1))
    assert [each.settings.corrects_precision for each in (stale, every)] == [False, True]


def test_guard_recenters_and_rescales_the_ratio_and_divides_by_the_step():
    guard = build_algorithm("grpo_guard", {"clip": 0.5, "kl_weight": 0})
    loss = guard.loss(one_step(log_prob_R=column(-0.45)))
    # b = .2^2 / (2 * .2^2) = .5; rho = exp((-.45 + .5) * .2) = exp(.01); over h = .25
    assert loss.total_M().item() == pytest.approx(-math.exp(0.01) / 0.25, rel=1e-12)
    assert guard.needs.step_means


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "threshold", "expected"),
    [
        (2.0, 0.1, 0.3, 0.0),
        (2.0, -0.1, 0.3, -1.8096748360719191),
        (-2.0, -0.1, 0.3, 0.0),
        (-2.0, 0.1, 0.3, 2.2103418361512952),
        (2.0, 0.1, 0.32, -2.2103418361512952),
    ],
)
def test_dppo_masks_terms_that_lead_further_away_beyond_a_kl(advantage, log_ratio, threshold, expected):
    """Expected values: `_flowdppo_kl_adv_loss` in UniRL's unirl/algorithms/flowdppo.py; the KL is .3125."""
    dppo = build_algorithm("flow_dppo", {"kl_threshold": threshold})
    row = one_step(mean_RL=column(0.5, 0.3)[None], old_mean_RL=column(0.4, 0.1)[None])
    loss = dppo.loss(replace(row, advantage_R=column(advantage), log_prob_R=column(log_ratio)))
    assert loss.fixed_M is None
    assert loss.total_M().item() == pytest.approx(expected, rel=1e-12)
    assert loss.measures["clipped"].item() == (expected == 0)
    assert dppo.needs.step_means


@pytest.mark.parametrize(
    ("sigma", "next_sigma", "std", "expected"),
    [
        (1.0, 0.8, 0.8 * 0.2**0.5, 1.788854381999832),
        (0.8, 0.5, 0.64 * 0.3**0.5, 1.1115627752514787),
        (0.5, 0.3, 0.4 * 0.2**0.5, 0.8281733249999222),
    ],
)
def test_flash_weights_steps_by_the_inverse_of_their_gradient(sigma, next_sigma, std, expected):
    """Expected values: `sde_step_with_logprob` of Flash-GRPO's wan2_1_pipeline_with_logprob2.py (`linear`)."""
    flash = build_algorithm("flash_grpo", {"mean_weight": 0.5})
    row = one_step(sigma_R=column(sigma), step_size_R=column(sigma - next_sigma), std_R=column(std))
    assert flash.loss(row).total_M().item() == pytest.approx(-expected / 0.5, rel=1e-6)


@pytest.mark.parametrize("kind", ["flow", "dance", "linear", "truncated_flow"])
def test_flash_makes_the_gradient_of_a_step_independent_of_the_step(kind):
    """d logp / d v times lambda is z, the noise of the step, per element."""
    schedule = Schedule(sigmas=torch.linspace(1, 0, 6).double(), timesteps=torch.linspace(1000, 200, 5).double())
    noise, flash = StepNoise(kind, 0.7), build_algorithm("flash_grpo")
    for step in range(4):
        times = StepTimes.at(schedule, [step])
        velocity_1L = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
        given = {
            "latents_BL": torch.ones(1, 1).double(),
            "prediction_BL": velocity_1L,
            "times": times,
            "noise": noise,
        }
        made = stochastic_step(**given, next_latents_BL=torch.zeros(1, 1).double())
        one_std_up = stochastic_step(**given, next_latents_BL=(made.mean_BL + made.std_B).detach())
        row = one_step(
            log_prob_R=one_std_up.log_prob_B,
            old_log_prob_R=one_std_up.log_prob_B.detach(),
            sigma_R=schedule.sigmas[step][None],
            step_size_R=(schedule.sigmas[step] - schedule.sigmas[step + 1])[None],
            std_R=made.std_B,
        )
        flash.loss(row).total_M().backward()
        assert velocity_1L.grad.item() == pytest.approx(1, rel=1e-5), "more velocity, a lower mean, for z = 1"


@pytest.mark.parametrize(
    ("advantage", "options", "expected"),
    [
        (2.0, {}, -0.5985772576881409),
        (-2.0, {}, 0.5985772576881409),
        (2.0, {"clip": 0.01}, -0.404),
        (2.0, {"power": 1.0}, -0.4350515575235304),  # their weighting `t`
    ],
)
def test_awm_weighs_the_matching_error_by_the_advantage(advantage, options, expected):
    """Expected values: AWM's train_sd3_awm.py, `compute_log_prob_awm` and the lines of `exp_first`."""
    more = {"kl_weight": 0, "old_decay_growth": 0.1}
    awm = build_algorithm("awm", {**more, **options})
    row = RenoisedPairs(
        advantage_R=column(advantage),
        sigma_R=column(0.6),
        final_RL=column(1.0, -0.5)[None],
        noise_RL=column(0.2, 0.4)[None],
        noised_RL=column(0.52, 0.04)[None],
        velocity_RL=column(-0.5, 0.7)[None].requires_grad_(),
        old_velocity_RL=column(-0.3, 0.5)[None],
        reference_velocity_RL=None,
    )
    loss = awm.loss(row)
    assert loss.total_M().item() == pytest.approx(expected, rel=1e-12)
    if not options:  # the two penalties: .1 * .2^2 to a reference at the old velocity, .5 * .2^2 to the old one
        penalized = build_algorithm("awm", {**more, "kl_weight": 0.1, "old_kl_weight": 0.5})
        fixed_M = penalized.loss(replace(row, reference_velocity_RL=row.old_velocity_RL)).fixed_M
        assert fixed_M.item() == pytest.approx(0.1 * 0.04 + 0.5 * 0.04)


def test_awm_on_policy_needs_no_old_weights_and_has_their_gradient():
    awm, pairs = build_algorithm("awm"), some_pairs("awm")
    assert not awm.needs.old_policy and awm.settings.generates_with_trained_weights
    assert build_algorithm("awm", {"updates_per_batch": 2}).needs.old_policy
    gradients = []
    for old_RL in (None, pairs.velocity_RL.detach()):
        awm.loss(replace(pairs, old_velocity_RL=old_RL)).total_M().sum().backward()
        gradients.append(pairs.velocity_RL.grad.clone())
        pairs.velocity_RL.grad = None
    assert torch.equal(*gradients)


def test_nft_moves_towards_good_samples_and_away_from_bad_ones():
    nft = build_algorithm("diffusion_nft", {"beta": 1.0, "kl_weight": 0.1})
    row = RenoisedPairs(
        advantage_R=column(2.5),
        sigma_R=column(0.5),
        final_RL=column(1.0)[None],
        noise_RL=column(-1.0)[None],
        noised_RL=column(0.0)[None],
        velocity_RL=column(-1.5)[None].requires_grad_(),
        old_velocity_RL=column(-1.0)[None],
        reference_velocity_RL=column(-1.0)[None],
    )
    # v+ = -1.5, v- = -.5; x0+ = .75, x0- = .25; l+ = .25^2 / .25, l- = .75^2 / .75; q = 2.5 / 10 + .5
    expected = 5 * (0.75 * 0.25 + 0.25 * 0.75) + 0.1 * 0.25
    loss = nft.loss(row).total_M()
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    # The errors -.25 and -.75 move by -+.5 per v and are not divided anew: l+' = 1, l-' = -1; and .1 * 2 * -.5
    loss.backward()
    assert row.velocity_RL.grad.item() == pytest.approx(5 * (0.75 * 1 - 0.25 * 1) - 0.1, rel=1e-12)


def test_nft_at_the_old_policy_has_the_gradient_of_the_advantage_alone():
    nft = build_algorithm("diffusion_nft", {"kl_weight": 0})
    pairs = some_pairs("diffusion_nft")
    pairs = replace(pairs, old_velocity_RL=pairs.velocity_RL.detach(), advantage_R=torch.zeros(ROWS).double())
    nft.loss(pairs).total_M().sum().backward()
    assert pairs.velocity_RL.grad.abs().max() < 1e-15, "good and bad pull equally where the advantage is 0"


def test_the_decay_of_the_old_policy_grows_up_to_its_limit():
    nft = build_algorithm("diffusion_nft", {"old_decay_growth": 0.1, "old_decay_max": 0.25})
    assert [nft.old_policy_decay(batch) for batch in range(4)] == [0.1, 0.2, 0.25, 0.25]
    options = {"old_decay_start": 3, "old_decay_growth": 0.1, "old_decay_max": 0.25, "updates_per_batch": 2}
    late = build_algorithm("diffusion_nft", options)
    assert [late.old_policy_decay(batch) for batch in range(4)] == [0.0, 0.1, 0.25, 0.25], "it counts updates"


def test_guard_has_the_published_defaults_and_mix_shares_the_initial_noise():
    guard = build_algorithm("grpo_guard").settings
    assert (guard.clip, guard.kl_weight, guard.updates_per_batch) == (2e-6, 0, 2)
    assert (guard.advantage.std_over, guard.advantage.ddof, guard.advantage.eps) == ("group", 0, 1e-4)
    shared = {name for name, settings in ALGORITHM_SETTINGS.items() if settings.same_initial_noise}
    assert shared == {"dance_grpo", "mix_grpo"}


def test_dpo_prefers_the_sample_with_the_larger_gain_over_the_reference():
    dpo = build_algorithm("flow_dpo", {"beta": 10})
    couple = RenoisedPairs(
        advantage_R=column(1.0, -1.0),
        sigma_R=column(0.5, 0.5),
        final_RL=column(1.0, 0.0)[:, None],
        noise_RL=column(0.0, 0.0)[:, None],
        noised_RL=column(0.5, 0.0)[:, None],
        velocity_RL=column(-0.9, 0.3)[:, None],
        reference_velocity_RL=column(-0.5, 0.1)[:, None],
    )
    # best: (.1^2 - .5^2) = -.24; worst: (.3^2 - .1^2) = .08; -ln sigmoid(-5 (-.24 - .08)) = ln(1 + e^-1.6)
    assert dpo.loss(couple).total_M().tolist() == [pytest.approx(math.log1p(math.exp(-1.6)), rel=1e-12)]


def test_dpo_with_errors_of_the_noise_is_diffusion_dpo():
    """Against the loss in train.py of https://github.com/SalesforceAIResearch/DiffusionDPO, at these numbers."""
    data, noise = column(1.0, -0.4)[:, None], column(0.7, 0.7)[:, None]
    predicted, reference = column(0.65, 0.3)[:, None], column(0.5, 0.45)[:, None]
    a, b = math.sqrt(0.6), math.sqrt(0.4)  # of a timestep whose alphas_cumprod is 0.6
    noised = a * data + b * noise

    def velocity(noise_R1):  # of a model that predicts noise
        return noise_R1 - (noised - b * noise_R1) / a

    couple = RenoisedPairs(
        advantage_R=column(1.0, -1.0),
        sigma_R=column(b / (a + b), b / (a + b)),
        final_RL=data,
        noise_RL=noise,
        noised_RL=noised / (a + b),
        velocity_RL=velocity(predicted),
        reference_velocity_RL=velocity(reference),
    )
    loss = build_algorithm("flow_dpo", {"beta": 20, "error": "noise"}).loss(couple)
    # chosen: .05^2 - .2^2 = -.0375; rejected: .4^2 - .25^2 = .0975; -10 (-.0375 - .0975) = 1.35
    assert loss.total_M().tolist() == [pytest.approx(math.log1p(math.exp(-1.35)), rel=1e-12)]
