"""Checkpoints and exports of several ranks: any number of ranks goes on from them, exactly; complete or absent."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from digenrl.worker.orders import SaveCheckpoint
from digenrl.worker.saving import Saving
from late_copies import LateCopies
from rank_cases import STEADY, WAYS, Case, train
from rank_processes import on_ranks
from scored_groups import Rollout, relative_difference, scored_groups, trainer_of
from test_checkpoints import files_of_at_most, flip_a_byte, names_in
from test_export import SIZE, loaded_in_diffusers, model_of, velocity_of

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.training import EmaSettings
from digenrl.testing.tiny_models import make_tiny_pipeline
from digenrl.training.checkpoint.checkpoints import (
    CheckpointError,
    latest_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from digenrl.training.checkpoint.part_files import part_name
from digenrl.training.checkpoint.state_trees import tensors_in
from digenrl.training.policy_weights import Snapshot
from digenrl.training.ranks.sharding import shard_model

CASE = Case(
    "diffusion_nft",
    {"kl_weight": 0.1, "old_decay_growth": 0.25},
    STEADY.model_copy(update={"ema": EmaSettings(decay=0.5, every_updates=1)}),
    Rollout(groups=2, group_size=3, steps=3),
    batches=3,
)


def saved(ranks, case, run):
    """Two batches, saved after each, and the third: the state at the second, and the weights at the end."""
    _, trainer, batches = case.trainer_and_batches(ranks)
    for step in (1, 2):
        train(trainer, batches[step - 1])
        path = save_checkpoint(run, step, trainer.state(), {"fingerprint": "f00d"}, ranks=ranks)
    middle = trainer.state()
    train(trainer, batches[2])
    return path, middle, trainer.published()


def resumed(ranks, case, path):
    """Goes on from a checkpoint; the state there, and the weights after the third batch."""
    model, trainer, batches = case.trainer_and_batches(ranks)
    Saving(model, trainer).resume(path)
    middle = trainer.state()
    train(trainer, batches[2])
    return path, middle, trainer.published()


def kept_and_left(ranks, case):
    """The state before a batch, and the same as it is kept when the batch's first update is committed.

    Copies are made at the worst time: while another policy's weights are in the model.
    """
    copies, swap = LateCopies(), Snapshot._swap

    def swapped(snapshot):
        swap(snapshot)
        copies.finish()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("digenrl.training.offload.host_copies.copies_beside", lambda device: copies)
        patch.setattr(Snapshot, "_swap", swapped)
        _, trainer, batches = case.trainer_and_batches(ranks)
        train(trainer, batches[0])
        before = trainer.state()
        for group in batches[1]:
            trainer.add_group(group)
        trainer.commit()
        assert trainer.update == 1
        return before, trainer.state_at_last_version()


@WAYS
def test_what_is_kept_of_a_version_is_not_what_replays_put_in_its_place(lora, tmp_path):
    case = replace(CASE, options=CASE.options | {"updates_per_batch": 2}, lora=lora)
    for before, kept in on(2, tmp_path, kept_and_left, case):
        assert_same_bits(tensors_in(before), tensors_in(kept))


def on(count, folder, job, *arguments):
    """On so many ranks; on one alone in this process, with no group at all."""
    return [job(None, *arguments)] if count == 1 else on_ranks(count, folder, job, *arguments)


def whole(states):
    """One state of what all ranks hold."""
    parts = [tensors_in(state) for state in states]
    shard = states[0]["shard"]
    if shard is None:
        return parts[0]
    counters = {path for path, value in parts[0].items() if not value.dim()}
    return {
        path: value if path in counters else torch.cat([p[path] for p in parts])
        for path, value in parts[0].items()
    }


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    for path, value in left.items():
        assert torch.equal(value, right[path]), path
        assert value.dtype == right[path].dtype, path


@WAYS
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2), (3, 2)])
def test_any_number_of_ranks_goes_on_from_a_checkpoint(tmp_path, lora, before, after):
    case = replace(CASE, lora=lora)
    through = on(before, tmp_path, saved, case, tmp_path / "run")
    path = latest_checkpoint(tmp_path / "run")
    assert path == through[0][0]
    others = on(after, tmp_path, resumed, case, path)
    expected, got = whole([each[1] for each in through]), whole([each[1] for each in others])
    assert_same_bits(got, expected)
    assert_same_bits(tensors_in(read_checkpoint(path, "f00d").trainer_state), expected)
    assert relative_difference(others[0][2], through[0][2]) < 1e-6
    if before == after:
        assert_same_bits(others[0][2], through[0][2])


def test_every_rank_writes_its_parts_and_the_reference_lies_on_the_disk_once(tmp_path):
    case = replace(CASE, lora=False)
    on_ranks(2, tmp_path, saved, case, tmp_path / "run")
    folders = [tmp_path / "run" / f"step_00000{step}" for step in (1, 2)]
    kinds = ["average", "old_policy", "optimizer", "reference", "state.json", "weights"]
    assert names_in(folders[1]) == kinds
    assert names_in(folders[1] / "weights") == [part_name(0), part_name(1)]
    content = json.loads((folders[1] / "state.json").read_text())
    assert content["format"] == 4
    assert (
        content["files"][f"weights/{part_name(1)}"]["bytes"]
        == (folders[1] / "weights" / part_name(1)).stat().st_size
    )
    for rank in range(2):
        files = [folder / "reference" / part_name(rank) for folder in folders]
        assert files[0].stat().st_ino == files[1].stat().st_ino
    (folders[1] / "weights" / part_name(1)).write_bytes(b"other")
    with pytest.raises(CheckpointError, match=r"weights/shard-00002.*has 5 bytes, expected"):
        read_checkpoint(folders[1])


# --- Complete or absent ---------------------------------------------------------------------------------------


def saved_twice(ranks, case, run, harm):
    _, trainer, batches = case.trainer_and_batches(ranks)
    train(trainer, batches[0])
    save_checkpoint(run, 1, trainer.state(), {}, ranks=ranks)
    train(trainer, batches[1])
    return harm(ranks, lambda: save_checkpoint(run, 2, trainer.state(), {}, ranks=ranks))


def dies_while_writing(ranks, save):
    """The second rank is killed when its first file is half written."""
    with pytest.MonkeyPatch.context() as patch:
        if ranks.index == 1:
            patch.setattr("safetensors.torch.save", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(
            CheckpointError, match=r"could not be saved: .*; the last good checkpoint is .*step_000001"
        ):
            save()


def test_a_rank_that_dies_while_saving_leaves_the_checkpoint_before_whole(tmp_path):
    case, run = replace(CASE, lora=False), tmp_path / "run"
    on_ranks(2, tmp_path, saved_twice, case, run, dies_while_writing, die=frozenset({1}))
    assert names_in(run) == ["step_000001"]
    assert read_checkpoint(latest_checkpoint(run)).step == 1


def disk_full_for_one(ranks, save):
    """The disk of one rank is full; all say so, and all can go on and save later."""
    if ranks.index == ranks.count - 1:
        with files_of_at_most(300), pytest.raises(CheckpointError, match="File too large"):
            save()
    else:
        with pytest.raises(CheckpointError, match=r"rank 1: File too large; the last good checkpoint is"):
            save()
    return save()


def disk_full_for_the_first(ranks, save):
    if ranks.first:
        with files_of_at_most(300), pytest.raises(CheckpointError, match="File too large"):
            save()
    else:
        with pytest.raises(CheckpointError, match=r"rank 0: .*File too large.*; the last good checkpoint is"):
            save()
    return save()


@pytest.mark.parametrize(
    ("lora", "harm"),
    [(False, disk_full_for_one), (False, disk_full_for_the_first), (True, disk_full_for_the_first)],
)
def test_a_rank_that_cannot_write_is_named_by_all_and_they_can_save_later(tmp_path, lora, harm):
    case, run = replace(CASE, lora=lora), tmp_path / "run"
    paths = on_ranks(2, tmp_path, saved_twice, case, run, harm)
    assert paths == [run / "step_000002"] * 2
    assert names_in(run) == ["step_000001", "step_000002"]
    assert read_checkpoint(run / "step_000002").step == 2


def resumed_from_harm(ranks, case, path):
    model, trainer, _ = case.trainer_and_batches(ranks)
    before = tensors_in(trainer.state())
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        Saving(model, trainer).resume(path)
    assert_same_bits(tensors_in(trainer.state()), before)


@WAYS
def test_harm_that_one_rank_finds_stops_all(tmp_path, lora):
    case = replace(CASE, lora=lora)
    path, *_ = on_ranks(2, tmp_path, saved, case, tmp_path / "run")[0]
    names = json.loads((path / "state.json").read_text())["files"]
    flip_a_byte(path / next(name for name in names if name.startswith("optimizer")))
    on_ranks(2, tmp_path, resumed_from_harm, case, path)


def test_parts_are_not_saved_as_if_they_were_the_whole(tmp_path):
    _, trainer, _ = replace(CASE, lora=False).trainer_and_batches(None)
    with pytest.raises(AssertionError, match="saved by all ranks together"):
        save_checkpoint(tmp_path, 1, trainer.state() | {"shard": {"index": 0}}, {})


# --- A real transformer ---------------------------------------------------------------------------------------


def trained_tiny(ranks, directory, run, lora):
    """A tiny SD3, whose blocks are sharded one by one: trained, saved and exported."""
    model, algorithm = model_of(directory, lora), build_algorithm("flow_grpo", {"updates_per_batch": 1})
    groups = scored_groups(model, algorithm, Rollout(groups=2, group_size=3, steps=3, slice_size=3, size=SIZE))
    if ranks is not None and not lora:
        shard_model(model, ranks)
    settings = STEADY.model_copy(update={"gradient_checkpointing": True})
    trainer = trainer_of(model, algorithm, groups, settings, ranks=ranks)
    metrics = train(trainer, groups)
    report = Saving(model, trainer).save(SaveCheckpoint(str(run), 1, {}, keep=1))
    return trainer.published(), metrics, report


@WAYS
def test_a_transformer_of_two_ranks_trains_as_one_and_its_export_loads_in_diffusers(tmp_path, lora):
    make_tiny_pipeline("sd3", tmp_path / "sd3")
    weights, metrics, _ = trained_tiny(None, tmp_path / "sd3", tmp_path / "one", lora)
    several = on_ranks(2, tmp_path, trained_tiny, tmp_path / "sd3", tmp_path / "two", lora)
    assert relative_difference(several[0][0], weights) < 1e-6
    assert several[0][1][0]["gradient_norm"] == pytest.approx(metrics[0]["gradient_norm"], rel=1e-4)
    assert several[0][2] == several[1][2]
    folders = [tmp_path / run / ("lora" if lora else "transformer") for run in ("one", "two")]
    assert names_in(folders[0]) == names_in(folders[1])
    loaded = [loaded_in_diffusers(tmp_path / "sd3", folder, lora) for folder in folders]
    assert torch.allclose(velocity_of(loaded[0]), velocity_of(loaded[1]), atol=1e-5)
    if not lora:
        assert_same_bits(dict(loaded[1].transformer.named_parameters()), several[0][0])
        configs = [json.loads((folder / "config.json").read_text()) for folder in folders]
        assert configs[0] == configs[1]
        assert configs[1]["_class_name"] == "SD3Transformer2DModel"


def export_fails(ranks, directory, run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("digenrl.worker.saving.export_weights", no_space)
        with pytest.raises(CheckpointError, match="No space left on device"):
            trained_tiny(ranks, directory, run, lora=False)


def no_space(*_):
    raise CheckpointError("No space left on device")


def test_an_export_that_fails_is_told_on_all_ranks(tmp_path):
    make_tiny_pipeline("sd3", tmp_path / "sd3")
    on_ranks(2, tmp_path, export_fails, tmp_path / "sd3", tmp_path / "run")
    assert names_in(tmp_path / "run" / "checkpoints") == ["step_000001"]
