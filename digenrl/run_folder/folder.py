"""A run's folder: the names of its files, run.json, and a lock so that only one process trains in it."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, field_validator

from digenrl import __version__
from digenrl.config.limits import LONGEST_RUN_NS
from digenrl.config.reading import ConfigError, Frozen, parse_model, read_mapping, read_model, shown
from digenrl.config.recipes.files import read_recipe, write_recipe
from digenrl.config.recipes.recipe import Recipe
from digenrl.run_folder.lines import JsonLines
from digenrl.telemetry.writing import write_atomically
from digenrl.training.checkpoint.format import step_folder

FORMAT: Final = 2  # of all files in the folder; raise it when an older version's files can no longer be read
_LOCK_NAME = ".lock"
_RUN_NAME = "run.json"


class Status(StrEnum):
    """The state of a run. A killed process leaves `running` behind; see `RunFolder.actual_status`."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


class LaneEntry(Frozen):
    """A lane of the trace, its device, and when it joined and left; see `LaneInfo`."""

    name: str
    pool: Literal["generator", "reward", "trainer"]
    device: str
    joined_ns: int = Field(default=0, ge=0, le=LONGEST_RUN_NS)
    left_ns: int | None = Field(default=None, ge=0, le=LONGEST_RUN_NS)


class RunInfo(Frozen):
    """The content of run.json. `initial_state` is the scheduler's state when the run last started or resumed."""

    format: int = FORMAT
    name: str
    digenrl: str = __version__
    started: datetime
    lanes: tuple[LaneEntry, ...] = ()
    status: Status = Status.RUNNING
    initial_state: dict[str, Any] = Field(default={})

    @field_validator("initial_state")
    @classmethod
    def _terms_are_a_mapping(cls, state: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(state.get("terms", {}), dict):
            raise ValueError(f"terms: expected a mapping of keys, got {shown(state['terms'])}")
        return state


class RunFolder:
    """One run on disk; `recipe` and `info` are the content of config.yaml and run.json.

    `create` starts a new folder, `open` reads an existing one.
    """

    def __init__(self, path: Path, recipe: Recipe, info: RunInfo) -> None:
        self.path = path
        self.recipe = recipe
        self.info = info
        self.config = path / "config.yaml"  # the resolved recipe
        self.run = path / _RUN_NAME
        self.journal = path / "journal.jsonl"  # one line per decision
        self.spans = path / "spans.jsonl"  # one line per span of the trace
        self.metrics = path / "metrics.jsonl"  # one line per optimizer step
        self.evaluations = path / "evaluations.jsonl"  # one line per evaluation
        self.logs = path / "logs"  # a file per worker, and driver.log
        self.samples = path / "samples"  # the evaluations' grids
        self.tensorboard = path / "tensorboard"
        self.checkpoints = path / "checkpoints"
        self.lora = path / "lora"  # the newest export of adapters
        self.transformer = path / "transformer"  # or of all weights
        self.trace = path / "trace.json"  # for Perfetto
        self.report = path / "report.html"

    @classmethod
    def create(cls, path: Path, recipe: Recipe, started: datetime) -> RunFolder:
        """Writes the first files of a run into a new or empty folder; any other folder is an error."""
        make_folder(path)
        check_empty(path)
        # Two processes may have seen the same empty folder: the one that locks it first owns it.
        with _lock(path):
            check_empty(path)
            folder = cls(path, recipe, RunInfo(name=recipe.name, started=started))
            for inside in (folder.samples, folder.checkpoints):
                inside.mkdir()
            folder.write_recipe(recipe)
            folder.update_info()
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Reads an existing run; raises ConfigError if the folder is not a run, or is of another format."""
        if not path.is_dir():
            problem = "is a file" if path.exists() else "no such folder"
            raise ConfigError(f"{path}: {problem}; name a run's folder, such as runs/demo-1")
        files = (path / _RUN_NAME, path / "config.yaml")
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            runs = sorted(path.glob(f"*/{_RUN_NAME}"))
            hint = f"; name one of the runs in it, such as {runs[0].parent}" if runs else ""
            raise ConfigError(f"{path}: not a run's folder: {' and '.join(missing)} missing{hint}")
        info = _read_info(files[0])  # first: another format may have other recipes
        return cls(path, read_recipe(str(files[1])), info)

    def line_files(self) -> dict[str, Path]:
        """The JSON-lines files by the names under which a checkpoint stores their sizes."""
        return {
            "journal": self.journal,
            "spans": self.spans,
            "metrics": self.metrics,
            "evaluations": self.evaluations,
        }

    def write_recipe(self, recipe: Recipe) -> None:
        """Writes config.yaml; a resumed run may have changed it, and calibration may have completed it."""
        self.recipe = recipe
        write_atomically(self.config, write_recipe(recipe), durable=True)

    def update_info(self, **changes: Any) -> None:
        """Writes run.json with these fields of `RunInfo` changed."""
        content = {**self.info.model_dump(), **changes}
        self.info = parse_model(RunInfo, content)
        write_atomically(self.run, self.info.model_dump_json(indent=2) + "\n", durable=True)

    def set_status(self, status: Status) -> None:
        """Writes the status to run.json."""
        self.update_info(status=status)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder's lock; raises ConfigError with the holder's process id if it is taken."""
        with _lock(self.path):
            yield

    def is_locked(self) -> bool:
        """Whether a process is training in this folder."""
        path = self.path / _LOCK_NAME
        if not path.exists():
            return False
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def actual_status(self) -> Status:
        """The status in run.json, except that a run whose process is gone counts as interrupted."""
        gone = self.info.status is Status.RUNNING and not self.is_locked()
        return Status.INTERRUPTED if gone else self.info.status

    def has_results(self) -> bool:
        """Whether the run completed a step, an evaluation or a checkpoint."""
        lines = (path for path in (self.metrics, self.evaluations) if path.exists())
        saved = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        return saved or any(path.stat().st_size for path in lines)

    def set_checkpoints_aside(self) -> Path | None:
        """Renames the folder of checkpoints, for a run that starts over; None if there is none."""
        if not self.checkpoints.is_dir() or not any(self.checkpoints.iterdir()):
            return None
        number = 1
        while (aside := self.path / f"checkpoints.old-{number}").exists():
            number += 1
        return self.checkpoints.rename(aside)

    def clear(self) -> None:
        for entry in self.path.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def grid(self, steps_done: int) -> Path:
        """The image grid of the evaluation after `steps_done` optimizer steps."""
        return self.samples / f"step_{steps_done:06d}.png"

    @property
    def source_grid(self) -> Path:
        """The image grid of the held-out prompts' source images, in the order of the other grids."""
        return self.samples / "sources.png"

    def grid_captions(self, steps_done: int) -> Path:
        """The prompts and rewards of that grid."""
        return self.samples / f"step_{steps_done:06d}.json"

    def checkpoint(self, steps_done: int) -> Path:
        """The checkpoint after `steps_done` optimizer steps."""
        return step_folder(self.checkpoints, steps_done)


class RunLines:
    """The four JSON-lines files of a run, open for appending; a checkpoint stores their sizes."""

    def __init__(self, folder: RunFolder) -> None:
        self._by_name = {name: JsonLines(path) for name, path in folder.line_files().items()}
        self.journal, self.spans = self._by_name["journal"], self._by_name["spans"]
        self.metrics, self.evaluations = self._by_name["metrics"], self._by_name["evaluations"]

    def positions(self) -> dict[str, int]:
        """The size of each file, for a checkpoint."""
        return {name: lines.position() for name, lines in self._by_name.items()}

    def sync(self) -> None:
        """Forces all files to disk, and sets long ones aside to be compressed."""
        for lines in self._by_name.values():
            lines.sync()
            lines.rotate()

    def truncate(self, positions: Mapping[str, int]) -> None:
        """Removes everything after these positions, which `positions` returned for a checkpoint."""
        if positions.keys() != self._by_name.keys():
            known = ", ".join(self._by_name)
            raise ConfigError(f"a checkpoint with positions of {sorted(positions)}; expected those of {known}")
        for name, position in positions.items():
            self._by_name[name].truncate(position)

    def clear(self) -> None:
        """Empties all files: a run that resumes without a checkpoint starts over."""
        self.truncate(dict.fromkeys(self._by_name, 0))

    def close(self) -> None:
        """Closes all files; may be called twice."""
        for lines in self._by_name.values():
            lines.close()


def numbered_path(parent: Path, name: str) -> Path:
    """Creates and returns a new folder `name-1`, `name-2`, ..., one above the highest number in use."""
    pattern = re.compile(rf"{re.escape(name)}-(\d+)")
    make_folder(parent)
    taken = [int(found[1]) for entry in parent.iterdir() if (found := pattern.fullmatch(entry.name))]
    number = max(taken, default=0) + 1
    while True:
        try:
            (parent / f"{name}-{number}").mkdir()
            return parent / f"{name}-{number}"
        except FileExistsError:  # another process was quicker
            number += 1
        except OSError as error:
            raise ConfigError(f"{parent}: cannot be written: {error.strerror or error}") from None


def make_folder(path: Path) -> None:
    """Creates a folder, unless it is there; raises ConfigError if that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"{path}: is a file; name a new folder") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be created: {error.strerror or error}") from None


def is_run(path: Path) -> bool:
    """Whether this is a folder that holds a run; anything else, such as a name that is too long, is not."""
    with suppress(OSError):
        return (path / _RUN_NAME).is_file()
    return False


def check_empty(path: Path) -> None:
    """Raises ConfigError if a folder holds a run or anything else."""
    inside = sorted(entry.name for entry in path.iterdir() if entry.name != _LOCK_NAME)
    if _RUN_NAME in inside:
        raise ConfigError(f"{path}: already contains a run; resume it, or name a new folder with --out")
    if inside:
        raise ConfigError(f"{path}: is not empty, it has {inside[0]}; name a new folder with --out")


def _read_info(path: Path) -> RunInfo:
    content = read_mapping(path)
    found, writer = content.get("format"), content.get("digenrl", "unknown")
    if found != FORMAT:
        raise ConfigError(
            f"{path}: format {found!r}, written by digenrl {writer}; digenrl {__version__} reads format {FORMAT}: "
            f"use digenrl {writer} for this run, or start a new run in another folder"
        )
    return read_model(RunInfo, path)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """The operating system releases the lock when the process ends; only its file remains."""
    path = folder / _LOCK_NAME
    try:
        file = path.open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise ConfigError(
                f"{folder}: {holder} is training in this folder; wait for it, stop it, or name another folder"
            ) from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be locked: {error.strerror or error}") from None
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        yield
