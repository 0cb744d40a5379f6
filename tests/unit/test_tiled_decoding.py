"""A sample that does not fit in memory while it is decoded is decoded in tiles."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.generation.rollout import GeneratedSlice, decode_slice
from digenrl.models.contract import SampleSize
from digenrl.models.pipeline_model import PipelineModel
from digenrl.models.registry import FAMILIES
from digenrl.testing.tiny_models import make_tiny_pipeline, tiny_size

TILE = {"tile_sample_min_height": 32, "tile_sample_min_width": 32}
STRIDE = {"tile_sample_stride_height": 24, "tile_sample_stride_width": 24}


def tiny_model(family: str, folder: Path, memory_pixels: int) -> PipelineModel:
    """A tiny model with small tiles, whose decoder runs out of memory above this number of pixels."""
    if not folder.exists():
        make_tiny_pipeline(family, folder)
    model = FAMILIES[family].load(folder, text_encoders=False)
    vae: Any = model.vae
    if hasattr(vae, "tile_sample_min_size"):
        vae.tile_sample_min_size, vae.tile_latent_min_size = 32, 32 // model.pipeline.vae_scale_factor
    else:
        vae.enable_tiling(**TILE, **STRIDE)
        vae.disable_tiling()
    decoder = vae.decoder.forward

    def limited(latents: Tensor, *arguments: Any, **named: Any) -> Tensor:
        decoded: Tensor = decoder(latents, *arguments, **named)
        if decoded.shape[-1] * decoded.shape[-2] > memory_pixels:
            raise torch.OutOfMemoryError("no room")
        return decoded

    vae.decoder.forward = limited
    return model


def decoded(model: PipelineModel, size: SampleSize) -> Tensor:
    # Smooth in space: a decoder with random weights normalizes every tile of noise differently.
    shape = model.noise_shape(size)
    even_B = torch.randn(2, shape[0], *[1] * (len(shape) - 1), generator=torch.Generator().manual_seed(0))
    noise_B = even_B.expand(2, *shape).contiguous()
    return decode_slice(model, GeneratedSlice(size, (), model.initial_latents(noise_B, size)))


# The largest mean difference, in standard deviations. SD3's VAE normalizes over space and so depends on the tile,
# which random weights show more than trained ones.
@pytest.mark.parametrize(("family", "difference"), [("qwen_image", 0.2), ("sd3", 1.5)])
def test_tiles_agree_with_the_whole_and_small_samples_are_not_cut(
    family: str, difference: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    large, small = SampleSize(64, 64, tiny_size(family).frames), SampleSize(32, 32, tiny_size(family).frames)
    roomy, narrow = (tiny_model(family, tmp_path / "tiny", pixels) for pixels in (64 * 64, 48 * 48))
    whole_small = decoded(narrow, small)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        tiled = decoded(narrow, large)
    assert len(caplog.records) == 1  # said once, although there are two samples
    whole = decoded(roomy, large)
    assert tiled.shape == whole.shape and not torch.equal(tiled, whole)
    assert (tiled - whole).abs().mean() < difference * whole.std()
    assert torch.equal(decoded(narrow, small), whole_small)


def test_a_sample_that_does_not_even_fit_in_tiles_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="decoding"):
        decoded(tiny_model("sd3", tmp_path / "tiny", memory_pixels=16 * 16), SampleSize(64, 64))
