"""LoRA files of other trainers, read as pairs by layer with their strength in B."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    FluxPipeline,
    QwenImagePipeline,
    StableDiffusionXLPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from original_names import original_state
from safetensors.torch import load_file, save_file
from tiny_pipelines import shared_tiny_model
from torch import Tensor, nn

from digenrl.config.reading import ConfigError
from digenrl.models.adapters.lora_files import Adapters, write_comfyui
from digenrl.models.adapters.lora_start import fitted, original_layers, read_lora
from digenrl.models.families.parts.comfyui_layers import WAN_LAYERS

RANK, ALPHA = 4, 2.0
KOHYA = (".lora_down.weight", ".lora_up.weight")
DIFFUSERS = (".lora_A.weight", ".lora_B.weight")


def pairs_of(*layers: str, sides: tuple[str, str] = KOHYA, alpha: bool = True) -> dict[str, Tensor]:
    generator, tensors = torch.Generator().manual_seed(1), {}
    for layer in layers:
        tensors[layer + sides[0]] = torch.randn(RANK, 8, generator=generator)
        tensors[layer + sides[1]] = torch.randn(8, RANK, generator=generator)
        tensors |= {f"{layer}.alpha": torch.tensor(ALPHA)} if alpha else {}
    return tensors


@pytest.mark.parametrize(
    ("pipeline", "layers", "found"),
    [
        (
            WanPipeline,
            [f"lora_unet_blocks_0_{kind}_{each}" for kind in ("self_attn", "cross_attn") for each in "qkvo"]
            + ["lora_unet_blocks_0_ffn_0", "lora_unet_blocks_0_ffn_2"],
            "blocks.0.attn1.to_q",
        ),
        (QwenImagePipeline, ["transformer_blocks.0.attn.to_q"], "transformer_blocks.0.attn.to_q"),
        (
            StableDiffusionXLPipeline,
            ["lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"],
            "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q",
        ),
    ],
)
def test_kohyas_files_are_read_with_their_alphas(
    pipeline: type[Any], layers: list[str], found: str, tmp_path: Path
) -> None:
    tensors = pairs_of(*layers)
    save_file(tensors, tmp_path / "lora.safetensors")
    read = read_lora(tmp_path / "lora.safetensors", pipeline, {})
    assert len(read) == len(layers)
    down, up = read[found]
    expected = tensors[layers[0] + KOHYA[1]] @ tensors[layers[0] + KOHYA[0]] * ALPHA / RANK
    torch.testing.assert_close(up @ down, expected)


def test_comfyuis_names_for_wan_are_those_that_diffusers_converts(tmp_path: Path) -> None:
    """Also of the layers that only image-to-video models have."""
    config = shared_tiny_model("wan_i2v").pipeline.transformer.config
    transformer = WanTransformer3DModel.from_config(config, image_dim=8, added_kv_proj_dim=32)
    linears = {path: each for path, each in transformer.named_modules() if isinstance(each, nn.Linear)}
    pairs = {
        path: (torch.randn(RANK, each.in_features), torch.randn(each.out_features, RANK))
        for path, each in linears.items()
    }
    file = write_comfyui(Adapters(pairs, RANK, [*pairs]), tmp_path / "lora.safetensors", WAN_LAYERS, transformer)
    assert read_lora(file, WanPipeline, {}).keys() == pairs.keys()
    torch.testing.assert_close(read_lora(file, WanPipeline, {}), pairs)


@pytest.mark.parametrize(
    ("prefix", "separator"), [("diffusion_model.", "."), ("lora_unet_", "_")], ids=["comfyui", "kohya"]
)
@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_original_names_are_those_of_single_files(
    family: str, prefix: str, separator: str, tmp_path: Path
) -> None:
    """All linear layers, also those that are joined, or have their halves in another order."""
    model, file = shared_tiny_model(family), tmp_path / "lora.safetensors"
    linears = {path: each for path, each in model.transformer.named_modules() if isinstance(each, nn.Linear)}
    weights = original_state(family, {f"{path}.weight": each.weight for path, each in linears.items()})
    tensors, updates = {}, {}
    for name, weight in weights.items():
        layer = prefix + name.removesuffix(".weight").replace(".", separator)
        down, up = torch.randn(RANK, weight.shape[1]), torch.randn(weight.shape[0], RANK)
        tensors |= {layer + KOHYA[0]: down, layer + KOHYA[1]: up}
        updates[name] = up @ down
    save_file(tensors, file)
    read = read_lora(file, type(model.pipeline), original_layers(type(model), model.transformer))
    assert read.keys() == linears.keys()
    got = original_state(family, {f"{path}.weight": up @ down for path, (down, up) in read.items()})
    torch.testing.assert_close(got, updates)


def test_what_diffusers_cannot_convert_is_refused_in_one_line(tmp_path: Path) -> None:
    save_file(pairs_of("lora_unet_img_emb_proj_1"), tmp_path / "lora.safetensors")
    with pytest.raises(ConfigError, match="not a LoRA of WanPipeline"):
        read_lora(tmp_path / "lora.safetensors", WanPipeline, {})


@pytest.mark.parametrize(
    ("prefix", "separator"), [("diffusion_model.", "."), ("lora_unet_", "_")], ids=["comfyui", "kohya"]
)
def test_fused_layers_of_z_image_are_split(prefix: str, separator: str, tmp_path: Path) -> None:
    """As musubi-tuner writes LoRAs for ComfyUI: a rank for each of q, k and v, and alpha times 3."""
    model, attention = shared_tiny_model("z_image"), "layers.0.attention"
    layers = [f"{attention}.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")]
    sizes = [model.transformer.get_submodule(layer).weight.shape for layer in layers]
    downs, ups = ([torch.randn(RANK, size[1]) for size in sizes], [torch.randn(size[0], RANK) for size in sizes])
    fused, out = (prefix + f"{attention}.{name}".replace(".", separator) for name in ("qkv", "out"))
    tensors = {
        fused + KOHYA[0]: torch.cat(downs[:3]),
        fused + KOHYA[1]: torch.block_diag(*ups[:3]),
        f"{fused}.alpha": torch.tensor(ALPHA * 3),
        **dict(zip([out + KOHYA[0], out + KOHYA[1]], [downs[3], ups[3]], strict=True)),
        f"{out}.alpha": torch.tensor(ALPHA),
    }
    save_file(tensors, tmp_path / "lora.safetensors")
    original = original_layers(type(model), model.transformer)
    read = read_lora(tmp_path / "lora.safetensors", type(model.pipeline), original)
    pairs = fitted(read, set(layers), RANK)
    for layer, down, up in zip(layers, downs, ups, strict=True):
        torch.testing.assert_close(pairs[layer], (down, up * ALPHA / RANK))
    with pytest.raises(ConfigError, match=f"rank {RANK}, the recipe 5; set training.lora.rank={RANK}"):
        fitted(read, set(layers), 5)


def test_a_lora_of_text_encoders_too_is_refused(tmp_path: Path) -> None:
    """As most of SDXL's on Civitai."""
    encoder, unet = "lora_te1_text_model_encoder_layers_0_self_attn_q_proj", "lora_unet_input_blocks_4_1_proj_in"
    save_file(pairs_of(encoder, unet), tmp_path / "lora.safetensors")
    with pytest.raises(ConfigError, match=r"adapts a text encoder \(text_encoder"):
        read_lora(tmp_path / "lora.safetensors", StableDiffusionXLPipeline, {})


def test_names_with_those_of_pefts_adapter_set_are_known(tmp_path: Path) -> None:
    sides = (".lora_A.default.weight", ".lora_B.default.weight")
    save_file(pairs_of("transformer.blocks.0.to_q", sides=sides, alpha=False), tmp_path / "lora.safetensors")
    assert list(read_lora(tmp_path / "lora.safetensors", FluxPipeline, {})) == ["blocks.0.to_q"]


def test_the_metadata_of_diffusers_give_the_strength_and_what_is_not_plain_is_refused(tmp_path: Path) -> None:
    file, layer = tmp_path / "lora.safetensors", "transformer.transformer_blocks.0.attn.to_q"
    tensors = pairs_of(layer, sides=DIFFUSERS, alpha=False)

    def read(metadata: dict[str, Any], **more: Tensor) -> tuple[Tensor, Tensor]:
        named = {f"transformer.{key}": value for key, value in {"r": RANK, "lora_alpha": 8, **metadata}.items()}
        save_file({**tensors, **more}, file, metadata={"lora_adapter_metadata": json.dumps(named)})
        return read_lora(file, FluxPipeline, {})["transformer_blocks.0.attn.to_q"]

    for metadata, scale in (({}, 8 / RANK), ({"use_rslora": True}, 8 / RANK**0.5)):
        torch.testing.assert_close(read(metadata)[1], tensors[layer + DIFFUSERS[1]] * scale)
    with pytest.raises(ConfigError, match=r"alpha_pattern.*plain LoRA"):
        read({"alpha_pattern": {"to_q": 2.0}})
    with pytest.raises(ConfigError, match=r"dora_scale.*plain LoRA"):
        read({}, **{f"{layer}.dora_scale": torch.ones(8, 1)})
    save_file(tensors, file, metadata={"lora_adapter_metadata": "{"})
    with pytest.raises(ConfigError, match="metadata are damaged"):
        read_lora(file, FluxPipeline, {})


SPELLINGS = {
    "save_lora_adapter": ("{}", DIFFUSERS),
    "DiffSynth-Studio": ("{}", (".lora_A.default.weight", ".lora_B.default.weight")),
    "a peft adapter": ("{}", (".lora_A.default_0.weight", ".lora_B.default_0.weight")),
    "diffusers": ("transformer.{}", DIFFUSERS),
    "diffusers, older": ("transformer.{}", (".lora.down.weight", ".lora.up.weight")),
    "ai-toolkit": ("diffusion_model.{}", DIFFUSERS),
    "peft": ("base_model.model.{}", DIFFUSERS),
    "kohya": ("lora_unet_{}", KOHYA),
    "OneTrainer": ("lora_transformer_{}", KOHYA),
    "LyCORIS": ("lycoris_{}", KOHYA),
}


@pytest.mark.parametrize("original", [True, False], ids=["original", "diffusers"])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("family", ["qwen_image", "flux2_klein", "wan"])
def test_layers_are_found_by_the_names_of_all_trainers(
    family: str, spelling: str, original: bool, tmp_path: Path
) -> None:
    """In the names of diffusers, and in those of the original code, which has joined layers."""
    model, (layout, sides) = shared_tiny_model(family), SPELLINGS[spelling]
    linears = {path: each for path, each in model.transformer.named_modules() if isinstance(each, nn.Linear)}
    pairs = {
        path: (torch.randn(RANK, each.in_features), torch.randn(each.out_features, RANK))
        for path, each in linears.items()
    }
    file, layers = tmp_path / "lora.safetensors", type(model).comfyui_layers or {}
    write_comfyui(Adapters(pairs, RANK, [*pairs]), file, layers if original else {}, model.transformer)
    tensors = {}
    for name, value in load_file(file).items():
        end = next(each for each in (*DIFFUSERS, ".alpha") if name.endswith(each))
        layer = name.removesuffix(end).partition(".")[2]
        named = layout.format(layer.replace(".", "_") if layout.endswith("_{}") else layer)
        tensors[named + dict(zip(DIFFUSERS, sides, strict=True)).get(end, end)] = value
    save_file(tensors, file)
    read = read_lora(file, type(model.pipeline), original_layers(type(model), model.transformer))
    assert read.keys() == pairs.keys()
    for layer, (down, up) in pairs.items():
        torch.testing.assert_close(read[layer][1] @ read[layer][0], up @ down)


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (".lora_magnitude_vector", "DoRA"),
        (".lora_magnitude_vector.default.weight", "DoRA"),
        (".dora_scale", "DoRA"),
        (".lokr_w1", "LoKr"),
        (".hada_w1_a", "LoHa"),
        (".oft_blocks", "OFT"),
        (".lora_mid.weight", "Tucker"),
        (".diff_b", "difference"),
        (".lora_B.bias", "bias"),
    ],
)
def test_what_is_no_plain_adapter_is_refused_by_its_name(end: str, kind: str, tmp_path: Path) -> None:
    layer = "transformer.transformer_blocks.0.attn.to_q"
    save_file({**pairs_of(layer, sides=DIFFUSERS), layer + end: torch.ones(8)}, tmp_path / "lora.safetensors")
    with pytest.raises(ConfigError, match=rf"to_q\{end} \({kind}.*plain LoRA"):
        read_lora(tmp_path / "lora.safetensors", FluxPipeline, {})


def test_a_layer_that_the_model_does_not_have_is_named_with_the_known_names(tmp_path: Path) -> None:
    model, file = shared_tiny_model("qwen_image"), tmp_path / "lora.safetensors"
    original = original_layers(type(model), model.transformer)
    bad = "transformer_blocks.0.attn.to_nowhere"
    for prefix, sides in (("transformer.", DIFFUSERS), ("elsewhere.", DIFFUSERS), ("lora_unet_", KOHYA)):
        save_file(pairs_of(prefix + bad, sides=sides), file)
        with pytest.raises(ConfigError, match=rf"{prefix}{bad}.* known: .*LAYER\.lora_A") as caught:
            read_lora(file, type(model.pipeline), original)
        assert "\n" not in str(caught.value)
    save_file({f"{bad}.alpha": torch.tensor(ALPHA)}, file)
    with pytest.raises(ConfigError, match="no adapters"):
        read_lora(file, type(model.pipeline), original)


def test_a_file_with_two_sets_of_adapters_is_refused(tmp_path: Path) -> None:
    sets = [(f".lora_A.{name}.weight", f".lora_B.{name}.weight") for name in ("one", "two")]
    tensors = [pairs_of("transformer.blocks.0.to_q", sides=sides, alpha=False) for sides in sets]
    save_file({**tensors[0], **tensors[1]}, tmp_path / "lora.safetensors")
    with pytest.raises(ConfigError, match="several sets"):
        read_lora(tmp_path / "lora.safetensors", FluxPipeline, {})


def test_peft_files_need_a_strength(tmp_path: Path) -> None:
    """From alphas or from peft's configuration, also if names lack peft's prefix."""
    layer, file = "blocks.0.to_q", tmp_path / "adapter_model.safetensors"
    for prefix in ("", "base_model.model."):
        tensors = pairs_of(prefix + layer, sides=DIFFUSERS, alpha=False)
        save_file(tensors, file)
        with pytest.raises(ConfigError, match=r"adapter_config\.json.*strength"):
            read_lora(file, FluxPipeline, {})
        (tmp_path / "adapter_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": 3 * RANK}))
        up = read_lora(file, FluxPipeline, {})[layer][1]
        torch.testing.assert_close(up, 3 * tensors[prefix + layer + DIFFUSERS[1]])
        (tmp_path / "adapter_config.json").unlink()
