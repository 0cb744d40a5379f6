"""Several trainers share every update of a batch: they get the weights between two updates, and no bit differs."""

from __future__ import annotations

import pytest
import torch
from scored_groups import differences, same, state_of
from shared_training import (
    MORE_REWARDS,
    SETTINGS,
    STEPS,
    Assistant,
    SharedCase,
    Team,
    trained_alone,
    trained_together,
    whole_groups,
)

from digenrl.training.gradients.share import share_as_tensors

RECOMPUTED = SETTINGS.model_copy(update={"old_log_probs": "recomputed"})


def case_of(algorithm, updates, options=None, **more):
    return SharedCase(
        algorithm, options={"updates_per_batch": updates, **(options or {})}, rewards=MORE_REWARDS, **more
    )


FLOW = case_of(
    "flow_grpo", 2, settings=RECOMPUTED
)  # the batch's scale, samples beyond the clamp, and a KL penalty
CASES = {
    "recomputed": FLOW,
    "stale, all weights": case_of("flow_grpo", 3, lora=False, stale_groups=2),
    "decoupled": case_of("mix_grpo", 3, {"stale": "decoupled"}, settings=RECOMPUTED, stale_groups=2),
    "left out": case_of("dance_grpo", 2, {"zero_spread_groups": "left_out"}),
    "a version that lags": case_of("diffusion_nft", 2, {"old_decay_growth": 0.1}),
    "of samples": case_of("flow_grpo", 2, {"updates_of": "samples"}, settings=RECOMPUTED),
    "pairs": case_of("flow_dpo", 2, settings=whole_groups()),
}
EVERY = pytest.mark.parametrize("name", list(CASES))


@pytest.fixture(scope="module")
def alone():
    made = {}

    def of(name):
        if name not in made:
            # A trainer that shares updates of samples wants the samples again for every update.
            made[name] = trained_alone(CASES[name], shares_gradients=not CASES[name].updates_samples)
        return made[name]

    return of


def weights_of(assistant):
    """The weights that the model has now."""
    return {name: value.detach().clone() for name, value in assistant.model.transformer.named_parameters()}


def in_second_update(case=FLOW, trainers=3):
    """Trainers that have committed the first update of the second batch."""
    team = Team(case, trainers, seed=2)
    for _ in range(case.updates + 1):
        team.train_update()
    assert (team.committer.batch, team.committer.update) == (1, 1)
    return team


# --- Updates do not depend on which trainer computed which part ----------------------------------------------


@EVERY
def test_the_weights_do_not_depend_in_any_bit_on_who_trained_what(name, alone):
    state, metrics = trained_together(CASES[name], 3, seed=3)
    expected, reports = alone(name)
    assert differences(state, expected) == []
    assert metrics == reports
    order = [(batch, update) for batch in range(STEPS) for update in range(CASES[name].updates)]
    assert [(each.batch, each.update) for each in metrics] == order
    assert len({each.gradient_norm for each in metrics}) == len(metrics)


@pytest.mark.parametrize("name", ["recomputed", "stale, all weights", "a version that lags"])
def test_a_trainer_that_joins_inside_a_batch_trains_the_open_update(name, alone):
    state, metrics = trained_together(CASES[name], 3, seed=5, one_dies=True)
    expected, reports = alone(name)
    assert differences(state, expected) == []
    assert metrics == reports


@pytest.mark.parametrize("name", ["recomputed", "stale, all weights", "a version that lags"])
def test_a_batch_whose_trainer_is_lost_is_trained_again_from_its_first_update(name, alone):
    case = CASES[name]
    team = in_second_update(case)
    for assistant in team.assistants:
        team.train(assistant.trainer, case.jobs(1)[:2])
    state = state_of(team.committer)
    team.committer = case.trainer(case.model(), shares_gradients=True)
    team.committer.load_state(state)
    lags = team.committer.version_lags
    assert lags == (name == "a version that lags")
    for assistant in team.assistants:
        assistant.trainer.start_update(0, team.committer.trained_at_version() if lags else None)
    metrics = [team.train_update() for _ in range((STEPS - 1) * case.updates)]
    expected, reports = alone(name)
    assert differences(state_of(team.committer), expected) == []
    assert metrics == reports[case.updates :]


def test_a_trainer_that_only_commits_keeps_the_version_inside_the_batch():
    committer, assistant = FLOW.trainer(FLOW.model(), shares_gradients=True), Assistant(FLOW)
    before, published = state_of(committer), assistant.trainer.published()
    groups = FLOW.batches()[0]
    for place, first in FLOW.jobs(0):
        assistant.trainer.add_samples(groups[place].part(first, 2))
    committer.add_share(assistant.trainer.take_share())
    for group in groups:
        committer.add_rewards(group.index, group.index, group.rewards)
    for place in committer.places_to_replay():
        committer.hold_group(groups[place])
    committer.commit()
    assert committer.update == 1
    assert differences(state_of(committer), before) == []
    assert same(committer.published(), published) and not same(committer.trained_weights(), published)


def test_groups_beyond_the_clamp_must_be_held_in_the_update_that_trains_them():
    team = in_second_update()
    committer, assistant = team.committer, team.assistants[0].trainer
    team.train(assistant, FLOW.jobs(1))
    committer.add_share(assistant.take_share())
    assert committer.can_commit(), "the rewards of the batch are known since its first update"
    assert committer.places_to_replay() == FLOW.places(1) == [3, 4]
    committer.hold_group(team.groups[3])
    with pytest.raises(RuntimeError, match=r"\[4\]"):
        committer.commit()
    committer.hold_group(team.groups[4])
    assert committer.places_to_replay() == []
    assert committer.commit().terms == 2 * 4 * 2, "two groups of four samples on two steps"


# --- Weights inside a batch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stale, all weights", "decoupled"])
def test_inside_a_batch_samples_are_generated_with_the_version(name):
    case = CASES[name]
    team = in_second_update(case)
    assistant = team.assistants[0]
    version, trained = team.committer.published(), team.committer.trained_weights()
    of_version, of_update = (Assistant(case, 1, weights) for weights in (version, trained))
    assert same(weights_of(assistant), weights_of(of_update))
    for turn in range(2):
        with assistant.trainer.generating():
            assert same(weights_of(assistant), weights_of(of_version)), f"turn {turn}"
        assert same(assistant.trainer.published(), version)
        assert same(state_of(assistant.trainer).weights, state_of(of_version.trainer).weights)
        assert same(weights_of(assistant), weights_of(of_update)), "training continues with the update's weights"
        team.train(assistant.trainer, case.jobs(1)[-1 - turn :][:1])
    assistant.trainer.start_update(0)
    assert same(weights_of(assistant), weights_of(of_version)) and assistant.trainer.update == 0


def test_the_share_of_a_later_update_depends_on_its_weights_and_on_the_version():
    team = in_second_update()
    committer, jobs = team.committer, FLOW.jobs(1)
    version, trained = committer.published(), committer.trained_weights()

    def share(of_version, of_update):
        assistant = Assistant(FLOW, 1, of_version)
        assistant.trainer.start_update(1, of_update)
        team.train(assistant.trainer, jobs)
        return share_as_tensors(assistant.trainer.take_share())

    expected = share(version, trained)
    assert same(share(version, trained), expected)
    assert not same(share(version, version), expected)
    assert not same(share(trained, trained), expected), "log-probs are recomputed with the version's weights"


def test_starting_an_update_discards_what_was_added():
    team = in_second_update()
    assistant, fresh = team.assistants
    trained = team.committer.trained_weights()
    team.train(assistant.trainer, FLOW.jobs(1)[:2])
    assistant.trainer.start_update(1, trained)
    for each in (assistant, fresh):
        team.train(each.trainer, FLOW.jobs(1)[1:])
    shares = [each.trainer.take_share() for each in (assistant, fresh)]
    assert shares[0].update == 1 and shares[0].jobs == shares[1].jobs
    assert same(*map(share_as_tensors, shares))


def test_a_snapshot_of_the_version_is_kept_only_if_a_batch_has_several_updates():
    for updates, kept in ((1, False), (2, True)):
        trainer = Assistant(case_of("flow_grpo", updates)).trainer
        assert (trainer.policies.old_snapshot is not None) == kept
        trainer.reserve_version()
        assert trainer.switching.host_bytes == 0, "a version is kept on the host by the trainer that commits"


# --- Refusals, which change nothing ---------------------------------------------------------------------------


def test_weights_and_updates_that_do_not_fit_are_refused_and_change_nothing():
    team = in_second_update()
    (assistant, fresh), trained = team.assistants, team.committer.trained_weights()
    first, *others = trained
    team.train(assistant.trainer, FLOW.jobs(1)[:1])
    for update, weights, reason in [
        (1, {name: trained[name] for name in others}, first),
        (1, {**trained, "other": torch.zeros(2)}, "other"),
        (1, {**trained, first: torch.zeros(1, 7)}, r"\(1, 7\)"),
        (1, None, "update 0"),
        (2, trained, "no update 2"),
        (-1, trained, "no update -1"),
    ]:
        with pytest.raises(ValueError, match=reason):
            assistant.trainer.start_update(update, weights)
    team.train(assistant.trainer, FLOW.jobs(1)[1:])
    team.train(fresh.trainer, FLOW.jobs(1))
    assert same(*(share_as_tensors(each.trainer.take_share()) for each in (assistant, fresh)))
    with pytest.raises(RuntimeError, match="commits"):
        team.committer.start_update(0)


def test_the_first_update_of_a_version_that_lags_needs_the_trained_weights():
    team = in_second_update(CASES["a version that lags"])
    committer, assistant = team.committer, team.assistants[0].trainer
    assert not same(committer.trained_at_version(), committer.published())
    assert not same(committer.trained_at_version(), committer.trained_weights()), "an update was committed since"
    with pytest.raises(ValueError, match="trained weights after batch 0"):
        assistant.start_update(0)
    assert assistant.update == 1


def test_samples_of_another_update_are_refused_by_a_trainer_that_never_commits():
    team = in_second_update()
    trainer, (earlier, *_), (later, *_) = team.assistants[0].trainer, FLOW.jobs(0), FLOW.jobs(1)
    with pytest.raises(ValueError, match="trained by update 0"):
        team.train(trainer, [earlier])
    team.train(trainer, [later])
    trainer.start_update(0)
    with pytest.raises(ValueError, match="update 0 is open"):
        team.train(trainer, [later])
    team.train(trainer, [earlier])
    assert [(job.place, job.first) for job in trainer.take_share().jobs] == [earlier]


def test_rewards_can_be_given_again_in_a_later_update_but_not_changed():
    committer = in_second_update().committer
    groups = FLOW.batches()[1]
    for group in groups:
        committer.add_rewards(group.index, group.index, group.rewards)
    with pytest.raises(ValueError, match="already has group 0"):
        committer.add_rewards(0, 0, groups[2].rewards)
    with pytest.raises(ValueError, match="trained by update 0"):
        committer.hold_group(groups[0])
    assert not committer.can_commit()
