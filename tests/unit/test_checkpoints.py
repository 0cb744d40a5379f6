"""Checkpoints: exact, complete or absent, and clear about what is wrong with one."""

from __future__ import annotations

import errno
import json
import os
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from scored_groups import Rollout, scored_groups, toy, trainer_of

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.reading import ConfigError
from digenrl.config.training import EmaSettings, TrainerSettings
from digenrl.training.checkpoint import atomic_folders as whole_folders
from digenrl.training.checkpoint.checkpoints import (
    CheckpointError,
    checkpoints_in,
    fingerprint_of,
    latest_checkpoint,
    prune_checkpoints,
    read_checkpoint,
    save_checkpoint,
)

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
    return trainer_of(model, algorithm, groups[0], SETTINGS, keep_last_version=True), groups


def train(trainer, groups):
    for group in groups:
        trainer.add_group(group)
        while trainer.can_commit():
            trainer.commit()


def tensors_of(tree, path=""):
    found = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= tensors_of(value, f"{path}{key}/")
        elif isinstance(value, torch.Tensor):
            found[path + key] = value
    return found


def assert_same(left, right):
    left_tensors, right_tensors = tensors_of(left), tensors_of(right)
    assert left_tensors.keys() == right_tensors.keys()
    for name, value in left_tensors.items():
        assert torch.equal(value, right_tensors[name]), name
        assert value.dtype == right_tensors[name].dtype, name


@contextmanager
def files_of_at_most(size):
    """Real writes beyond this size fail, as they do on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def state():
    trainer, (groups,) = flow_grpo_trainer()
    train(trainer, groups)
    return trainer.state()


# --- Exactness ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("flow_grpo", {"updates_per_batch": 2}),
        ("diffusion_nft", {"old_decay_growth": 0.25, "updates_per_batch": 1}),
    ],
)
def test_a_run_that_goes_on_from_a_checkpoint_ends_with_the_same_bits(name, options, lora, tmp_path):
    algorithm = build_algorithm(name, options)
    through, batches = trainer_and_batches(algorithm, lora, batches=4)
    train(through, batches[0])
    train(through, batches[1])
    path = save_checkpoint(tmp_path, 2, through.state(), FACTS)
    train(through, batches[2])
    train(through, batches[3])

    resumed, _ = trainer_and_batches(algorithm, lora, batches=1)
    checkpoint = read_checkpoint(path, fingerprint="f00d")
    assert (checkpoint.step, checkpoint.facts) == (2, FACTS)
    resumed.load_state(checkpoint.trainer_state)
    assert resumed.pack_size == through.pack_size == 5
    train(resumed, batches[2])
    train(resumed, batches[3])
    assert (resumed.batch, resumed.updates_done) == (through.batch, through.updates_done)
    assert_same(resumed.state(), through.state())
    assert ("policies/old/" in "".join(tensors_of(through.state()))) == (name == "diffusion_nft")


def test_a_checkpoint_taken_inside_a_batch_is_of_the_version_before_it(tmp_path):
    algorithm = build_algorithm("flow_grpo", {"updates_per_batch": 2})
    trainer, batches = trainer_and_batches(algorithm, True, batches=2)
    train(trainer, batches[0])
    expected = trainer.state()
    for group in batches[1]:
        trainer.add_group(group)
    trainer.commit()
    path = save_checkpoint(tmp_path, 1, trainer.state_at_last_version(), FACTS)
    assert_same(read_checkpoint(path).trainer_state, expected)


def test_nothing_is_pickled_and_weights_are_found_by_the_names_of_parameters(state, tmp_path):
    path = save_checkpoint(tmp_path, 1, state, FACTS)
    assert path == tmp_path / "step_000001"
    assert names_in(path) == ["average.safetensors", "optimizer.safetensors", "state.json", WEIGHTS]
    content = json.loads((path / "state.json").read_text())
    assert content["format"] == 3
    assert content["trainer"]["updates_done"] == 2
    assert content["files"][WEIGHTS]["bytes"] == (path / WEIGHTS).stat().st_size


def test_an_export_is_part_of_the_checkpoint_and_checked_with_it(state, tmp_path):
    def export(folder):
        (folder / "lora").mkdir()
        (folder / "lora" / "adapter.bin").write_bytes(b"abc")

    path = save_checkpoint(tmp_path, 1, state, FACTS, export)
    read_checkpoint(path)
    (path / "lora" / "adapter.bin").write_bytes(b"abd")
    with pytest.raises(CheckpointError, match=r"lora/adapter.bin does not match its checksum"):
        read_checkpoint(path)


def test_the_frozen_reference_lies_on_the_disk_once(tmp_path):
    trainer, (groups,) = flow_grpo_trainer(lora=False)
    train(trainer, groups)
    state = trainer.state()
    paths = [save_checkpoint(tmp_path, step, state, FACTS) for step in (1, 2, 3)]
    assert len({(path / REFERENCE).stat().st_ino for path in paths}) == 1
    assert len({(path / WEIGHTS).stat().st_ino for path in paths}) == 3
    prune_checkpoints(tmp_path, keep=1)
    assert_same(read_checkpoint(paths[2]).trainer_state, state)
    moved = {name: value + 1 for name, value in state["policies"]["reference"].items()}
    other = save_checkpoint(tmp_path, 4, state | {"policies": state["policies"] | {"reference": moved}}, FACTS)
    assert_same(read_checkpoint(other).trainer_state["policies"]["reference"], moved)


def test_where_there_are_no_hard_links_the_reference_is_written_again(tmp_path, monkeypatch):
    trainer, _ = flow_grpo_trainer(lora=False)
    state = trainer.state()

    def refused(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    paths = [save_checkpoint(tmp_path, step, state, FACTS) for step in (1, 2)]
    assert len({(path / REFERENCE).stat().st_ino for path in paths}) == 2
    assert_same(read_checkpoint(paths[1]).trainer_state, state)


# --- Complete or absent ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("size", [300, 3000])
def test_a_disk_that_is_full_leaves_what_was_there_before(state, tmp_path, step, size):
    good = save_checkpoint(tmp_path, 1, state, FACTS)
    files = {path.name: path.read_bytes() for path in good.iterdir()}
    with files_of_at_most(size), pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path, step, state, {"more": "x" * 5000})
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / f'step_{step:06d}'}: could not be saved: File too large")
    assert message.endswith(f"the last good checkpoint is {good}")
    assert "\n" not in message
    assert names_in(tmp_path) == ["step_000001"]
    assert {path.name: path.read_bytes() for path in good.iterdir()} == files
    save_checkpoint(tmp_path, 2, state, FACTS)
    assert latest_checkpoint(tmp_path) == tmp_path / "step_000002"


@pytest.mark.parametrize("failing", ["fsync", "rename", "mkdir"])
def test_any_failure_of_the_system_while_saving_is_told_and_undone(state, tmp_path, monkeypatch, failing):
    good = save_checkpoint(tmp_path, 1, state, FACTS)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    owner = whole_folders.os if failing == "fsync" else Path
    with monkeypatch.context() as patch:
        patch.setattr(owner, failing, full)
        with pytest.raises(CheckpointError, match=r"could not be saved: No space left on device; the last good"):
            save_checkpoint(tmp_path, 2, state, FACTS)
    assert names_in(tmp_path) == ["step_000001"]
    assert_same(read_checkpoint(good).trainer_state, state)


def test_a_first_checkpoint_that_fails_says_that_there_is_no_other(state, tmp_path):
    with files_of_at_most(300), pytest.raises(ConfigError, match="there is no other checkpoint"):
        save_checkpoint(tmp_path / "checkpoints", 1, state, FACTS)
    assert names_in(tmp_path / "checkpoints") == []


def test_an_export_that_raises_leaves_no_checkpoint(state, tmp_path):
    def export(folder):
        raise KeyError("not a matter of files")

    with pytest.raises(KeyError):
        save_checkpoint(tmp_path, 1, state, FACTS, export)
    assert names_in(tmp_path) == []


def test_leftovers_of_a_process_that_was_stopped_are_ignored_and_then_tidied(state, tmp_path):
    good = save_checkpoint(tmp_path, 1, state, FACTS)
    for name in (".saving-step_000002", ".removing-step_000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / WEIGHTS).write_bytes(b"half")
    assert latest_checkpoint(tmp_path) == good
    assert checkpoints_in(tmp_path) == [good]
    save_checkpoint(tmp_path, 3, state, FACTS)
    assert names_in(tmp_path) == ["step_000001", "step_000003"]


def test_a_checkpoint_of_the_same_step_is_replaced_and_comes_back_if_that_was_stopped(state, tmp_path):
    path = save_checkpoint(tmp_path, 1, state, FACTS)
    save_checkpoint(tmp_path, 1, state, FACTS | {"journal_bytes": 2})
    assert read_checkpoint(path).facts["journal_bytes"] == 2
    assert names_in(tmp_path) == ["step_000001"]
    path.rename(tmp_path / ".replaced-step_000001")  # as it stands between the two renames
    assert latest_checkpoint(tmp_path) == path
    assert read_checkpoint(path).facts["journal_bytes"] == 2


def test_a_replacement_that_fails_halfway_is_undone(state, tmp_path, monkeypatch):
    path = save_checkpoint(tmp_path, 1, state, FACTS)
    rename = Path.rename

    def refused_for_the_new_one(self, target):
        if self.name.startswith(whole_folders.SAVING):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refused_for_the_new_one)
        with pytest.raises(CheckpointError, match="could not be saved: Input/output error"):
            save_checkpoint(tmp_path, 1, state, {})
    assert names_in(tmp_path) == ["step_000001"]
    assert read_checkpoint(path).facts == FACTS


def test_the_newest_are_kept_and_always_the_one_just_written(state, tmp_path):
    for step in (8, 9, 10, 11):
        save_checkpoint(tmp_path, step, state, FACTS)
    prune_checkpoints(tmp_path, keep=2)
    assert names_in(tmp_path) == ["step_000010", "step_000011"]
    written = save_checkpoint(tmp_path, 4, state, FACTS)
    prune_checkpoints(tmp_path, keep=1, just_written=written)
    assert names_in(tmp_path) == ["step_000004", "step_000011"]


def test_steps_are_compared_as_numbers(state, tmp_path):
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "nowhere") is None
    save_checkpoint(tmp_path, 999_999, state, FACTS)
    newest = save_checkpoint(tmp_path, 1_000_000, state, FACTS)
    assert latest_checkpoint(tmp_path) == newest


# --- What is wrong with it ------------------------------------------------------------------------------------


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def rewrite(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (lambda p: (p / WEIGHTS).unlink(), f"is damaged: {WEIGHTS} is missing"),
        (lambda p: flip_a_byte(p / WEIGHTS), f"is damaged: {WEIGHTS} does not match its checksum"),
        (lambda p: os.truncate(p / "optimizer.safetensors", 99), "optimizer.safetensors has 99 bytes, expected"),
        (
            lambda p: (p / "state.json").write_text("{"),
            "is damaged: state.json cannot be read: Expecting property",
        ),
        (lambda p: (p / "state.json").write_bytes(b"\xff\xfe"), "is damaged: state.json cannot be read"),
        (lambda p: rewrite(p / "state.json", step=7), "is damaged: state.json does not match its checksum"),
        (lambda p: (p / "state.json").unlink(), "not a checkpoint, it has no state.json"),
    ],
)
def test_harm_is_named_and_the_checkpoint_before_it_too(state, tmp_path, harm, complaint):
    before, path = (save_checkpoint(tmp_path, step, state, FACTS) for step in (1, 2))
    harm(path)
    with pytest.raises(ConfigError) as caught:
        read_checkpoint(path)
    assert complaint in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).endswith(f"the last good checkpoint is {before}")


def test_a_foreign_checkpoint_is_refused(state, tmp_path):
    path = save_checkpoint(tmp_path, 1, state, FACTS)
    with pytest.raises(ConfigError, match=r"another recipe \(fingerprint f00d, this one has beef\)"):
        read_checkpoint(path, fingerprint="beef")
    rewrite(path / "state.json", format=1)
    with pytest.raises(ConfigError, match="is of format 1, known: 3, 4;"):
        read_checkpoint(path)
    (path / "state.json").write_text('{"lr": 1}')
    with pytest.raises(ConfigError, match="not of a DigenRL checkpoint"):
        read_checkpoint(path)


def test_a_folder_that_is_none_says_what_is_inside(state, tmp_path):
    with pytest.raises(ConfigError, match=r"not a checkpoint, it has no state.json; there is no other checkpoint"):
        read_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="there is no such checkpoint"):
        read_checkpoint(tmp_path / "step_000001")
    path = save_checkpoint(tmp_path, 1, state, FACTS)
    with pytest.raises(ConfigError, match=f"did you mean {path}"):
        read_checkpoint(tmp_path)


def test_a_fingerprint_knows_values_but_not_the_order_of_keys():
    assert fingerprint_of({"a": 1, "b": [0.1]}) == fingerprint_of({"b": [0.1], "a": 1})
    assert fingerprint_of({"a": 1}) != fingerprint_of({"a": 2})
