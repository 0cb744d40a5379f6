"""Reads YAML or JSON into a frozen model, and turns what is wrong into one line that says what to do."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

Model = TypeVar("Model", bound=BaseModel)


class ConfigError(ValueError):
    """A user's mistake, told in one line: what, what was given, what is known, what to do."""


class Frozen(BaseModel):
    """The base of every settings model: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping at the top of a YAML or JSON file (JSON is read as YAML's subset)."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    try:
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        first_line = " ".join(str(error).split())
        raise ConfigError(f"{path}: not valid YAML or JSON: {first_line}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of keys at the top, got {_describe(content)}")
    return content


def read_model(model: type[Model], path: Path) -> Model:
    """Reads one file into `model`; every complaint begins with the file's name."""
    try:
        return parse_model(model, read_mapping(path))
    except ConfigError as error:
        message = str(error)
        raise ConfigError(message if message.startswith(f"{path}:") else f"{path}: {message}") from None


def parse_model(model: type[Model], content: dict[str, Any]) -> Model:
    """Validates `content` as `model`; raises ConfigError with the first complaint, in one line."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise ConfigError(_first_complaint(model, error)) from None


def nearest(word: str, known: list[str]) -> str:
    """A hint that names the nearest known word, or lists all of them."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    did_you_mean = f"did you mean '{close[0]}'? " if close else ""
    return f"{did_you_mean}known: {', '.join(known)}"


def _first_complaint(model: type[BaseModel], error: ValidationError) -> str:
    complaints = error.errors(include_url=False, include_context=False)
    unknown = [c for c in complaints if c["type"] == "extra_forbidden"]
    complaint = (unknown or complaints)[0]
    where = _dotted(complaint["loc"])
    if complaint["type"] == "extra_forbidden":
        known = _known_keys(model, complaint["loc"][:-1])
        return f"{where}: unknown key; {nearest(str(complaint['loc'][-1]), known)}"
    if complaint["type"] == "missing":
        return f"{where}: missing; this key is required"
    message = complaint["msg"].removeprefix("Value error, ")
    if not where or complaint["type"] == "value_error":
        return f"{where}: {message}" if where else message
    return f"{where}: {message[0].lower()}{message[1:]}, got {_describe(complaint['input'])}"


def _dotted(location: tuple[int | str, ...]) -> str:
    """('generators', 0, 'count') reads generators[0].count."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text.removesuffix(".[key]")


def _known_keys(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The keys of the model that stands at `location` below `model`."""
    current = model
    for part in location:
        if isinstance(part, int):
            continue
        current = _model_inside(current.model_fields[str(part)].annotation)
    return list(current.model_fields)


def _model_inside(annotation: Any) -> type[BaseModel]:
    """The one settings model named in an annotation such as `tuple[Pool, ...]` or `Helper | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        try:
            return _model_inside(argument)
        except LookupError:
            continue
    raise LookupError(f"no settings model inside {annotation}")


def _describe(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
