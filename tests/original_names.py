"""Transformers as single files with the tensor names of the families' original code, as ComfyUI and Civitai have.

Each family's rules are the inverse of the conversion in diffusers' `from_single_file`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any
from unittest.mock import patch

import torch
from diffusers.loaders import single_file_model
from safetensors.torch import load_file, save_file
from torch import Tensor

State = dict[str, Tensor]
Rules = tuple[tuple[str, str], ...]  # regular expressions and what takes their place, applied in order

# Tensors that are one in the original: the name of the first, with a group for what varies, and the joint name.
FUSED: dict[str, tuple[tuple[tuple[str, ...], str], ...]] = {
    "sd3": (
        (("attn.to_q", "attn.to_k", "attn.to_v"), "x_block.attn.qkv"),
        (("attn2.to_q", "attn2.to_k", "attn2.to_v"), "x_block.attn2.qkv"),
        (("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), "context_block.attn.qkv"),
    ),
    "flux": (
        (("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"), "linear1"),
        (("attn.to_q", "attn.to_k", "attn.to_v"), "img_attn.qkv"),
        (("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), "txt_attn.qkv"),
    ),
    "hunyuan_video": (
        (("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"), "linear1"),
        (("attn.to_q", "attn.to_k", "attn.to_v"), "img_attn_qkv"),
        (("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), "txt_attn_qkv"),
    ),
}
RENAMED: dict[str, Rules] = {
    "sd3": (
        (r"^pos_embed\.pos_embed$", "pos_embed"),
        (r"^pos_embed\.proj", "x_embedder.proj"),
        (r"^time_text_embed\.timestep_embedder\.linear_1", "t_embedder.mlp.0"),
        (r"^time_text_embed\.timestep_embedder\.linear_2", "t_embedder.mlp.2"),
        (r"^time_text_embed\.text_embedder\.linear_1", "y_embedder.mlp.0"),
        (r"^time_text_embed\.text_embedder\.linear_2", "y_embedder.mlp.2"),
        (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
        (r"^proj_out", "final_layer.linear"),
        (r"^transformer_blocks", "joint_blocks"),
        (r"attn\.norm_added_([qk])", r"context_block.attn.ln_\1"),
        (r"(attn2?)\.norm_([qk])", r"x_block.\1.ln_\2"),
        (r"(attn2?)\.to_out\.0", r"x_block.\1.proj"),
        (r"attn\.to_add_out", "context_block.attn.proj"),
        (r"norm1_context\.linear", "context_block.adaLN_modulation.1"),
        (r"norm1\.linear", "x_block.adaLN_modulation.1"),
        (r"ff_context\.net\.0\.proj", "context_block.mlp.fc1"),
        (r"ff_context\.net\.2", "context_block.mlp.fc2"),
        (r"ff\.net\.0\.proj", "x_block.mlp.fc1"),
        (r"ff\.net\.2", "x_block.mlp.fc2"),
    ),
    "flux": (
        (r"^time_text_embed\.timestep_embedder\.linear_1", "time_in.in_layer"),
        (r"^time_text_embed\.timestep_embedder\.linear_2", "time_in.out_layer"),
        (r"^time_text_embed\.text_embedder\.linear_1", "vector_in.in_layer"),
        (r"^time_text_embed\.text_embedder\.linear_2", "vector_in.out_layer"),
        (r"^time_text_embed\.guidance_embedder\.linear_1", "guidance_in.in_layer"),
        (r"^time_text_embed\.guidance_embedder\.linear_2", "guidance_in.out_layer"),
        (r"^context_embedder", "txt_in"),
        (r"^x_embedder", "img_in"),
        (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
        (r"^proj_out", "final_layer.linear"),
        (r"^single_transformer_blocks\.(\d+)\.norm\.linear", r"single_blocks.\1.modulation.lin"),
        (r"^single_transformer_blocks\.(\d+)\.attn\.norm_q\.weight", r"single_blocks.\1.norm.query_norm.scale"),
        (r"^single_transformer_blocks\.(\d+)\.attn\.norm_k\.weight", r"single_blocks.\1.norm.key_norm.scale"),
        (r"^single_transformer_blocks\.(\d+)\.proj_out", r"single_blocks.\1.linear2"),
        (r"^single_transformer_blocks", "single_blocks"),
        (r"^transformer_blocks", "double_blocks"),
        (r"norm1_context\.linear", "txt_mod.lin"),
        (r"norm1\.linear", "img_mod.lin"),
        (r"attn\.norm_added_q\.weight", "txt_attn.norm.query_norm.scale"),
        (r"attn\.norm_added_k\.weight", "txt_attn.norm.key_norm.scale"),
        (r"attn\.norm_q\.weight", "img_attn.norm.query_norm.scale"),
        (r"attn\.norm_k\.weight", "img_attn.norm.key_norm.scale"),
        (r"attn\.to_out\.0", "img_attn.proj"),
        (r"attn\.to_add_out", "txt_attn.proj"),
        (r"ff_context\.net\.0\.proj", "txt_mlp.0"),
        (r"ff_context\.net\.2", "txt_mlp.2"),
        (r"ff\.net\.0\.proj", "img_mlp.0"),
        (r"ff\.net\.2", "img_mlp.2"),
    ),
    "qwen_image": (),  # its original names are those of diffusers
    "wan": (
        (r"^condition_embedder\.time_embedder\.linear_1", "time_embedding.0"),
        (r"^condition_embedder\.time_embedder\.linear_2", "time_embedding.2"),
        (r"^condition_embedder\.text_embedder\.linear_1", "text_embedding.0"),
        (r"^condition_embedder\.text_embedder\.linear_2", "text_embedding.2"),
        (r"^condition_embedder\.time_proj", "time_projection.1"),
        (r"^scale_shift_table", "head.modulation"),
        (r"^proj_out", "head.head"),
        (r"scale_shift_table", "modulation"),
        (r"attn1", "self_attn"),
        (r"attn2", "cross_attn"),
        (r"\.to_out\.0\.", ".o."),
        (r"\.to_([qkv])\.", r".\1."),
        (r"ffn\.net\.0\.proj", "ffn.0"),
        (r"ffn\.net\.2", "ffn.2"),
        (r"\.norm2\.", ".norm3."),
    ),
    "hunyuan_video": (
        (r"^context_embedder\.time_text_embed\.timestep_embedder\.linear_1", "txt_in.t_embedder.mlp.0"),
        (r"^context_embedder\.time_text_embed\.timestep_embedder\.linear_2", "txt_in.t_embedder.mlp.2"),
        (r"^context_embedder\.time_text_embed\.text_embedder", "txt_in.c_embedder"),
        (r"^context_embedder\.proj_in", "txt_in.input_embedder"),
        (r"^context_embedder\.token_refiner\.refiner_blocks", "txt_in.individual_token_refiner.blocks"),
        (r"^(txt_in.*)\.img_attn_qkv", r"\1.self_attn_qkv"),
        (r"^(txt_in.*)\.attn\.to_out\.0", r"\1.self_attn_proj"),
        (r"^(txt_in.*)\.norm_out\.linear", r"\1.adaLN_modulation.1"),
        (r"^(txt_in.*)\.ff\.net\.0\.proj", r"\1.mlp.fc1"),
        (r"^(txt_in.*)\.ff\.net\.2", r"\1.mlp.fc2"),
        (r"^time_text_embed\.timestep_embedder\.linear_1", "time_in.mlp.0"),
        (r"^time_text_embed\.timestep_embedder\.linear_2", "time_in.mlp.2"),
        (r"^time_text_embed\.guidance_embedder\.linear_1", "guidance_in.mlp.0"),
        (r"^time_text_embed\.guidance_embedder\.linear_2", "guidance_in.mlp.2"),
        (r"^time_text_embed\.text_embedder\.linear_1", "vector_in.in_layer"),
        (r"^time_text_embed\.text_embedder\.linear_2", "vector_in.out_layer"),
        (r"^x_embedder", "img_in"),
        (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
        (r"^proj_out", "final_layer.linear"),
        (r"^single_transformer_blocks\.(\d+)\.norm\.linear", r"single_blocks.\1.modulation.linear"),
        (r"^single_transformer_blocks\.(\d+)\.attn\.norm_([qk])", r"single_blocks.\1.\2_norm"),
        (r"^single_transformer_blocks\.(\d+)\.proj_out", r"single_blocks.\1.linear2"),
        (r"^single_transformer_blocks", "single_blocks"),
        (r"^transformer_blocks", "double_blocks"),
        (r"norm1_context\.linear", "txt_mod.linear"),
        (r"norm1\.linear", "img_mod.linear"),
        (r"attn\.norm_added_([qk])", r"txt_attn_\1_norm"),
        (r"attn\.norm_([qk])", r"img_attn_\1_norm"),
        (r"attn\.to_out\.0", "img_attn_proj"),
        (r"attn\.to_add_out", "txt_attn_proj"),
        (r"ff_context\.net\.0\.proj", "txt_mlp.fc1"),
        (r"ff_context\.net\.2", "txt_mlp.fc2"),
        (r"ff\.net\.0\.proj", "img_mlp.fc1"),
        (r"ff\.net\.2", "img_mlp.fc2"),
    ),
}
# Modulations whose halves, shift and scale, have the other order.
SWAPPED = {"sd3": r"^norm_out\.linear|^transformer_blocks\.1\.norm1_context", "flux": r"^norm_out\.linear"}
SWAPPED["hunyuan_video"] = SWAPPED["flux"]
PUBLISHED_WIDTH = 3072  # of FLUX and HunyuanVideo, written into diffusers' conversion


def write_original_file(family: str, pipeline: Path, path: Path, prefix: str = "") -> None:
    """Writes the transformer of a pipeline folder as a single file; the last block of SD3 must be number 1."""
    shards = (load_file(path) for path in sorted((pipeline / "transformer").glob("*.safetensors")))
    state = {name: value for shard in shards for name, value in shard.items()}
    save_file({prefix + name: value.contiguous() for name, value in original_state(family, state).items()}, path)


def original_state(family: str, state: State) -> State:
    """The same tensors with the names and layouts of the original code."""
    swapped = SWAPPED.get(family)
    state = {
        name: torch.cat(list(reversed(value.chunk(2)))) if swapped and re.search(swapped, name) else value
        for name, value in state.items()
    }
    for parts, joint in FUSED.get(family, ()):
        state = _fused(state, parts, joint)
    return {_renamed(name, RENAMED[family]): value for name, value in state.items()}


@contextmanager
def conversion_for_width(family: str, width: int) -> Iterator[None]:
    """Inside, diffusers converts tiny transformers of a family too: it takes this width, not the published one."""
    entries = single_file_model.SINGLE_FILE_LOADABLE_CLASSES
    names = {"flux": "FluxTransformer2DModel", "hunyuan_video": "HunyuanVideoTransformer3DModel"}
    if family not in names:
        yield
        return
    convert = entries[names[family]]["checkpoint_mapping_fn"]
    changed = type(convert)(_with_width(convert.__code__, width), convert.__globals__)
    with patch.dict(entries[names[family]], checkpoint_mapping_fn=changed):
        yield


def _with_width(code: CodeType, width: int) -> CodeType:
    def constant(value: Any) -> Any:
        if isinstance(value, CodeType):
            return _with_width(value, width)
        return width if value == PUBLISHED_WIDTH and isinstance(value, int) else value

    return code.replace(co_consts=tuple(constant(value) for value in code.co_consts))


def _fused(state: State, parts: tuple[str, ...], joint: str) -> State:
    fused = dict(state)
    first = re.compile(rf"(.*\.){re.escape(parts[0])}\.(weight|bias)")
    for name in state:
        match = first.fullmatch(name)
        names = [f"{match[1]}{part}.{match[2]}" for part in parts] if match else []
        if match and all(each in fused for each in names):
            fused[f"{match[1]}{joint}.{match[2]}"] = torch.cat([fused.pop(each) for each in names])
    return fused


def _renamed(name: str, rules: Rules) -> str:
    if ".norm3." in name:  # Wan's names of the second and third norm are swapped
        return name.replace(".norm3.", ".norm2.")
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
