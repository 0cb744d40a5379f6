"""Tokenizers with a small vocabulary and text encoders with random weights, built without network access."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from inspect import signature
from typing import Any

from diffusers import HunyuanVideo15Pipeline
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    LlamaConfig,
    LlamaModel,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    Qwen3Config,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

TEXT_LENGTH = 48  # tokens
VOCABULARY_SIZE = 768
END_OF_WORD = "</w>"  # CLIP's mark on the last piece of a word
SENTENCES = (
    "a photo of a red cat sitting on a wooden table",
    "a green apple and a blue cup in front of a window",
    'a sign in the street that says "hello world"',
    "an oil painting of a ship on the sea at sunset",
    "two small dogs running through a field of yellow flowers",
    "a video of a woman walking in the rain with an umbrella",
)
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL_TEMPLATE = (
    "<s>{% for message in messages %}{% set mark = 'SYSTEM_PROMPT' if message['role'] == 'system' else 'INST' %}"
    "[{{ mark }}]{% for part in message['content'] %}{{ part['text'] }}{% endfor %}[/{{ mark }}]{% endfor %}"
)
# What every prompt of HunyuanVideo 1.5 contains, of which the pipeline cuts off the first 108 tokens.
HUNYUAN_VIDEO_1_5_TEMPLATE = (
    "system user assistant "
    + signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters["system_message"].default
)
WORDS = sorted({word for sentence in SENTENCES for word in sentence.split() if word.isalpha()})
CHARACTERS = tuple(string.ascii_letters + string.digits + string.punctuation)


def tiny_clip_tokenizer(words: Sequence[str] = WORDS, length: int = TEXT_LENGTH) -> Any:
    """CLIP's tokenizer with one token for each of these words; other words are spelled byte by byte.

    The vocabulary is written out: the trainer's is not deterministic when it uses an end-of-word suffix.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        left, *others = [*word[:-1], word[-1] + END_OF_WORD]
        for right in others:
            merges[left, right] = None
            left += right
    tokens = ["<|startoftext|>", "<|endoftext|>", *alphabet, *(byte + END_OF_WORD for byte in alphabet)]
    tokens += [left + right for left, right in merges]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocabulary, merges=list(merges), model_max_length=length)


def tiny_t5_tokenizer(words: Sequence[str] = WORDS, length: int = TEXT_LENGTH) -> Any:
    """T5's tokenizer with one piece for each of these words and for every character.

    The vocabulary is written out: the trainer's is not deterministic.
    """
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces = [(f"▁{word}", -4.0) for word in words]
    characters = [(character, -8.0) for character in ("▁", *CHARACTERS)]
    return T5TokenizerFast(vocab=special + pieces + characters, extra_ids=0, model_max_length=length)


def tiny_qwen3_tokenizer() -> Any:
    """Qwen2's tokenizer, as Qwen3 uses it: with a chat template."""
    return tiny_chat_tokenizer("user assistant")


def tiny_chat_tokenizer(template: str) -> Any:
    """Qwen2's tokenizer with a chat template, trained on this text, which chats contain."""
    tokenizer = tiny_qwen_tokenizer(template)
    tokenizer.chat_template, tokenizer.model_max_length = CHAT_TEMPLATE, TEXT_LENGTH
    return tokenizer


def tiny_qwen_tokenizer(template: str) -> Any:
    """Qwen2's tokenizer with the special tokens of a chat.

    It is trained on the pipeline's prompt template, so that little more than the prompt is left after the pipeline
    has cut off the template's 34 tokens.
    """
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *VISION_TOKENS]
    trained = _byte_level_bpe([template] * 2 + list(SENTENCES), special)
    merges = [tuple(merge) for merge in json.loads(trained.to_str())["model"]["merges"]]
    tokenizer = Qwen2Tokenizer(vocab=trained.get_vocab(), merges=merges)
    tokenizer.add_special_tokens({"additional_special_tokens": special[1:]})
    return tokenizer


def tiny_llama_tokenizer() -> Any:
    """A byte-level tokenizer with Llama 3's special tokens, trained on HunyuanVideo's prompt template.

    The pipeline cuts off the first 95 tokens and everything after token 351; a tokenizer that does not know the
    template's words would spend all of these on it and never reach the prompt.
    """
    special = [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<pad>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ]
    tokenizer = _byte_level_bpe([DEFAULT_PROMPT_TEMPLATE["template"]] * 2 + list(SENTENCES), special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{special[0]} $A", special_tokens=[(special[0], tokenizer.token_to_id(special[0]))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special[0],
        eos_token=special[1],
        pad_token=special[2],
        padding_side="right",
        additional_special_tokens=special[3:],
    )


def tiny_clip(tokenizer: Any, width: int) -> CLIPTextModel:
    """A CLIP text encoder with this hidden size and no projection."""
    return CLIPTextModel(_clip_config(tokenizer, width)).eval()


def tiny_clip_with_projection(
    tokenizer: Any, width: int, projected: int | None = None
) -> CLIPTextModelWithProjection:
    """A CLIP text encoder with this hidden size, and the same or this projected size."""
    config = _clip_config(tokenizer, width)
    config.projection_dim = projected or width
    return CLIPTextModelWithProjection(config).eval()


def tiny_t5(tokenizer: Any, width: int) -> T5EncoderModel:
    return T5EncoderModel(T5Config(**_t5_settings(tokenizer, width))).eval()  # eval: T5 has dropout


def tiny_umt5(tokenizer: Any, width: int) -> UMT5EncoderModel:
    return UMT5EncoderModel(UMT5Config(**_t5_settings(tokenizer, width))).eval()  # eval: UMT5 has dropout


def tiny_llama(tokenizer: Any, width: int) -> LlamaModel:
    """A Llama with this hidden size. The pipeline reads the third layer from the end, so it has three."""
    config = LlamaConfig(
        **sizes(width, layers=3),
        vocab_size=len(tokenizer),
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaModel(config).eval()


def tiny_mistral_tokenizer() -> Any:
    """A byte-level tokenizer with a chat template of Mistral 3, whose messages are lists of parts."""
    special = ["<s>", "</s>", "<pad>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level_bpe([SYSTEM_MESSAGE] * 2 + list(SENTENCES), special),
        bos_token=special[0],
        eos_token=special[1],
        pad_token=special[2],
        additional_special_tokens=special[3:],
        model_max_length=2 * TEXT_LENGTH,  # of which the system message takes half
        chat_template=MISTRAL_TEMPLATE,
    )


def tiny_mistral3(tokenizer: Any, width: int, layers: int) -> Mistral3ForConditionalGeneration:
    """Mistral 3 with this hidden size and a minimal vision tower, which is never used."""
    text = {
        **sizes(width, layers),
        "model_type": "mistral",
        "vocab_size": len(tokenizer),
        "num_key_value_heads": 2,
        "head_dim": width // 2,
    }
    vision = {
        "model_type": "pixtral",
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision)).eval()


def tiny_byt5(width: int) -> T5EncoderModel:
    """An encoder of bytes with this hidden size."""
    shape = {"d_model": width, "d_ff": 2 * width, "d_kv": width // 2, "num_heads": 2, "num_layers": 2}
    return T5EncoderModel(T5Config(vocab_size=259, **shape)).eval()


def tiny_qwen3_config(tokenizer: Any, width: int, layers: int) -> Qwen3Config:
    """The configuration of a Qwen3 with this hidden size."""
    return Qwen3Config(
        **sizes(width, layers),
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        head_dim=width // 2,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def sizes(width: int, layers: int = 2) -> dict[str, int]:
    """The sizes of a transformer, as most of transformers' configurations name them."""
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
    }


def _clip_config(tokenizer: Any, width: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        **sizes(width),
        vocab_size=len(tokenizer),
        projection_dim=width,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _t5_settings(tokenizer: Any, width: int) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "d_model": width,
        "d_kv": width // 2,
        "d_ff": 2 * width,
        "num_layers": 2,
        "num_heads": 2,
        "feed_forward_proj": "gated-gelu",
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def _byte_level_bpe(texts: Sequence[str], special: list[str]) -> Tokenizer:
    """A byte-level BPE of everything that occurs at least twice in the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=special,
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
