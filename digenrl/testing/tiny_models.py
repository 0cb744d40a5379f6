"""A tiny diffusers pipeline for every model family: all components of the real one, random weights.

Add a family's `TinyModel` to `TINY_MODELS`; the tests that run for every family then cover it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from digenrl.config.reading import ConfigError
from digenrl.models.contract import SampleSize
from digenrl.models.loading.pipelines import without_progress_bars
from digenrl.models.registry import find_family
from digenrl.testing import tiny_image_models as images
from digenrl.testing import tiny_video_models as videos


@dataclass(frozen=True, slots=True)
class TinyModel:
    """How a family's tiny pipeline is built, and the size of its samples.

    `build` takes a tokenizer of each kind, tiny ones by default.
    """

    build: Callable[..., Any]
    size: SampleSize


def make_tiny_pipeline(family: str, directory: Path, seed: int = 0) -> None:
    """Writes a family's tiny pipeline. The same seed writes the same weights; no network access is needed.

    The directory is created atomically; raises ConfigError if it exists and is not empty.
    """
    tiny = TINY_MODELS.get(find_family(family).name)
    if tiny is None:
        raise ConfigError(f"no tiny model of '{family}'; known: {', '.join(TINY_MODELS)}")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory}: exists and is not empty; name a new directory or empty this one")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be created: {error.strerror}") from None
    try:
        with without_progress_bars(), seeded_weights(seed):
            tiny.build().save_pretrained(partial)
        partial.chmod(0o755)  # mkdtemp's folders are private
        partial.replace(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def tiny_size(family: str) -> SampleSize:
    return TINY_MODELS[family].size


@contextmanager
def seeded_weights(seed: int) -> Iterator[None]:
    """Modules built inside get the same random weights every time; the caller's random state is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


IMAGE = SampleSize(height=32, width=32)
LARGER_IMAGE = SampleSize(height=64, width=64)  # of models with larger tokens, and of UNets of full size
VIDEO = SampleSize(height=32, width=32, frames=5)
LARGER_VIDEO = SampleSize(height=64, width=64, frames=9)

TINY_MODELS: dict[str, TinyModel] = {
    "sd3": TinyModel(images.tiny_sd3, IMAGE),
    "flux": TinyModel(images.tiny_flux, IMAGE),
    "flux_kontext": TinyModel(images.tiny_flux_kontext, IMAGE),
    "flux2_klein": TinyModel(images.tiny_flux2_klein, IMAGE),
    "flux2_dev": TinyModel(images.tiny_flux2_dev, IMAGE),
    "qwen_image": TinyModel(images.tiny_qwen_image, IMAGE),
    "qwen_image_edit": TinyModel(images.tiny_qwen_image_edit, IMAGE),
    "qwen_image_2_1": TinyModel(images.tiny_qwen_image_2_1, LARGER_IMAGE),
    "z_image": TinyModel(images.tiny_z_image, IMAGE),
    "sdxl": TinyModel(images.tiny_sdxl, LARGER_IMAGE),
    "sd15": TinyModel(images.tiny_sd15, LARGER_IMAGE),
    "wan": TinyModel(videos.tiny_wan, VIDEO),
    "wan_i2v": TinyModel(videos.tiny_wan_i2v, VIDEO),
    "hunyuan_video": TinyModel(videos.tiny_hunyuan_video, VIDEO),
    "hunyuan_video_1_5": TinyModel(videos.tiny_hunyuan_video_1_5, VIDEO),
    "hunyuan_video_1_5_i2v": TinyModel(videos.tiny_hunyuan_video_1_5_i2v, VIDEO),
    "ltx2": TinyModel(videos.tiny_ltx2, LARGER_VIDEO),
}
