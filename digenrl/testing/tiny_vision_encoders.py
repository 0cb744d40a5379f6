"""Image encoders with random weights, built without network access."""

from __future__ import annotations

from transformers import CLIPVisionConfig, CLIPVisionModel, SiglipVisionConfig, SiglipVisionModel


def tiny_clip_vision(width: int, image_size: int, patch_size: int) -> CLIPVisionModel:
    """A CLIP image encoder with this hidden size."""
    return CLIPVisionModel(CLIPVisionConfig(**_shape(width, image_size, patch_size))).eval()


def tiny_siglip_vision(width: int, image_size: int, patch_size: int) -> SiglipVisionModel:
    """A SigLIP image encoder with this hidden size; it has no token besides those of the patches."""
    return SiglipVisionModel(SiglipVisionConfig(**_shape(width, image_size, patch_size))).eval()


def _shape(width: int, image_size: int, patch_size: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": image_size,
        "patch_size": patch_size,
    }
