"""Reads prompts from text files (one per line), JSON lines and parquet, or draws them from a prompt set.

Prompts in JSON lines and parquet may have source images, and a pair of a chosen and a rejected image: paths,
relative to the file, data URLs, or in parquet also bytes.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

from digenrl.config.limits import PROMPT_CHARACTERS
from digenrl.config.reading import ConfigError, check_content, errors_in, is_text, mapped, one_line
from digenrl.config.recipes.prompts import HeldOutPromptSettings, PromptSettings

ImageSource = Path | bytes


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt. `id` is its index in the source; two prompts may have the same text. Errors say `where` it is.

    `pair` has the chosen and the rejected image, if prompts have them.
    """

    id: int
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[ImageSource, ...] = ()
    pair: tuple[ImageSource, ...] = ()
    where: str = field(default="", compare=False)


def read_prompts(settings: PromptSettings) -> tuple[Prompt, ...]:
    """The prompts of a file or prompt set; raises ConfigError if there are too few, or if one is empty."""
    prompts = _from_prompt_set(settings) if settings.path is None else _from_file(settings.path, settings)
    if len(prompts) < (settings.count or 1):
        raise ConfigError(
            f"{settings.path or settings.name}: has {len(prompts)} prompts, count = {settings.count}; lower it"
        )
    return prompts


def _from_prompt_set(settings: PromptSettings) -> tuple[Prompt, ...]:
    assert settings.prompt_set is not None, "prompts without a file are those of a prompt set"
    generated = settings.prompt_set.prompts(settings.split, settings.count, settings.seed)
    return tuple(
        Prompt(index, prompt.text, prompt.wants, where=f"prompt set '{settings.name}'")
        for index, prompt in enumerate(generated)
    )


def _from_file(path: Path, settings: PromptSettings) -> tuple[Prompt, ...]:
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; expected a file with prompts as .txt, .jsonl or .parquet")
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; expected prompts as .txt, .jsonl or .parquet")
    readers = {".txt": _from_text, ".jsonl": _from_json_lines, ".parquet": _from_parquet}
    prompts = tuple(islice(readers[path.suffix](path, settings), settings.count))
    if not prompts:
        raise ConfigError(f"{path}: contains no prompts; at least one is needed")
    if settings.image_column is not None and not any(prompt.images for prompt in prompts):
        known = ", ".join(prompts[0].metadata) or "nothing"
        raise ConfigError(
            f"{path}: no prompt has a source image in '{settings.image_column}'; other columns: {known}; set "
            f"{_key(settings)}.image_column to the one with images, or leave it out"
        )
    return prompts


def _key(settings: PromptSettings) -> str:
    return "evaluation.prompts" if isinstance(settings, HeldOutPromptSettings) else "prompts"


def _from_text(path: Path, settings: PromptSettings) -> Iterator[Prompt]:
    """One prompt per line; spaces and '#' belong to the prompt."""
    del settings
    for index, line in enumerate(_lines(path)):
        _check_text(line, f"{path}:{index + 1}")
        yield Prompt(index, line, where=f"{path}:{index + 1}")


def _from_json_lines(path: Path, settings: PromptSettings) -> Iterator[Prompt]:
    """One object per line with a prompt and perhaps source images; the other keys are metadata."""
    decode = json.JSONDecoder(parse_constant=_refuse_constant).decode
    for index, line in enumerate(_lines(path)):
        where = f"{path}:{index + 1}"
        try:
            content = decode(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not valid JSON: {one_line(error)}") from None
        if not isinstance(content, dict):
            example = f'{{"{settings.column}": "a cat"}}'
            raise ConfigError(f"{where}: expected an object such as {example}, got {line[:60]}")
        yield _from_record(index, content, settings, where)


def _from_parquet(path: Path, settings: PromptSettings) -> Iterator[Prompt]:
    """One prompt per row, perhaps with source images; the other columns are metadata."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError:
        raise ConfigError(f"{path}: reading parquet needs the package 'pyarrow', which is not installed") from None
    try:
        index = 0
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                for record in batch.to_pylist():
                    yield _from_record(index, record, settings, f"{path}, row {index + 1}")
                    index += 1
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not a readable parquet file: {' '.join(str(error).split())}") from None


def _from_record(index: int, record: dict[str, Any], settings: PromptSettings, where: str) -> Prompt:
    column = settings.column
    if column not in record:
        known = ", ".join(record) or "nothing"
        raise ConfigError(f"{where}: no '{column}'; known: {known}; set {_key(settings)}.column to one of them")
    text = record[column]
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{where}: '{column}' must be a non-empty string, got {repr(text)[:60]}")
    _check_text(text, where)
    images = tuple(
        image for name in settings.image_columns for image in images_in(record.get(name), name, settings, where)
    )
    pair = tuple(_paired_image(record, name, settings, where) for name in settings.pair_columns or ())
    others = (column, *settings.image_columns, *(settings.pair_columns or ()))
    metadata = {key: value for key, value in record.items() if key not in others}
    with errors_in(where):
        check_content(metadata)
    return Prompt(index, text, mapped(metadata, _plain), images, pair, where)


def _plain(value: Any) -> Any:
    """A value of a parquet file as JSON has it, so that rewards get the same in all processes and on servers.

    Dates are text, bytes text in base64, decimals and durations (in seconds) numbers; numbers that are not finite
    are null.
    """
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        value = float(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _paired_image(record: dict[str, Any], column: str, settings: PromptSettings, where: str) -> ImageSource:
    images = tuple(images_in(record.get(column), column, settings, where))
    if len(images) != 1:
        raise ConfigError(
            f"{where}: {len(images) or 'no'} images in '{column}', one is needed; known: {', '.join(record)}; set "
            "`pair_columns`"
        )
    return images[0]


def images_in(value: Any, column: str, settings: PromptSettings, where: str) -> Iterator[ImageSource]:
    """The images of a column: none, one or a list; each a path, bytes, or both as in Hugging Face datasets."""
    assert settings.path is not None
    for image in value if isinstance(value, list) else [] if value is None else [value]:
        content = image.get("bytes") or image.get("path") if isinstance(image, dict) else image
        if isinstance(content, bytes):
            yield content
        elif isinstance(content, str) and content.startswith("data:"):
            yield _data_url(content, column, where)
        elif isinstance(content, str) and content and is_text(content):
            yield settings.path.parent / content
        else:
            raise ConfigError(
                f"{where}: '{column}' must be the path of an image, or bytes, got {repr(image)[:60]}"
            )


def _data_url(url: str, column: str, where: str) -> bytes:
    """The content of an image inside the file, as data:image/png;base64,..."""
    head, _, content = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("not in base64")
        return base64.b64decode(content, validate=True)
    except ValueError as error:
        raise ConfigError(f"{where}: '{column}' is not a data URL of an image ({error}): {url[:40]}") from None


def _lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file. Only a line feed ends a line: prompts may contain other separators."""
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text; save the file as UTF-8") from None
    for number, line_text in enumerate(text.rstrip("\r\n").split("\n") if text.strip("\r\n") else [], start=1):
        line_text = line_text.removesuffix("\r")
        if not line_text.strip():
            raise ConfigError(f"{path}:{number}: an empty line; every line is a prompt, remove it")
        yield line_text


def _check_text(text: str, where: str) -> None:
    if len(text) > PROMPT_CHARACTERS:
        raise ConfigError(
            f"{where}: a prompt of {len(text)} characters, at most {PROMPT_CHARACTERS} are allowed; is every "
            "prompt on its own line?"
        )
    if not is_text(text):
        raise ConfigError(f"{where}: {text[:60]!r} is not text: it has half of a surrogate pair; remove it")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
