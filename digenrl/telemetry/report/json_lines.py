"""Reads a file of JSON lines that a run may still be writing, or was killed while writing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from digenrl.config.reading import ConfigError


@dataclass(frozen=True, slots=True)
class Line:
    """One line's content, and where it stands, for complaints."""

    path: Path
    number: int
    content: dict[str, Any]

    def complaint(self, what: str) -> ConfigError:
        """An error that begins with the file and the line."""
        return ConfigError(f"{self.path}, line {self.number}: {what}")


def read_json_lines(path: Path) -> Iterator[Line]:
    """Every line of the file, in order; none if there is no such file.

    A last line without its newline is one that a crash cut short: it counts only if it is whole. Any other line
    that is no JSON object is damage, and raises ConfigError.
    """
    if not path.exists():
        return
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    lines = raw.split(b"\n")
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        content = _parsed(text)
        if content is None:
            if number == len(lines):
                return
            raise ConfigError(
                f"{path}, line {number}: not a JSON object: {_shortened(text)}; the file is damaged: "
                "delete this line to leave it out"
            )
        yield Line(path, number, content)


def numbers_in(line: Line, leave_out: frozenset[str]) -> dict[str, float]:
    """The line's finite numbers by name; what is null or not finite is left out, anything else is damage."""
    numbers: dict[str, float] = {}
    for name, value in line.content.items():
        if name in leave_out or value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise line.complaint(f"'{name}' is {value!r}, expected a number")
        if abs(value) < float("inf"):
            numbers[name] = value
    return numbers


def step_of(line: Line) -> int:
    """The line's step, which it must have."""
    step = line.content.get("step")
    if isinstance(step, bool) or not isinstance(step, int):
        raise line.complaint(f"'step' is {step!r}, expected a whole number")
    return step


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(text)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _shortened(text: bytes) -> str:
    words = text.decode("utf-8", errors="replace")
    return repr(words if len(words) <= 60 else f"{words[:57]}...")
