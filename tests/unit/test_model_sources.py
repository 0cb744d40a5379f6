"""Models load from folders, variants, subfolders, single files and the hub; what cannot load is one clear line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hub_stand_in import TOKEN, HubStandIn, serving
from original_names import RENAMED, conversion_for_width, write_original_file
from safetensors.torch import load_file, save_file
from torch import nn

from digenrl.config.reading import ConfigError
from digenrl.models.loading.hub import HubUnreachableError
from digenrl.models.loading.sources import ModelSource, check_one_transformer, check_source, weight_files
from digenrl.models.registry import find_family, naming_families
from digenrl.testing.tiny_models import make_tiny_pipeline

SD3 = find_family("sd3")
WEIGHTS = "diffusion_pytorch_model.safetensors"
TRANSFORMER = f"transformer/{WEIGHTS}"
WIDTH = {"flux": 16, "hunyuan_video": 32}  # of the tiny transformers


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny pipelines."""
    root = tmp_path_factory.mktemp("tiny")
    for family in RENAMED:
        make_tiny_pipeline(family, root / family)
    return root


@pytest.fixture
def folder(folders: Path, tmp_path: Path) -> Path:
    """A tiny SD3 that a test may modify."""
    return Path(shutil.copytree(folders / "sd3", tmp_path / "model"))


@pytest.fixture
def hub(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    """A hub with the repository me/sd3, and an empty cache."""
    shutil.copytree(folders / "sd3", tmp_path / "hub" / "me" / "sd3")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    huggingface_hub.utils.disable_progress_bars()
    with serving(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == value.dtype and torch.equal(ours[name], value) for name, value in theirs.items()
    )


def refusal(source: str | Path | ModelSource, family: str = "sd3") -> str:
    with pytest.raises(ConfigError) as error:
        find_family(family).load(source)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- Folders -----------------------------------------------------------------------------------------------------


def make_fp16_only(folder: Path) -> None:
    for path in list(folder.glob("*/*.safetensors")):
        halves = {name: value.half() for name, value in load_file(path).items()}
        save_file(halves, path.with_suffix(".fp16.safetensors"), {"format": "pt"})
        path.unlink()


def test_a_folder_with_only_a_variant_loads_with_it_and_names_the_key_without(folder: Path) -> None:
    expected = SD3.load(folder).transformer
    make_fp16_only(folder)
    assert "fp16" in refusal(folder) and "model.variant=fp16" in refusal(folder)
    assert "known: fp16" in refusal(ModelSource(str(folder), variant="bf16"))
    loaded = SD3.load(ModelSource(str(folder), variant="fp16")).transformer
    assert same_weights(loaded, expected.half().float())


def test_a_subfolder_of_a_folder_is_loaded(folder: Path) -> None:
    loaded = SD3.load(ModelSource(str(folder.parent), subfolder="model"))
    assert same_weights(loaded.transformer, SD3.load(folder).transformer)


def test_missing_damaged_and_pickled_weights_are_refused_before_anything_is_read(folder: Path) -> None:
    weights = folder / TRANSFORMER
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    with pytest.raises(ConfigError, match=r"transformer.*damaged"):
        check_source(SD3.pipeline_class, folder)
    weights.write_bytes(b"<html>not found</html>")
    with pytest.raises(ConfigError, match="not a safetensors file"):
        check_source(SD3.pipeline_class, folder)
    weights.rename(weights.with_name("diffusion_pytorch_model-00002-of-00003.safetensors"))
    assert "2 of 3 shards of transformer" in refusal(folder)
    for path in (folder / "transformer").glob("*.safetensors"):
        path.rename(folder / "transformer" / "diffusion_pytorch_model.bin")
    assert "pickled" in refusal(folder)
    shutil.rmtree(folder / "tokenizer_3")
    assert "tokenizer_3 has no vocabulary" in refusal(folder)


def test_shards_are_read_if_they_have_an_index_else_the_whole_file(folder: Path) -> None:
    name = "transformer/diffusion_pytorch_model"
    shard, whole = f"{name}-00001-of-00001.safetensors", folder / TRANSFORMER
    shutil.copy(whole, folder / shard)
    read = lambda: {each for each in weight_files(SD3.pipeline_class, ModelSource(str(folder))) if name in each}  # noqa: E731
    assert read() == {TRANSFORMER}
    (folder / f"{name}.safetensors.index.json").write_text("{}")
    assert read() == {shard}


def test_what_diffusers_cannot_load_is_refused_in_one_line(folder: Path) -> None:
    def change(name: str, **values: object) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    tensors = load_file(folder / TRANSFORMER)
    save_file({name: value for name, value in tensors.items() if name != "proj_out.bias"}, folder / TRANSFORMER)
    assert "transformer lack 1 tensors of its config.json, the first: proj_out.bias" in refusal(folder)
    change("transformer/config.json", pooled_projection_dim=7)
    assert "diffusers cannot load it" in refusal(folder)
    change("model_index.json", transformer=["diffusers", "Transformer3DModelOfAFork"])
    assert "Transformer3DModelOfAFork" in refusal(folder)
    change("model_index.json", _class_name=["pipeline_of_ours", "OurPipeline"])
    assert "code of its own" in refusal(folder)


def test_quantized_folders_are_refused(folder: Path) -> None:
    path = folder / "transformer" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {}}))
    assert "transformer has quantized weights" in refusal(folder)


def test_the_error_about_another_class_names_the_family_that_takes_it(folders: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.family=sd3"), naming_families(find_family("flux")):
        find_family("flux").load(folders / "sd3")
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxFillPipeline"}))
    with (
        pytest.raises(ConfigError, match=r"FluxFillPipeline.*takes a FluxPipeline; no family"),
        naming_families(find_family("flux")),
    ):
        find_family("flux").load(tmp_path)


# --- Single files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "prefix"), [(name, ("", "model.diffusion_model.")[n % 2]) for n, name in enumerate(RENAMED)]
)
def test_a_single_file_with_original_names_gives_the_same_transformer(
    family: str, prefix: str, folders: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    write_original_file(family, folders / family, path, prefix)
    source = ModelSource(str(path), base=str(folders / family))
    for dtype in (torch.float32, torch.bfloat16):
        expected = find_family(family).load(folders / family, dtype, text_encoders=False)
        with conversion_for_width(family, WIDTH.get(family, 0)):
            loaded = find_family(family).load(source, dtype, text_encoders=False)
        assert same_weights(loaded.transformer, expected.transformer)
        assert [value.dtype for value in loaded.transformer.buffers()] == [
            value.dtype for value in expected.transformer.buffers()
        ]


def test_a_single_file_with_names_of_diffusers_loads_and_needs_a_base(folders: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(folders / "sd3" / TRANSFORMER, tmp_path / "mine.safetensors"))
    loaded = SD3.load(ModelSource(str(path), base=str(folders / "sd3")))
    assert same_weights(loaded.transformer, SD3.load(folders / "sd3").transformer)
    assert loaded.encode(["a cat"]).positive
    assert "model.base_source" in refusal(path)  # no published size is that small


def test_files_that_are_no_model_are_refused(folders: Path, tmp_path: Path) -> None:
    base, path = str(folders / "sd3"), tmp_path / "x.safetensors"

    def refused(content: dict[str, torch.Tensor]) -> str:
        save_file(content, path)
        return refusal(ModelSource(str(path), base=base))

    assert "LoRA" in refused({"transformer.attn.to_q.lora_A.weight": torch.zeros(1)})
    assert "quantized" in refused({"blocks.0.weight.quant_state.bitsandbytes__nf4": torch.zeros(1)})
    for dtype in (torch.float8_e4m3fn, torch.int8):
        assert "quantized" in refused({"model.diffusion_model.x.weight": torch.zeros(2, 2).to(dtype)})
    assert "does not fit" in refused({"something.else": torch.zeros(1)})
    state = load_file(folders / "sd3" / TRANSFORMER)
    state.pop("proj_out.bias")
    assert "SD3Transformer2DModel" in refused(state)
    assert "proj_out.bias expected shape" in refused({**state, "proj_out.bias": torch.zeros(3)})
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    assert "GGUF" in refusal(tmp_path / "x.gguf")
    (tmp_path / "x.ckpt").write_bytes(b"PK")
    assert "pickled" in refusal(tmp_path / "x.ckpt")
    assert "hf download me/sd3 x.safetensors" in refusal("me/sd3/x.safetensors")
    with pytest.raises(ConfigError, match="not a single"):
        check_source(SD3.pipeline_class, ModelSource(base, base=base))


def test_the_base_of_a_single_file_is_the_published_pipeline_of_its_size(tmp_path: Path) -> None:
    path, elements = tmp_path / "wan.safetensors", 1_400_000_000
    header = json.dumps({"x": {"dtype": "BF16", "shape": [elements], "data_offsets": [0, 2 * elements]}})
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + 2 * elements)  # a sparse file
    assert find_family("wan").with_base(path).base == "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    with pytest.raises(ConfigError, match="one of two transformers"):
        find_family("wan").with_base(path.rename(tmp_path / "wan2.2_t2v_low_noise_14B.safetensors"))
    path = tmp_path / "wan2.2_t2v_low_noise_14B.safetensors"
    two = ModelSource(str(path), base="owner/A14B")
    with pytest.raises(ConfigError, match="owner/A14B has two transformers"):
        check_one_transformer(two, {"boundary_ratio": 0.875})
    with pytest.raises(ConfigError, match=r"3\.5-large 8\.06 billion.*model\.base_source"):
        SD3.with_base(path)


# --- The hub -----------------------------------------------------------------------------------------------------


def test_a_hub_id_is_downloaded_once_and_then_loaded_from_the_cache(hub: HubStandIn, folders: Path) -> None:
    encoders = SD3.load_text_encoders("me/sd3")
    assert TRANSFORMER not in hub.served  # only what is needed
    loaded = SD3.load(ModelSource("me/sd3", revision="main"))
    assert same_weights(loaded.transformer, SD3.load(folders / "sd3").transformer)
    assert encoders.encode(["a cat"]).positive
    served = hub.bytes_served
    SD3.load("me/sd3")
    assert hub.bytes_served == served


def test_nothing_but_the_index_is_fetched_of_a_pipeline_of_another_class(hub: HubStandIn) -> None:
    assert "StableDiffusion3Pipeline" in refusal("me/sd3", "flux")
    assert list(hub.served) == ["model_index.json"]


def test_texts_that_are_too_long_for_the_tokenizer_of_a_hub_id_are_refused_before_it_is_downloaded(
    hub: HubStandIn,
) -> None:
    with pytest.raises(ConfigError, match=r"model\.text_tokens: 200 .* 48 .*me/sd3"):
        SD3.check_tokenizer(200, ModelSource("me/sd3"))
    assert list(hub.served) == ["tokenizer_3/tokenizer_config.json"]


def test_a_subfolder_of_a_repository_is_loaded(hub: HubStandIn, folders: Path) -> None:
    shutil.copytree(folders / "sd3", hub.root / "me" / "two" / "small")
    loaded = SD3.load(ModelSource("me/two", subfolder="small"), text_encoders=False)
    assert same_weights(loaded.transformer, SD3.load(folders / "sd3").transformer)
    assert "no model_index.json" in refusal("me/two")


def test_the_hub_refusals_say_what_to_do(hub: HubStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add("me/sd3")
    gated = refusal("me/sd3")
    assert f"{hub.endpoint}/me/sd3" in gated and "hf auth login" in gated and "model.token=env:NAME" in gated
    assert "THE_TOKEN is not set" in refusal(ModelSource("me/sd3", token="env:THE_TOKEN"))
    assert "no such repository" in refusal("me/nothing")
    assert "known: main" in refusal(ModelSource("me/sd3", revision="v2"))
    assert not hub.served
    monkeypatch.setenv("THE_TOKEN", TOKEN)
    SD3.load_text_encoders(ModelSource("me/sd3", token="env:THE_TOKEN"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert SD3.load_text_encoders("me/sd3").encode(["a cat"]).positive  # from the cache
    with pytest.raises(HubUnreachableError, match=r"in the cache: incomplete: transformer .* cannot be reached"):
        SD3.load("me/sd3")


def test_a_variant_that_the_cache_lacks_is_downloaded(hub: HubStandIn) -> None:
    repository, variant = hub.root / "me" / "sd3", TRANSFORMER.replace(".safetensors", ".fp16.safetensors")
    halves = {name: value.half() for name, value in load_file(repository / TRANSFORMER).items()}
    save_file(halves, repository / variant, {"format": "pt"})
    SD3.load("me/sd3", text_encoders=False)
    assert variant not in hub.served
    SD3.load(ModelSource("me/sd3", variant="fp16"), text_encoders=False)
    assert variant in hub.served


def test_text_encoders_load_if_only_the_transformer_has_the_variant(folder: Path, hub: HubStandIn) -> None:
    """As SD 1.5 with its `non_ema` files."""
    for root in (folder, hub.root / "me" / "sd3"):
        shutil.copy(root / TRANSFORMER, root / TRANSFORMER.replace(".safetensors", ".non_ema.safetensors"))
    for location in (str(folder), "me/sd3"):
        source = ModelSource(location, variant="non_ema")
        assert SD3.load_text_encoders(source).encode(["a cat"]).positive
        SD3.load(source, text_encoders=False)
    assert "known: non_ema" in refusal(ModelSource("me/sd3", variant="ema"))


def test_a_repository_with_missing_shards_is_refused_before_its_weights_are_fetched(hub: HubStandIn) -> None:
    weights = hub.root / "me" / "sd3" / TRANSFORMER
    weights.rename(weights.with_name("diffusion_pytorch_model-00001-of-00002.safetensors"))
    assert "1 of 2 shards" in refusal("me/sd3")
    assert not any(name.endswith(".safetensors") for name in hub.served)


def test_only_the_tokenizer_of_a_processor_is_loaded(tmp_path: Path) -> None:
    """FLUX.2 dev names a PixtralProcessor, which needs torchvision for images; prompts have none."""
    make_tiny_pipeline("flux2_dev", tmp_path / "flux2_dev")
    path = tmp_path / "flux2_dev" / "model_index.json"
    index = {**json.loads(path.read_text()), "tokenizer": ["transformers", "PixtralProcessor"]}
    plain = find_family("flux2_dev").load_text_encoders(tmp_path / "flux2_dev").encode(["a red cat"])
    path.write_text(json.dumps(index))
    text = find_family("flux2_dev").load_text_encoders(tmp_path / "flux2_dev").encode(["a red cat"])
    expected, got = plain.positive["encoder_hidden_states"], text.positive["encoder_hidden_states"]
    assert expected is not None and got is not None and torch.equal(got, expected)
