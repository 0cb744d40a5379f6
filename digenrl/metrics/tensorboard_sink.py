"""TensorBoard's event files, written with the tensorboard package alone: no torch, no TensorFlow."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from digenrl.metrics.step_metrics import Evaluation

_FILE_VERSION = "brain.Event:2"
_NO_CURVES = {"step", "at_s", "version"}  # the axis itself


class TensorBoardSink:
    """One new event file in `run_folder/tensorboard`; on the axis are the optimizer steps done.

    A run that goes on after `steps_done` steps thereby takes back what earlier files say about later ones.
    Each step is in the file when `step` returns. No thread, as a step's numbers are few; a picture takes about
    0.2 s per megabyte for its checksum.
    """

    def __init__(self, run_folder: Path, steps_done: int, wall_clock: Callable[[], float]) -> None:
        folder = run_folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        self._run_folder, self._wall_clock = run_folder, wall_clock
        # TensorBoard reads files in the order of their names, and must come to the later one later.
        number = sum(1 for _ in folder.glob("events.out.tfevents.*"))
        path = folder / f"events.out.tfevents.{number:06d}.{int(wall_clock())}"
        self._records = RecordWriter(path.open("xb"))
        self._write(Event(wall_time=wall_clock(), file_version=_FILE_VERSION))
        if number:
            begun = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=wall_clock(), step=steps_done + 1, session_log=begun))

    def step(self, numbers: Mapping[str, float]) -> None:
        """A point on the curve of every number."""
        values = [Summary.Value(tag=_tag(name), simple_value=number) for name, number in _curves(numbers)]
        self._add(int(numbers["version"]), values)

    def evaluation(self, evaluation: Evaluation) -> None:
        """A point on the curve of every number, and the grid."""
        values = [
            Summary.Value(tag=f"evaluation/{name}", simple_value=number)
            for name, number in evaluation.numbers.items()
        ]
        if evaluation.grid is not None:
            values.append(_picture("evaluation/samples", self._run_folder / evaluation.grid))
        self._add(evaluation.steps_done, values)

    def close(self) -> None:
        """May be called twice."""
        self._records.close()

    def _add(self, steps_done: int, values: list[Summary.Value]) -> None:
        self._write(Event(wall_time=self._wall_clock(), step=steps_done, summary=Summary(value=values)))

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()


def _curves(numbers: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(name, number) for name, number in numbers.items() if name not in _NO_CURVES]


def _tag(name: str) -> str:
    """TensorBoard groups curves by what stands before the first slash."""
    return name if "/" in name else f"train/{name}"


def _picture(tag: str, path: Path) -> Summary.Value:
    encoded = path.read_bytes()
    width, height = _png_size(encoded, path)
    image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=encoded)
    return Summary.Value(tag=tag, image=image)


def _png_size(encoded: bytes, path: Path) -> tuple[int, int]:
    """Width and height stand at fixed places of every PNG."""
    assert encoded.startswith(b"\x89PNG\r\n\x1a\n"), f"{path} is no PNG"
    width, height = struct.unpack(">II", encoded[16:24])
    return width, height
