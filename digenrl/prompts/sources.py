"""Reads prompts from text files (one per line), JSON lines and parquet, or draws them from a prompt set."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from digenrl.config.limits import PROMPT_CHARACTERS
from digenrl.config.prompts import PromptSettings
from digenrl.config.reading import ConfigError, check_content, errors_in, is_text, one_line


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt. `id` is its index in the source; two prompts may have the same text."""

    id: int
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


def read_prompts(settings: PromptSettings) -> tuple[Prompt, ...]:
    """The prompts of a file or prompt set; raises ConfigError if there are too few, or if one is empty."""
    prompts = _from_prompt_set(settings) if settings.path is None else _from_file(settings.path, settings.column)
    if len(prompts) < (settings.count or 1):
        raise ConfigError(
            f"{settings.path or settings.name}: has {len(prompts)} prompts, count = {settings.count}; lower it"
        )
    return prompts[: settings.count]


def _from_prompt_set(settings: PromptSettings) -> tuple[Prompt, ...]:
    assert settings.prompt_set is not None, "prompts without a file are those of a prompt set"
    generated = settings.prompt_set.prompts(settings.split, settings.count, settings.seed)
    return tuple(Prompt(index, prompt.text, prompt.wants) for index, prompt in enumerate(generated))


def _from_file(path: Path, column: str) -> tuple[Prompt, ...]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; expected prompts as .txt, .jsonl or .parquet")
    readers = {".txt": _from_text, ".jsonl": _from_json_lines, ".parquet": _from_parquet}
    prompts = tuple(readers[path.suffix](path, column))
    if not prompts:
        raise ConfigError(f"{path}: contains no prompts; at least one is needed")
    return prompts


def _from_text(path: Path, column: str) -> Iterator[Prompt]:
    """One prompt per line; spaces and '#' belong to the prompt."""
    del column
    for index, line in enumerate(_lines(path)):
        _check_text(line, f"{path}:{index + 1}")
        yield Prompt(index, line)


def _from_json_lines(path: Path, column: str) -> Iterator[Prompt]:
    """One object per line with the prompt under `column`; the other keys are metadata."""
    for index, line in enumerate(_lines(path)):
        where = f"{path}:{index + 1}"
        try:
            content = json.loads(line, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not valid JSON: {one_line(error)}") from None
        if not isinstance(content, dict):
            raise ConfigError(f'{where}: expected an object such as {{"{column}": "a cat"}}, got {line[:60]}')
        yield _from_record(index, content, column, where)


def _from_parquet(path: Path, column: str) -> Iterator[Prompt]:
    """One prompt per row; the other columns are metadata."""
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
                    yield _from_record(index, record, column, f"{path}, row {index + 1}")
                    index += 1
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not a readable parquet file: {' '.join(str(error).split())}") from None


def _from_record(index: int, record: dict[str, Any], column: str, where: str) -> Prompt:
    if column not in record:
        raise ConfigError(f"{where}: no '{column}'; known: {', '.join(record) or 'nothing'}; set `column`")
    text = record[column]
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{where}: '{column}' must be a non-empty string, got {repr(text)[:60]}")
    _check_text(text, where)
    with errors_in(where):
        check_content(record)
    return Prompt(index, text, {key: value for key, value in record.items() if key != column})


def _lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file. Only a line feed ends a line: prompts may contain other separators."""
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text; save the file as UTF-8") from None
    for number, line_text in enumerate(text.removesuffix("\n").split("\n") if text else [], start=1):
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
