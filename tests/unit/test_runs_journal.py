"""The journal reads back exactly what it wrote."""

from __future__ import annotations

import json
from dataclasses import fields
from inspect import isabstract
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from watched_runs import SPEC, AfterEach, initial_state_of, watch

from digenrl import records
from digenrl.config.reading import ConfigError
from digenrl.records import (
    Action,
    Commit,
    Committed,
    Event,
    Job,
    LaneOffer,
    Publish,
    SampleId,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from digenrl.run_folder.journal import Decision, Journal, decision_line, read_journal
from digenrl.run_folder.lines import JsonLines
from digenrl.simulation.virtual_cluster import Faults

SECOND = 1_000_000_000


def _kinds(kind: type) -> list[type]:
    known = [each for each in vars(records).values() if isinstance(each, type) and issubclass(each, kind)]
    return [each for each in known if each is not kind and not isabstract(each)]


def _records(kind: Any) -> st.SearchStrategy[Any]:
    """Records of a kind, with any values in the fields that the journal keeps."""
    hints = get_type_hints(kind)
    kept = {field.name: hints[field.name] for field in fields(kind) if not field.metadata.get("data")}
    return st.builds(kind, **{name: _values(hint) for name, hint in kept.items()})


def _values(hint: Any) -> st.SearchStrategy[Any]:
    if isinstance(hint, type) and issubclass(hint, Job):
        return _records(Commit if hint is Job else hint)
    return st.from_type(hint)


def _write(path: Path, *decisions: Decision) -> Path:
    lines = JsonLines(path)
    for decision in decisions:
        lines.append(decision_line(decision.event, decision.actions))
    lines.close()
    return path


@pytest.mark.parametrize("kind", [*_kinds(Event), *_kinds(Action)], ids=lambda kind: kind.__name__)
@settings(max_examples=4)
@given(data=st.data())
def test_every_event_and_every_action_is_read_back_equal(
    kind: Any, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    record = data.draw(_records(kind))
    event, actions = (record, ()) if isinstance(record, Event) else (Tick(7), (record, record))
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    assert list(read_journal(_write(path, Decision(event, actions)))) == [Decision(event, actions)]


def test_a_line_starts_with_the_time_and_has_records_by_type_and_fields() -> None:
    job = records.Generate(4, 5, records.Slice(0, 1, 2, 2), lane=3, version=0)
    line = decision_line(records.Generated(9, job, version=0), (records.Score(6, 9, job.slice, scorer=0),))
    piece = {"step": 0, "group": 1, "first": 2, "size": 2}
    generate = {"type": "Generate", "id": 4, "issued_ns": 5, "slice": piece, "lane": 3, "version": 0, "hedges": -1}
    assert line == {
        "at_ns": 9,
        "event": {"type": "Generated", "job": generate, "version": 0, "score_failure": ""},
        "actions": [{"type": "Score", "id": 6, "issued_ns": 9, "piece": piece, "scorer": 0}],
    }


def test_the_journal_of_a_run_with_faults_has_every_decision_except_ticks_without_actions(
    tmp_path: Path,
) -> None:
    seen: list[Decision] = []
    keep = AfterEach(lambda event, actions, state: seen.append(Decision(event, tuple(actions))))
    faults = Faults(
        events=(WorkerLost(SECOND, 0), WorkerJoined(2 * SECOND, LaneOffer("new", SECOND))),
        failing_jobs=frozenset({1}),
        failing_samples=frozenset({SampleId(1, 0, 0)}),
    )
    lines = JsonLines(tmp_path / "journal.jsonl")
    watch(initial_state_of(), (), faults=faults, after=(Journal(lines), keep))
    wanted = [each for each in seen if each.actions or not isinstance(each.event, Tick)]
    assert len(wanted) < len(seen)
    assert {type(each.event).__name__ for each in wanted} >= {"WorkerLost", "WorkerJoined", "JobFailed"}
    assert list(read_journal(lines.path)) == wanted
    assert sum(isinstance(each.event, Committed) for each in wanted) == SPEC["steps"]


GOOD = decision_line(Committed(5, Commit(1, 4, step=0)), (Publish(2, 5, 1, (0, 1)),))
PUBLISH, COMMIT = GOOD["actions"][0], GOOD["event"]["job"]


@pytest.mark.parametrize(
    ("damaged", "complaint"),
    [
        ({**GOOD, "event": {"type": "Commited", "job": COMMIT}}, "'Commited'.*'Committed'"),
        ({**GOOD, "event": PUBLISH}, "unknown type 'Publish'"),
        ({**GOOD, "event": {"type": "Committed"}}, r"Committed with \['at_ns'\]"),
        ({**GOOD, "event": {"type": "Committed", "job": {**COMMIT, "step": "0"}}}, "expected int, got '0'"),
        ({**GOOD, "actions": [{**PUBLISH, "lanes": 3}]}, "not a decision"),
        ({"event": GOOD["event"], "actions": []}, "at_ns"),
        ({**GOOD, "event": "Committed"}, "not a decision"),
    ],
)
def test_a_damaged_decision_is_named_by_file_and_line(
    tmp_path: Path, damaged: dict[str, Any], complaint: str
) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{json.dumps(damaged)}\n")
    with pytest.raises(ConfigError, match=rf"journal.jsonl, line 2: .*{complaint}"):
        list(read_journal(path))
