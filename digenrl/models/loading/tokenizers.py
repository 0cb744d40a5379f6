"""Checks that a pipeline's tokenizers split text as their `tokenizer.json` says.

transformers 5 rebuilds a tokenizer from its class and takes little more than the vocabulary from the file. If a
repository names a class that does not fit the file (HunyuanVideo: `LlamaTokenizerFast` for the byte-level
tokenizer of Llama 3), the rebuilt tokenizer splits text in other places, without an error.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
# Both cases, punctuation, digits, quotes, accents, other scripts, an emoji, repeated and unusual white space.
PROBE = (
    'A Photo of a "Café" sign: it’s 50% off, don\'t (wait)? naïve — 東京 Привет 🙂!\n'
    "  Two  spaces,\ta tab; x2_y-3.14"
)
SPECIAL_TOKENS_PROBED = 8
KEPT = ("padding_side", "truncation_side", "model_max_length", "model_input_names")


def use_tokenizer_files(pipeline: Any) -> None:
    """Replaces every tokenizer of a diffusers pipeline that disagrees with its `tokenizer.json` by the file's.

    The two are compared on a probe sentence. Special tokens, padding side and maximum length are kept.
    """
    for name, component in pipeline.components.items():
        if isinstance(component, PreTrainedTokenizerBase):
            faithful = faithful_tokenizer(component)
            if faithful is not component:
                pipeline.register_modules(**{name: faithful})


def faithful_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer itself if it agrees with the `tokenizer.json` in its folder, else one built from that file."""
    folder = Path(tokenizer.name_or_path)
    if not (folder / TOKENIZER_FILE).is_file():
        return tokenizer
    from_file = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    probe = PROBE + "".join(_added_tokens(from_file)[:SPECIAL_TOKENS_PROBED])
    if _token_ids(tokenizer, probe) == _token_ids(from_file, probe):
        return tokenizer
    _keep_settings(tokenizer, from_file)
    logger.warning(
        "%s: %s splits text differently from this file; using the file",
        folder / TOKENIZER_FILE,
        type(tokenizer).__name__,
    )
    return from_file


def _token_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, verbose=False).input_ids  # it may be longer than the tokenizer's maximum
    return ids


def _added_tokens(tokenizer: Any) -> list[str]:
    return [token.content for _, token in sorted(tokenizer.added_tokens_decoder.items())]


def _keep_settings(tokenizer: Any, from_file: Any) -> None:
    """Copies what the class or the configuration sets, and special tokens that only the class knows."""
    for name in KEPT:
        setattr(from_file, name, getattr(tokenizer, name))
    vocabulary = from_file.get_vocab()
    for role, token in tokenizer.special_tokens_map.items():
        if isinstance(token, str) and token in vocabulary and getattr(from_file, role) is None:
            setattr(from_file, role, token)
