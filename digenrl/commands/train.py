"""`digenrl train`: checks everything, creates or opens the run's folder, trains, and reports the outcome."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.files import fingerprint, read_recipe, shipped_recipes
from digenrl.config.recipes.recipe import Recipe
from digenrl.console.live_view import Clocks, RunTitle, RunView, choose_view
from digenrl.driver.supervisor import TrainerLostError, WorkerFailedError
from digenrl.loop import RunGaveUpError
from digenrl.report.page import write_report
from digenrl.run_folder.folder import RunFolder, Status, check_empty, is_run, numbered_path
from digenrl.run_folder.metric_lines import read_evaluations, read_steps
from digenrl.run_folder.reading import read_run
from digenrl.runs.checkpointer import RunPosition
from digenrl.runs.held_out import unfinished_evaluations
from digenrl.runs.resuming import ResumePoint, find_resume_point, kept_positions, repair_logs
from digenrl.runs.stopping import RunFailedError
from digenrl.runs.training import check_recipe, train
from digenrl.transports.contract import Backend

RUNS = Path("runs")
REQUIRED = ("diffusers", "numpy", "peft", "PIL", "safetensors", "torch", "transformers")


def start_run(where: str, overrides: Sequence[str], out: Path | None, console: Console, as_json: bool) -> Status:
    """Starts a new run. Nothing is written before everything is checked."""
    check_installed()
    if where not in shipped_recipes() and is_run(Path(where)):
        raise ConfigError(f"{where}: is a run's folder; to continue it: {_resume_command(Path(where))}")
    recipe = read_recipe(where, overrides)
    if out is not None and out.is_dir():
        check_empty(out)  # checking the recipe takes longer
    backend = check_recipe(recipe)
    with closing(backend):
        existing = [path for path in (RUNS, out) if path is not None and path.exists()]
        path = numbered_path(RUNS, recipe.name) if out is None else out
        folder = RunFolder.create(path, recipe, datetime.now().astimezone())
        with _removed_unless_begun(folder, existing):
            return _train_and_report(folder, backend, console, as_json)


@contextmanager
def _removed_unless_begun(folder: RunFolder, existing: Sequence[Path]) -> Iterator[None]:
    """A run that a user's mistake ends before its first result leaves nothing behind but what was `existing`.

    The logs of a run that failed otherwise are needed to find out why.
    """
    try:
        yield
    except ConfigError:
        if not folder.has_results():
            folder.clear()
            for path in (folder.path, RUNS):
                if path not in existing:
                    with suppress(OSError):  # has other runs
                        path.rmdir()
        raise


def resume_run(
    path: Path, overrides: Sequence[str], console: Console, as_json: bool, restart: bool = False
) -> Status:
    """Resumes an interrupted run; overrides may change only what does not affect the computed update.

    With `restart` the run starts over from step 0, and its checkpoints are set aside.
    """
    check_installed()
    folder = RunFolder.open(path)

    def tell(line: str) -> None:
        if as_json:
            print(line, file=sys.stderr)
        else:
            console.print(line, highlight=False, soft_wrap=True)

    recipe = read_recipe(str(folder.config), overrides)
    _check_prompts_exist(recipe)
    moved = not _prompts_exist(folder.recipe)  # then the checkpoint says whether these are its prompts
    if fingerprint(recipe) != fingerprint(folder.recipe) and not moved:
        raise ConfigError(
            f"{' '.join(_changes_of_the_update(folder, overrides))}: would change what the run computes; a "
            "resumed run may change steps, mode, lanes, cluster, logging, checkpoint, evaluation, techniques "
            "other than tcss, and what affects only rounding, such as training.pack_size; for anything else, "
            f"start a new run with model.source set to what 'digenrl export {folder.path} --to merged' writes"
        )
    with folder.locked(), ExitStack() as unless_it_trains:  # a process that is training here keeps its recipe
        backend = None
        if restart:
            backend = unless_it_trains.enter_context(closing(check_recipe(recipe)))  # before checkpoints are moved
            _set_checkpoints_aside(folder, tell)
        resume_point = find_resume_point(folder, tell, recipe)
        if resume_point is None:
            _check_may_start_over(folder, restart, tell)
        else:
            resume_point = repair_logs(folder, resume_point, tell)
            _check_something_is_left(folder, recipe, resume_point)
            tell(_where_it_resumes(folder, resume_point))
        if backend is None:
            opened = check_recipe(recipe if resume_point is None else recipe.from_checkpoint())
            backend = unless_it_trains.enter_context(closing(opened))
        folder.write_recipe(recipe)
        unless_it_trains.pop_all()
    with closing(backend):
        return _train_and_report(folder, backend, console, as_json, resume_point)


def _changes_of_the_update(folder: RunFolder, overrides: Sequence[str]) -> list[str]:
    """The overrides that change what a run computes; all, if none does so alone."""
    found = []
    for each in overrides:
        with suppress(ConfigError):  # some are valid only together
            if fingerprint(read_recipe(str(folder.config), [each])) == fingerprint(folder.recipe):
                continue
        found.append(each)
    return found or list(overrides)


def _prompts_exist(recipe: Recipe) -> bool:
    return recipe.prompts.path is None or recipe.prompts.path.is_file()


def _check_prompts_exist(recipe: Recipe) -> None:
    """Raises ConfigError if the file with the prompts is gone."""
    if not _prompts_exist(recipe):
        raise ConfigError(
            f"prompts.path: {recipe.prompts.path} does not exist; put it back, or say where the same prompts are "
            "now, with prompts.path=FILE"
        )


def _check_something_is_left(folder: RunFolder, recipe: Recipe, resume_point: ResumePoint) -> None:
    """Raises ConfigError if all steps are done, and all evaluations, too."""
    position = resume_point.position
    done, end = position.step, kept_positions(folder, position)["evaluations"]
    only_evaluates = done == recipe.steps and bool(unfinished_evaluations(folder, recipe, position, end))
    if done >= recipe.steps and not only_evaluates:
        raise ConfigError(
            f"{folder.path}: steps is {recipe.steps}, and {done} are done; "
            f"to continue, set more, such as steps={done * 2}"
        )


def _set_checkpoints_aside(folder: RunFolder, tell: Callable[[str], None]) -> None:
    aside = folder.set_checkpoints_aside()
    if aside is not None:
        tell(f"its checkpoints are now in {aside}")


def _check_may_start_over(folder: RunFolder, restart: bool, tell: Callable[[str], None]) -> None:
    """Raises ConfigError if completed steps would be discarded without --restart."""
    if not restart and folder.metrics.is_file() and folder.metrics.stat().st_size:
        raise ConfigError(
            f"{folder.path}: steps are done (see {folder.metrics.name}), but {folder.checkpoints} has no "
            "checkpoint; put it back, or start over from step 0 with --restart"
        )
    tell("starting from step 0" if restart else "no step was saved: starting from step 0")


def _where_it_resumes(folder: RunFolder, resume_point: ResumePoint) -> str:
    killed = "the last process ended without saving; " if folder.info.status is Status.RUNNING else ""
    return f"{killed}resuming from {resume_point.checkpoint}"


def check_installed() -> None:
    """Raises ConfigError if packages that the workers need are missing; this process does not import them."""
    missing = [package for package in REQUIRED if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"training needs packages that are not installed: {', '.join(missing)}; "
            "install digenrl[train], or with the OCR reward digenrl[train,ocr]"
        )


def _train_and_report(
    folder: RunFolder, backend: Backend, console: Console, as_json: bool, resume_point: ResumePoint | None = None
) -> Status:
    try:
        status = _train_with_restarts(folder, backend, console, as_json, resume_point)
    except (WorkerFailedError, RunGaveUpError) as error:
        raise RunFailedError(f"{error}{_how_to_resume(folder)}") from error
    except OSError as error:
        reason = f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
        raise RunFailedError(f"{folder.path}: cannot be written: {reason}{_how_to_resume(folder)}") from error
    except KeyboardInterrupt:
        if not as_json:
            console.print(f"interrupted without saving{_how_to_resume(folder)}", markup=False, soft_wrap=True)
        raise
    report = write_report(read_run(folder.path))
    if not as_json:
        if status is Status.INTERRUPTED:
            console.print(f"interrupted; resume with: {_resume_command(folder.path)}", soft_wrap=True)
        console.print(f"report: {report}", soft_wrap=True)
    return status


def _train_with_restarts(
    folder: RunFolder, backend: Backend, console: Console, as_json: bool, resume_point: ResumePoint | None
) -> Status:
    """Trains; a run that loses its trainer resumes from the last checkpoint, up to `lanes.restarts` times."""
    title = RunTitle(folder.recipe.name, folder.path, folder.recipe.steps)
    for restarts_left in range(folder.recipe.lanes.restarts, -1, -1):
        view = choose_view(title, console, Clocks(time.monotonic, time.thread_time), as_json)
        if resume_point is not None:
            _load_history(view, folder, resume_point.position)
        try:
            return train(folder, backend, view, resume_point)
        except TrainerLostError as error:
            resume_point = find_resume_point(folder)
            if not restarts_left or resume_point is None:
                raise
            if not as_json:
                console.print(f"{error}; resuming from {resume_point.checkpoint}", soft_wrap=True)
    raise AssertionError("the last attempt returns or raises")


def _load_history(view: RunView, folder: RunFolder, position: RunPosition) -> None:
    ends = kept_positions(folder, position)
    steps = (each for each in read_steps(folder.metrics, ends.get("metrics")) if each.step < position.step)
    evaluations = read_evaluations(folder.evaluations, ends["evaluations"])
    view.load_history(steps, [each for each in evaluations if each.steps_done <= position.step])


def _how_to_resume(folder: RunFolder) -> str:
    try:
        resume_point = find_resume_point(folder)
    except ConfigError as error:
        return f"\n{error}"
    if resume_point is None:
        return ""
    return f"\n{resume_point.checkpoint} is complete; resume with: {_resume_command(folder.path)}"


def _resume_command(folder: Path) -> str:
    return shlex.join(("digenrl", "train", "--resume", str(folder)))
