"""A run's folder: what is in it and where, what the run is, and that only one process trains in it."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from digenrl import __version__
from digenrl.config.reading import ConfigError, Frozen, parse_model, read_mapping, read_model
from digenrl.config.recipe import Recipe
from digenrl.config.recipe_files import read_recipe, write_recipe
from digenrl.run_folder.lines import JsonLines
from digenrl.telemetry.writing import write_atomically
from digenrl.training.checkpoint.format import step_folder

FORMAT: Final = 1
_LOCK_NAME = ".lock"


class Status(StrEnum):
    """How a run stands. A process that was killed leaves `running` behind; see `RunFolder.standing`."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    FAILED = "failed"


class LaneEntry(Frozen):
    """A lane of the trace, the device it is on, and from when to when it was there; see `LaneInfo`."""

    name: str
    pool: Literal["generator", "reward", "trainer"]
    device: str
    joined_ns: int = 0
    left_ns: int | None = None


class RunInfo(Frozen):
    """What run.json says. `opening` is what was expected of the lanes when the run began, or went on."""

    format: Literal[1] = FORMAT
    name: str
    digenrl: str = __version__
    started: datetime
    lanes: tuple[LaneEntry, ...] = ()
    status: Status = Status.RUNNING
    opening: dict[str, Any] = Field(default={})


class RunFolder:
    """One run on disk. Make a new one with `create`, find an existing one with `open`.

    `recipe` and `info` are what config.yaml and run.json say.
    """

    def __init__(self, path: Path, recipe: Recipe, info: RunInfo) -> None:
        self.path = path
        self.recipe = recipe
        self.info = info
        self.config = path / "config.yaml"  # the resolved recipe
        self.run = path / "run.json"
        self.journal = path / "journal.jsonl"  # one line per decision
        self.spans = path / "spans.jsonl"  # one line per span of the trace
        self.metrics = path / "metrics.jsonl"  # one line per optimizer step
        self.evaluations = path / "evaluations.jsonl"  # one line per evaluation
        self.samples = path / "samples"  # the evaluations' grids
        self.tensorboard = path / "tensorboard"
        self.checkpoints = path / "checkpoints"
        self.lora = path / "lora"  # the newest export of adapters
        self.transformer = path / "transformer"  # or of all weights
        self.trace = path / "trace.json"  # for Perfetto
        self.report = path / "report.html"

    @classmethod
    def create(cls, path: Path, recipe: Recipe, started: datetime) -> RunFolder:
        """Writes the first files of a run into a new or empty folder; anything else in it is an error."""
        _make_folder(path)
        _check_empty(path)
        # Two processes may have seen the same empty folder; the one that locks it first has it.
        with _lock(path):
            _check_empty(path)
            folder = cls(path, recipe, RunInfo(name=recipe.name, started=started))
            for inside in (folder.samples, folder.checkpoints):
                inside.mkdir()
            folder.rewrite(recipe)
            folder.describe()
        return folder

    def rewrite(self, recipe: Recipe) -> None:
        """Writes config.yaml anew: a recipe that was resumed with changes, or whose last question was settled."""
        self.recipe = recipe
        write_atomically(self.config, write_recipe(recipe))

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing run, to resume it or to look at it."""
        if not path.is_dir():
            raise ConfigError(f"{path}: there is no such folder; give a run's folder, as runs/demo-1")
        files = (path / "config.yaml", path / "run.json")
        missing = [file.name for file in files if not file.is_file()]
        if len(missing) == len(files):
            raise ConfigError(f"{path}: holds no run: {' and '.join(missing)} are missing; give a run's folder")
        if missing:
            raise ConfigError(f"{path}: {missing[0]} is missing; restore it, or start a new run in another folder")
        return cls(path, read_recipe(str(files[0])), _read_info(files[1]))

    def describe(self, **changes: Any) -> None:
        """Writes run.json with these values of `RunInfo` changed."""
        content = {**self.info.model_dump(), **changes}
        self.info = parse_model(RunInfo, content)
        write_atomically(self.run, self.info.model_dump_json(indent=2) + "\n")

    def set_status(self, status: Status) -> None:
        """Writes how the run stands."""
        self.describe(status=status)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else trains in this folder meanwhile; ConfigError with the pid of whoever does."""
        with _lock(self.path):
            yield

    def is_locked(self) -> bool:
        """Whether a process trains in this folder right now."""
        path = self.path / _LOCK_NAME
        if not path.exists():
            return False
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def standing(self) -> Status:
        """The status, but a run whose process is gone without a word was interrupted."""
        gone = self.info.status is Status.RUNNING and not self.is_locked()
        return Status.INTERRUPTED if gone else self.info.status

    def grid(self, steps_done: int) -> Path:
        """The picture of the evaluation after so many optimizer steps."""
        return self.samples / f"step_{steps_done:06d}.png"

    def grid_words(self, steps_done: int) -> Path:
        """The prompts and rewards of that picture."""
        return self.samples / f"step_{steps_done:06d}.json"

    def checkpoint(self, steps_done: int) -> Path:
        """The checkpoint after so many optimizer steps."""
        return step_folder(self.checkpoints, steps_done)


class RunLines:
    """The four files of a run that grow line by line; a checkpoint remembers how long they were."""

    def __init__(self, folder: RunFolder) -> None:
        self.journal = JsonLines(folder.journal)
        self.spans = JsonLines(folder.spans)
        self.metrics = JsonLines(folder.metrics)
        self.evaluations = JsonLines(folder.evaluations)
        self._by_name = {
            "journal": self.journal,
            "spans": self.spans,
            "metrics": self.metrics,
            "evaluations": self.evaluations,
        }

    def positions(self) -> dict[str, int]:
        """How long each file is, for a checkpoint."""
        return {name: lines.position() for name, lines in self._by_name.items()}

    def sync(self) -> None:
        """Brings all of them to the disk."""
        for lines in self._by_name.values():
            lines.sync()

    def cut_back(self, positions: Mapping[str, int]) -> None:
        """Forgets what came after the checkpoint that remembered these positions."""
        if positions.keys() != self._by_name.keys():
            known = ", ".join(self._by_name)
            raise ConfigError(f"a checkpoint with positions of {sorted(positions)}; expected those of {known}")
        for name, position in positions.items():
            self._by_name[name].truncate(position)

    def cut_to_nothing(self) -> None:
        """For a run that goes on without a checkpoint: it begins again."""
        self.cut_back(dict.fromkeys(self._by_name, 0))

    def close(self) -> None:
        """May be called twice."""
        for lines in self._by_name.values():
            lines.close()


def numbered_path(parent: Path, name: str) -> Path:
    """Makes and names a new folder for a run: `demo-1`, `demo-2`, ... one above the highest there is."""
    pattern = re.compile(rf"{re.escape(name)}-(\d+)")
    _make_folder(parent)
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


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"{path}: is a file; name a new folder") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be made: {error.strerror or error}") from None


def _check_empty(path: Path) -> None:
    inside = sorted(entry.name for entry in path.iterdir() if entry.name != _LOCK_NAME)
    if "run.json" in inside:
        raise ConfigError(f"{path}: holds a run already; resume it, or name a new folder with --out")
    if inside:
        raise ConfigError(f"{path}: is not empty, it has {inside[0]}; name a new folder with --out")


def _read_info(path: Path) -> RunInfo:
    found = read_mapping(path).get("format")
    if found != FORMAT:
        raise ConfigError(
            f"{path}: format {found!r}, this digenrl {__version__} reads {FORMAT}; "
            "use the version that wrote it, or start a new run in another folder"
        )
    return read_model(RunInfo, path)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """The lock goes with the process, however that ends; only its file stays."""
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
