"""The journal: every result and other event that the scheduler received, and the jobs it issued, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from digenrl import records
from digenrl.config.reading import nearest
from digenrl.records import Action, Event, Job, Tick
from digenrl.run_folder.lines import JsonLines, located_lines
from digenrl.scheduling import SchedulerState

Record = TypeVar("Record")
_PRIMITIVES = frozenset((int, float, str, bool))


@dataclass(frozen=True, slots=True)
class Decision:
    """One line of the journal: an event, and the actions that followed."""

    event: Event
    actions: tuple[Action, ...]


class Journal:
    """An observer that writes each decision to a file before its actions start, except ticks without actions."""

    def __init__(self, lines: JsonLines) -> None:
        self._lines = lines

    def observe(self, event: Event, actions: Sequence[Action], state: SchedulerState) -> None:
        if actions or not isinstance(event, Tick):
            self._lines.append(decision_line(event, actions))


def decision_line(event: Event, actions: Sequence[Action]) -> dict[str, Any]:
    """A decision as JSON: records by type and fields, fractions as "1/3"; the event's time comes first.

    >>> committed = records.Committed(5, records.Commit(3, 4, step=0))
    >>> decision_line(committed, [records.Publish(4, 5, version=1, lanes=(0, 1))])["event"]
    {'type': 'Committed', 'job': {'type': 'Commit', 'id': 3, 'issued_ns': 4, 'step': 0}}
    """
    fields_of_event = _record_object(event)
    at_ns = fields_of_event.pop("at_ns")
    return {"at_ns": at_ns, "event": fields_of_event, "actions": [_record_object(action) for action in actions]}


def read_journal(path: Path, first_byte: int = 0) -> Iterator[Decision]:
    """The decisions in order, one at a time; a damaged line raises ConfigError with its number."""
    for line in located_lines(path, first_byte):
        content = line.content
        try:
            event = _read_record(_EVENTS, {**content["event"], "at_ns": content["at_ns"]})
            actions = tuple(_read_record(_ACTIONS, action) for action in content["actions"])
        except KeyError as error:
            raise line.error(f"lacks {error}; the file is damaged") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise line.error(f"not a decision: {error}; the file is damaged") from None
        yield Decision(event, actions)


def _known(kind: type[Record]) -> dict[str, type[Record]]:
    """The records of one kind by name, without the base class."""
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
    if type(value) in _PRIMITIVES:
        return value
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, Job):
        return _record_object(value)
    return _object(value) if is_dataclass(value) else value


@cache
def _field_names(record: type) -> tuple[str, ...]:
    assert is_dataclass(record), f"{record} is not a dataclass"
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
    """The fields without a default; the others may be absent."""
    names = set(_field_names(record))
    return frozenset(field.name for field in fields(record) if field.name in names and field.default is MISSING)


@cache
def _readers(record: type) -> dict[str, Callable[[Any], Any]]:
    """A function per field that reads its value back from JSON."""
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
    assert hint in (int, float, str, bool), f"the journal cannot read {hint} back; add it here"
    return lambda value: _exactly(hint, value)


def _tuple_reader(inner: tuple[Any, ...]) -> Callable[[Any], Any]:
    if inner[-1] is Ellipsis:
        each = _reader(inner[0])
        return lambda values: tuple(each(value) for value in values)
    readers = [_reader(part) for part in inner]
    return lambda values: tuple(read(value) for read, value in zip(readers, values, strict=True))


def _read_one_of(kinds: Sequence[type], content: Mapping[str, Any]) -> Any:
    """The record that has these fields."""
    for kind in kinds:
        if set(_field_names(kind)) == content.keys():
            return _read_fields(kind, content)
    raise ValueError(f"{sorted(content)} instead of the fields of {' or '.join(kind.__name__ for kind in kinds)}")


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, got {value!r}")
    return value
