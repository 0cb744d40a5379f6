"""The model families by name, in one visible dictionary."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from digenrl.config.reading import ConfigError, nearest
from digenrl.models.families.flux import FLUX
from digenrl.models.families.hunyuan_video import HUNYUAN_VIDEO
from digenrl.models.families.qwen_image import QWEN_IMAGE
from digenrl.models.families.sd3 import SD3
from digenrl.models.families.wan import WAN
from digenrl.models.family import Family
from digenrl.models.loading import without_progress_bars

FAMILIES: dict[str, Family] = {
    "sd3": SD3,
    "flux": FLUX,
    "qwen_image": QWEN_IMAGE,
    "wan": WAN,
    "hunyuan_video": HUNYUAN_VIDEO,
}


def find_family(name: str) -> Family:
    """The family of this name; an unknown one is answered with the nearest."""
    if name not in FAMILIES:
        raise ConfigError(f"unknown model family '{name}'; {nearest(name, list(FAMILIES))}")
    return FAMILIES[name]


def make_tiny_pipeline(family: str, directory: Path, seed: int = 0) -> None:
    """Writes a complete tiny pipeline with random weights, with no network; the directory is whole or absent.

    The same seed writes the same weights. A directory that exists and is not empty is never touched.
    """
    entry = find_family(family)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory}: exists and is not empty; name a new directory or empty this one")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be made: {error.strerror}") from None
    try:
        with without_progress_bars():
            entry.write_tiny(beside, seed)
        beside.chmod(0o755)  # mkdtemp's folders are private
        beside.replace(directory)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
