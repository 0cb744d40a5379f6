"""The layers of ComfyUI's models, as its LoRA loaders name them, and the diffusers layers that they consist of.

ComfyUI keeps the names of the original implementations. For SD3, FLUX.1, Qwen-Image, Z-Image and UNets it also
knows those of diffusers.
"""

from __future__ import annotations

from digenrl.models.contract import ComfyuiLayers

DIFFUSERS_NAMES: ComfyuiLayers = {}


_OWN, _ADDED = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")


def _qkv(attention: str, names: tuple[str, str, str] = _OWN) -> tuple[str, ...]:
    return tuple(f"{attention}.{name}" for name in names)


def _embedder(theirs: str, ours: str) -> dict[str, tuple[str, ...]]:
    """An embedder of two layers."""
    return {f"{theirs}.in_layer": (f"{ours}.linear_1",), f"{theirs}.out_layer": (f"{ours}.linear_2",)}


_FINAL_LAYERS = {"final_layer.linear": ("proj_out",), "final_layer.adaLN_modulation.1": ("norm_out.linear",)}
_DOUBLE, _SINGLE = "transformer_blocks.*", "single_transformer_blocks.*"
_JOINT = "joint_blocks.*"
_REFINER = "context_embedder.token_refiner.refiner_blocks.*"
_REFINED = "txt_in.individual_token_refiner.blocks.*"

_HUNYUAN_VIDEOS_LAYERS = {
    "double_blocks.*.img_attn_qkv": _qkv(f"{_DOUBLE}.attn"),
    "double_blocks.*.img_attn_proj": (f"{_DOUBLE}.attn.to_out.0",),
    "double_blocks.*.img_mod.linear": (f"{_DOUBLE}.norm1.linear",),
    "double_blocks.*.img_mlp.fc1": (f"{_DOUBLE}.ff.net.0.proj",),
    "double_blocks.*.img_mlp.fc2": (f"{_DOUBLE}.ff.net.2",),
    "double_blocks.*.txt_attn_qkv": _qkv(f"{_DOUBLE}.attn", _ADDED),
    "double_blocks.*.txt_attn_proj": (f"{_DOUBLE}.attn.to_add_out",),
    "double_blocks.*.txt_mod.linear": (f"{_DOUBLE}.norm1_context.linear",),
    "double_blocks.*.txt_mlp.fc1": (f"{_DOUBLE}.ff_context.net.0.proj",),
    "double_blocks.*.txt_mlp.fc2": (f"{_DOUBLE}.ff_context.net.2",),
    "single_blocks.*.linear1": (*_qkv(f"{_SINGLE}.attn"), f"{_SINGLE}.proj_mlp"),
    "single_blocks.*.linear2": (f"{_SINGLE}.proj_out",),
    "single_blocks.*.modulation.linear": (f"{_SINGLE}.norm.linear",),
    f"{_REFINED}.self_attn_qkv": _qkv(f"{_REFINER}.attn"),
    f"{_REFINED}.self_attn_proj": (f"{_REFINER}.attn.to_out.0",),
    f"{_REFINED}.mlp.fc1": (f"{_REFINER}.ff.net.0.proj",),
    f"{_REFINED}.mlp.fc2": (f"{_REFINER}.ff.net.2",),
    f"{_REFINED}.adaLN_modulation.1": (f"{_REFINER}.norm_out.linear",),
    "txt_in.input_embedder": ("context_embedder.proj_in",),
    **_embedder("txt_in.t_embedder", "context_embedder.time_text_embed.timestep_embedder"),
    **_embedder("txt_in.c_embedder", "context_embedder.time_text_embed.text_embedder"),
    **_FINAL_LAYERS,
}
HUNYUAN_VIDEO_LAYERS: ComfyuiLayers = {
    **_HUNYUAN_VIDEOS_LAYERS,
    **_embedder("time_in", "time_text_embed.timestep_embedder"),
    **_embedder("guidance_in", "time_text_embed.guidance_embedder"),
    **_embedder("vector_in", "time_text_embed.text_embedder"),
}
HUNYUAN_VIDEO_1_5_LAYERS: ComfyuiLayers = {
    **_HUNYUAN_VIDEOS_LAYERS,
    **_embedder("time_in", "time_embed.timestep_embedder"),
    **{f"byt5_in.fc{number}": (f"context_embedder_2.linear_{number}",) for number in (1, 2, 3)},
    "vision_in.proj.1": ("image_embedder.linear_1",),
    "vision_in.proj.3": ("image_embedder.linear_2",),
}

_FLUX_LAYERS = {
    "double_blocks.*.img_attn.qkv": _qkv(f"{_DOUBLE}.attn"),
    "double_blocks.*.img_attn.proj": (f"{_DOUBLE}.attn.to_out.0",),
    "double_blocks.*.txt_attn.qkv": _qkv(f"{_DOUBLE}.attn", _ADDED),
    "double_blocks.*.txt_attn.proj": (f"{_DOUBLE}.attn.to_add_out",),
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    **_FINAL_LAYERS,
}
# ComfyUI also knows the names of diffusers, in which LoRAs are written.
SD3_FUSED_LAYERS: ComfyuiLayers = {
    **{
        f"{_JOINT}.{theirs}.{layer}": parts
        for theirs, attention, names, output in (
            ("x_block.attn", "attn", _OWN, "to_out.0"),
            ("x_block.attn2", "attn2", _OWN, "to_out.0"),
            ("context_block.attn", "attn", _ADDED, "to_add_out"),
        )
        for layer, parts in (
            ("qkv", _qkv(f"{_DOUBLE}.{attention}", names)),
            ("proj", (f"{_DOUBLE}.{attention}.{output}",)),
        )
    },
    **{
        f"{_JOINT}.{theirs}_block.{layer}": (f"{_DOUBLE}.{part}",)
        for theirs, suffix in (("x", ""), ("context", "_context"))
        for layer, part in (
            ("adaLN_modulation.1", f"norm1{suffix}.linear"),
            ("mlp.fc1", f"ff{suffix}.net.0.proj"),
            ("mlp.fc2", f"ff{suffix}.net.2"),
        )
    },
    **{
        f"{theirs}_embedder.mlp.{layer}": (f"time_text_embed.{ours}_embedder.{part}",)
        for theirs, ours in (("t", "timestep"), ("y", "text"))
        for layer, part in (("0", "linear_1"), ("2", "linear_2"))
    },
    **_FINAL_LAYERS,
}
FLUX_FUSED_LAYERS: ComfyuiLayers = {
    **_FLUX_LAYERS,
    "double_blocks.*.img_mod.lin": (f"{_DOUBLE}.norm1.linear",),
    "double_blocks.*.img_mlp.0": (f"{_DOUBLE}.ff.net.0.proj",),
    "double_blocks.*.img_mlp.2": (f"{_DOUBLE}.ff.net.2",),
    "double_blocks.*.txt_mod.lin": (f"{_DOUBLE}.norm1_context.linear",),
    "double_blocks.*.txt_mlp.0": (f"{_DOUBLE}.ff_context.net.0.proj",),
    "double_blocks.*.txt_mlp.2": (f"{_DOUBLE}.ff_context.net.2",),
    "single_blocks.*.linear1": (*_qkv(f"{_SINGLE}.attn"), f"{_SINGLE}.proj_mlp"),
    "single_blocks.*.linear2": (f"{_SINGLE}.proj_out",),
    "single_blocks.*.modulation.lin": (f"{_SINGLE}.norm.linear",),
    **_embedder("time_in", "time_text_embed.timestep_embedder"),
    **_embedder("guidance_in", "time_text_embed.guidance_embedder"),
    **_embedder("vector_in", "time_text_embed.text_embedder"),
}
FLUX_2_LAYERS: ComfyuiLayers = {
    **_FLUX_LAYERS,
    "double_blocks.*.img_mlp.0": (f"{_DOUBLE}.ff.linear_in",),
    "double_blocks.*.img_mlp.2": (f"{_DOUBLE}.ff.linear_out",),
    "double_blocks.*.txt_mlp.0": (f"{_DOUBLE}.ff_context.linear_in",),
    "double_blocks.*.txt_mlp.2": (f"{_DOUBLE}.ff_context.linear_out",),
    "single_blocks.*.linear1": (f"{_SINGLE}.attn.to_qkv_mlp_proj",),
    "single_blocks.*.linear2": (f"{_SINGLE}.attn.to_out",),
    **{
        f"{name}.lin": (f"{name}.linear",)
        for name in ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
    },
    **_embedder("time_in", "time_guidance_embed.timestep_embedder"),
    **_embedder("guidance_in", "time_guidance_embed.guidance_embedder"),
}

Z_IMAGE_FUSED_LAYERS: ComfyuiLayers = {
    "x_embedder": ("all_x_embedder.2-1",),
    **{f"final_layer.{layer}": (f"all_final_layer.2-1.{layer}",) for layer in ("linear", "adaLN_modulation.1")},
    **{
        f"{blocks}.*.attention.{theirs}": tuple(f"{blocks}.*.attention.{name}" for name in ours)
        for blocks in ("layers", "noise_refiner", "context_refiner")
        for theirs, ours in (("qkv", ("to_q", "to_k", "to_v")), ("out", ("to_out.0",)))
    },
}

_LTX_2_ATTENTIONS = ["attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn"]
_LTX_2_IN_BLOCKS = [
    *(f"{attention}.{name}" for attention in _LTX_2_ATTENTIONS for name in ("to_q", "to_k", "to_v", "to_out.0")),
    *(f"{feed_forward}.{name}" for feed_forward in ("ff", "audio_ff") for name in ("net.0.proj", "net.2")),
]
_LTX_2_MODULATIONS = {
    "adaln_single": "time_embed",
    "audio_adaln_single": "audio_time_embed",
    "av_ca_video_scale_shift_adaln_single": "av_cross_attn_video_scale_shift",
    "av_ca_audio_scale_shift_adaln_single": "av_cross_attn_audio_scale_shift",
    "av_ca_a2v_gate_adaln_single": "av_cross_attn_video_a2v_gate",
    "av_ca_v2a_gate_adaln_single": "av_cross_attn_audio_v2a_gate",
}
# The layers of blocks have the names of diffusers, but ComfyUI knows them only as those of its own model.
LTX_2_LAYERS: ComfyuiLayers = {
    "patchify_proj": ("proj_in",),
    "audio_patchify_proj": ("audio_proj_in",),
    **{layer: (layer,) for layer in ("proj_out", "audio_proj_out")},
    **{
        f"{track}caption_projection.{layer}": (f"{track}caption_projection.{layer}",)
        for track in ("", "audio_")
        for layer in ("linear_1", "linear_2")
    },
    **{
        f"{theirs}.{layer}": (f"{ours}.{layer}",)
        for theirs, ours in _LTX_2_MODULATIONS.items()
        for layer in ("linear", "emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2")
    },
    **{f"{_DOUBLE}.{layer}": (f"{_DOUBLE}.{layer}",) for layer in _LTX_2_IN_BLOCKS},
}

WAN_LAYERS: ComfyuiLayers = {
    **{
        f"blocks.*.{theirs}.{short}": (f"blocks.*.{ours}.{name}",)
        for theirs, ours in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for short, name in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"))
    },
    "blocks.*.cross_attn.k_img": ("blocks.*.attn2.add_k_proj",),
    "blocks.*.cross_attn.v_img": ("blocks.*.attn2.add_v_proj",),
    "img_emb.proj.1": ("condition_embedder.image_embedder.ff.net.0.proj",),
    "img_emb.proj.3": ("condition_embedder.image_embedder.ff.net.2",),
    "blocks.*.ffn.0": ("blocks.*.ffn.net.0.proj",),
    "blocks.*.ffn.2": ("blocks.*.ffn.net.2",),
    "text_embedding.0": ("condition_embedder.text_embedder.linear_1",),
    "text_embedding.2": ("condition_embedder.text_embedder.linear_2",),
    "time_embedding.0": ("condition_embedder.time_embedder.linear_1",),
    "time_embedding.2": ("condition_embedder.time_embedder.linear_2",),
    "time_projection.1": ("condition_embedder.time_proj",),
    "head.head": ("proj_out",),
}
