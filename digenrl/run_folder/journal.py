"""The journal: every event that the scheduler was told and every action it answered with, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from digenrl import records
from digenrl.config.reading import ConfigError, nearest
from digenrl.records import Action, Event, Job, Tick
from digenrl.run_folder.lines import JsonLines, read_lines
from digenrl.scheduling import SchedulerState

Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class Decision:
    """One line of the journal: what happened, and what was done about it."""

    event: Event
    actions: tuple[Action, ...]


class Journal:
    """An observer that appends each decision to a file. A tick that led to nothing is left out."""

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        """One line, in the file before the actions start."""
        if actions or not isinstance(event, Tick):
            self._lines.append(decision_line(event, actions))


def decision_line(event: Event, actions: Sequence[Action]) -> dict[str, Any]:
    """A decision as JSON: records by type and fields, fractions as "1/3"; the event's time stands in front.

    >>> committed = records.Committed(5, records.Commit(3, 4, step=0))
    >>> decision_line(committed, [records.Publish(4, 5, version=1, lanes=(0, 1))])["event"]
    {'type': 'Committed', 'job': {'type': 'Commit', 'id': 3, 'issued_ns': 4, 'step': 0}}
    """
    told = _record_object(event)
    return {"at_ns": told.pop("at_ns"), "event": told, "actions": [_record_object(action) for action in actions]}


def read_journal(path: Path) -> Iterator[Decision]:
    """The decisions as they were taken, one at a time; a damaged line raises ConfigError with its number."""
    for number, line in enumerate(read_lines(path), start=1):
        try:
            event = _read_record(_EVENTS, {**line["event"], "at_ns": line["at_ns"]})
            actions = tuple(_read_record(_ACTIONS, action) for action in line["actions"])
        except KeyError as error:
            raise ConfigError(f"{path}: line {number} lacks {error}; the file is damaged") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{path}: line {number} is no decision: {error}; the file is damaged") from None
        yield Decision(event, actions)


def _known(kind: type[Record]) -> dict[str, type[Record]]:
    """The records of one kind by name; the bare kind itself never travels."""
    classes = [each for each in vars(records).values() if isinstance(each, type) and issubclass(each, kind)]
    return {each.__name__: each for each in classes if each is not kind}


_EVENTS = _known(Event)
_ACTIONS = _known(Action)


def _record_object(record: Event | Action) -> dict[str, Any]:
    return {"type": type(record).__name__, **_object(record)}


def _object(record: Any) -> dict[str, Any]:
    kind: type = type(record)
    return {name: _plain(getattr(record, name)) for name in _field_names(kind)}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, Job):
        return _record_object(value)
    return _object(value) if is_dataclass(value) else value


@cache
def _field_names(record: type) -> tuple[str, ...]:
    assert is_dataclass(record), f"{record} is no record"
    return tuple(field.name for field in fields(record) if not field.metadata.get("data"))


def _read_record(known: Mapping[str, type[Record]], content: Mapping[str, Any]) -> Record:
    name = content["type"]
    if name not in known:
        raise ValueError(f"unknown type '{name}'; {nearest(str(name), list(known))}")
    return _read_fields(known[name], {key: value for key, value in content.items() if key != "type"})


def _read_fields(record: type[Record], content: Mapping[str, Any]) -> Record:
    kind: type = record
    readers = _readers(kind)
    if not _needed(kind) <= content.keys() <= readers.keys():
        raise ValueError(f"{record.__name__} with {sorted(content)} instead of {sorted(readers)}")
    return record(**{name: readers[name](value) for name, value in content.items()})


@cache
def _needed(record: type) -> frozenset[str]:
    """The fields without a default: an older journal may lack the others."""
    names = set(_field_names(record))
    return frozenset(field.name for field in fields(record) if field.name in names and field.default is MISSING)


@cache
def _readers(record: type) -> dict[str, Callable[[Any], Any]]:
    """How each field of a record is read back from JSON."""
    hints = get_type_hints(record)
    return {name: _reader(hints[name]) for name in _field_names(record)}


def _reader(hint: Any) -> Callable[[Any], Any]:
    if get_origin(hint) is tuple:
        return _tuple_reader(get_args(hint))
    if isinstance(hint, UnionType):
        return lambda content: _read_one_of(get_args(hint), content)
    if hint is Fraction or get_origin(hint) is Literal:
        return Fraction if hint is Fraction else lambda value: value
    if isinstance(hint, type) and is_dataclass(hint):
        if issubclass(hint, Job):
            return lambda content: _read_record(_ACTIONS, content)
        return lambda content: _read_fields(hint, content)
    assert hint in (int, float, str, bool), f"the journal cannot read {hint} back; teach it here"
    return lambda value: _exactly(hint, value)


def _tuple_reader(inner: tuple[Any, ...]) -> Callable[[Any], Any]:
    if inner[-1] is Ellipsis:
        each = _reader(inner[0])
        return lambda values: tuple(each(value) for value in values)
    readers = [_reader(part) for part in inner]
    return lambda values: tuple(read(value) for read, value in zip(readers, values, strict=True))


def _read_one_of(kinds: Sequence[type], content: Mapping[str, Any]) -> Any:
    """The record whose fields these are."""
    for kind in kinds:
        if set(_field_names(kind)) == content.keys():
            return _read_fields(kind, content)
    raise ValueError(f"{sorted(content)} instead of the fields of {' or '.join(kind.__name__ for kind in kinds)}")


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, got {value!r}")
    return value
