"""Where a run resumes: its newest whole checkpoint, if that belongs to this run. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.files import fingerprint
from digenrl.config.recipes.recipe import Recipe
from digenrl.run_folder.folder import RunFolder
from digenrl.run_folder.journal import read_journal
from digenrl.run_folder.lines import JsonLine
from digenrl.run_folder.metric_lines import end_of_evaluations, evaluation_record, step_record
from digenrl.run_folder.repair import repair_lines
from digenrl.run_folder.segments import live_start
from digenrl.runs.checkpointer import RunPosition
from digenrl.runs.initial_facts import RECORDED, recorded_steps
from digenrl.scheduling import RecordedStep
from digenrl.scheduling.recorded_versions import VersionRecord
from digenrl.training.checkpoint.atomic_folders import restore
from digenrl.training.checkpoint.format import (
    CheckpointContent,
    DamagedCheckpointError,
    check_file,
    checkpoints_in,
    read_content,
)

READERS: Final[Mapping[str, Callable[[JsonLine], object]]] = {
    "metrics": step_record,
    "evaluations": evaluation_record,
}  # of lines that a resumed run reads again; they raise ConfigError for damaged ones


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A checkpoint, and the position of the run when it was saved."""

    checkpoint: Path
    position: RunPosition


def find_resume_point(
    folder: RunFolder, notify: Callable[[str], None] = lambda line: None, recipe: Recipe | None = None
) -> ResumePoint | None:
    """The newest whole checkpoint; None for a run without any.

    `notify` is called with a line about every newer checkpoint that is damaged. Raises ConfigError if all are, or
    if the checkpoint was made with other settings than those of the recipe, by default the folder's.
    """
    if folder.checkpoints.is_dir():
        restore(folder.checkpoints)
    damage: list[DamagedCheckpointError] = []
    for path in reversed(checkpoints_in(folder.checkpoints)):
        try:
            content = _whole_content(path)
        except DamagedCheckpointError as error:
            damage.append(error)
            continue
        for each in damage:
            notify(str(each))
        return ResumePoint(path, _position(folder, recipe or folder.recipe, path, content))
    if damage:
        raise DamagedCheckpointError(f"{damage[0]}; to start over from step 0, resume with --restart")
    return None


def _whole_content(path: Path) -> CheckpointContent:
    content = read_content(path)
    for name, record in content.files.items():
        check_file(path, name, record)
    return content


def _position(folder: RunFolder, recipe: Recipe, path: Path, content: CheckpointContent) -> RunPosition:
    try:
        facts = content.facts
        recorded = recorded_steps(facts.get("recorded", ()))
        position = RunPosition(
            content.step,
            facts["at_ns"],
            facts["jobs_issued"],
            facts["positions"],
            recorded,
            tuple(facts.get("evaluations", ())),
        )
        owner = facts["fingerprint"]
    except KeyError as error:
        raise ConfigError(
            f"{path}: lacks {error.args[0]}; resume with the version of DigenRL that wrote it"
        ) from None
    if owner != fingerprint(recipe):
        raise ConfigError(
            f"{path}: was saved by another run: seed, model, prompts, rewards, batch, algorithm or training "
            f"differ from {folder.config}; resume in its own folder, or start a new run"
        )
    return position


def repair_logs(folder: RunFolder, resume_point: ResumePoint, notify: Callable[[str], None]) -> ResumePoint:
    """Mends log files that were cut or damaged since the checkpoint, and tells the user about each."""
    positions = dict(resume_point.position.positions)
    for name, path in folder.line_files().items():
        start = live_start(path)
        if positions.get(name, 0) >= start:
            read = READERS.get(name, lambda line: None)
            end, remark = repair_lines(path, positions.get(name, 0) - start, read)
            positions[name] = start + end
            if remark is not None:
                notify(remark)
    return replace(resume_point, position=replace(resume_point.position, positions=positions))


def steps_to_repeat(folder: RunFolder, position: RunPosition) -> tuple[RecordedStep, ...]:
    """The versions of stale samples that the run had generated for steps after its checkpoint.

    The newest are in the journal behind the checkpoint. Those that a resumed run has not repeated before it was
    interrupted again are in run.json.
    """
    if folder.recipe.techniques.tcss == 0:
        return ()
    earlier = recorded_steps(folder.info.initial_state.get(RECORDED, ()))
    record = VersionRecord(position.step, (*earlier, *position.recorded))
    with suppress(ConfigError):  # a damaged line ends what is known
        for decision in read_journal(folder.journal, position.positions.get("journal", 0)):
            record.observe(decision.event, decision.actions)
    return record.steps(position.step)


def kept_positions(folder: RunFolder, position: RunPosition) -> dict[str, int]:
    """The sizes to which a resumed run truncates its JSON-lines files."""
    end = end_of_evaluations(folder.evaluations, position.positions.get("evaluations", 0), position.step)
    return {**position.positions, "evaluations": end}
