"""Reads YAML or JSON into a frozen model, and turns what is wrong into one line that says what to do."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

Model = TypeVar("Model", bound=BaseModel)
Place = tuple[int | str, ...]  # keys of mappings and indices of lists


class ConfigError(ValueError):
    """A user's mistake, told in one line: what, what was given, what is known, what to do.

    `where` is the dotted key that the line is about, where it is about one; the line begins with it.
    """

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        self.where = where


class Frozen(BaseModel):
    """The base of every settings model: immutable, finite, and an unknown key is an error.

    YAML reads `off` and `no` as False. Where a setting's word for that is `off` or `none`, or a part of the
    settings can be absent, that is what False means. Yes and no are never numbers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _yes_and_no(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, bool) or info.field_name is None:
            return value
        return _meaning(value, list(_kinds(cls.model_fields[info.field_name].annotation)))


@contextmanager
def complaints_about(where: str) -> Iterator[None]:
    """A ValueError raised inside becomes a ConfigError about the dotted key `where`."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{where}: {error}", where) from None


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
        raise _first_complaint(model, content, error) from None


def nearest(word: str, known: list[str]) -> str:
    """A hint that names the nearest known word, or lists all of them."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    did_you_mean = f"did you mean '{close[0]}'? " if close else ""
    return f"{did_you_mean}known: {', '.join(known)}"


def model_inside(annotation: Any) -> type[BaseModel]:
    """The one settings model named in an annotation such as `tuple[Pool, ...]` or `Helper | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        try:
            return model_inside(argument)
        except LookupError:
            continue
    raise LookupError(f"no settings model inside {annotation}")


@dataclass(frozen=True, slots=True)
class _Complaint:
    """One of pydantic's complaints. Each member of a union makes its own about the same place."""

    place: Place
    kind: str
    message: str
    given: Any
    raised: Any = None  # by one of our validators

    @property
    def wrong_kind_of_value(self) -> bool:
        """Whether it says no more than that the value is not of this member's kind."""
        return self.kind.endswith(("_type", "_parsing")) or self.kind == "literal_error"


def _first_complaint(model: type[BaseModel], content: Any, error: ValidationError) -> ConfigError:
    complaints = [
        _Complaint(
            _place(c["loc"], content, c["type"]),
            c["type"],
            _plain(c["msg"]),
            c["input"],
            c.get("ctx", {}).get("error"),
        )
        for c in error.errors(include_url=False)
    ]
    unknown = [complaint for complaint in complaints if complaint.kind == "extra_forbidden"]
    complaint = unknown[0] if unknown else _meant(complaints)
    if isinstance(complaint.raised, ConfigError) and complaint.raised.where:
        return complaint.raised  # it already names its key
    where = _dotted(complaint.place)
    text = _told(model, complaint).replace("\n", " ")
    return ConfigError(f"{where}: {text}" if where else text, where)


def _told(model: type[BaseModel], complaint: _Complaint) -> str:
    if complaint.kind == "extra_forbidden":
        known = _known_keys(model, complaint.place[:-1])
        return f"unknown key; {nearest(str(complaint.place[-1]), known)}"
    if complaint.kind == "missing":
        return "missing; this key is required"
    if complaint.kind == "value_error" or not complaint.place:
        return complaint.message
    return f"{complaint.message[0].lower()}{complaint.message[1:]}, got {_describe(complaint.given)}"


def _meant(complaints: Sequence[_Complaint]) -> _Complaint:
    """The first complaint, or of those about the same union the one about the member that was meant.

    That is the member in which the complaint lies deepest, then one that has more to say than that the kind is
    wrong. Where no member is of the value's kind, all are named.
    """
    first = complaints[0].place
    same_union = [complaint for complaint in complaints if complaint.place[: len(first)] == first]
    deepest = max(same_union, key=lambda complaint: len(complaint.place)).place
    members = [complaint for complaint in same_union if complaint.place == deepest]
    telling = [complaint for complaint in members if not complaint.wrong_kind_of_value]
    if telling or len(members) == 1:
        return (telling or members)[0]
    expected = [member.message.removeprefix("Input should be ") for member in members]
    message = f"Input should be {' or '.join(dict.fromkeys(expected))}"
    return _Complaint(deepest, members[0].kind, message, members[0].given)


def _place(location: Place, content: Any, kind: str) -> Place:
    """Where a complaint is, in the user's own keys: pydantic also names members of unions, which are left out."""
    place: list[int | str] = []
    for depth, part in enumerate(location):
        missing = kind == "missing" and depth == len(location) - 1
        if isinstance(content, Mapping):
            by_name = {str(key): key for key in content}
            if missing or str(part) in by_name:
                place.append(part)
                content = content.get(by_name.get(str(part)))
        elif isinstance(content, list | tuple) and isinstance(part, int):
            place.append(part)
            content = None if missing else content[part]
    return tuple(place)


def _dotted(place: Place) -> str:
    """('generators', 0, 'count') reads generators[0].count."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _known_keys(model: type[BaseModel], place: Place) -> list[str]:
    """The keys of the model that stands at `place` below `model`."""
    current = model
    for part in place:
        if not isinstance(part, int):
            current = model_inside(current.model_fields[str(part)].annotation)
    return list(current.model_fields)


def _kinds(annotation: Any) -> Iterator[Any]:
    """The members of a union, or the one kind there is; words of a Literal each by itself."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _kinds(member)
    elif origin is Literal:
        yield from get_args(annotation)
    else:
        yield annotation


def _meaning(value: bool, kinds: list[Any]) -> Any:
    """What a setting of these kinds means by yes or no; a number is never meant."""
    if bool in kinds or Any in kinds:
        return value
    has_a_part = any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds)
    words = [word for word in ("off", "none") if word in kinds]
    if not value and words:
        return words[0]
    if not value and has_a_part and NoneType in kinds:
        return None
    if any(kind in (int, float, Decimal) for kind in kinds):
        raise ValueError(f"expected a number, got {value} (YAML reads yes, on, no and off as True and False)")
    return value


def _plain(message: str) -> str:
    """What a value should be, in the words of someone who writes YAML."""
    if message.startswith("Value error, "):
        return message.removeprefix("Value error, ")
    if message.startswith("Input is not a valid path"):
        return "Input should be a path"
    before, valid, kind = message.partition("should be a valid ")
    if not valid:
        return message
    kind = kind.split(",")[0].split(" or ")[0]
    return f"{before}should be {_KINDS_IN_YAML.get(kind, f'a valid {kind}')}"


_KINDS_IN_YAML = {
    "integer": "a whole number",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "tuple": "a list",
    "list": "a list",
    "dictionary": "a mapping of keys",
}


def _describe(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
