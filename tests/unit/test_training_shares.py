"""Several trainers share an update: no bit depends on who trained what, and nothing is counted twice."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from scored_groups import differences, relative_difference, same, state_of
from shared_training import (
    SETTINGS,
    STEPS,
    Assistant,
    SharedCase,
    trained_alone,
    trained_together,
    without_first_sample,
)

from digenrl.training.gradients.share import share_as_tensors, share_of_tensors

CASES = [
    SharedCase("flow_grpo"),  # the batch's scale with samples beyond the clamp, and a reference
    SharedCase("flow_grpo", lora=False),
    SharedCase("dance_grpo", options={"best_of_n": None, "advantage": {"std_over": "batch", "clamp": 0.8}}),
    SharedCase("dance_grpo", lora=False),  # some samples are not trained
    SharedCase("mix_grpo"),
    SharedCase("diffusion_nft", options={"old_decay_growth": 0.3}),  # versions follow the trained weights slowly
    SharedCase("flow_dppo"),
    SharedCase("flash_grpo"),
    SharedCase("awm", options={"old_decay_max": 0.0, "old_kl_weight": 0.0}),
]
CASE_NAMES = [f"{case.algorithm}-{'lora' if case.lora else 'full'}-{number}" for number, case in enumerate(CASES)]
EVERY = pytest.mark.parametrize("case", CASES, ids=CASE_NAMES)
FLOW = CASES[0]


@pytest.fixture(scope="module")
def alone():
    made = {}

    def of(case):
        if id(case) not in made:
            made[id(case)] = trained_alone(case, shares_gradients=True)
        return made[id(case)]

    return of


# --- The update does not depend on which trainer computed which part ------------------------------------------


@EVERY
def test_the_weights_do_not_depend_in_any_bit_on_who_trained_what(case, alone):
    state, metrics = trained_together(case, 4, seed=4)
    expected, reports = alone(case)
    assert differences(state, expected) == []
    assert metrics == reports
    assert expected.average and expected.batch == STEPS


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=[CASE_NAMES[0], CASE_NAMES[3]])
def test_jobs_of_a_trainer_that_died_are_trained_again_elsewhere(case, alone):
    state, metrics = trained_together(case, 3, seed=8, one_dies=True)
    expected, reports = alone(case)
    assert differences(state, expected) == []
    assert metrics == reports


def test_a_trainer_of_adapters_that_shares_nothing_has_the_same_bits(alone):
    assert differences(trained_alone(FLOW)[0], alone(FLOW)[0]) == []


@EVERY
def test_sums_in_floating_point_agree_to_rounding(case):
    """The gradient's norm and direction, before an optimizer amplifies the rounding of small values."""
    floats = SETTINGS.model_copy(update={"sum_in_order": not case.lora})
    trainers = [case.trainer(case.model(), floats), case.trainer(case.model(), shares_gradients=True)]
    for trainer in trainers:
        for group in case.batches()[0]:
            trainer.add_group(group)
    floating, fixed = (trainer.gradient() for trainer in trainers)
    assert relative_difference(fixed, floating) < 1e-6
    assert any(not torch.equal(fixed[name], floating[name]) for name in floating), "they are not the same sums"
    assert {value.dtype for value in fixed.values()} == {torch.float32}
    expected, found = (trainer.commit() for trainer in trainers)
    assert found.measures == pytest.approx(expected.measures, rel=1e-6, abs=1e-6)
    assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-6)


# --- Shares ---------------------------------------------------------------------------------------------------


def shared_jobs(case=FLOW, jobs=((0, 0), (2, 2))):
    """A trainer that commits, its first batch, and the share of another trainer that has trained these jobs."""
    groups, assistant = case.batches()[0], Assistant(case)
    for place, first in jobs:
        assistant.trainer.add_samples(groups[place].part(first, 2))
    return case.trainer(case.model(), shares_gradients=True), groups, assistant.trainer.take_share()


def sums_of(trainer):
    """The gradient sums of the open update. They are taken, and given back."""
    share = trainer.take_share()
    trainer.add_share(share)
    return share_as_tensors(share)


def test_a_share_survives_the_exchange_in_every_bit():
    _, _, share = shared_jobs()
    sent = share_as_tensors(share)
    back = share_of_tensors(sent)
    assert same(sent, share_as_tensors(back))
    assert (back.batch, back.update, back.steps, back.bound) == (0, 0, 2, share.bound)
    assert [(job.place, job.first) for job in back.jobs] == [(0, 0), (2, 2)] and back.job_samples == 2
    assert {value.dtype for value in (*back.unscaled.values(), *back.final.values())} == {torch.int64}
    assert back.unscaled and back.final, "of Flow-GRPO one part awaits the scale of the batch, the KL does not"


def test_sums_start_over_once_they_were_taken():
    groups, assistant = FLOW.batches()[0], Assistant(FLOW)
    shares = []
    for _ in range(2):
        assistant.trainer.add_samples(groups[0].part(0, 2))
        shares.append(share_as_tensors(assistant.trainer.take_share()))
    assert same(*shares)
    nothing = assistant.trainer.take_share()
    assert nothing.jobs == [] and nothing.unscaled == {} and nothing.final == {}


def test_an_update_is_complete_once_every_sample_is_covered_and_all_rewards_are_known():
    trainer, groups, share = shared_jobs(jobs=[(0, 0), (0, 2), (1, 0), (1, 2)])
    trainer.add_samples(groups[2].part(0, 2))
    trainer.add_share(share)
    trainer.add_samples(groups[2].part(2, 2))
    assert not trainer.can_commit()
    with pytest.raises(RuntimeError, match=r"\[0, 1\]"):
        trainer.places_to_replay()
    for group in groups:
        trainer.add_rewards(group.index, group.index, group.rewards)
    assert trainer.can_commit()


def test_groups_beyond_the_clamp_that_were_trained_elsewhere_must_be_held_for_the_commit():
    trainer, groups, share = shared_jobs(jobs=[(0, 0), (0, 2), (1, 0), (1, 2)])
    trainer.add_group(groups[2])
    trainer.add_share(share)
    for group in groups[:2]:
        trainer.add_rewards(group.index, group.index, group.rewards)
    assert trainer.places_to_replay() == [0], "rewards at place 1 are equal, and group 2 was trained here"
    with pytest.raises(RuntimeError, match=r"\[0\]"):
        trainer.commit()
    trainer.hold_group(groups[0])
    assert trainer.places_to_replay() == []
    assert trainer.commit().batch == 0


def test_no_group_is_held_if_each_has_its_own_scale():
    trainer, groups, share = shared_jobs(CASES[4], jobs=[(p, first) for p in range(3) for first in (0, 2)])
    trainer.add_share(share)
    for group in groups:
        trainer.add_rewards(group.index, group.index, group.rewards)
    assert trainer.places_to_replay() == [] and trainer.can_commit()


# --- Refusals, which change nothing ---------------------------------------------------------------------------


def test_samples_that_do_not_belong_are_refused_and_change_nothing():
    trainer, groups, share = shared_jobs()
    trainer.add_samples(groups[0].part(2, 2))
    trainer.add_share(share)
    later = FLOW.batches()[1]
    before = sums_of(trainer)
    for samples, place, reason in [
        (groups[0].part(2, 2), 0, "sample 2 .*before"),
        (groups[0].part(0, 2), 0, "sample 0 .*before"),  # was in the share
        (groups[0], 0, "sample 0 .*before"),
        (groups[1].part(1, 2), 1, "whole jobs of 2"),
        (groups[1].part(0, 1), 1, "whole jobs of 2"),
        (groups[1].part(0, 2), 7, "place 7"),
        (groups[1].part(0, 2), 0, "place 0 already has group 0"),
        (later[1].part(0, 2), 1, "step 1 .*open batch"),
        (without_first_sample(groups[1]).part(0, 2), 1, "3 samples, expected 4"),
        (replace(groups[1], rewards=(0.0, math.nan, 1.0, 2.0)).part(0, 2), 1, "reward of sample 1"),
    ]:
        with pytest.raises(ValueError, match=reason):
            trainer.add_samples(samples, place)
    assert same(sums_of(trainer), before)
    for place, group, reason in [(7, groups[1], "place 7"), (0, groups[1], "already"), (1, later[1], "step 1")]:
        with pytest.raises(ValueError, match=reason):
            trainer.hold_group(group, place)
    with pytest.raises(ValueError, match="already has group 0"):
        trainer.add_rewards(0, 0, (0.0, 1.0, 2.0, 3.0))
    trainer.add_rewards(0, 0, groups[0].rewards)
    trainer.add_samples(groups[1].part(0, 2))


def with_jobs(share, **changed):
    return replace(share, tallies={replace(job, **changed): each for job, each in share.tallies.items()})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda share: replace(share, batch=1), "batch 1"),
        (lambda share: replace(share, update=1), "update 1"),
        (lambda share: replace(share, job_samples=1), "job_samples 1"),
        (lambda share: replace(share, steps=5), "5 steps"),
        (lambda share: replace(share, final={"other": torch.zeros(2, dtype=torch.int64)}), "other.*not trained"),
        (lambda share: replace(share, final={next(iter(share.final)): torch.zeros(1).long()}), "expected"),
        (lambda share: replace(share, final={name: v.float() for name, v in share.final.items()}), "float32"),
        (lambda share: with_jobs(share, place=3), "place 3"),
        (lambda share: with_jobs(share, first=1), "samples 1 and up"),
    ],
)
def test_a_share_that_does_not_belong_is_refused_and_changes_nothing(change, reason):
    trainer, groups, share = shared_jobs()
    trainer.add_samples(groups[1].part(0, 2))
    before = sums_of(trainer)
    with pytest.raises(ValueError, match=reason):
        trainer.add_share(change(share))
    assert same(sums_of(trainer), before)
    trainer.add_share(share)
    with pytest.raises(ValueError, match="added before"):
        trainer.add_share(share)


def spoiled(group):
    """A group whose third sample is not a number."""
    latents = group.trajectories[2].latents_KL.clone()
    latents[0, 0, 0, 0] = math.nan
    trajectories = [*group.trajectories]
    trajectories[2] = replace(trajectories[2], latents_KL=latents)
    return replace(group, trajectories=tuple(trajectories))


@pytest.mark.parametrize("elsewhere", [True, False])
def test_an_update_with_a_gradient_out_of_range_is_skipped_wherever_that_was_computed(elsewhere):
    model = FLOW.model()
    committer = FLOW.trainer(model, FLOW.settings.model_copy(update={"skipped_steps": 1}), shares_gradients=True)
    assistant, groups = Assistant(FLOW), FLOW.batches()[0]
    before = {name: value.clone() for name, value in committer.published().items()}
    (assistant.trainer if elsewhere else committer).add_samples(spoiled(groups[0]).part(2, 2))
    for place, first in FLOW.jobs():
        if (place, first) != (0, 2):
            committer.add_samples(groups[place].part(first, 2))
    committer.add_share(share_of_tensors(share_as_tensors(assistant.trainer.take_share())))
    for place, group in enumerate(groups):
        committer.add_rewards(place, group.index, group.rewards)
    for place in committer.places_to_replay():
        committer.hold_group(groups[place])
    assert committer.commit().skipped == 1
    assert committer.batch == 1 and same(before, dict(committer.published()))


# --- A trainer on a generator's card --------------------------------------------------------------------------


def test_a_trainer_that_never_commits_has_no_moments_no_average_and_no_kept_version():
    assistant, groups = Assistant(CASES[1]).trainer, CASES[1].batches()[0]
    for group in groups:
        assistant.add_group(group)
    assert not assistant.can_commit()
    with pytest.raises(RuntimeError, match="never commits"):
        assistant.commit()
    assistant.keep_version()
    assistant.reserve_version()
    assert assistant.switching.host_bytes == 0
    state = state_of(assistant)
    assert state.optimizer.moments == {} and state.average is None
    with pytest.raises(ValueError, match="must share"):
        CASES[1].trainer(CASES[1].model(), commits=False)


def test_starting_a_version_discards_the_open_batch():
    assistant, (first, second) = Assistant(FLOW), FLOW.batches()
    fresh = Assistant(FLOW)
    assistant.trainer.add_samples(first[0].part(0, 2))
    weights = {name: value + 0.01 for name, value in assistant.trainer.published().items()}
    for each in (assistant, fresh):
        each.start(1, weights)
        assert each.trainer.batch == 1
        with pytest.raises(ValueError, match="step 0"):
            each.trainer.add_samples(first[1].part(0, 2))
        each.trainer.add_samples(second[0].part(0, 2))
    assert same(sums_of(assistant.trainer), sums_of(fresh.trainer))
    with pytest.raises(RuntimeError, match="commits"):
        FLOW.trainer(FLOW.model(), shares_gradients=True).start_version(1)


def test_a_trainer_of_all_weights_that_shares_nothing_adds_whole_groups_and_gives_no_share():
    case = CASES[1]
    trainer, groups = case.trainer(case.model()), case.batches()[0]
    with pytest.raises(ValueError, match="whole groups of 4"):
        trainer.add_samples(groups[0].part(0, 2))
    trainer.add_group(groups[0])
    for alone in (trainer, FLOW.trainer(FLOW.model())):
        with pytest.raises(RuntimeError, match="shares_gradients=True"):
            alone.take_share()
