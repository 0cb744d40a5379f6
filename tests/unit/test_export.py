"""Exported weights load in diffusers and give exactly the same velocity."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from scored_groups import Rollout, nudge, scored_groups, trainer_of

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.recipes.training import EmaSettings, TrainerSettings
from digenrl.models.adapters.lora import add_lora
from digenrl.models.adapters.lora_files import FILE_NAME
from digenrl.models.model_weights import load_weights, weights_state
from digenrl.models.registry import find_family
from digenrl.testing.tiny_models import make_tiny_pipeline, tiny_size
from digenrl.training.checkpoint.export import export_lora, export_transformer, export_weights, weights_to_export
from digenrl.training.checkpoint.format import CheckpointError

FAMILY = find_family("sd3")
SIZE = tiny_size(FAMILY.name)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "sd3"
    make_tiny_pipeline("sd3", path)
    return path


def model_of(directory, lora):
    model = FAMILY.load(directory, torch.float32, "cpu")
    if lora:
        add_lora(model, rank=2, alpha=8, seed=0)  # alpha differs from the rank: the scale must be exported too
        nudge(model, 0.1, seed=4)
    return model


@torch.no_grad()
def velocity_of(model):
    generator = torch.Generator().manual_seed(3)
    latents = model.initial_latents(torch.randn(2, *model.noise_shape(SIZE), generator=generator), SIZE)
    times = model.schedule(4, SIZE).timesteps[[0, 2]]
    return model.velocity(latents, times, model.encode(["a cat", "a sign"]), guidance=1.0, size=SIZE)


def loaded_in_diffusers(directory, folder, lora):
    pipeline = FAMILY.pipeline_class.from_pretrained(directory)
    if lora:
        pipeline.load_lora_weights(folder)
    else:
        pipeline.transformer = type(pipeline.transformer).from_pretrained(folder)
    return FAMILY.model_class(pipeline)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("ema", [EmaSettings(decay=0.5, every_updates=1), None], ids=["average", "weights"])
def test_trained_weights_load_in_diffusers_and_give_the_same_velocity(directory, tmp_path, lora, ema):
    model, algorithm = model_of(directory, lora), build_algorithm("diffusion_nft")
    rollout = Rollout(groups=1, group_size=2, steps=2, slice_size=2, size=SIZE)
    groups = scored_groups(model, algorithm, rollout, [(0.0, 1.0)])
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(pack_size=2, learning_rate=0.01, ema=ema))
    trainer.add_group(groups[0])
    trainer.commit()
    trained = velocity_of(model)
    values = weights_to_export(trainer.state_at_last_version())
    folder = export_weights(model, tmp_path, values)
    assert folder == tmp_path / ("lora" if lora else "transformer")
    assert torch.equal(velocity_of(model), trained), "the trained weights do not change"
    got = velocity_of(loaded_in_diffusers(directory, folder, lora))
    assert torch.equal(got, trained) == (ema is None)
    load_weights(model, values)
    assert torch.equal(got, velocity_of(model))


def test_a_large_transformer_is_split_into_files_however_its_weights_are_stored(directory, tmp_path, monkeypatch):
    model = model_of(directory, lora=False)
    kind = type(model.transformer)
    save = kind.save_pretrained
    monkeypatch.setattr(kind, "save_pretrained", lambda self, folder: save(self, folder, max_shard_size="20KB"))
    own = {name: value.detach() + 1 for name, value in model.transformer.named_parameters()}
    together = torch.cat([value.reshape(-1) for value in own.values()])
    pieces = torch.split(together, [value.numel() for value in own.values()])
    shared = {name: piece.view(own[name].shape) for name, piece in zip(own, pieces, strict=True)}
    export_transformer(model, tmp_path / "apart", own)
    export_transformer(model, tmp_path / "together", shared)
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("apart", "together")]
    assert files[0] == files[1] and len(files[0]) > 3
    loaded = dict(kind.from_pretrained(tmp_path / "together").named_parameters())
    assert all(torch.equal(loaded[name], value) for name, value in own.items())


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_newer_export_replaces_the_older(directory, tmp_path, lora):
    model = model_of(directory, lora)
    folder = export_weights(model, tmp_path / "run")
    names = sorted(path.name for path in folder.iterdir())
    assert names == ([FILE_NAME] if lora else ["config.json", "diffusion_pytorch_model.safetensors"])
    nudge(model, 0.1, seed=9)
    export_weights(model, tmp_path / "run")
    assert sorted(path.name for path in folder.iterdir()) == names
    assert [path.name for path in (tmp_path / "run").iterdir()] == [folder.name]
    assert torch.equal(velocity_of(loaded_in_diffusers(directory, folder, lora)), velocity_of(model))


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_a_failed_export_leaves_the_older_one_and_the_model_unchanged(directory, tmp_path, lora, monkeypatch):
    model = model_of(directory, lora)
    before = weights_state(model)
    folder = export_weights(model, tmp_path)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    other = {name: value + 1 for name, value in before.items()}
    with monkeypatch.context() as patch:
        for name in ("rename", "replace"):
            patch.setattr(Path, name, full)
        with pytest.raises(CheckpointError, match=f"{folder}: .*No space left on device"):
            (export_lora if lora else export_transformer)(model, folder, other)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert all(torch.equal(value, before[name]) for name, value in weights_state(model).items())
