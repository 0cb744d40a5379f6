"""Image encoders, and text encoders that see images, with random weights, built without network access."""

from __future__ import annotations

from typing import Any

from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from digenrl.testing.tiny_text_encoders import VISION_TOKENS, sizes


def tiny_clip_vision(width: int, image_size: int, patch_size: int) -> CLIPVisionModel:
    return CLIPVisionModel(CLIPVisionConfig(**_shape(width, image_size, patch_size))).eval()


def tiny_siglip_vision(width: int, image_size: int, patch_size: int) -> SiglipVisionModel:
    """A SigLIP image encoder with this hidden size; it has no token besides those of the patches."""
    return SiglipVisionModel(SiglipVisionConfig(**_shape(width, image_size, patch_size))).eval()


def tiny_qwen_text_encoder(tokenizer: Any, width: int, layers: int = 2) -> Qwen2_5_VLForConditionalGeneration:
    """Qwen2.5-VL with this hidden size and a minimal vision tower."""
    vision = _qwen_vision(width) | {"fullatt_block_indexes": [0]}
    config = Qwen2_5_VLConfig(
        text_config=_qwen_text(tokenizer, width, layers), vision_config=vision, **_vision_token_ids(tokenizer)
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def tiny_qwen3_vl(tokenizer: Any, width: int) -> Qwen3VLForConditionalGeneration:
    """Qwen3-VL with this hidden size and a minimal vision tower."""
    text = _qwen_text(tokenizer, width, layers=2) | {"head_dim": width // 2}
    text["rope_parameters"]["mrope_interleaved"] = True
    vision = _qwen_vision(width) | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **_vision_token_ids(tokenizer))
    return Qwen3VLForConditionalGeneration(config).eval()


def tiny_gemma3(tokenizer: Any, width: int) -> Gemma3ForConditionalGeneration:
    """Gemma 3 with this hidden size, two layers and a minimal vision tower, which is never used."""
    text = {
        **sizes(width),
        "vocab_size": len(tokenizer),
        "num_key_value_heads": 1,
        "head_dim": width // 2,
        "query_pre_attn_scalar": width // 2,
    }
    vision = {"model_type": "siglip_vision_model", **_shape(width, image_size=16, patch_size=8)}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return Gemma3ForConditionalGeneration(config).eval()


def _shape(width: int, image_size: int, patch_size: int) -> dict[str, int]:
    return {**sizes(width), "image_size": image_size, "patch_size": patch_size}


def _qwen_text(tokenizer: Any, width: int, layers: int) -> dict[str, Any]:
    third = width // 4 // 3
    return {
        **sizes(width, layers),
        "vocab_size": len(tokenizer),
        "num_key_value_heads": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            # Channels for time, height and width; together half of a head's width.
            "mrope_section": [width // 4 - 2 * third, third, third],
        },
        "bos_token_id": tokenizer.eos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def _qwen_vision(width: int) -> dict[str, Any]:
    return {
        "depth": 1,
        "hidden_size": width,
        "intermediate_size": width,
        "num_heads": 2,
        "out_hidden_size": width,
    }


def _vision_token_ids(tokenizer: Any) -> dict[str, int]:
    return {
        f"{token.strip('<|>').replace('_pad', '')}_token_id": tokenizer.convert_tokens_to_ids(token)
        for token in VISION_TOKENS
    }
