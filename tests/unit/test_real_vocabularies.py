"""Token ids with the vocabularies of the published models. They are not part of this repository.

The source distribution of stable-diffusion-cpp-python on PyPI has CLIP's, T5's, UMT5's and Qwen2's as C arrays.
Unpack it and run: REAL_VOCABULARIES=path/of/the/folder pytest tests/unit/test_real_vocabularies.py
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from diffusers import QwenImagePipeline
from tokenizers import Tokenizer, pre_tokenizers
from transformers import CLIPTokenizer, LlamaTokenizerFast, Qwen2Tokenizer, T5TokenizerFast

from digenrl.models.loading.pipelines import pipeline_without
from digenrl.models.loading.tokenizers import PROBE, faithful_tokenizer

FOLDER = os.environ.get("REAL_VOCABULARIES")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="REAL_VOCABULARIES does not name the unpacked sdist")
TEXTS = (
    "a photo of a cat",
    PROBE,
    'A storefront sign that says "Open 24h", neon; it’s raining — 8k, ultra-detailed (masterpiece)',
    "tabs\tand\nlines   and spaces",
    "一只猫 в Москве, œuvre d'été",
)


@pytest.fixture(scope="module")
def contents() -> dict[str, bytes]:
    """The content of every C array, by its name."""
    arrays: dict[str, bytes] = {}
    for path in Path(FOLDER or "").rglob("vocab/*.hpp"):
        if path.stem == "mistral":
            continue
        for name, numbers in re.findall(r"(\w+)\[\]\s*=\s*\{(.*?)\}", path.read_text(), re.S):
            arrays[name] = bytes(int(number, 16) for number in re.findall(r"0x[0-9a-fA-F]+", numbers)).rstrip(
                b"\0"
            )
    assert arrays, f"no vocabularies below {FOLDER}"
    return arrays


def bpe_files(folder: Path, merges: str, suffix: str, special: tuple[str, ...]) -> None:
    """`vocab.json` and `merges.txt`. A vocabulary is all bytes, all merges in their order, and special tokens."""
    lines = [line for line in merges.split("\n") if line and not line.startswith("#version")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # printable bytes first, as in the published ones
    tokens = [
        *alphabet,
        *(byte + suffix for byte in alphabet if suffix),
        *("".join(line.split()) for line in lines),
    ]
    tokens += special
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines) + "\n")


def test_clip(contents: dict[str, bytes], tmp_path: Path) -> None:
    special = ("<|startoftext|>", "<|endoftext|>")
    bpe_files(tmp_path / "clip", contents["clip_merges_utf8_c_str"].decode(), "</w>", special)
    tokenizer = faithful_tokenizer(CLIPTokenizer.from_pretrained(tmp_path / "clip"))
    assert len(tokenizer) == 49408
    assert tokenizer("a photo of a cat").input_ids == [49406, 320, 1125, 539, 320, 2368, 49407]


@pytest.mark.parametrize(("name", "vocabulary"), [("t5", 32100), ("umt5", 256300)])
def test_t5_and_umt5(contents: dict[str, bytes], tmp_path: Path, name: str, vocabulary: int) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(contents[f"{name}_tokenizer_json_str"])
    settings = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "T5Tokenizer"}))
    tokenizer = faithful_tokenizer(T5TokenizerFast.from_pretrained(folder))
    assert len(tokenizer) == vocabulary and tokenizer.model_max_length == 512
    same_ids(tokenizer, folder)


def test_qwen(contents: dict[str, bytes], tmp_path: Path) -> None:
    """The pipeline cuts off the 34 tokens of its template."""
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    bpe_files(tmp_path / "qwen", contents["qwen2_merges_utf8_c_str"].decode(), "", special)
    settings = {"added_tokens_decoder": {}, "tokenizer_class": "Qwen2Tokenizer"}
    for index, token in enumerate(special):
        settings["added_tokens_decoder"][str(151643 + index)] = {"content": token, "special": True}
    (tmp_path / "qwen" / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = faithful_tokenizer(Qwen2Tokenizer.from_pretrained(tmp_path / "qwen"))
    pipeline = pipeline_without(QwenImagePipeline)
    template, cut = pipeline.prompt_template_encode, pipeline.prompt_template_encode_start_idx
    prompt, ending = tokenizer("a cat").input_ids, template.partition("{}")[2]
    assert tokenizer(template.format("a cat")).input_ids[cut:] == prompt + tokenizer(ending).input_ids
    assert tokenizer.decode(tokenizer(TEXTS[4]).input_ids) == TEXTS[4]


def test_a_byte_level_file_under_llamas_class_name(contents: dict[str, bytes], tmp_path: Path) -> None:
    """Llama 3's vocabulary is not at hand; Qwen's, in the same format, stands in for it."""
    bpe_files(tmp_path / "qwen", contents["qwen2_merges_utf8_c_str"].decode(), "", ("<|endoftext|>",))
    tokenizer = Qwen2Tokenizer.from_pretrained(tmp_path / "qwen")
    folder = tmp_path / "llama"
    folder.mkdir()
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"})
    )
    by_class = LlamaTokenizerFast.from_pretrained(folder)
    faithful = faithful_tokenizer(by_class)
    assert by_class(TEXTS[0]).input_ids != faithful(TEXTS[0]).input_ids
    same_ids(faithful, folder)


def same_ids(tokenizer: Any, folder: Path) -> None:
    expected = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        assert tokenizer(text, verbose=False).input_ids == expected.encode(text).ids, text
