"""Text parts of the tiny Qwen-Image, Wan and HunyuanVideo pipelines, made with no network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    LlamaConfig,
    LlamaModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from digenrl.models.tiny import SENTENCES, tiny_clip_tokenizer, vocabulary_and_merges

CLIP_LENGTH = 77  # HunyuanVideo's pipeline asks for so many tokens, whatever the tokenizer says
VOCABULARY = 768


def tiny_qwen_tokenizer(template: str) -> Any:
    """Qwen2's tokenizer over a small vocabulary, with the marks of a chat.

    It knows the words of the pipeline's template, so that little more than the prompt is left when the pipeline
    has cut 34 tokens away.
    """
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary, merges = vocabulary_and_merges(_byte_bpe([template] * 2 + list(SENTENCES), marks))
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=merges)
    tokenizer.add_special_tokens({"additional_special_tokens": marks[1:]})
    return tokenizer


def tiny_qwen_text_encoder(tokenizer: Any, width: int) -> Qwen2_5_VLForConditionalGeneration:
    """Qwen2.5-VL of this hidden size; its vision tower is there, as small as it can be, and never used."""
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        # One share of a head's width each for time, height and width; together half of it.
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": _thirds(width // 4)},
        "bos_token_id": tokenizer.eos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {
        "depth": 1,
        "hidden_size": width,
        "intermediate_size": width,
        "num_heads": 2,
        "out_hidden_size": width,
        "fullatt_block_indexes": [0],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=0,
        vision_end_token_id=0,
        image_token_id=0,
        video_token_id=0,
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def _thirds(total: int) -> list[int]:
    return [total - 2 * (total // 3), total // 3, total // 3]


def tiny_umt5(tokenizer: Any, width: int) -> UMT5EncoderModel:
    """A UMT5 encoder of this hidden size."""
    config = UMT5Config(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=width // 2,
        d_ff=2 * width,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return UMT5EncoderModel(config).eval()  # eval: it has dropout


def tiny_llama_tokenizer() -> Any:
    """A byte-level tokenizer with Llama 3's marks, which knows the words of HunyuanVideo's template.

    The pipeline cuts the first 95 tokens away and everything behind 351: a tokenizer that did not know the
    template would spend all of them on it and never reach the prompt.
    """
    marks = [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<pad>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ]
    tokenizer = _byte_bpe([DEFAULT_PROMPT_TEMPLATE["template"]] * 2 + list(SENTENCES), marks)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{marks[0]} $A", special_tokens=[(marks[0], tokenizer.token_to_id(marks[0]))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=marks[0],
        eos_token=marks[1],
        pad_token=marks[2],
        padding_side="right",
        additional_special_tokens=marks[3:],
    )


def tiny_llama(tokenizer: Any, width: int) -> LlamaModel:
    """A Llama of this hidden size; the pipeline reads the layer before the last two, so there are three."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=3,
        num_attention_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaModel(config).eval()


def tiny_long_clip_tokenizer() -> Any:
    """CLIP's tokenizer over a small vocabulary, for 77 tokens."""
    tokenizer = tiny_clip_tokenizer()
    tokenizer.model_max_length = CLIP_LENGTH
    return tokenizer


def tiny_long_clip(tokenizer: Any, width: int) -> CLIPTextModel:
    """A CLIP text encoder of this hidden size for 77 tokens."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CLIP_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config).eval()


def _byte_bpe(texts: Sequence[str], marks: list[str]) -> Tokenizer:
    """A byte-level BPE of what occurs at least twice in the texts; the marks are whole tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=marks,
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
