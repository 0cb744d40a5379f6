"""Checkpoints: exact, complete or absent, and clear about damage."""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scored_groups import Rollout, differences, scored_groups, state_of, toy, train, trainer_of

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.reading import ConfigError
from digenrl.config.recipes.training import EmaSettings, TrainerSettings
from digenrl.training.checkpoint import atomic_folders
from digenrl.training.checkpoint.checkpoints import (
    prune_checkpoints,
    read_checkpoint,
    read_version_before,
    save_checkpoint,
)
from digenrl.training.checkpoint.format import CheckpointError, checkpoints_in

SETTINGS = TrainerSettings(pack_size="auto", largest_pack=5, learning_rate=0.02, ema=EmaSettings(every_updates=1))
FACTS = {"fingerprint": "f00d", "sampler": {"next_step": 3, "seed": 7}, "journal_bytes": 12345, "share": 0.1}
WEIGHTS, REFERENCE = "weights.safetensors", "reference.safetensors"


def flow_grpo_trainer(lora=True):
    algorithm = build_algorithm("flow_grpo", {"updates_per_batch": 2})
    return trainer_and_batches(algorithm, lora, batches=1)


def trainer_and_batches(algorithm, lora, batches):
    model = toy(torch.float32, lora)
    rollouts = [Rollout(groups=2, steps=3, step=step, version=step) for step in range(batches)]
    groups = [scored_groups(model, algorithm, rollout, [(0, 1, 2, 4), (3, 1, 1, 0)]) for rollout in rollouts]
    return trainer_of(model, algorithm, groups[0], SETTINGS), groups


@contextmanager
def files_of_at_most(size):
    """Makes real writes beyond this size fail, as on a full disk."""
    before, wrote_none = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # bytecode would be cut off as well
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = wrote_none


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def state():
    trainer, (groups,) = flow_grpo_trainer()
    train(trainer, groups)
    return state_of(trainer)


# --- Exactness ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("flow_grpo", {"updates_per_batch": 2}),
        ("diffusion_nft", {"old_decay_growth": 0.25, "updates_per_batch": 1}),
    ],
)
def test_a_resumed_trainer_ends_with_the_same_bits(name, options, lora, tmp_path):
    algorithm = build_algorithm(name, options)
    through, batches = trainer_and_batches(algorithm, lora, batches=4)
    train(through, batches[0])
    train(through, batches[1])
    path = save_checkpoint(tmp_path, 2, through.state_at_last_version(), FACTS)
    train(through, batches[2])
    train(through, batches[3])

    resumed, _ = trainer_and_batches(algorithm, lora, batches=1)
    checkpoint = read_checkpoint(path)
    assert (checkpoint.step, checkpoint.facts) == (2, FACTS)
    resumed.load_state(checkpoint.trainer_state)
    assert resumed.plan.pack_size == through.plan.pack_size == 5
    train(resumed, batches[2])
    train(resumed, batches[3])
    assert differences(resumed.state_at_last_version(), through.state_at_last_version()) == []
    assert (state_of(through).old_policy is not None) == (name == "diffusion_nft")


def test_a_checkpoint_saved_inside_a_batch_is_of_the_last_version(tmp_path):
    algorithm = build_algorithm("flow_grpo", {"updates_per_batch": 2})
    trainer, batches = trainer_and_batches(algorithm, True, batches=2)
    train(trainer, batches[0])
    expected = state_of(trainer)
    for group in batches[1]:
        trainer.add_group(group)
    trainer.commit()
    path = save_checkpoint(tmp_path, 1, trainer.state_at_last_version(), FACTS)
    assert differences(read_checkpoint(path).trainer_state, expected) == []


def test_a_checkpoint_has_a_safetensors_file_per_kind_and_a_json_file(state, tmp_path):
    path = save_checkpoint(tmp_path, 1, state, FACTS)
    assert path == tmp_path / "step_000001"
    assert names_in(path) == ["average.safetensors", "optimizer.safetensors", "state.json", WEIGHTS]
    content = json.loads((path / "state.json").read_text())
    assert content["format"] == 3
    assert content["trainer"]["updates_done"] == 2
    assert content["files"][WEIGHTS]["bytes"] == (path / WEIGHTS).stat().st_size


def test_a_checkpoint_may_hold_the_version_before(state, tmp_path):
    before = {"weight": torch.tensor([1.5, -2.0])}
    path = save_checkpoint(tmp_path, 3, state, {}, version_before=before)
    assert torch.equal(read_version_before(path)["weight"], before["weight"])
    assert not differences(read_checkpoint(path).trainer_state, state)
    flip_a_byte(path / "version_before.safetensors")
    with pytest.raises(CheckpointError, match="version_before"):
        read_checkpoint(path)
    assert read_version_before(save_checkpoint(tmp_path, 4, state, {})) == {}


def test_the_frozen_reference_is_stored_once(tmp_path):
    trainer, (groups,) = flow_grpo_trainer(lora=False)
    train(trainer, groups)
    state = state_of(trainer)
    paths = [save_checkpoint(tmp_path, step, state, FACTS) for step in (1, 2, 3)]
    assert len({(path / REFERENCE).stat().st_ino for path in paths}) == 1
    assert len({(path / WEIGHTS).stat().st_ino for path in paths}) == 3
    prune_checkpoints(tmp_path, keep=1)
    assert differences(read_checkpoint(paths[2]).trainer_state, state) == []
    other = replace(state, reference={name: value + 1 for name, value in state.reference.items()})
    path = save_checkpoint(tmp_path, 4, other, FACTS)
    assert differences(read_checkpoint(path).trainer_state, other) == []


def test_without_hard_links_the_reference_is_written_again(tmp_path, monkeypatch):
    trainer, _ = flow_grpo_trainer(lora=False)
    state = state_of(trainer)

    def refused(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    paths = [save_checkpoint(tmp_path, step, state, FACTS) for step in (1, 2)]
    assert len({(path / REFERENCE).stat().st_ino for path in paths}) == 2
    assert differences(read_checkpoint(paths[1]).trainer_state, state) == []


# --- Complete or absent ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("size", [300, 3000])
def test_a_full_disk_leaves_older_checkpoints_unchanged(state, tmp_path, step, size):
    good = save_checkpoint(tmp_path, 1, state, FACTS)
    files = {path.name: path.read_bytes() for path in good.iterdir()}
    with files_of_at_most(size), pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path, step, state, {"more": "x" * 5000})
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / f'step_{step:06d}'}: ") and "File too large" in message
    assert message.endswith(f"{good}") and "\n" not in message
    assert names_in(tmp_path) == ["step_000001"]
    assert {path.name: path.read_bytes() for path in good.iterdir()} == files
    save_checkpoint(tmp_path, 2, state, FACTS)
    assert checkpoints_in(tmp_path)[-1] == tmp_path / "step_000002"


@pytest.mark.parametrize("failing", ["fsync", "rename", "mkdir"])
def test_a_failed_system_call_while_saving_is_reported_and_undone(state, tmp_path, monkeypatch, failing):
    good = save_checkpoint(tmp_path, 1, state, FACTS)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    owner = os if failing == "fsync" else Path
    with monkeypatch.context() as patch:
        patch.setattr(owner, failing, full)
        with pytest.raises(CheckpointError, match=r"No space left on device; .*step_000001"):
            save_checkpoint(tmp_path, 2, state, FACTS)
    assert names_in(tmp_path) == ["step_000001"]
    assert differences(read_checkpoint(good).trainer_state, state) == []


def test_a_failed_first_checkpoint_leaves_an_empty_folder(state, tmp_path):
    with files_of_at_most(300), pytest.raises(ConfigError, match="no other checkpoint"):
        save_checkpoint(tmp_path / "checkpoints", 1, state, FACTS)
    assert names_in(tmp_path / "checkpoints") == []


def test_leftovers_of_an_interrupted_process_are_ignored_and_then_removed(state, tmp_path):
    good = save_checkpoint(tmp_path, 1, state, FACTS)
    for name in (".saving-step_000002", ".removing-step_000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / WEIGHTS).write_bytes(b"half")
    assert checkpoints_in(tmp_path) == [good]
    save_checkpoint(tmp_path, 3, state, FACTS)
    assert names_in(tmp_path) == ["step_000001", "step_000003"]


def test_an_interrupted_replacement_of_a_checkpoint_is_undone(state, tmp_path):
    path = save_checkpoint(tmp_path, 1, state, FACTS)
    save_checkpoint(tmp_path, 1, state, FACTS | {"journal_bytes": 2})
    assert read_checkpoint(path).facts["journal_bytes"] == 2
    assert names_in(tmp_path) == ["step_000001"]
    path.rename(tmp_path / ".replaced-step_000001")  # the situation between the two renames
    atomic_folders.restore(tmp_path)
    assert checkpoints_in(tmp_path) == [path]
    assert read_checkpoint(path).facts["journal_bytes"] == 2


def test_a_failed_replacement_of_a_checkpoint_is_undone(state, tmp_path, monkeypatch):
    path = save_checkpoint(tmp_path, 1, state, FACTS)
    rename = Path.rename

    def fail_for_the_new_one(self, target):
        if self.name.startswith(atomic_folders.SAVING):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail_for_the_new_one)
        with pytest.raises(CheckpointError, match="Input/output error"):
            save_checkpoint(tmp_path, 1, state, {})
    assert names_in(tmp_path) == ["step_000001"]
    assert read_checkpoint(path).facts == FACTS


def test_pruning_keeps_the_newest_and_the_one_just_written(state, tmp_path):
    for step in (8, 9, 10, 11):
        save_checkpoint(tmp_path, step, state, FACTS)
    prune_checkpoints(tmp_path, keep=2)
    assert names_in(tmp_path) == ["step_000010", "step_000011"]
    written = save_checkpoint(tmp_path, 4, state, FACTS)
    prune_checkpoints(tmp_path, keep=1, just_written=written)
    assert names_in(tmp_path) == ["step_000004", "step_000011"]


def test_steps_are_compared_as_numbers(state, tmp_path):
    assert checkpoints_in(tmp_path) == []
    assert checkpoints_in(tmp_path / "nowhere") == []
    save_checkpoint(tmp_path, 999_999, state, FACTS)
    newest = save_checkpoint(tmp_path, 1_000_000, state, FACTS)
    assert checkpoints_in(tmp_path)[-1] == newest


# --- Damage ---------------------------------------------------------------------------------------------------


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def rewrite(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda p: (p / WEIGHTS).unlink(), f"{WEIGHTS} is missing"),
        (lambda p: flip_a_byte(p / WEIGHTS), f"{WEIGHTS} does not match its checksum"),
        (lambda p: os.truncate(p / "optimizer.safetensors", 99), "optimizer.safetensors has 99 bytes"),
        (lambda p: (p / "state.json").write_text("{"), "state.json cannot be read"),
        (lambda p: (p / "state.json").write_bytes(b"\xff\xfe"), "state.json cannot be read"),
        (lambda p: rewrite(p / "state.json", step=7), "state.json does not match its checksum"),
        (lambda p: (p / "state.json").unlink(), "no state.json"),
    ],
)
def test_errors_name_the_damage_and_the_last_good_checkpoint(state, tmp_path, harm, message):
    before, path = (save_checkpoint(tmp_path, step, state, FACTS) for step in (1, 2))
    harm(path)
    with pytest.raises(ConfigError) as caught:
        read_checkpoint(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ") and str(caught.value).endswith(f"{before}")


def test_unknown_formats_are_refused(state, tmp_path):
    path = save_checkpoint(tmp_path, 1, state, FACTS)
    rewrite(path / "state.json", format=1)
    with pytest.raises(ConfigError, match="format 1, known: 3, 4"):
        read_checkpoint(path)
    (path / "state.json").write_text('{"lr": 1}')
    with pytest.raises(ConfigError, match="no format number"):
        read_checkpoint(path)


def test_a_path_that_is_not_a_checkpoint_is_refused_with_a_suggestion(state, tmp_path):
    with pytest.raises(ConfigError, match=r"no state.json; .* no other checkpoint"):
        read_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="no such checkpoint"):
        read_checkpoint(tmp_path / "step_000001")
    path = save_checkpoint(tmp_path, 1, state, FACTS)
    with pytest.raises(ConfigError, match=f"did you mean {path}"):
        read_checkpoint(tmp_path)
