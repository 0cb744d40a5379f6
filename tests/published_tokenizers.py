"""Small tokenizers in the file formats of the published repositories.

Each function writes a folder and returns a tokenizer that splits text as the folder's files say.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import sentencepiece
from diffusers import QwenImagePipeline
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from sentencepiece import sentencepiece_model_pb2
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import CLIPTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from digenrl.models.loading.pipelines import pipeline_without
from digenrl.models.loading.tokenizers import PROBE
from digenrl.testing.tiny_text_encoders import SENTENCES, VISION_TOKENS, tiny_clip_tokenizer

CORPUS = (*SENTENCES, PROBE, "It's SO good: 3 cats, 2 dogs; naïve “quotes” — 東京!", "Привет, мир 🙂")
TEXT_LENGTH = 77  # of CLIP
T5_LENGTH = 512
BPE_SIZE = 1024
SENTENCEPIECE_SIZE = 448
START, END = "<|startoftext|>", "<|endoftext|>"
LLAMA_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
LLAMA_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<image>",
    "<pad>",
)
QWEN_SPECIAL = (END, "<|im_start|>", "<|im_end|>", *VISION_TOKENS)


def write_clip_tokenizer(folder: Path, pad_token: str = END) -> Any:
    """`vocab.json` and `merges.txt`; the special tokens have the highest ids, which pooling relies on."""
    tiny = tiny_clip_tokenizer(length=TEXT_LENGTH)
    model = json.loads(tiny.backend_tokenizer.to_str())["model"]
    pieces = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    pieces = [*(token for token in pieces if token not in (START, END)), START, END]
    vocabulary = {token: index for index, token in enumerate(pieces)}
    _write_bpe(folder, vocabulary, [" ".join(merge) for merge in model["merges"]], heading="#version: 0.2\n")
    special = {"bos_token": START, "eos_token": END, "unk_token": END, "pad_token": pad_token}
    settings = {
        "add_prefix_space": False,
        "added_tokens_decoder": _added({vocabulary[token]: token for token in (START, END, pad_token)}),
        "clean_up_tokenization_spaces": True,
        "do_lower_case": True,
        "errors": "replace",
        "model_max_length": TEXT_LENGTH,
        "tokenizer_class": "CLIPTokenizer",
    }
    _write_settings(folder, special, settings)
    return CLIPTokenizer.from_pretrained(folder)


def write_t5_tokenizer(folder: Path) -> Any:
    """`spiece.model`, and a `tokenizer.json` with SentencePiece's table of normalized characters."""
    proto = _write_sentencepiece(folder, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    normalizer = normalizers.Sequence(
        [
            normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )
    return _write_unigram(folder, proto, normalizer, extra_tokens=100)


def write_umt5_tokenizer(folder: Path) -> Any:
    """As T5's, without normalization: tabs and line breaks are tokens of their own."""
    proto = _write_sentencepiece(
        folder, pad_id=0, eos_id=1, bos_id=2, unk_id=3, normalization_rule_name="identity", byte_fallback=True
    )
    return _write_unigram(
        folder, proto, normalizers.Sequence([normalizers.Replace(Regex(" {2,}"), " ")]), extra_tokens=300
    )


def write_qwen_tokenizer(folder: Path) -> Any:
    """`vocab.json`, `merges.txt` and `added_tokens.json`, trained on the pipeline's prompt template."""
    template = pipeline_without(QwenImagePipeline).prompt_template_encode
    trained = _byte_level_bpe((template, template, *CORPUS, *CORPUS), special=())
    model = json.loads(trained.to_str())["model"]
    _write_bpe(folder, model["vocab"], [" ".join(merge) for merge in model["merges"]])
    added = {token: len(model["vocab"]) + index for index, token in enumerate(QWEN_SPECIAL)}
    _write_json(folder / "added_tokens.json", added)
    settings = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": _added({index: token for token, index in added.items()}),
        "additional_special_tokens": list(QWEN_SPECIAL[1:]),
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "extra_special_tokens": {},
        "model_max_length": 131072,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    _write_settings(folder, {"eos_token": "<|im_end|>", "pad_token": END}, settings)
    return Qwen2Tokenizer.from_pretrained(folder)


def write_llama_tokenizer(folder: Path) -> Any:
    """A byte-level `tokenizer.json`, under the class name of a SentencePiece tokenizer, as HunyuanVideo has it.

    It is trained on the pipeline's prompt template, whose first 95 tokens the pipeline cuts off.
    """
    template = DEFAULT_PROMPT_TEMPLATE["template"]
    tokenizer = _byte_level_bpe((template, template, *CORPUS, *CORPUS), LLAMA_SPECIAL)
    begin = LLAMA_SPECIAL[0]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{begin} $A",
                pair=f"{begin} $A {begin} $B",
                special_tokens=[(begin, tokenizer.token_to_id(begin))],
            ),
        ]
    )
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        "bos_token": begin,
        "eos_token": LLAMA_SPECIAL[1],
        "pad_token": "<pad>",
        "unk_token": LLAMA_SPECIAL[1],
    }
    settings = {
        "added_tokens_decoder": _added({tokenizer.get_vocab()[token]: token for token in LLAMA_SPECIAL}),
        "clean_up_tokenization_spaces": True,
        "legacy": True,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 8192,
        "padding_side": "right",
        "tokenizer_class": "LlamaTokenizer",
    }
    _write_settings(folder, special, settings)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def _byte_level_bpe(texts: Iterable[str], special: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(special),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _write_sentencepiece(folder: Path, **settings: Any) -> Any:
    """Trains a unigram model, writes `spiece.model` and returns its content."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS for line in text.splitlines()),
        model_writer=model,
        model_type="unigram",
        vocab_size=SENTENCEPIECE_SIZE,
        hard_vocab_limit=False,
        character_coverage=1.0,
        pad_piece="<pad>",
        num_threads=1,
        minloglevel=2,
        **settings,
    )
    folder.mkdir(parents=True)
    (folder / "spiece.model").write_bytes(model.getvalue())
    return sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())  # type: ignore[attr-defined]


def _write_unigram(folder: Path, proto: Any, normalizer: Any, extra_tokens: int) -> Any:
    """Writes the `tokenizer.json` of a SentencePiece model with the sentinel tokens of T5."""
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    sentinels = [f"<extra_id_{index}>" for index in range(extra_tokens)]
    pieces += [(token, 0.0) for token in reversed(sentinels)]
    names = [piece for piece, _ in pieces]
    tokenizer = Tokenizer(
        models.Unigram(pieces, unk_id=proto.trainer_spec.unk_id, byte_fallback=proto.trainer_spec.byte_fallback)
    )
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", names.index("</s>"))]
    )
    special = ["<pad>", "</s>", "<unk>", *sentinels]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "added_tokens_decoder": _added({names.index(token): token for token in special}),
        "additional_special_tokens": sentinels,
        "clean_up_tokenization_spaces": True,
        "extra_ids": extra_tokens,
        "legacy": True,
        "model_max_length": T5_LENGTH,
        "sp_model_kwargs": {},
        "tokenizer_class": "T5Tokenizer",
    }
    _write_settings(folder, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}, settings)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def _write_bpe(folder: Path, vocabulary: Mapping[str, int], merges: list[str], heading: str = "") -> None:
    folder.mkdir(parents=True)
    _write_json(folder / "vocab.json", vocabulary)
    (folder / "merges.txt").write_text(heading + "\n".join(merges) + "\n", encoding="utf-8")


def _write_settings(folder: Path, special: Mapping[str, str], settings: Mapping[str, Any]) -> None:
    _write_json(folder / "special_tokens_map.json", special)
    _write_json(folder / "tokenizer_config.json", {**settings, **special})


def _added(tokens: Mapping[int, str]) -> dict[str, dict[str, Any]]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {str(index): {"content": token, **flags} for index, token in sorted(tokens.items())}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
