"""Every family's exported LoRA gives the same velocity in diffusers, ComfyUI and as a merged pipeline.

peft's names and files without metadata do not depend on the family: they are tested with a transformer and a UNet.

ComfyUI is not needed: `comfyui_model` rebuilds how it names the layers of each model, and `apply_in_comfyui`
how its loader finds adapters and scales them. Both were compared with its code, `comfy/lora.py`, `comfy/utils.py`
and the models in `comfy/ldm`, at the commits that docs/models.md names.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from rounding import assert_same
from safetensors.torch import load_file, save_file
from tiny_pipelines import shared_tiny_model, tiny_folder, tiny_model, with_own_transformer
from torch import Tensor
from typer.testing import CliRunner

from digenrl.cli import app
from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.recipes.recipe import Recipe
from digenrl.models.adapters.lora import adapter_parameters
from digenrl.models.adapters.lora_files import FILE_NAME
from digenrl.models.contract import Conditioning, DiffusionModel
from digenrl.models.family import Family
from digenrl.models.pipeline_model import PipelineModel
from digenrl.models.registry import FAMILIES
from digenrl.run_folder.folder import RunFolder
from digenrl.testing.tiny_models import tiny_size
from digenrl.training.checkpoint.checkpoints import save_checkpoint
from digenrl.training.trainer_state import OptimizerState, TrainerState
from digenrl.worker.blueprint import check_adapters, load_model, read_blueprint

BOTH_KINDS = ("sd3", "sdxl")  # of models: a transformer and a UNet
RANK, ALPHA = 2, 8.0  # a scale of 4: a reader that ignores it is far off, and it rounds nothing
WITHOUT = "single_transformer_blocks.1.attn.to_k"  # so that a fused layer of ComfyUI has a part without adapters


@dataclass(frozen=True)
class Trained:
    """A run with adapters, and the velocity of its model with them."""

    family: Family
    source: Path
    run: Path
    conditioning: Conditioning
    velocity: Tensor


@torch.no_grad()
def velocity_of(model: DiffusionModel, conditioning: Conditioning) -> Tensor:
    generator, size = torch.Generator().manual_seed(3), tiny_size(model.family)
    latents = model.initial_latents(torch.randn(2, *model.noise_shape(size), generator=generator), size)
    times = model.schedule(4, size).timesteps[[0, 2]]
    return model.velocity(latents, times, conditioning, guidance=1.0, size=size)


def all_layers(family: str) -> str:
    """Every linear layer of the transformer but one, as training.lora.targets."""
    layers = shared_tiny_model(family).transformer.named_modules()
    return "|".join(
        re.escape(path) for path, each in layers if isinstance(each, torch.nn.Linear) and path != WITHOUT
    )


def recipe_of(family: Family, source: Path, **lora: Any) -> Recipe:
    size = tiny_size(family.name)
    content = {
        "steps": 1,
        "model": {"family": family.name, "source": str(source)},
        "prompts": {"path": str(source / "prompts.txt")},
        "rewards": "jpeg_compressibility",
        "sample": {"height": size.height, "width": size.width, "frames": size.frames},
        "batch": {"prompts": 2, "samples_per_prompt": 2},
        "algorithm": {"name": "flow_grpo"},
        "training": {"lora": {"rank": RANK, "alpha": ALPHA, "targets": all_layers(family.name), **lora}},
    }
    return parse_model(Recipe, content)


@pytest.fixture(scope="module", params=list(FAMILIES))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run's folder with one checkpoint, whose adapters are random."""
    family, folder = FAMILIES[request.param], tmp_path_factory.mktemp("trained")
    source = tiny_folder(family.name)
    recipe = recipe_of(family, source)
    check_adapters(read_blueprint(recipe))
    model = load_model(read_blueprint(recipe), "cpu")
    generator = torch.Generator().manual_seed(4)
    for parameter in adapter_parameters(model).values():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    weights = {name: value for name, value in model.transformer.named_parameters() if ".lora_" in name}
    run = RunFolder.create(folder / "run", recipe, datetime.now(UTC))
    state = TrainerState(
        1, 1, None, {name: value.detach() for name, value in weights.items()}, OptimizerState({}, {})
    )
    save_checkpoint(run.checkpoints, 1, state, {})
    conditioning = shared_tiny_model(family.name).encode(["a red cat", "a sign"])
    return Trained(family, source, run.path, conditioning, velocity_of(model, conditioning))


@pytest.fixture(scope="module")
def exports(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the command wrote, by format: a folder or, for ComfyUI, a file."""
    folder = tmp_path_factory.mktemp("exports")
    assert export(trained, "diffusers", folder / "diffusers") == [FILE_NAME]
    others = ["merged", *(["peft"] if trained.family.name in BOTH_KINDS else [])]
    for to in others:
        export(trained, to, folder / to)
    assert export(trained, "comfyui", folder / "comfyui") == ["run.safetensors"]
    return {to: folder / to for to in ("diffusers", *others)} | {"comfyui": folder / "comfyui" / "run.safetensors"}


def export(trained: Trained, to: str, out: Path) -> list[str]:
    """The files that the command says it wrote."""
    result = CliRunner().invoke(app, ["export", str(trained.run), "--to", to, "--out", str(out), "--json"])
    if result.exception is not None:
        raise result.exception
    content = json.loads(result.stdout)
    assert (content["format"], content["folder"], content["checkpoint"]) == (to, str(out), "step_000001")
    files: list[str] = content["files"]
    assert files == sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    return files


def assert_same_velocity(trained: Trained, model: DiffusionModel) -> None:
    got = velocity_of(model, trained.conditioning)
    torch.testing.assert_close(got, trained.velocity, atol=3e-5, rtol=1e-5)


def open_model(family: Family, source: Path) -> PipelineModel:
    """The model as diffusers loads it, without our adapters."""
    without = dict.fromkeys(family.model_class.text_encoders)
    return family.model_class(family.pipeline_class.from_pretrained(source, **without))


@pytest.fixture(scope="module")
def shared_base(trained: Trained) -> PipelineModel:
    return open_model(trained.family, trained.source)


@pytest.fixture
def base(shared_base: PipelineModel) -> PipelineModel:
    """For tests that modify it."""
    return with_own_transformer(shared_base)


@pytest.mark.parametrize("trained", ["sd3"], indirect=True)
@pytest.mark.parametrize("to", ["diffusers", "comfyui", "peft", "merged"])
def test_a_full_disk_is_one_line_with_the_folder_that_was_asked_for(
    trained: Trained, to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it would be cut off as well
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, before[1]))
    try:
        with pytest.raises(OSError) as caught:
            export(trained, to, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.filename == str(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_adapters_matter(trained: Trained, shared_base: PipelineModel) -> None:
    base = velocity_of(shared_base, trained.conditioning)
    assert (base - trained.velocity).abs().max() > 1e-2


def assert_diffusers_loads(trained: Trained, base: PipelineModel, folder: Path) -> None:
    if hasattr(base.pipeline, "load_lora_weights"):
        base.pipeline.load_lora_weights(folder)
    else:  # as of HunyuanVideo 1.5
        base.pipeline.transformer.load_lora_adapter(folder, weight_name=FILE_NAME)
    assert_same(velocity_of(base, trained.conditioning), trained.velocity)


def test_diffusers_loads_it(trained: Trained, base: PipelineModel, exports: dict[str, Path]) -> None:
    assert_diffusers_loads(trained, base, exports["diffusers"])


@pytest.mark.parametrize("trained", BOTH_KINDS, indirect=True)
def test_diffusers_loads_it_without_metadata(
    trained: Trained, base: PipelineModel, exports: dict[str, Path], tmp_path: Path
) -> None:
    save_file(load_file(exports["diffusers"] / FILE_NAME), tmp_path / FILE_NAME)
    assert_diffusers_loads(trained, base, tmp_path)


@pytest.mark.parametrize("trained", BOTH_KINDS, indirect=True)
def test_peft_loads_it(trained: Trained, base: PipelineModel, exports: dict[str, Path]) -> None:
    peft.PeftModel.from_pretrained(base.transformer, exports["peft"])  # adapts the transformer in place
    assert_same_velocity(trained, base)


def test_a_merged_pipeline_has_no_adapters_and_all_components(trained: Trained, exports: dict[str, Path]) -> None:
    model = open_model(trained.family, exports["merged"])
    assert not [name for name, _ in model.transformer.named_parameters() if "lora" in name]
    assert_same_velocity(trained, model)
    index, original = (
        json.loads((folder / "model_index.json").read_text()) for folder in (exports["merged"], trained.source)
    )
    assert {key: value for key, value in index.items() if not key.startswith("_")} == {
        key: value for key, value in original.items() if not key.startswith("_")
    }


def test_comfyui_loads_it(trained: Trained, base: PipelineModel, exports: dict[str, Path]) -> None:
    apply_in_comfyui(load_file(exports["comfyui"]), trained.family.name, base.transformer)
    assert_same_velocity(trained, base)


@pytest.mark.parametrize("trained", ["sd3"], indirect=True)
@pytest.mark.parametrize(
    ("layers", "expected"), [(None, "names for sd3 are not known"), ({"a": ("b",)}, "no name for")]
)
def test_layers_that_comfyui_has_no_names_for_are_refused(
    trained: Trained, layers: Any, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trained.family.model_class, "comfyui_layers", layers)
    with pytest.raises(ConfigError, match=expected):
        export(trained, "comfyui", tmp_path / "comfyui")


def test_training_starts_from_it(trained: Trained, exports: dict[str, Path]) -> None:
    for to in ("diffusers", "comfyui", "peft") if trained.family.name in BOTH_KINDS else ("comfyui",):
        recipe = recipe_of(trained.family, trained.source, alpha=RANK * 2.0, start_from=str(exports[to]))
        check_adapters(read_blueprint(recipe))
        assert_same_velocity(trained, load_model(read_blueprint(recipe), "cpu"))


@pytest.mark.parametrize("trained", ["flux", "sdxl"], indirect=True)
def test_a_lora_that_does_not_fit_is_refused_before_training(trained: Trained, exports: dict[str, Path]) -> None:
    for changes, expected in (
        ({"rank": RANK + 1}, f"training.lora.rank={RANK}"),
        ({"targets": ["to_q"]}, "training.lora.targets="),
        ({"start_from": str(trained.run)}, "no .safetensors"),
        ({"start_from": str(trained.source / "nowhere")}, "no such file"),
        ({"targets": ["to_qq"]}, "to_q"),
    ):
        changes = {"start_from": str(exports["diffusers"]), **changes}
        with pytest.raises(ConfigError, match=expected):
            check_adapters(read_blueprint(recipe_of(trained.family, trained.source, **changes)))


def test_training_starts_from_kohyas_names_and_alphas(tmp_path: Path) -> None:
    family, source, base = FAMILIES["flux"], tiny_folder("flux"), tiny_model("flux")
    conditioning, generator = base.encode(["a red cat", "a sign"]), torch.Generator().manual_seed(6)
    block, content = "transformer_blocks.0.attn", {}
    for name, parts in {
        "img_attn_qkv": ["to_q", "to_k", "to_v"],
        "txt_attn_qkv": ["add_q_proj", "add_k_proj", "add_v_proj"],
        "img_attn_proj": ["to_out.0"],
        "txt_attn_proj": ["to_add_out"],
    }.items():
        weights = [base.transformer.get_submodule(f"{block}.{part}").weight for part in parts]
        down, up = (
            torch.randn(*shape, generator=generator) * 0.3
            for shape in ((RANK, weights[0].shape[1]), (sum(map(len, weights)), RANK))
        )
        layer = f"lora_unet_double_blocks_0_{name}"
        content |= {f"{layer}.lora_down.weight": down, f"{layer}.lora_up.weight": up}
        content[f"{layer}.alpha"] = torch.tensor(ALPHA)
        for weight, rows in zip(weights, (up @ down * ALPHA / RANK).split([*map(len, weights)]), strict=True):
            weight.data += rows
    save_file(content, tmp_path / "kohya.safetensors")
    targets = r"transformer_blocks\.0\.attn\.(to_[qkv]|to_out\.0|add_[qkv]_proj|to_add_out)"
    recipe = recipe_of(family, source, targets=targets, start_from=str(tmp_path / "kohya.safetensors"))
    check_adapters(read_blueprint(recipe))
    got = velocity_of(load_model(read_blueprint(recipe), "cpu"), conditioning)
    torch.testing.assert_close(got, velocity_of(base, conditioning), atol=1e-5, rtol=1e-5)


# --- ComfyUI's rules --------------------------------------------------------------------------------------------

UNETS = ("sd15", "sdxl")
DIFFUSERS_NAMES = ("sd3", "flux", "flux_kontext", "qwen_image", "qwen_image_edit", "qwen_image_2_1", "z_image")
# The shift is before the scale, in diffusers behind it. For the names of diffusers, the loader swaps them itself.
SWAPPED = "diffusion_model.final_layer.adaLN_modulation.1"


def apply_in_comfyui(lora: dict[str, Tensor], family: str, transformer: torch.nn.Module) -> None:
    """Adds alpha / rank * B A to the rows of each layer that a LoRA names; without `.alpha`, B A."""
    linears = {path: each for path, each in transformer.named_modules() if isinstance(each, torch.nn.Linear)}
    known = comfyui_model(family, list(linears))
    used = set()
    down_end, up_end = "lora_A.weight", "lora_B.weight"
    if family in UNETS:
        down_end, up_end = "lora_down.weight", "lora_up.weight"
    for name, parts in known.items():
        if f"{name}.{up_end}" not in lora:
            continue
        up, down = lora[f"{name}.{up_end}"], lora[f"{name}.{down_end}"]
        alpha = lora.get(f"{name}.alpha")
        scale = 1.0 if alpha is None else alpha.item() / down.shape[0]
        update = up @ down * scale
        if name == SWAPPED:
            update = torch.cat([update[len(update) // 2 :], update[: len(update) // 2]])
        for part, rows in zip(parts, update.split([linears[part].out_features for part in parts]), strict=True):
            linears[part].weight.data += rows
        used |= {f"{name}.{end}" for end in (down_end, up_end, "alpha")}
    assert used == lora.keys(), "lora key not loaded"


def comfyui_model(family: str, linears: list[str]) -> dict[str, list[str]]:
    """The names that ComfyUI's loader knows, each with the diffusers layers whose rows it has, in order."""
    if family in DIFFUSERS_NAMES:
        return {f"transformer.{path}": [path] for path in linears}
    if family in UNETS:
        return {f"lora_unet_{path.replace('.', '_')}": [path] for path in linears}
    rename, outside = COMFYUI_NAMES[family.partition("_")[0]]
    known: dict[str, list[str]] = {}
    for path in linears:
        name = next((theirs + _end(path, ours) for ours, theirs in outside.items() if _is_in(path, ours)), None)
        known.setdefault(f"diffusion_model.{rename(path) if name is None else name}", []).append(path)
    order = ["to_q", "add_q_proj", "to_k", "add_k_proj", "to_v", "add_v_proj", "proj_mlp"]
    for parts in known.values():  # q, k, v and then the MLP, in whatever order diffusers has them
        parts.sort(key=lambda path: order.index(last) if (last := path.rpartition(".")[2]) in order else 0)
    return known


def _is_in(path: str, module: str) -> bool:
    return f"{path}.".startswith(f"{module}.")


def _end(path: str, module: str) -> str:
    """The rest of a path, where the two layers of an embedder have names of their own."""
    rest = path.removeprefix(module)
    return {".linear_1": ".in_layer", ".linear_2": ".out_layer"}.get(rest, rest)


def _wan_name(path: str) -> str:
    for ours, theirs in (
        *(("attn2.add_k_proj", "cross_attn.k_img"), ("attn2.add_v_proj", "cross_attn.v_img")),
        *(("attn1", "self_attn"), ("attn2", "cross_attn"), ("ffn.net.0.proj", "ffn.0"), ("ffn.net.2", "ffn.2")),
        *((f".to_{short}", f".{short}") for short in "qkv"),
        (".to_out.0", ".o"),
    ):
        path = path.replace(ours, theirs)
    return path


def _flux2_name(path: str) -> str:
    single, stream = path.startswith("single_t"), "txt" if "add_" in path or "_context" in path else "img"
    for pattern, theirs in (
        (r"^single_transformer_blocks", "single_blocks"),
        (r"^transformer_blocks", "double_blocks"),
        (r"attn\.to_qkv_mlp_proj$", "linear1"),
        (r"attn\.to_out$", "linear2"),
        (r"attn\.(to_[qkv]|add_[qkv]_proj)$", f"{stream}_attn.qkv"),
        (r"attn\.(to_out\.0|to_add_out)$", f"{stream}_attn.proj"),
        (r"ff(_context)?\.linear_in$", f"{stream}_mlp.0"),
        (r"ff(_context)?\.linear_out$", f"{stream}_mlp.2"),
        (r"_modulation(_img|_txt)?\.linear$", r"_modulation\1.lin"),
    ):
        path = re.sub(pattern, theirs, path)
    assert not single or path.rpartition(".")[2] in ("linear1", "linear2"), path
    return path


def _hunyuan_name(path: str) -> str:
    """The name of ComfyUI's module, then its other spelling for LoRAs, with the original underscores."""
    stream = "txt" if "add_" in path or "_context" in path else "img"
    refiner, single = "refiner_blocks" in path, path.startswith("single")
    for ours, theirs in (
        ("context_embedder.token_refiner.refiner_blocks", "txt_in.individual_token_refiner.blocks"),
        ("single_transformer_blocks", "single_blocks"),
        ("transformer_blocks", "double_blocks"),
        *((f"attn.{name}", "linear1" if single else "attn.qkv") for name in ("to_q", "to_k", "to_v")),
        *((f"attn.add_{short}_proj", "attn.qkv") for short in "qkv"),
        *(
            (
                ("attn.to_out.0", "attn.proj"),
                ("attn.to_add_out", "attn.proj"),
                ("norm_out.linear", "adaLN_modulation.1"),
            )
        ),
        *(("proj_mlp", "linear1"), ("proj_out", "linear2")),
        *(
            (f"{ff}.net.{ours}", f"mlp.{theirs}")
            for ff in ("ff_context", "ff")
            for ours, theirs in (("0.proj", "0"), ("2", "2"))
        ),
        *(("norm1_context.linear", "mod.lin"), ("norm1.linear", "mod.lin"), ("norm.linear", "modulation.lin")),
    ):
        path = path.replace(ours, theirs)
    if refiner:
        path = path.replace(".attn.", ".self_attn.")
    elif not single:
        path = path.replace(".attn.", f".{stream}_attn.").replace(".mlp.", f".{stream}_mlp.")
        path = path.replace(".mod.", f".{stream}_mod.")
    for module, spelling in (
        *((("_mod.lin", "_mod.linear"), ("_attn.qkv", "_attn_qkv"), ("_attn.proj", "_attn_proj"))),
        *(("mlp.0", "mlp.fc1"), ("mlp.2", "mlp.fc2"), (".modulation.lin", ".modulation.linear")),
    ):
        path = path.replace(module, spelling)
    return path


_FINAL_LAYERS = {"proj_out": "final_layer.linear", "norm_out.linear": "final_layer.adaLN_modulation.1"}
# By the first word of a family: how layers in blocks are renamed, and the names of modules outside of blocks.
COMFYUI_NAMES: dict[str, tuple[Callable[[str], str], dict[str, str]]] = {
    "wan": (
        _wan_name,
        {
            "condition_embedder.text_embedder.linear_1": "text_embedding.0",
            "condition_embedder.text_embedder.linear_2": "text_embedding.2",
            "condition_embedder.time_embedder.linear_1": "time_embedding.0",
            "condition_embedder.time_embedder.linear_2": "time_embedding.2",
            "condition_embedder.time_proj": "time_projection.1",
            "proj_out": "head.head",
        },
    ),
    "flux2": (
        _flux2_name,
        {
            "x_embedder": "img_in",
            "context_embedder": "txt_in",
            "time_guidance_embed.timestep_embedder": "time_in",
            "time_guidance_embed.guidance_embedder": "guidance_in",
            **_FINAL_LAYERS,
        },
    ),
    "hunyuan": (
        _hunyuan_name,
        {
            "context_embedder.proj_in": "txt_in.input_embedder",
            "context_embedder.time_text_embed.timestep_embedder": "txt_in.t_embedder",
            "context_embedder.time_text_embed.text_embedder": "txt_in.c_embedder",
            "time_text_embed.timestep_embedder": "time_in",
            "time_text_embed.guidance_embedder": "guidance_in",
            "time_text_embed.text_embedder": "vector_in",
            "time_embed.timestep_embedder": "time_in",
            **{f"context_embedder_2.linear_{number}": f"byt5_in.fc{number}" for number in (1, 2, 3)},
            "image_embedder.linear_1": "vision_in.proj.1",
            "image_embedder.linear_2": "vision_in.proj.3",
            **_FINAL_LAYERS,
        },
    ),
    "ltx2": (
        str,
        {
            "proj_in": "patchify_proj",
            "audio_proj_in": "audio_patchify_proj",
            "time_embed": "adaln_single",
            "audio_time_embed": "audio_adaln_single",
            "av_cross_attn_video_scale_shift": "av_ca_video_scale_shift_adaln_single",
            "av_cross_attn_audio_scale_shift": "av_ca_audio_scale_shift_adaln_single",
            "av_cross_attn_video_a2v_gate": "av_ca_a2v_gate_adaln_single",
            "av_cross_attn_audio_v2a_gate": "av_ca_v2a_gate_adaln_single",
        },
    ),
}
