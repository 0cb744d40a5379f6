"""`digenrl train`: checks everything, makes or opens the run's folder, trains, and says what came of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from digenrl.config.reading import ConfigError
from digenrl.config.recipe_files import fingerprint, read_recipe
from digenrl.console.live_view import Clocks, RunTitle, View, choose_view
from digenrl.driver.supervisor import TrainerLostError, WorkerFailedError
from digenrl.loop import RunGaveUpError
from digenrl.metrics.step_metrics import Evaluation
from digenrl.run_folder.folder import RunFolder, Status, numbered_path
from digenrl.run_folder.lines import read_lines
from digenrl.runs.errors import RunFailedError
from digenrl.runs.resuming import ResumePoint, find_resume_point
from digenrl.runs.training import check_recipe, train
from digenrl.telemetry.report.page import write_report
from digenrl.transports.contract import Backend

RUNS = Path("runs")


NEEDED = ("diffusers", "numpy", "peft", "PIL", "safetensors", "torch", "transformers")


def start_run(where: str, overrides: Sequence[str], out: Path | None, console: Console, as_json: bool) -> Status:
    """A new run. Nothing is written before everything is checked."""
    check_installed()
    recipe = read_recipe(where, overrides)
    grounds = check_recipe(recipe)
    with closing(grounds):
        path = numbered_path(RUNS, recipe.name) if out is None else out
        folder = RunFolder.create(path, recipe, datetime.now().astimezone())
        return _train_and_tell(folder, grounds, console, as_json)


def resume_run(path: Path, overrides: Sequence[str], console: Console, as_json: bool) -> Status:
    """A run that was interrupted goes on; overrides may change what the computed update does not depend on."""
    check_installed()
    folder = RunFolder.open(path)
    recipe = read_recipe(str(folder.config), overrides)
    if fingerprint(recipe) != fingerprint(folder.recipe):
        raise ConfigError(
            f"{' '.join(overrides)}: would change what the run computes; a resumed run may change steps, lanes, "
            "logging, checkpoint, evaluation and techniques other than tcss"
        )
    with folder.locked():  # whoever trains here keeps its recipe
        standing = find_resume_point(folder)
        done = 0 if standing is None else standing.position.step
        if done >= recipe.steps:
            raise ConfigError(
                f"{path}: has all its {recipe.steps} steps; to go on, give more, as steps={recipe.steps * 2}"
            )
        grounds = check_recipe(recipe)
        folder.rewrite(recipe)
    with closing(grounds):
        return _train_and_tell(folder, grounds, console, as_json, standing)


def check_installed() -> None:
    """Complains about packages that workers need; this process does not import them."""
    missing = [package for package in NEEDED if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"training needs the package{'s' if len(missing) > 1 else ''} {', '.join(missing)}, not installed; "
            "install digenrl[train], and for the OCR reward digenrl[train,ocr]"
        )


def _train_and_tell(
    folder: RunFolder, grounds: Backend, console: Console, as_json: bool, standing: ResumePoint | None = None
) -> Status:
    try:
        status = _train_with_new_trainers(folder, grounds, console, as_json, standing)
    except (WorkerFailedError, RunGaveUpError) as error:
        raise RunFailedError(f"{error}{_how_to_go_on(folder)}") from error
    except OSError as error:
        reason = f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
        raise RunFailedError(f"{folder.path}: cannot be written: {reason}{_how_to_go_on(folder)}") from error
    report = write_report(folder.path)
    if not as_json:
        if status is Status.INTERRUPTED:
            console.print(f"interrupted; go on with: digenrl train --resume {folder.path}", soft_wrap=True)
        console.print(f"report: {report}", soft_wrap=True)
    return status


def _train_with_new_trainers(
    folder: RunFolder, grounds: Backend, console: Console, as_json: bool, standing: ResumePoint | None
) -> Status:
    """A run whose trainer is lost with all that it stood for goes on from its last checkpoint, a few times."""
    title = RunTitle(folder.recipe.name, folder.path, folder.recipe.steps)
    for restarts_left in range(folder.recipe.lanes.restarts, -1, -1):
        view = choose_view(title, console, Clocks(time.monotonic, time.thread_time), as_json)
        if standing is not None:
            _recall(view, folder, standing)
        try:
            return train(folder, grounds, view, standing)
        except TrainerLostError as error:
            standing = find_resume_point(folder)
            if not restarts_left or standing is None:
                raise
            if not as_json:
                console.print(f"{error}; going on from {standing.checkpoint}", soft_wrap=True)
    raise AssertionError("the last try returns or raises")


def _recall(view: View, folder: RunFolder, standing: ResumePoint) -> None:
    """What the run has behind it."""
    done = standing.position.step
    steps = [line for line in read_lines(folder.metrics) if line["step"] < done]
    evaluations = []
    for line in read_lines(folder.evaluations):
        step, at_s, count = line.pop("step"), line.pop("at_s"), line.pop("count")
        grid = line.pop("grid", None)
        if step <= done:
            evaluations.append(Evaluation(step, at_s, count, line, grid))
    view.recall(steps, evaluations)


def _how_to_go_on(folder: RunFolder) -> str:
    try:
        standing = find_resume_point(folder)
    except ConfigError as error:
        return f"\n{error}"
    if standing is None:
        return ""
    return f"\n{standing.checkpoint} is whole; go on with: digenrl train --resume {folder.path}"
