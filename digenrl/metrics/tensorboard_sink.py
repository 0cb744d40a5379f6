"""TensorBoard event files, written with the tensorboard package alone: no torch, no TensorFlow."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from digenrl.run_folder.folder import RunFolder
from digenrl.run_folder.metric_lines import EvaluationRecord

_FILE_VERSION = "brain.Event:2"
_NO_CURVES = {"step", "at_s", "version"}  # the axis itself


class TensorBoardSink:
    """Writes a new event file in the run's folder; the x axis counts optimizer steps done.

    A run resumed after `steps_done` steps overrides what earlier files say about later steps. Each step is in the
    file when `step` returns. There is no writer thread, as a step has few values; an image takes about 0.2 s per
    megabyte for its checksum.
    """

    def __init__(self, folder: RunFolder, steps_done: int, wall_clock: Callable[[], float]) -> None:
        self._run_folder, self._wall_clock = folder.path, wall_clock
        folder.tensorboard.mkdir(exist_ok=True)
        # TensorBoard reads files in the order of their names: later files need later names.
        number = sum(1 for _ in folder.tensorboard.glob("events.out.tfevents.*"))
        path = folder.tensorboard / f"events.out.tfevents.{number:06d}.{int(wall_clock())}"
        self._records = RecordWriter(path.open("xb"))
        self._write(Event(wall_time=wall_clock(), file_version=_FILE_VERSION))
        if number:
            restart = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=wall_clock(), step=steps_done + 1, session_log=restart))

    def step(self, metrics: Mapping[str, float]) -> None:
        values = [
            Summary.Value(tag=_tag(name), simple_value=value)
            for name, value in metrics.items()
            if name not in _NO_CURVES
        ]
        self._add(int(metrics["version"]), values)

    def evaluation(self, evaluation: EvaluationRecord) -> None:
        values = [
            Summary.Value(tag=f"evaluation/{name}", simple_value=value)
            for name, value in evaluation.values.items()
        ]
        if evaluation.grid is not None:
            values.append(_image("evaluation/samples", self._run_folder / evaluation.grid))
        self._add(evaluation.steps_done, values)

    def close(self) -> None:
        self._records.close()

    def _add(self, steps_done: int, values: list[Summary.Value]) -> None:
        self._write(Event(wall_time=self._wall_clock(), step=steps_done, summary=Summary(value=values)))

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()


def _tag(name: str) -> str:
    """TensorBoard groups curves by the prefix before the first slash."""
    return name if "/" in name else f"train/{name}"


def _image(tag: str, path: Path) -> Summary.Value:
    encoded = path.read_bytes()
    width, height = _png_size(encoded, path)
    image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=encoded)
    return Summary.Value(tag=tag, image=image)


def _png_size(encoded: bytes, path: Path) -> tuple[int, int]:
    """Width and height, which are at fixed offsets in every PNG."""
    assert encoded.startswith(b"\x89PNG\r\n\x1a\n"), f"{path} is not a PNG"
    width, height = struct.unpack(">II", encoded[16:24])
    return width, height
