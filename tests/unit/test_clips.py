"""Videos as MP4 files, beside the grids of evaluations and in the report."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from handmade_runs import write_run
from PIL import Image
from torch import Tensor

from digenrl.report.grids import grids
from digenrl.run_folder.folder import RunFolder
from digenrl.run_folder.grids import HeldOutScore, clip_of, write_grid
from digenrl.run_folder.reading import read_run
from digenrl.worker.clips import ClipError, clip_suffix, mp4_encoder, write_clip
from digenrl.worker.pictures import picture_files

LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)  # one frame each


def video(height: int = 31, width: int = 33) -> Tensor:
    """Frames of one color, which becomes brighter."""
    levels_F = torch.tensor(LEVELS).view(-1, 1, 1, 1)
    return levels_F * torch.tensor([1.0, 0.8, 0.4]).view(1, 3, 1, 1).expand(len(LEVELS), 3, height, width)


@pytest.fixture
def encoder() -> str:
    pytest.importorskip("imageio_ffmpeg")
    path = mp4_encoder()
    assert path is not None
    return path


@pytest.fixture
def no_encoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the package were not installed."""
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    mp4_encoder.cache_clear()
    yield
    mp4_encoder.cache_clear()


def decoded(encoder: str, path: Path, height: int, width: int) -> numpy.ndarray:
    """All frames of a clip, (frames, height, width, 3)."""
    command = [encoder, "-loglevel", "error", "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    content = subprocess.run(command, capture_output=True, check=True).stdout
    return numpy.frombuffer(content, numpy.uint8).reshape(-1, height, width, 3)


def test_a_clip_is_h264_with_every_frame_in_order_and_even_sides(encoder: str, tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    write_clip(video(31, 33), path)
    frames = decoded(encoder, path, height=32, width=34)
    shown = numpy.array(LEVELS)[:, None] * numpy.array([1.0, 0.8, 0.4]) * 255
    assert numpy.abs(frames.mean(axis=(1, 2)) - shown).max() < 6  # of 255
    streams = subprocess.run([encoder, "-i", str(path)], capture_output=True, text=True, check=False).stderr
    assert "h264" in streams and "yuv420p" in streams and "16 fps" in streams


def test_a_clip_that_cannot_be_written_is_an_error_without_a_file(encoder: str, tmp_path: Path) -> None:
    with pytest.raises(ClipError, match=r"clip\.mp4"):
        write_clip(video(), tmp_path / "absent" / "clip.mp4")
    assert not (tmp_path / "absent").exists()


def test_without_an_encoder_clips_are_gifs_and_evaluations_have_images_only(
    no_encoder: None, tmp_path: Path
) -> None:
    assert clip_suffix() == ".gif"
    write_clip(video(), tmp_path / "clip.gif")
    with Image.open(tmp_path / "clip.gif") as clip:
        assert (getattr(clip, "n_frames", 1), clip.size) == (len(LEVELS), (33, 31))
        assert clip.info["duration"] > 0
    assert list(picture_files(video()[None], first=0, shown=1)) == ["0000.png"]


def test_the_clips_of_an_evaluation_are_beside_its_grid_and_in_the_report(encoder: str, tmp_path: Path) -> None:
    folder, pictures = RunFolder.open(write_run(tmp_path / "run")), tmp_path / "pictures"
    pictures.mkdir()
    for name, content in picture_files(video()[None].expand(2, -1, -1, -1, -1), first=0, shown=4).items():
        (pictures / name).write_bytes(content)
    scores = [HeldOutScore(f"prompt {index}", 0.5, {}) for index in range(2)]
    grid = write_grid(folder, 2, pictures, scores)
    assert not pictures.exists()
    assert len(decoded(encoder, clip_of(grid, 1), height=32, width=34)) == len(LEVELS)
    before, after = grids(read_run(folder.path))["shown"]
    assert [cell["clip"] for cell in before["cells"]] == [None] * 4
    for number, cell in enumerate(after["cells"]):
        kind, _, content = cell["clip"].partition(";base64,")
        assert (kind, base64.b64decode(content)) == ("data:video/mp4", clip_of(grid, number).read_bytes())


def test_images_have_no_clips(encoder: str) -> None:
    assert list(picture_files(video()[None, :1], first=3, shown=4)) == ["0003.png"]
