"""Checkpoints and exports of several ranks: readable by any number of ranks, exact, complete or absent."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from late_copier import LateCopier
from rank_cases import LORA_OR_SHARDED, STEADY, Case, resume, stages_of, train
from rank_processes import on_ranks
from scored_groups import Rollout, differences, relative_difference, scored_groups, state_of, trainer_of
from test_checkpoints import files_of_at_most, flip_a_byte, names_in
from test_export import SIZE, loaded_in_diffusers, model_of, velocity_of

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.recipes.training import EmaSettings
from digenrl.records import Save
from digenrl.testing.tiny_models import make_tiny_pipeline
from digenrl.training.checkpoint.checkpoints import read_checkpoint, save_checkpoint
from digenrl.training.checkpoint.format import CheckpointError, checkpoints_in
from digenrl.training.checkpoint.shard_files import shard_file_name
from digenrl.training.checkpoint.state_tensors import JSON_TENSOR, state_as_tensors
from digenrl.training.policy_weights import Snapshot
from digenrl.training.ranks.rank import Rank
from digenrl.training.ranks.rank_group import PeersLostError
from digenrl.training.ranks.sharding import ShardSpec, shard_model

CASE = Case(
    "diffusion_nft",
    {"kl_weight": 0.1, "old_decay_growth": 0.25},
    STEADY.model_copy(update={"ema": EmaSettings(decay=0.5, every_updates=1)}),
    Rollout(groups=2, group_size=3, steps=3),
    batches=3,
)


def saved(ranks, case, run):
    """Trains three batches and saves after the first two: the state after the second, and the final weights."""
    _, trainer, batches = case.trainer_and_batches(ranks)
    for step in (1, 2):
        train(trainer, batches[step - 1])
        path = save_checkpoint(run, step, trainer.state_at_last_version(), {}, ranks=ranks)
    middle = state_of(trainer)
    train(trainer, batches[2])
    return path, middle, trainer.published()


def resumed(ranks, case, path):
    """Resumes from a checkpoint: the state there, and the weights after the third batch."""
    _, trainer, batches = case.trainer_and_batches(ranks)
    resume(trainer, path)
    middle = state_of(trainer)
    train(trainer, batches[2])
    return path, middle, trainer.published()


def before_and_kept(ranks, case):
    """How the kept state differs from the one before the batch, once the batch's first update is committed.

    Copies are made at the worst time: while the model has another policy's weights.
    """
    copier, swap = LateCopier(), Snapshot._swap

    def swapped(snapshot):
        swap(snapshot)
        copier.finish()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("digenrl.training.offload.host_copies.make_copier", lambda device: copier)
        patch.setattr(Snapshot, "_swap", swapped)
        _, trainer, batches = case.trainer_and_batches(ranks)
        train(trainer, batches[0])
        before = state_of(trainer)
        for group in batches[1]:
            trainer.add_group(group)
        trainer.commit()
        assert trainer.update == 1
        return differences(trainer.state_at_last_version(), before)


@LORA_OR_SHARDED
def test_a_kept_version_is_not_affected_by_weights_that_replays_swap_in(lora, tmp_path):
    case = replace(CASE, options=CASE.options | {"updates_per_batch": 2}, lora=lora)
    assert on(2, tmp_path, before_and_kept, case) == [[], []]


def on(count, folder, job, *arguments):
    """The results of all ranks; a single one runs in this process, without a group."""
    return [job(None, *arguments)] if count == 1 else on_ranks(count, folder, job, *arguments)


def whole(states):
    """The tensors of the whole state, from the states of all ranks."""
    parts = [tensors_of(state) for state in states]
    if states[0].shard is None:
        return parts[0]
    counters = {path for path, value in parts[0].items() if not value.dim()}
    return {
        path: value if path in counters else torch.cat([p[path] for p in parts])
        for path, value in parts[0].items()
    }


def tensors_of(state):
    return {path: value for path, value in state_as_tensors(state).items() if path != JSON_TENSOR}


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    for path, value in left.items():
        assert torch.equal(value, right[path]), path
        assert value.dtype == right[path].dtype, path


@pytest.fixture(scope="module")
def saved_by(tmp_path_factory):
    """What `saved` returns on some ranks. Every combination is trained once; its run must not be changed."""

    @cache
    def results(count, lora):
        folder = tmp_path_factory.mktemp("saved")
        return on(count, folder, saved, replace(CASE, lora=lora), folder / "run")

    return results


@pytest.mark.parametrize(
    ("lora", "before", "after"),
    [(True, 2, 2), (False, 2, 2), (True, 2, 1), (False, 1, 2), (False, 3, 2)],
)
def test_any_number_of_ranks_resumes_from_a_checkpoint(tmp_path, saved_by, lora, before, after):
    case = replace(CASE, lora=lora)
    through = saved_by(before, lora)
    path = through[0][0]
    assert path == checkpoints_in(path.parent)[-1]
    others = on(after, tmp_path, resumed, case, path)
    expected, got = whole([each[1] for each in through]), whole([each[1] for each in others])
    assert_same_bits(got, expected)
    assert_same_bits(tensors_of(read_checkpoint(path).trainer_state), expected)
    assert relative_difference(others[0][2], through[0][2]) < 1e-6
    if before == after:
        assert_same_bits(others[0][2], through[0][2])


def test_every_rank_writes_its_shards_and_the_reference_is_stored_once(tmp_path, saved_by):
    run = saved_by(2, False)[0][0].parent
    folders = [run / f"step_00000{step}" for step in (1, 2)]
    kinds = ["average", "old_policy", "optimizer", "reference", "state.json", "weights"]
    assert names_in(folders[1]) == kinds
    assert names_in(folders[1] / "weights") == [shard_file_name(0), shard_file_name(1)]
    content = json.loads((folders[1] / "state.json").read_text())
    assert content["format"] == 4
    assert (
        content["files"][f"weights/{shard_file_name(1)}"]["bytes"]
        == (folders[1] / "weights" / shard_file_name(1)).stat().st_size
    )
    for rank in range(2):
        files = [folder / "reference" / shard_file_name(rank) for folder in folders]
        assert files[0].stat().st_ino == files[1].stat().st_ino
    other = Path(shutil.copytree(folders[1], tmp_path / "other"))
    (other / "weights" / shard_file_name(1)).write_bytes(b"other")
    with pytest.raises(CheckpointError, match=r"weights/shard-00002.* 5 bytes"):
        read_checkpoint(other)


# --- Complete or absent ---------------------------------------------------------------------------------------


def saved_twice(ranks, case, run, harm):
    _, trainer, batches = case.trainer_and_batches(ranks)
    train(trainer, batches[0])
    save_checkpoint(run, 1, trainer.state_at_last_version(), {}, ranks=ranks)
    train(trainer, batches[1])
    return harm(ranks, lambda: save_checkpoint(run, 2, trainer.state_at_last_version(), {}, ranks=ranks))


def dies_while_writing(ranks, save):
    """Rank 1 is killed when it writes its first file."""
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank.index == 1:
            patch.setattr("safetensors.torch.save", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        with pytest.raises(PeersLostError, match="while writing a checkpoint"):
            save()


def test_a_rank_that_dies_while_saving_leaves_the_previous_checkpoint_intact(tmp_path):
    case, run = replace(CASE, lora=False), tmp_path / "run"
    on_ranks(2, tmp_path, saved_twice, case, run, dies_while_writing, die=frozenset({1}))
    assert names_in(run) == ["step_000001"]
    assert read_checkpoint(checkpoints_in(run)[-1]).step == 1


def disk_full_for_one(ranks, save):
    """The disk of the last rank is full: all ranks raise, and can save later."""
    if ranks.rank.index == ranks.rank.count - 1:
        with files_of_at_most(300), pytest.raises(CheckpointError, match="File too large"):
            save()
    else:
        with pytest.raises(CheckpointError, match="rank 1: File too large"):
            save()
    return save()


def disk_full_for_the_first(ranks, save):
    if ranks.rank.is_first:
        with files_of_at_most(300), pytest.raises(CheckpointError, match="File too large"):
            save()
    else:
        with pytest.raises(CheckpointError, match=r"rank 0: .*File too large"):
            save()
    return save()


@pytest.mark.parametrize(
    ("lora", "harm"),
    [(False, disk_full_for_one), (False, disk_full_for_the_first), (True, disk_full_for_the_first)],
)
def test_all_ranks_name_the_one_that_cannot_write_and_can_save_later(tmp_path, lora, harm):
    case, run = replace(CASE, lora=lora), tmp_path / "run"
    paths = on_ranks(2, tmp_path, saved_twice, case, run, harm)
    assert paths == [run / "step_000002"] * 2
    assert names_in(run) == ["step_000001", "step_000002"]
    assert read_checkpoint(run / "step_000002").step == 2


def resumed_from_damaged(ranks, case, path):
    _, trainer, _ = case.trainer_and_batches(ranks)
    before = state_of(trainer)
    with pytest.raises(CheckpointError, match="checksum"):
        resume(trainer, path)
    assert differences(trainer.state_at_last_version(), before) == []


@LORA_OR_SHARDED
def test_damage_that_one_rank_finds_stops_all(tmp_path, saved_by, lora):
    case = replace(CASE, lora=lora)
    path = Path(shutil.copytree(saved_by(2, lora)[0][0], tmp_path / "step_000002"))
    names = json.loads((path / "state.json").read_text())["files"]
    flip_a_byte(path / next(name for name in names if name.startswith("optimizer")))
    on_ranks(2, tmp_path, resumed_from_damaged, case, path)


def test_shards_are_not_saved_by_a_single_process(tmp_path):
    _, trainer, _ = replace(CASE, lora=False).trainer_and_batches(None)
    state = trainer.state_at_last_version()
    with pytest.raises(AssertionError, match="all ranks"):
        save_checkpoint(tmp_path, 1, replace(state, shard=ShardSpec(Rank(0, 2), {})), {})


# --- A real transformer ---------------------------------------------------------------------------------------


def trained_tiny(ranks, directory, run, lora):
    """Trains, saves and exports a tiny SD3, whose blocks are sharded separately."""
    model, algorithm = model_of(directory, lora), build_algorithm("flow_grpo", {"updates_per_batch": 1})
    groups = scored_groups(model, algorithm, Rollout(groups=2, group_size=3, steps=3, slice_size=3, size=SIZE))
    if ranks is not None and not lora:
        shard_model(model, ranks)
    settings = STEADY.model_copy(update={"gradient_checkpointing": True})
    trainer = trainer_of(model, algorithm, groups, settings, ranks=ranks)
    metrics = train(trainer, groups)
    report = stages_of(model, trainer).save(Save(1, 0, 1, str(run), {}, keep=1))
    return trainer.published(), metrics, report


@LORA_OR_SHARDED
def test_a_transformer_on_two_ranks_trains_as_on_one_and_its_export_loads_in_diffusers(tmp_path, lora):
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
        patch.setattr("digenrl.worker.stages.export_weights", no_space)
        with pytest.raises(CheckpointError, match="No space left on device"):
            trained_tiny(ranks, directory, run, lora=False)


def no_space(*_):
    raise CheckpointError("No space left on device")


def test_an_export_that_fails_raises_on_all_ranks(tmp_path):
    make_tiny_pipeline("sd3", tmp_path / "sd3")
    on_ranks(2, tmp_path, export_fails, tmp_path / "sd3", tmp_path / "run")
    assert names_in(tmp_path / "run" / "checkpoints") == ["step_000001"]
