"""Reads YAML or JSON into frozen settings, and turns validation errors into one line that says what to do."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from digenrl.config.limits import NESTED_KEYS, VALUES_IN_A_FILE

Model = TypeVar("Model", bound=BaseModel)
LONGEST_COMPLAINT = 2_000  # characters; a user may have given megabytes
TOO_DEEP = f"keys or lists are nested more than {NESTED_KEYS} deep"
KeyPath = tuple[int | str, ...]  # keys of mappings and indices of lists


class ConfigError(ValueError):
    """A user's mistake, in one line: what is wrong, what was given, what is known, what to do.

    `where` is the dotted key that is wrong, if there is one; the line then begins with it.
    """

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        self.where = where


class Frozen(BaseModel):
    """Base of all settings models: immutable, finite numbers only, unknown keys are errors.

    YAML reads `off` and `no` as False. In a setting that accepts the word `off` or `none`, or that is an optional
    section, False means that. Booleans are never read as numbers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _yes_and_no(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, bool) or info.field_name is None:
            return value
        return _meaning_of_bool(value, list(_kinds(cls.model_fields[info.field_name].annotation)))


@contextmanager
def errors_in(path: object) -> Iterator[None]:
    """Puts the path of a file, or a place in it, before the messages of ConfigErrors that are raised inside."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", error.where) from None


@contextmanager
def errors_about(where: str) -> Iterator[None]:
    """Turns a ValueError raised inside into a ConfigError about the dotted key `where`."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{where}: {error}", where) from None


def one_line(error: BaseException) -> str:
    """The message of an error on a single line; its type if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


def read_mapping(path: Path) -> dict[str, Any]:
    """The top-level mapping of a YAML or JSON file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    try:
        content = _read_json(text) if path.suffix == ".json" else yaml.load(text, _LoaderOfUniqueKeys)
    except RecursionError:
        raise ConfigError(f"{path}: {TOO_DEEP}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: not valid YAML or JSON: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping of keys at the top, got {shown(content)}")
    with errors_in(path):
        check_content(content)
    return content


class _LoaderOfUniqueKeys(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML would drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        mapping = super().construct_mapping(node, deep)
        _refuse_repeated(
            (self.construct_object(key, deep=True), f" in line {key.start_mark.line + 1}") for key in own
        )
        return mapping


def _read_json(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_repeated((key, "") for key, _ in pairs)
        return dict(pairs)

    return json.loads(text, object_pairs_hook=unique)


def _refuse_repeated(keys: Iterable[tuple[Any, str]]) -> None:
    """Raises ValueError for a key that was there before; each comes with the place where it is."""
    seen = set()
    for key, place in keys:
        if key in seen:
            raise ValueError(f"the key {shown(key)}{place} is given twice; leave one of them out")
        seen.add(key)


def check_content(content: Any) -> None:
    """Raises ConfigError for content that is nested too deep, too large, or has strings that are not text.

    An alias of YAML counts wherever it is used, so that a few lines cannot stand for billions of values.
    """
    values, pending = 0, [(content, 0)]
    while pending:
        value, depth = pending.pop()
        values += 1
        if depth > NESTED_KEYS:
            raise ConfigError(TOO_DEEP)
        if values > VALUES_IN_A_FILE:
            raise ConfigError(f"has more than {VALUES_IN_A_FILE} values; aliases count wherever they are used")
        if isinstance(value, Mapping):
            pending += [(each, depth + 1) for item in value.items() for each in item]
        elif isinstance(value, list | tuple):
            pending += [(each, depth + 1) for each in value]
        elif isinstance(value, str) and not is_text(value):
            raise ConfigError(f"{shown(value)} is not text: it has half of a surrogate pair")


def mapped(content: Any, change: Callable[[Any], Any]) -> Any:
    """The same mappings and lists, with every other value changed; tuples become lists."""
    if isinstance(content, Mapping):
        return {key: mapped(value, change) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [mapped(value, change) for value in content]
    return change(content)


def is_text(value: str) -> bool:
    """Whether a string can be written as UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_model(model: type[Model], path: Path) -> Model:
    """Reads a file into `model`; error messages begin with the path."""
    content = read_mapping(path)
    with errors_in(path):
        return parse_model(model, content)


def parse_model(model: type[Model], content: dict[str, Any]) -> Model:
    """Validates `content` as `model`; raises ConfigError for the first mistake."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise _first_complaint(model, content, error) from None


def nearest(word: str, known: list[str]) -> str:
    """A hint that names the nearest known word, or lists all of them."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    did_you_mean = f"did you mean '{close[0]}'? " if close else ""
    return f"{did_you_mean}known: {', '.join(known)}"


def model_inside(annotation: Any) -> type[BaseModel] | None:
    """The settings model inside an annotation such as `tuple[GeneratorPool, ...]` or `HelperCosts | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(model_inside, get_args(annotation))), None)


@dataclass(frozen=True, slots=True)
class _Complaint:
    """One error of pydantic. For a union, every member reports its own about the same path."""

    path: KeyPath
    kind: str
    message: str
    given: Any
    raised: Any = None  # the exception, if one of our validators raised it

    @property
    def is_type_mismatch(self) -> bool:
        """Whether it only says that the value has the wrong type for this member of the union."""
        return self.kind.endswith(("_type", "_parsing")) or self.kind == "literal_error"


def first_problem(error: ValidationError, whole: str) -> str:
    """Where the first problem in a message is, and what it is; `whole` names the message itself."""
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {first['msg']}"


def _first_complaint(model: type[BaseModel], content: Any, error: ValidationError) -> ConfigError:
    complaints = [
        _Complaint(
            _user_path(c["loc"], content, c["type"]),
            c["type"],
            _plain(c["msg"]),
            c["input"],
            c.get("ctx", {}).get("error"),
        )
        for c in error.errors(include_url=False)
    ]
    unknown = [complaint for complaint in complaints if complaint.kind == "extra_forbidden"]
    complaint = unknown[0] if unknown else _most_relevant(complaints)
    if isinstance(complaint.raised, ConfigError) and complaint.raised.where:
        return complaint.raised  # it already names its key
    where = _dotted(complaint.path)
    text = " ".join(_text_of(model, complaint).splitlines())
    text = text if len(text) <= LONGEST_COMPLAINT else f"{text[: LONGEST_COMPLAINT // 2]} ... {text[-500:]}"
    return ConfigError(f"{where}: {text}" if where else text, where)


def _text_of(model: type[BaseModel], complaint: _Complaint) -> str:
    if complaint.kind == "extra_forbidden":
        known = _known_keys(model, complaint.path[:-1])
        return f"unknown key; {nearest(str(complaint.path[-1]), known)}"
    if complaint.kind == "missing":
        return "missing; this key is required"
    if complaint.kind == "value_error" or not complaint.path:
        return complaint.message
    return f"{complaint.message[0].lower()}{complaint.message[1:]}, got {shown(complaint.given)}"


def _most_relevant(complaints: Sequence[_Complaint]) -> _Complaint:
    """The first complaint, or, if it is about a union, the one about the member that the user most likely meant.

    That is the member with the deepest path, preferably with more to say than that the type is wrong. If the type
    is wrong for all members, the complaint names all of them.
    """
    first = complaints[0].path
    same_union = [complaint for complaint in complaints if complaint.path[: len(first)] == first]
    deepest = max(same_union, key=lambda complaint: len(complaint.path)).path
    members = [complaint for complaint in same_union if complaint.path == deepest]
    specific = [complaint for complaint in members if not complaint.is_type_mismatch]
    if specific or len(members) == 1:
        return (specific or members)[0]
    expected = [member.message.removeprefix("Input should be ") for member in members]
    message = f"Input should be {' or '.join(dict.fromkeys(expected))}"
    return _Complaint(deepest, members[0].kind, message, members[0].given)


def _user_path(location: KeyPath, content: Any, kind: str) -> KeyPath:
    """The path in the user's content; pydantic's location also names members of unions, which are left out."""
    path: list[int | str] = []
    for depth, part in enumerate(location):
        missing = kind == "missing" and depth == len(location) - 1
        if isinstance(content, Mapping):
            by_name = {str(key): key for key in content}
            if missing or str(part) in by_name:
                path.append(part)
                content = content.get(by_name.get(str(part)))
        elif isinstance(content, list | tuple) and isinstance(part, int):
            path.append(part)
            content = None if missing else content[part]
    return tuple(path)


def _dotted(path: KeyPath) -> str:
    """('generators', 0, 'count') reads generators[0].count."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _known_keys(model: type[BaseModel], path: KeyPath) -> list[str]:
    """The keys of the model at `path` below `model`."""
    for part in path:
        if not isinstance(part, int):
            inner = model_inside(model.model_fields[part].annotation)
            assert inner is not None, f"{part} has keys"
            model = inner
    return list(model.model_fields)


def _kinds(annotation: Any) -> Iterator[Any]:
    """The members of a union, or the annotation itself; each word of a Literal separately."""
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


def _meaning_of_bool(value: bool, kinds: list[Any]) -> Any:
    """The value that a boolean stands for in a setting of these kinds; raises ValueError if that is a number."""
    if bool in kinds or Any in kinds:
        return value
    has_section = any(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in kinds)
    words = [word for word in ("off", "none") if word in kinds]
    if not value and words:
        return words[0]
    if not value and has_section and NoneType in kinds:
        return None
    if any(kind in (int, float, Decimal) for kind in kinds):
        raise ValueError(f"expected a number, got {value} (YAML reads yes, on, no and off as True and False)")
    return value


def _plain(message: str) -> str:
    """Pydantic's message in YAML's vocabulary."""
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


def shown(value: Any) -> str:
    """A value as an error shows it, abbreviated."""
    try:
        text = str(value) if isinstance(value, Decimal) else repr(value)
    except (ValueError, RecursionError):  # Python refuses to print integers of thousands of digits
        return f"a {type(value).__name__} that is too large to print"
    return text if len(text) <= 60 else f"{text[:57]}..."
