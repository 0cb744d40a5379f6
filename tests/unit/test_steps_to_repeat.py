"""What a resumed run repeats: stale samples in the checkpoint, in the journal behind it, and in run.json."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path

from fake_workers import fake_recipe
from replaying import initial_state_of

from digenrl.records import Commit, Committed, Generate, Generated, LaneOffer, Slice, Tick
from digenrl.run_folder.folder import RunFolder, RunLines
from digenrl.run_folder.journal import Decision, decision_line
from digenrl.runs.checkpointer import RunPosition
from digenrl.runs.initial_facts import initial_facts
from digenrl.runs.resuming import steps_to_repeat
from digenrl.scheduling import Costs, RecordedStep, Terms, initial_state

STARTED = datetime(2026, 1, 1, tzinfo=UTC)
STALE = Generate(7, 10, Slice(4, 1, 0, 2), lane=0, version=3)
AHEAD = Generate(8, 20, Slice(5, 0, 0, 2), lane=0, version=4)
DECISIONS = (
    Decision(Tick(10), (STALE,)),
    Decision(Generated(15, STALE, version=3), ()),
    Decision(Tick(20), (AHEAD,)),
    Decision(Committed(30, Commit(9, 25, step=4)), ()),
)


def interrupted(tmp_path: Path, share: float = 0.5) -> tuple[RunFolder, RunPosition]:
    """A run whose newest checkpoint is that of step 4; its journal goes further than the checkpoint knows."""
    recipe = fake_recipe(techniques={"tcss": share})
    folder = RunFolder.create(tmp_path / "run", recipe, STARTED)
    lines = RunLines(folder)
    for decision in DECISIONS[:1]:
        lines.journal.append(decision_line(decision.event, decision.actions))
    known = RecordedStep(4, ((1, 0b11),), closed=True)
    position = RunPosition(4, 12, 8, lines.positions(), (known,))
    for decision in DECISIONS[1:]:
        lines.journal.append(decision_line(decision.event, decision.actions))
    lines.close()
    return folder, position


def test_the_journal_continues_what_the_checkpoint_knows(tmp_path: Path) -> None:
    first, second = steps_to_repeat(*interrupted(tmp_path))
    assert first == RecordedStep(4, ((1, 0b11),), closed=True)
    assert second == RecordedStep(5, ((0, 0b11),), closed=True), "step 4 was committed, so version 5 existed"


def test_a_damaged_line_ends_the_record(tmp_path: Path) -> None:
    folder, position = interrupted(tmp_path)
    content = folder.journal.read_bytes().splitlines(keepends=True)
    folder.journal.write_bytes(b"".join([*content[:2], b"{damaged\n", *content[3:]]))
    assert steps_to_repeat(folder, position) == (RecordedStep(4, ((1, 0b11),), closed=True),)


def test_a_run_that_is_interrupted_again_keeps_the_older_record(tmp_path: Path) -> None:
    folder, position = interrupted(tmp_path)
    later = {"index": 6, "stale": [[2, 1]], "closed": False}
    past = {"index": 3, "stale": [[2, 1]], "closed": True}
    folder.update_info(initial_state={"recorded": [past, later]})
    assert [step.index for step in steps_to_repeat(folder, position)] == [4, 5, 6]
    assert steps_to_repeat(folder, position)[-1] == RecordedStep(6, ((2, 1),))


def test_a_run_without_stale_samples_has_nothing_to_repeat(tmp_path: Path) -> None:
    assert steps_to_repeat(*interrupted(tmp_path, share=0.0)) == ()


def test_the_initial_state_of_a_run_that_repeats_is_read_back_from_run_json() -> None:
    terms = Terms(steps=3, prompts=2, samples_per_prompt=2, slice_size=1, stale_budget=2)
    record = RecordedStep(1, ((0, 0b10),), closed=True)
    offers = [LaneOffer("lane", 5)]
    state = initial_state(terms, Costs(Fraction(1)), offers, committed=1, served=0, recorded=(record,))
    assert state.lanes[0].version == 0 and state.current.reissue == (Slice(1, 0, 1, 1),)
    assert initial_state_of(json.loads(json.dumps(initial_facts(state)))) == state
