"""What commands print: results to stdout, progress to stderr."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class LastingConsole(Console):
    """A console whose reader may leave: a run that is stopped together with `| tee` must still be saved.

    It prints text as it is: a path or an error may contain what rich reads as markup or as the name of an emoji.
    """

    def __init__(self, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False)

    def on_broken_pipe(self) -> None:
        """Prints nothing from now on, instead of ending the program."""
        self.quiet = True
        with suppress(OSError):  # not a real file
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.file.fileno())
            os.close(nowhere)


out = LastingConsole()
err = LastingConsole(stderr=True)


class ShowProgress(Protocol):
    """Shows how much of the total is done and, optionally, what is being done."""

    def __call__(self, done: int, total: int, activity: str = "") -> None: ...


@contextmanager
def progress_bar(title: str, hidden: bool) -> Iterator[ShowProgress]:
    """A progress bar on stderr if that is a terminal; it disappears at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=hidden or not err.is_terminal) as progress:
        task = progress.add_task(title, total=None)

        def show(done: int, total: int, activity: str = "") -> None:
            description = f"{title}: {activity}" if activity else title
            progress.update(task, completed=done, total=total, description=description)

        yield show


def print_written(*paths: Path | None) -> None:
    """Prints the paths of the files that were written."""
    for path in paths:
        if path is not None:
            out.print(f"wrote {path}", soft_wrap=True)
