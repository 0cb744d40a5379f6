"""Videos as files: H.264 in MP4 by the encoder in the package imageio-ffmpeg, or GIF where it is not installed.

Shape legend: F = frames, C = 3 colors, H, W = height and width.
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import numpy
import numpy.typing
from PIL import Image
from torch import Tensor

FRAMES_PER_S = 16
# Plays in every browser; visually lossless; encodes faster than a model generates.
_H264 = ("-c:v", "libx264", "-preset", "veryfast", "-crf", "18", "-pix_fmt", "yuv420p", "-movflags", "+faststart")


class ClipError(RuntimeError):
    """The encoder failed; no file was written."""


@cache
def mp4_encoder() -> str | None:
    """The path of ffmpeg; None if imageio-ffmpeg is not installed or has no encoder for this platform."""
    try:
        from imageio_ffmpeg import get_ffmpeg_exe

        return str(get_ffmpeg_exe())
    except (ImportError, RuntimeError):
        return None


def clip_suffix() -> str:
    """`.mp4`, or `.gif` without an encoder."""
    return ".gif" if mp4_encoder() is None else ".mp4"


def write_clip(pixels_FCHW: Tensor, path: Path) -> None:
    """Writes pixels in [0, 1] in the format of the path's suffix, `.mp4` or `.gif`."""
    frames_FHWC = (pixels_FCHW.permute(0, 2, 3, 1).numpy() * 255).round().clip(0, 255).astype(numpy.uint8)
    if path.suffix == ".gif":
        frames = [Image.fromarray(frame_HWC) for frame_HWC in frames_FHWC]
        duration_ms = 1000 // FRAMES_PER_S // 10 * 10  # GIFs count in hundredths of a second
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=duration_ms, loop=0)
        return
    encoder = mp4_encoder()
    assert encoder is not None, "`clip_suffix` says whether there is an encoder"
    _, height, width, _ = frames_FHWC.shape
    # H.264 with subsampled color needs even sides: the last row and column are repeated.
    even_FHWC = numpy.pad(frames_FHWC, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    _encode(encoder, even_FHWC, path)


def _encode(encoder: str, frames_FHWC: numpy.typing.NDArray[numpy.uint8], path: Path) -> None:
    _, height, width, _ = frames_FHWC.shape
    source = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(FRAMES_PER_S), "-i", "-")
    command = [encoder, "-y", "-loglevel", "error", *source, *_H264, str(path)]
    ended = subprocess.run(command, input=frames_FHWC.tobytes(), capture_output=True, check=False)
    if ended.returncode != 0:
        path.unlink(missing_ok=True)
        reason = " ".join(ended.stderr.decode(errors="replace").split()) or f"exit status {ended.returncode}"
        raise ClipError(f"{path.name}: the encoder failed: {reason}")
