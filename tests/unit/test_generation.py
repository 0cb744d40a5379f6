"""Windows, rollouts, decoding and encoding, on the toy model and on every family's tiny pipeline."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import replace

import pytest
import torch
from family_cases import ONE_PER_TRANSFORMER
from tiny_pipelines import tiny_model
from torch import Tensor
from toy_model import TOY_SIZE, ToyModel

from digenrl.config.algorithms import Needs
from digenrl.config.reading import ConfigError
from digenrl.config.recipes.windows import WINDOWS, AllSteps, EulerOnly, RandomSubset, Window, read_window
from digenrl.generation.encoding import encode_prompts
from digenrl.generation.noise import initial_noise, step_noise
from digenrl.generation.rollout import GeneratedSlice, RolloutSettings, decode_slice, generate_slice
from digenrl.generation.row_limits import RowLimit
from digenrl.generation.windows import choose_steps, plan_rollouts
from digenrl.models.contract import Conditioning, DiffusionModel, SampleSize
from digenrl.models.stochastic_step import StepTimes, stochastic_step
from digenrl.models.trajectory import RolloutPlan, StepNoise, Trajectory
from digenrl.records import SampleId, Slice
from digenrl.testing.tiny_models import tiny_size

RUN_SEED = 11
STEPS = 6
GROUP = 4
CLIP_RANGE = 1e-4  # of typical recipes: a mismatch above it would clip gradients
NOTHING = Needs()
FLOW = StepNoise("flow", 0.7)
DANCE = StepNoise("dance", 0.3)


def plans_of(
    model: DiffusionModel,
    slice_: Slice,
    window: Window,
    size: SampleSize = TOY_SIZE,
    noise: StepNoise = FLOW,
    guidance: float = 3.0,
    last_step_noise: bool = False,
) -> tuple[RolloutPlan, ...]:
    return plan_rollouts(
        window,
        slice_.samples(),
        schedule=model.schedule(STEPS, size),
        size=size,
        noise=noise,
        guidance=guidance,
        run_seed=RUN_SEED,
        last_step_noise=last_step_noise,
    )


def generate(
    model: DiffusionModel, slice_: Slice, window: Window, needs: Needs = NOTHING, **how
) -> GeneratedSlice:
    same = how.pop("same_noise_in_group", False)
    return generate_slice(
        model,
        how.pop("conditioning", None) or model.encode(["a red cat"]),
        plans_of(model, slice_, window, **how),
        slice_,
        RolloutSettings(RUN_SEED, needs, same),
        version=9,
    )


def scored_again(model: DiffusionModel, row: Conditioning, trajectories: list[Trajectory], k: int) -> Tensor:
    """The log-probs of every trajectory's k-th kept step, all in one batch as in the rollout."""
    plan = trajectories[0].plan
    times = StepTimes.of_rows([(t.plan.schedule, t.plan.kept_steps[k]) for t in trajectories])
    latents_BL = torch.stack([t.latents_KL[k] for t in trajectories])
    conditioning = model.compact(row).repeated(len(trajectories))
    velocity_BL = model.velocity(latents_BL, times.timestep_B, conditioning, plan.guidance, plan.size)
    next_latents_BL = torch.stack([t.next_latents_KL[k] for t in trajectories])
    return stochastic_step(latents_BL, velocity_BL, times, plan.noise, next_latents_BL=next_latents_BL).log_prob_B


def with_sigma_off(trajectory: Trajectory, index: int) -> Trajectory:
    """The same, but the sigma of one step is wrong by a thousandth."""
    sigmas = trajectory.plan.schedule.sigmas.clone()
    sigmas[index] += -1e-3 if index == 0 else 1e-3
    schedule = replace(trajectory.plan.schedule, sigmas=sigmas)
    return replace(trajectory, plan=replace(trajectory.plan, schedule=schedule))


# --- Windows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps, kept", [(10, 9), (6, 5), (2, 1), (100, 99), (200, 198)])
def test_flow_grpo_keeps_99_percent_and_never_the_last_step(steps: int, kept: int) -> None:
    choice = choose_steps(AllSteps(), steps, 0, SampleId(0, 0, 0))
    assert choice.stochastic == tuple(range(steps - 1))
    assert choice.kept == tuple(range(kept))


def test_dance_grpo_keeps_a_uniform_subset_drawn_per_sample() -> None:
    window = RandomSubset()
    choices = [choose_steps(window, 16, RUN_SEED, SampleId(0, 0, index)) for index in range(2000)]
    assert all(choice.stochastic == tuple(range(15)) for choice in choices)
    assert all(len(choice.kept) == 9 and list(choice.kept) == sorted(set(choice.kept)) for choice in choices)
    counts = Counter(index for choice in choices for index in choice.kept)
    assert set(counts) == set(range(15))
    # Each step is kept with probability .6; 4.5 standard deviations over 15 steps.
    assert all(abs(count - 1200) < 4.5 * (2000 * 0.6 * 0.4) ** 0.5 for count in counts.values())
    assert choose_steps(window, 16, RUN_SEED, SampleId(0, 0, 3)) == choices[3]
    assert len({choice.kept for choice in choices[:20]}) > 15


def test_the_sparse_window_draws_steps_of_the_first_half_per_group_or_training_step() -> None:
    def at(step: int, group: int, index: int = 0, **settings: object) -> tuple[int, ...]:
        window = read_window({"kind": "sparse", **settings})
        choice = choose_steps(window, 20, RUN_SEED, SampleId(step, group, index))
        assert choice.kept == choice.stochastic
        return choice.kept

    drawn = Counter(at(step, group) for step in range(25) for group in range(80))
    assert set(drawn) == {(step,) for step in range(10)}
    assert all(abs(count - 200) < 4.5 * (2000 * 0.1 * 0.9) ** 0.5 for count in drawn.values())
    assert at(3, 5, index=0) == at(3, 5, index=7), "one step for a group"
    shared = [at(step, group, count=3, drawn_per="training_step") for step in (1, 2) for group in range(4)]
    assert len(set(shared[:4])) == len(set(shared[4:])) == 1 and shared[0] != shared[4]
    assert all(len(steps) == 3 and max(steps) < 10 for steps in shared)
    with pytest.raises(ConfigError, match=r"a window of 4 steps .* allows 3"):
        read_window({"kind": "sparse", "count": 4}).check(6)


def test_the_sliding_window_moves_by_one_every_25_training_steps_and_wraps_at_n_minus_2() -> None:
    window = read_window({"kind": "sliding"})

    def at(step: int) -> tuple[int, ...]:
        choice = choose_steps(window, 25, 0, SampleId(step, 1, 2))
        assert choice.kept == choice.stochastic
        return choice.kept

    assert at(0) == at(24) == (0, 1, 2, 3)
    assert at(25) == (1, 2, 3, 4)
    assert at(25 * 20) == (20, 21, 22, 23)
    assert at(25 * 22) == (22, 23)
    assert at(25 * 23 - 1) == (22, 23)
    assert at(25 * 23) == (0, 1, 2, 3)


@pytest.mark.parametrize("steps, width, places", [(10, 2, 4), (10, 3, 3), (6, 3, 1)])
def test_the_fast_window_is_uniform_over_the_first_half_and_shared_by_a_training_step(
    steps, width, places
) -> None:
    window = read_window({"kind": "fast", "width": width})
    firsts = Counter()
    for step in range(1200):
        choice = choose_steps(window, steps, RUN_SEED, SampleId(step, 0, 0))
        assert choice == choose_steps(window, steps, RUN_SEED, SampleId(step, 5, 3))
        assert choice.kept == choice.stochastic == tuple(range(choice.kept[0], choice.kept[0] + width))
        firsts[choice.kept[0]] += 1
    assert sorted(firsts) == list(range(places))
    assert all(abs(count - 1200 / places) < 4 * (1200 / places) ** 0.5 for count in firsts.values())


@pytest.mark.parametrize(
    "settings, steps, message",
    [
        ({"kind": "fast", "width": 4}, 6, "a window of 4 steps .* schedule of 6.* 3"),
        ({"kind": "sliding", "width": 6}, 6, "a window of 6 steps .* schedule of 6.* 5"),
        ({"kind": "sliding", "width": 1}, 2, "schedule of 2"),
        ({"kind": "random_subset"}, 2, "random_subset.* schedule of 2"),
        ({"kind": "all"}, 1, "schedule of 1"),
    ],
)
def test_a_window_that_does_not_fit_is_refused_in_one_line(settings, steps: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_window(settings).check(steps)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"kind": "slidng"}, "unknown window kind 'slidng'; did you mean 'sliding'"),
        ({"kind": "fast", "widht": 3}, "widht: unknown key; did you mean 'width'"),
        ({"kind": "fast", "width": 0}, "width: .*greater than or equal to 1"),
    ],
)
def test_window_settings_are_checked_when_read(settings, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_window(settings)


def test_every_kind_of_window_plans_only_trainable_steps() -> None:
    model, slice_ = ToyModel(), Slice(30, 0, 0, 3)
    for kind, cls in WINDOWS.items():
        window = cls()
        assert window.kind == kind
        assert read_window({"kind": kind}) == window
        for plan in plans_of(model, slice_, window):
            assert len(plan.kept_steps) <= window.kept_steps(STEPS)
            assert set(plan.kept_steps) <= set(plan.stochastic_steps) <= set(range(STEPS - 1))


@pytest.mark.parametrize("window", [AllSteps(), RandomSubset(fraction=0.6)])
def test_noise_in_the_last_step_changes_the_sample_and_is_never_kept(window: Window) -> None:
    model, slice_ = ToyModel(), Slice(0, 0, 0, 2)
    without = generate(model, slice_, window)
    with_noise = generate(model, slice_, window, last_step_noise=True)
    for one, other in zip(without.trajectories, with_noise.trajectories, strict=True):
        assert other.plan.stochastic_steps == tuple(range(STEPS))
        assert one.plan.kept_steps == other.plan.kept_steps and STEPS - 1 not in other.plan.kept_steps
        assert torch.equal(one.log_prob_K, other.log_prob_K)
    sigma = float(model.schedule(STEPS, TOY_SIZE).sigmas[-2])
    std = FLOW.level * sigma / (1 - sigma) ** 0.5  # a sqrt(sigma / (1 - sigma)) sqrt(h), and h = sigma
    spread = (with_noise.final_BL - without.final_BL).std().item()
    assert spread == pytest.approx(std, rel=0.3)


@pytest.mark.parametrize(
    "stochastic, kept, level, message",
    [
        ((4, 6), (4,), 0.7, "step 6 cannot be stochastic in a schedule of 6 steps; use steps 0 to 5"),
        ((4, 5), (4, 5), 0.7, "step 5 is the last and is never trained"),
        ((-1, 0), (0,), 0.7, "step -1 cannot be stochastic"),
        ((1, 2), (1, 3), 0.7, "step 3 is kept for training but has no noise"),
        ((1, 2), (2, 1), 0.7, "ascending"),
        ((1, 2), (1, 2), 0.0, "its level must be above 0, got 0.0"),
    ],
)
def test_a_plan_made_by_hand_is_checked_before_the_first_forward(stochastic, kept, level, message: str) -> None:
    model, slice_ = ToyModel(), Slice(0, 0, 0, 1)
    (plan,) = plans_of(model, slice_, AllSteps())
    plan = replace(plan, stochastic_steps=stochastic, kept_steps=kept, noise=StepNoise("flow", level))
    with pytest.raises(ConfigError, match=message):
        generate_slice(model, model.encode(["x"]), [plan], slice_, RolloutSettings(0), version=0)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("velocity", r"family 'toy': velocity returned a tensor of shape \(1, .*expected \(4, "),
        ("decode", r"family 'toy': decode returned a tensor of shape \(1, .*expected \(4, "),
    ],
)
def test_shapes_of_a_model_that_would_be_broadcast_are_refused(
    method: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(ToyModel, method)
    monkeypatch.setattr(ToyModel, method, lambda *inputs: original(*inputs)[:1])
    with pytest.raises(ConfigError, match=message):
        decode_slice(ToyModel(), generate(ToyModel(), Slice(2, 1, 0, GROUP), AllSteps(), Needs()))


# --- Rollouts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("kind", WINDOWS)
def test_a_sample_does_not_depend_on_its_slice(kind: str, dtype, tolerance: float) -> None:
    model, needs = ToyModel(dtype=dtype), Needs(step_means=True, final_latents=True)
    window = read_window({"kind": kind})
    whole = generate(model, Slice(2, 1, 0, GROUP), window, needs)
    for size in (1, 2, GROUP):
        parts = [generate(model, Slice(2, 1, first, size), window, needs) for first in range(0, GROUP, size)]
        sliced = [trajectory for part in parts for trajectory in part.trajectories]
        for one, other in zip(whole.trajectories, sliced, strict=True):
            assert (one.sample, one.plan.kept_steps) == (other.sample, other.plan.kept_steps)
            for name in ("latents_KL", "next_latents_KL", "log_prob_K", "mean_KL", "final_L"):
                left, right = getattr(one, name), getattr(other, name)
                torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)
                assert size != GROUP or torch.equal(left, right)
        finals = torch.cat([part.final_BL for part in parts])
        torch.testing.assert_close(finals, whole.final_BL, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("noise", [FLOW, DANCE, StepNoise("cps", 0.8), StepNoise("truncated_flow", 0.7)])
@pytest.mark.parametrize("kind", ["all", "random_subset", "sliding", "fast"])
def test_stored_steps_scored_again_have_bitwise_the_stored_log_probs(kind: str, noise: StepNoise) -> None:
    model = ToyModel()
    row = model.encode(["a red cat"])
    generated = generate(model, Slice(2, 1, 0, GROUP), read_window({"kind": kind}), noise=noise)
    assert len(generated.trajectories[0].log_prob_K) >= 2
    for k in range(len(generated.trajectories[0].log_prob_K)):
        log_prob_B = scored_again(model, row, list(generated.trajectories), k)
        # With "random_subset" the rows of this batch are at different steps.
        ratio_B = (log_prob_B - torch.stack([t.log_prob_K[k] for t in generated.trajectories])).exp()
        assert torch.equal(ratio_B, torch.ones(GROUP))


def test_a_sigma_off_by_a_thousandth_changes_every_ratio() -> None:
    model = ToyModel()
    row = model.encode(["a red cat"])
    generated = generate(model, Slice(2, 1, 0, GROUP), AllSteps())
    for k, index in enumerate(generated.trajectories[0].plan.kept_steps):
        off = [with_sigma_off(trajectory, index) for trajectory in generated.trajectories]
        ratio_B = (scored_again(model, row, off, k) - torch.stack([t.log_prob_K[k] for t in off])).exp()
        assert (ratio_B - 1).abs().max() > CLIP_RANGE


def test_weights_prompt_and_guidance_each_change_the_log_probs() -> None:
    model = ToyModel()
    trajectories = list(generate(model, Slice(2, 1, 0, GROUP), AllSteps()).trajectories)
    stored_B = torch.stack([t.log_prob_K[1] for t in trajectories])
    assert (scored_again(ToyModel(seed=1), model.encode(["a red cat"]), trajectories, 1) != stored_B).all()
    assert (scored_again(model, model.encode(["a blue cat"]), trajectories, 1) != stored_B).all()
    guided = [replace(t, plan=replace(t.plan, guidance=1.0)) for t in trajectories]
    assert (scored_again(model, model.encode(["a red cat"]), guided, 1) != stored_B).all()


@pytest.mark.parametrize("kind", WINDOWS)
def test_a_trajectory_contains_only_the_kept_steps(kind: str) -> None:
    model, slice_ = ToyModel(), Slice(2, 1, 1, 3)
    bare = generate(model, slice_, read_window({"kind": kind}))
    full = generate(model, slice_, read_window({"kind": kind}), Needs(step_means=True, final_latents=True))
    latent_bytes = 4 * 4 * 4 * 4
    for row, (trajectory, with_all) in enumerate(zip(bare.trajectories, full.trajectories, strict=True)):
        kept = trajectory.plan.kept_steps
        assert trajectory.sample == SampleId(2, 1, 1 + row)
        assert trajectory.version == 9
        assert trajectory.latents_KL.shape == trajectory.next_latents_KL.shape == (len(kept), 4, 4, 4)
        assert trajectory.log_prob_K.shape == (len(kept),)
        assert trajectory.log_prob_K.isfinite().all()
        assert (trajectory.mean_KL, trajectory.final_L) == (None, None)
        assert with_all.mean_KL is not None and with_all.mean_KL.shape == trajectory.latents_KL.shape
        assert with_all.final_L is not None and torch.equal(with_all.final_L, full.final_BL[row])
        assert with_all.final_L.untyped_storage().nbytes() == latent_bytes
        assert not trajectory.latents_KL.requires_grad
        if kept and kept[-1] - kept[0] == len(kept) - 1:
            assert torch.equal(trajectory.latents_KL[1:], trajectory.next_latents_KL[:-1])
            assert trajectory.latents_KL.untyped_storage().nbytes() == (len(kept) + 1) * latent_bytes
            assert trajectory.latents_KL.data_ptr() + latent_bytes == trajectory.next_latents_KL.data_ptr()
        # It does not share storage with the rest of the batch.
        assert len(pickle.dumps(trajectory)) < 2 * len(kept) * latent_bytes + 8_000


def test_every_step_is_drawn_around_its_mean_with_the_samples_own_noise_of_that_step() -> None:
    generated = generate(ToyModel(), Slice(2, 1, 0, 2), AllSteps(), Needs(step_means=True))
    for t in generated.trajectories:
        assert t.mean_KL is not None
        times = StepTimes.at(t.plan.schedule, t.plan.kept_steps)
        ones = torch.ones_like(t.latents_KL)
        std_K = stochastic_step(ones, ones, times, t.plan.noise, next_latents_BL=ones).std_B
        z_KL = (t.next_latents_KL - t.mean_KL) / std_K.view(-1, 1, 1, 1)
        expected = [step_noise(RUN_SEED, [t.sample], index, (4, 4, 4))[0] for index in t.plan.kept_steps]
        torch.testing.assert_close(z_KL, torch.stack(expected), rtol=1e-4, atol=1e-5)
        density = torch.distributions.Normal(t.mean_KL, std_K.view(-1, 1, 1, 1))
        torch.testing.assert_close(density.log_prob(t.next_latents_KL).mean((1, 2, 3)), t.log_prob_K)


def test_a_rollout_without_noise_is_plain_euler_from_the_samples_own_noise() -> None:
    model, slice_ = ToyModel(), Slice(2, 1, 0, 2)
    generated = generate(model, slice_, EulerOnly(), noise=DANCE)
    schedule = model.schedule(STEPS, TOY_SIZE)
    x = initial_noise(RUN_SEED, list(slice_.samples()), (4, 4, 4))
    conditioning = model.encode(["a red cat"]).repeated(2)
    with torch.no_grad():
        for index in range(STEPS):
            v = model.velocity(x, schedule.timesteps[index].repeat(2), conditioning, 3.0, TOY_SIZE)
            x = x + (schedule.sigmas[index + 1] - schedule.sigmas[index]) * v
    assert torch.equal(generated.final_BL, x)


def test_steps_outside_the_window_are_euler_steps_and_so_is_the_last() -> None:
    model, slice_ = ToyModel(), Slice(0, 0, 0, 2)
    (plan, _) = plans_of(model, slice_, AllSteps())
    plan = replace(plan, stochastic_steps=(1, 3), kept_steps=(1, 3))
    row = model.encode(["a red cat"])
    generated = generate_slice(model, row, [plan] * 2, slice_, RolloutSettings(RUN_SEED), version=0)
    x = torch.stack([t.next_latents_KL[1] for t in generated.trajectories])
    with torch.no_grad():
        for index in (4, 5):
            v = model.velocity(x, plan.schedule.timesteps[index].repeat(2), row.repeated(2), 3.0, TOY_SIZE)
            x = x + (plan.schedule.sigmas[index + 1] - plan.schedule.sigmas[index]) * v
    assert torch.equal(generated.final_BL, x)
    for trajectory in generated.trajectories:
        assert not torch.allclose(trajectory.latents_KL[1], trajectory.next_latents_KL[0])


def test_samples_differ_within_a_group_even_from_the_same_initial_noise() -> None:
    generated = generate(ToyModel(), Slice(0, 0, 0, 3), AllSteps(), same_noise_in_group=True)
    first, second, third = generated.trajectories
    assert torch.equal(first.latents_KL[0], second.latents_KL[0])
    assert torch.equal(first.latents_KL[0], third.latents_KL[0])
    assert not torch.allclose(first.next_latents_KL[0], second.next_latents_KL[0])
    assert not torch.allclose(generated.final_BL[0], generated.final_BL[1])
    apart = generate(ToyModel(), Slice(0, 0, 0, 3), AllSteps())
    assert not torch.equal(apart.trajectories[0].latents_KL[0], apart.trajectories[1].latents_KL[0])


def test_a_rollout_does_not_touch_gradients_or_global_random_state() -> None:
    model = ToyModel()
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    generated = generate(model, Slice(0, 0, 0, 2), AllSteps(), Needs(final_latents=True))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.transformer.parameters())
    # Not inference tensors: training may use them in a graph.
    assert not generated.trajectories[0].latents_KL.is_inference()


def test_a_slice_with_the_rows_of_two_prompts_is_refused() -> None:
    model = ToyModel()
    with pytest.raises(ValueError, match="one row"):
        generate(model, Slice(0, 0, 0, 2), AllSteps(), conditioning=model.encode(["a", "b"]))


@pytest.mark.parametrize("rows_at_once", [None, 1, 2])
def test_decoding_does_not_depend_on_the_number_of_rows_at_once(rows_at_once: int | None) -> None:
    model = ToyModel()
    generated = generate(model, Slice(0, 0, 0, 3), AllSteps())
    pixels = decode_slice(model, generated, RowLimit(rows_at_once))
    assert pixels.shape == (3, 1, 3, TOY_SIZE.height, TOY_SIZE.width)
    assert pixels.min() >= 0 and pixels.max() <= 1
    assert torch.equal(pixels, model.decode(generated.final_BL, TOY_SIZE))


# --- Prompt cache --------------------------------------------------------------------------------------------


class CountingToy(ToyModel):
    """Counts how often its text encoder runs."""

    encoded = 0

    def encode(self, prompts, negative_prompts=None) -> Conditioning:
        self.encoded += len(prompts)
        return super().encode(prompts, negative_prompts)


def test_every_distinct_prompt_is_encoded_once_before_the_encoders_are_dropped() -> None:
    model = CountingToy()
    expected = ToyModel().encode(["a"], ["ugly"])
    rows = encode_prompts(model, ["a", "b", "a", "c", "b"], lambda text: model.encode([text], ["ugly"]))
    assert (model.encoded, list(rows)) == (3, ["a", "b", "c"])
    row = rows["a"]
    assert len(row) == 1
    assert row.negative is not None and expected.negative is not None
    assert torch.equal(row.positive["encoder_hidden_states"], expected.positive["encoder_hidden_states"])
    assert torch.equal(row.negative["encoder_hidden_states"], expected.negative["encoder_hidden_states"])
    with pytest.raises(RuntimeError, match="text encoders"):
        model.encode(["d"])


def test_all_prompts_share_one_copy_of_the_unconditional_rows() -> None:
    model = ToyModel()
    rows = encode_prompts(model, ["a", "b", "c"], lambda text: model.encode([text]))
    negatives = [row.negative for row in rows.values()]
    assert len({side["encoder_hidden_states"].data_ptr() for side in negatives if side is not None}) == 1


# --- Tiny pipelines --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", ONE_PER_TRANSFORMER)
def test_a_rollout_of_a_tiny_pipeline_is_bitwise_on_policy_and_that_of_each_sample_alone(family: str) -> None:
    model, size = tiny_model(family), tiny_size(family)
    rows = encode_prompts(model, ["a red cat", "a blue cup"], lambda text: model.encode([text]))  # drops encoders
    row = rows["a red cat"]
    together, *alone = (
        generate(model, slice_, AllSteps(), size=size, conditioning=row)
        for slice_ in (Slice(0, 3, 0, 2), Slice(0, 3, 0, 1), Slice(0, 3, 1, 1))
    )
    torch.testing.assert_close(together.final_BL, torch.cat([one.final_BL for one in alone]), rtol=1e-5, atol=1e-5)
    trajectories = list(together.trajectories)
    assert trajectories[0].plan.kept_steps == tuple(range(STEPS - 1))
    largest_mismatch = 0.0
    for k, index in enumerate(trajectories[0].plan.kept_steps):
        stored_B = torch.stack([t.log_prob_K[k] for t in trajectories])
        assert torch.equal((scored_again(model, row, trajectories, k) - stored_B).exp(), torch.ones(2))
        off = [with_sigma_off(t, index) for t in trajectories]
        mismatch_B = (scored_again(model, row, off, k) - stored_B).exp() - 1
        assert (mismatch_B != 0).all()
        largest_mismatch = max(largest_mismatch, float(mismatch_B.detach().abs().max()))
    assert largest_mismatch > CLIP_RANGE
    pixels = decode_slice(model, together)
    assert pixels.shape == (2, size.frames, 3, size.height, size.width)
    assert not torch.equal(pixels[0], pixels[1])
