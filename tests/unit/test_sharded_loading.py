"""Sharded models are loaded row by row: the same weights as whole models, and never more than a rank's share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from family_cases import ONE_PER_TRANSFORMER
from rank_processes import on_ranks
from test_model_sources import WEIGHTS
from torch import nn

from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.recipes.recipe import Recipe
from digenrl.models.adapters.lora import adapter_parameters
from digenrl.models.loading.sources import ModelSource
from digenrl.models.loading.stored_weights import StoredWeights
from digenrl.models.parallel.shards import gather_to_first_rank, is_sharded, local_shard
from digenrl.models.registry import FAMILIES, find_family
from digenrl.testing.tiny_models import make_tiny_pipeline, tiny_size
from digenrl.training.ranks.sharded_loading import load_sharded
from digenrl.worker.blueprint import load_model, read_blueprint
from digenrl.worker.checks.sharding import check_blocks, check_sharding

SD3 = find_family("sd3")
STATUS = Path("/proc/self/status")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pipeline of every kind of transformer, with its weights in several files."""
    root = tmp_path_factory.mktemp("tiny")
    for name in ONE_PER_TRANSFORMER:
        make_tiny_pipeline(name, root / name)
        split_files(FAMILIES[name], root / name, "20KB")
    return root


def split_files(family, folder, size):
    weights = folder / family.denoiser
    transformer = family.full_size().transformer.cls.from_pretrained(weights)
    (weights / WEIGHTS).unlink()
    transformer.save_pretrained(weights, max_shard_size=size)


# --- The same weights -----------------------------------------------------------------------------------------


def loaded_tensors(ranks, folders):
    """All parameters, gathered, and all buffers of every kind of transformer."""
    found = {}
    for name in ONE_PER_TRANSFORMER:
        model = load_sharded(FAMILIES[name], ModelSource.of(folders / name), ranks, torch.bfloat16)
        transformer = model.transformer
        parameters = dict(transformer.named_parameters())
        shards = {key: local_shard(value.detach()) for key, value in parameters.items()}
        found[name] = gather_to_first_rank(parameters, shards) | dict(transformer.named_buffers())
    return found


def test_the_shards_of_all_ranks_are_the_whole_weights_of_every_kind_of_transformer(folders, tmp_path):
    found = on_ranks(2, tmp_path, loaded_tensors, folders)[0]
    for name in ONE_PER_TRANSFORMER:
        family = FAMILIES[name]
        assert len(list((folders / name / family.denoiser).glob("*.safetensors"))) > 1
        whole = family.load(folders / name, torch.bfloat16, text_encoders=False).transformer
        expected = dict(whole.named_parameters()) | dict(whole.named_buffers())
        assert found[name].keys() == expected.keys()
        for key, value in expected.items():
            assert found[name][key].dtype == value.dtype, (name, key)
            assert torch.equal(found[name][key], value), (name, key)


def recipe_of(folder: Path, *, full: bool = False, single_file: bool = False, **lanes) -> Recipe:
    size = tiny_size("sd3")
    source = {"source": str(folder)}
    if single_file:
        source = {"source": str(folder / "transformer" / WEIGHTS), "base_source": str(folder)}
    content = {
        "steps": 1,
        "model": {"family": "sd3", **source},
        "prompts": {"path": str(folder / "prompts.txt")},
        "rewards": "jpeg_compressibility",
        "sample": {"height": size.height, "width": size.width, "frames": size.frames},
        "batch": {"prompts": 2, "samples_per_prompt": 2},
        "algorithm": {"name": "flow_grpo"},
        "training": {} if full else {"lora": {"rank": 2, "alpha": 4}},
        "lanes": lanes,
    }
    return parse_model(Recipe, content)


def of_a_recipe(ranks, recipe):
    """The adapters and the velocity of a recipe's model on one of these ranks, or alone."""
    model = load_model(read_blueprint(recipe), "cpu", shard_over=ranks)
    assert is_sharded(model.transformer) is (ranks is not None)
    generator, size = torch.Generator().manual_seed(3), tiny_size("sd3")
    adapters = {name: value.detach() for name, value in adapter_parameters(model).items()}
    for name, value in adapters.items():
        value.add_(torch.randn(value.shape, generator=generator) * (".lora_B." in name))
    latents = model.initial_latents(torch.randn(2, *model.noise_shape(size), generator=generator), size)
    times = model.schedule(4, size).timesteps[[0, 2]]
    conditioning = SD3.load_text_encoders(recipe.model.pipeline_folder).encode(["a cat", "a sign"])
    with torch.no_grad():
        return adapters, model.velocity(latents, times, conditioning, guidance=1.0, size=size)


@pytest.mark.parametrize("single_file", [False, True], ids=["several files", "a single file"])
def test_a_sharded_base_with_adapters_computes_the_velocity_of_a_whole_one(tmp_path, single_file):
    make_tiny_pipeline("sd3", tmp_path / "sd3")
    if not single_file:
        split_files(SD3, tmp_path / "sd3", "20KB")
    recipe = recipe_of(tmp_path / "sd3", single_file=single_file, ranks=2, shard_base=True)
    adapters, velocity = of_a_recipe(None, recipe)
    for found, own in on_ranks(2, tmp_path, of_a_recipe, recipe):
        assert found.keys() == adapters.keys() and all(torch.equal(found[name], adapters[name]) for name in found)
        assert torch.equal(own, velocity)


# --- Never more than a share ----------------------------------------------------------------------------------


def memory_of_loading(ranks, folder):
    """Bytes read from files, the largest tensor among them, and by how much this process's memory grew at most."""
    read, used = [], []
    with pytest.MonkeyPatch.context() as patch:
        real = StoredWeights.read

        def counted(*arguments):
            value = real(*arguments)
            read.append(value.nbytes)
            used.append(private_bytes())
            return value

        load_sharded(SD3, ModelSource.of(folder / "small"), ranks, torch.float32)  # imports everything
        before = private_bytes()
        patch.setattr(StoredWeights, "read", counted)
        model = load_sharded(SD3, ModelSource.of(folder / "large"), ranks, torch.float32)
    assert is_sharded(model.transformer)
    return sum(read), max(read), max(*used, private_bytes()) - before


def private_bytes():
    """The memory of this process, without pages of files, which the system can drop."""
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(lines["RssAnon"].split()[0]) * 1024


@pytest.mark.skipif(not STATUS.exists(), reason="a process can measure its memory on Linux only")
def test_a_rank_reads_and_holds_its_rows_and_nothing_else(tmp_path):
    for name in ("small", "large"):
        make_tiny_pipeline("sd3", tmp_path / name)
    kind = SD3.full_size().transformer.cls
    config = dict(kind.load_config(tmp_path / "large" / "transformer"))
    config |= {"num_attention_heads": 8, "attention_head_dim": 64, "num_layers": 3, "caption_projection_dim": 512}
    transformer = kind.from_config(config)
    (tmp_path / "large" / "transformer" / WEIGHTS).unlink()
    transformer.save_pretrained(tmp_path / "large" / "transformer", max_shard_size="30MB")
    sizes = [value.nbytes for value in transformer.parameters()]
    buffers = sum(value.nbytes for value in transformer.state_dict().values()) - sum(sizes)
    assert sum(sizes) > 80e6
    for read, largest, grown in on_ranks(4, tmp_path, memory_of_loading, tmp_path):
        assert read == pytest.approx(sum(sizes) / 4 + buffers, rel=0.01)
        assert largest <= max(sizes) / 4 + buffers
        assert sum(sizes) / 5 < grown < sum(sizes) / 2, "a quarter, and what the process needs for anything else"


# --- One line before anything is loaded -----------------------------------------------------------------------


def test_files_that_are_not_those_of_the_transformer_are_named(tmp_path):
    folder = tmp_path / "sd3"
    make_tiny_pipeline("sd3", folder)
    config = json.loads((folder / "transformer" / "config.json").read_text())
    (folder / "transformer" / "config.json").write_text(json.dumps(config | {"num_layers": 5}))
    (line,) = on_ranks(1, tmp_path, complaint_of, recipe_of(folder, full=True))
    assert line.startswith("model.source: ") and "transformer_blocks" in line and "\n" not in line


def complaint_of(ranks, recipe):
    with pytest.raises(ConfigError) as caught:
        load_model(read_blueprint(recipe), "cpu", shard_over=ranks)
    return str(caught.value)


@pytest.mark.parametrize(
    ("lanes", "full", "key"),
    [
        ({"shard_base": True}, False, "lanes.shard_base"),  # one rank
        ({"shard_base": True, "ranks": 2}, True, "lanes.shard_base"),  # no adapters
        ({"shard_base": True, "ranks": 20}, False, "lanes.ranks"),  # a group has 18 pairs
        ({"ranks": 100}, True, "lanes.ranks"),
    ],
)
def test_what_cannot_be_sharded_is_one_line_before_anything_is_loaded(folders, lanes, full, key):
    with pytest.raises(ConfigError) as caught:
        check_sharding(read_blueprint(recipe_of(folders / "sd3", full=full, **lanes)))
    assert str(caught.value).startswith(f"{key}: ") and "\n" not in str(caught.value)


def test_ranks_that_train_each_sample_together_need_only_one_pair(folders):
    recipe = recipe_of(folders / "sd3", shard_base=True, ranks=20, cards_per_replica=2)
    check_sharding(read_blueprint(recipe))


@pytest.mark.parametrize(
    ("transformer", "complaint"),
    [
        (nn.Linear(4, 4), "no repeated blocks"),
        (nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 4)])}), "at most 4 rows"),
    ],
)
def test_a_model_without_blocks_or_with_fewer_rows_than_ranks_is_not_sharded(transformer, complaint):
    with pytest.raises(ConfigError, match=complaint):
        check_blocks(transformer, "plain", ranks=5)
