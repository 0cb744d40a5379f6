"""Logging with the worker, job, step and version in every line.

Each worker logs to its own file in the run's folder. The driver logs to `driver.log` there.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from digenrl.records import Job, Slice

FORMAT = "%(asctime)s %(levelname)-7s %(worker)s %(job)s %(name)s: %(message)s"

_worker = "-"
_job: ContextVar[Job | None] = ContextVar("job", default=None)


def configure_logging(worker: str, *, verbose: bool, file: Path | None = None) -> None:
    """Logs of this process go to `file`, or to standard error, which a worker process redirects to its file.

    So do the warnings of all libraries.
    """
    global _worker
    _worker = worker
    handler = logging.StreamHandler(sys.stderr) if file is None else logging.FileHandler(file, encoding="utf-8")
    handler.addFilter(_add_context)
    handler.setFormatter(logging.Formatter(FORMAT))
    logging.captureWarnings(True)
    for logger in (logging.getLogger("digenrl"), logging.getLogger("py.warnings")):
        for old in list(logger.handlers):
            logger.removeHandler(old)
            old.close()
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG if verbose else logging.INFO)
        logger.propagate = False


@contextmanager
def logged_job(job: Job, worker: str | None = None) -> Iterator[None]:
    """Inside, log lines carry this job, and the worker's name if several workers share this process."""
    token = _job.set(job)
    named = None if worker is None else _thread_worker.set(worker)
    try:
        yield
    finally:
        _job.reset(token)
        if named is not None:
            _thread_worker.reset(named)


_thread_worker: ContextVar[str | None] = ContextVar("worker", default=None)


def describe(job: Job) -> str:
    """The job in a few words: its kind, id, step and version.

    >>> from digenrl.records import Generate
    >>> describe(Generate(7, 0, Slice(step=3, group=1, first=0, size=4), lane=0, version=2))
    'Generate#7 step=3 group=1 version=2'
    """
    words = [f"{type(job).__name__}#{job.id}"]
    piece = getattr(job, "slice", None) or getattr(job, "piece", None)
    step = piece.step if isinstance(piece, Slice) else getattr(job, "step", None)
    chunk = getattr(job, "chunk", None) or piece
    version = getattr(job, "version", None)
    if step is not None:
        words.append(f"step={step}")
    if isinstance(piece, Slice):
        words.append(f"group={piece.group}")
    elif chunk is not None:
        version = chunk.version
    if version is not None:
        words.append(f"version={version}")
    return " ".join(words)


def _add_context(record: logging.LogRecord) -> bool:
    job = _job.get()
    record.worker = _thread_worker.get() or _worker
    record.job = "-" if job is None else f"[{describe(job)}]"
    return True


@contextmanager
def without_hub_warnings() -> Iterator[None]:
    """Inside, the library of the Hugging Face hub does not log its retries."""
    from huggingface_hub.utils import logging as hub_logging

    verbosity = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hub_logging.set_verbosity(verbosity)
