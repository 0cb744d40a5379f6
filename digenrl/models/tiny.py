"""Parts of tiny pipelines, made with no network: tokenizers with few words, modules of random weights.

A tiny pipeline has every part of a real one, of the same classes, in well under 2 MB.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import AutoencoderKL
from tokenizers import Tokenizer, pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

TEXT_LENGTH = 48  # tokens of every tiny text encoder
END_OF_WORD = "</w>"  # how CLIP marks a word's last piece
SENTENCES = (
    "a photo of a red cat sitting on a wooden table",
    "a green apple and a blue cup in front of a window",
    'a sign in the street that says "hello world"',
    "an oil painting of a ship on the sea at sunset",
    "two small dogs running through a field of yellow flowers",
    "a video of a woman walking in the rain with an umbrella",
)
CHARACTERS = tuple(string.ascii_letters + string.digits + string.punctuation)


@contextmanager
def seeded_weights(seed: int) -> Iterator[None]:
    """Modules made inside get the same random weights every time; the caller's randomness is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def vocabulary_and_merges(tokenizer: Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """What a trained BPE consists of, as the constructors of transformers' tokenizers take it."""
    model = json.loads(tokenizer.to_str())["model"]
    return tokenizer.get_vocab(), [tuple(merge) for merge in model["merges"]]


def tiny_clip_tokenizer() -> Any:
    """CLIP's tokenizer over a small vocabulary: any text has tokens, and the words of SENTENCES have short ones.

    Written down, not trained: with an end-of-word suffix, the trainer's vocabulary is another one every time.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: dict[tuple[str, str], None] = {}
    for word in _words():
        left, *others = [*word[:-1], word[-1] + END_OF_WORD]
        for right in others:
            merges[left, right] = None
            left += right
    tokens = ["<|startoftext|>", "<|endoftext|>", *alphabet, *(byte + END_OF_WORD for byte in alphabet)]
    tokens += [left + right for left, right in merges]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocabulary, merges=list(merges), model_max_length=TEXT_LENGTH)


def tiny_t5_tokenizer() -> Any:
    """T5's tokenizer over a small vocabulary: every word of SENTENCES is one piece, and so is every character.

    Written down, not trained: the trainer's vocabulary is another one every time.
    """
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    words = [(f"▁{word}", -4.0) for word in _words()]
    characters = [(character, -8.0) for character in ("▁", *CHARACTERS)]
    return T5TokenizerFast(vocab=special + words + characters, extra_ids=0, model_max_length=TEXT_LENGTH)


def _words() -> list[str]:
    return sorted({word for sentence in SENTENCES for word in sentence.split() if word.isalpha()})


def tiny_clip(tokenizer: Any, width: int) -> CLIPTextModel:
    """A CLIP text encoder of this hidden size, with no projection."""
    return CLIPTextModel(_clip_config(tokenizer, width)).eval()


def tiny_clip_with_projection(tokenizer: Any, width: int) -> CLIPTextModelWithProjection:
    """A CLIP text encoder of this hidden and projected size."""
    return CLIPTextModelWithProjection(_clip_config(tokenizer, width)).eval()


def _clip_config(tokenizer: Any, width: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TEXT_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def tiny_t5(tokenizer: Any, width: int) -> T5EncoderModel:
    """A T5 encoder of this hidden size."""
    config = T5Config(
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
    return T5EncoderModel(config).eval()  # eval: T5 has dropout


def tiny_image_vae(scaling_factor: float, shift_factor: float) -> AutoencoderKL:
    """An image VAE with 16 latent channels and 8 pixels per latent, as SD3 and FLUX have."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(4, 4, 4, 8),
        layers_per_block=1,
        norm_num_groups=2,
        latent_channels=16,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=False,
    )
