"""HPSv2: CLIP-H fine-tuned on ranked images; the score is the cosine similarity.

The published file has open_clip's names. Its weights replace those of the CLIP-H base model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from digenrl.config.rewards.models import HpsV2Settings
from digenrl.rewards.parts.clip import ClipPairReward, LetterboxedImages, load_clip, processor_of
from digenrl.rewards.parts.weights import load_into, read_state_dict

TOWERS = {"visual.": "vision_model.", "": "text_model."}
RENAMED = {
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",  # transformers' spelling
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "logit_scale": "logit_scale",
}
TRANSPOSED = {"text_projection": "text_projection.weight", "visual.proj": "visual_projection.weight"}
INSIDE_A_BLOCK = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}
BLOCKS = "transformer.resblocks."


class HpsV2Reward(ClipPairReward):
    """Sees the whole of an image that is not square, as the published scorer does."""

    preprocessing = LetterboxedImages


def build(settings: HpsV2Settings) -> HpsV2Reward:
    """Loads the model, and the published file into it if one is given."""
    model = load_clip(settings)
    if settings.checkpoint is not None:
        path = Path(settings.checkpoint).expanduser()
        load_into(model, from_open_clip(read_state_dict(path)), source=path)
    return HpsV2Reward(settings, model, processor_of(settings))


def from_open_clip(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Renames weights from open_clip to transformers' CLIPModel; unknown names stay unchanged."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        tower = "visual." if name.startswith("visual.") else ""
        if name in TRANSPOSED:
            renamed[TRANSPOSED[name]] = tensor.T.contiguous()
        elif name.startswith(tower + BLOCKS):
            renamed.update(_block_weight(name.removeprefix(tower + BLOCKS), TOWERS[tower], tensor))
        elif name not in ("attn_mask", "visual.attn_mask"):  # a constant that some versions store
            renamed[RENAMED.get(name, name)] = tensor
    return renamed


def _block_weight(name: str, tower: str, tensor: Tensor) -> dict[str, Tensor]:
    """Splits `3.attn.in_proj_weight` into three weights and renames the others."""
    number, _, inner = name.partition(".")
    layer = f"{tower}encoder.layers.{number}."
    if inner.startswith("attn.in_proj_"):
        kind = inner.removeprefix("attn.in_proj_")
        pieces = zip("qkv", tensor.chunk(3, dim=0), strict=True)
        return {f"{layer}self_attn.{letter}_proj.{kind}": piece.contiguous() for letter, piece in pieces}
    stem, _, kind = inner.rpartition(".")
    return {f"{layer}{INSIDE_A_BLOCK.get(stem, stem)}.{kind}": tensor}
