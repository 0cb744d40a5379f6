"""Images of prompts, sources and pairs: reads, checks and resizes them. Needs Pillow, and no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from math import sqrt
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from digenrl.config.reading import ConfigError, one_line
from digenrl.config.recipes.prompts import PromptSettings
from digenrl.config.recipes.recipe import SourceSize
from digenrl.prompts.sources import ImageSource, Prompt, images_in

MULTIPLE = 32  # of the sides of sources that keep their aspect ratio
RESAMPLING = Image.Resampling.LANCZOS


def check_images(prompts: Sequence[Prompt]) -> None:
    """Raises ConfigError if an image is missing or not an image; reads headers only."""
    for prompt in prompts:
        _check_headers((*prompt.images, *prompt.pair), prompt.where)


def check_named_images(prompts: Sequence[Prompt], key: str, settings: PromptSettings) -> None:
    """Likewise, for the images that `named_images` reads."""
    for prompt in prompts:
        _check_headers(_named(prompt.metadata, key, settings, prompt.where), prompt.where)


def named_images(
    metadata: Mapping[str, Any], key: str, settings: PromptSettings, where: str
) -> tuple[Image.Image, ...]:
    """The image that a prompt's metadata names under this key, for rewards: RGB, upright, at its own size.

    Empty if it names none. Raises ConfigError if it cannot be read.
    """
    return tuple(_decoded(_content(image, where), where) for image in _named(metadata, key, settings, where))


def decode_images(prompts: Sequence[Prompt], most: int, report: Callable[[int, int], None]) -> int:
    """Decodes each image once, one at a time, up to `most` of them; returns how many.

    Raises ConfigError for the first that cannot be decoded. `report` gets how many are done, and of how many.
    """
    where = {image: prompt.where for prompt in reversed(prompts) for image in (*prompt.pair, *prompt.images)}
    images = list(reversed(where))[:most]
    for done, image in enumerate(images):
        report(done, len(images))
        _decoded(_content(image, where[image]), where[image], _image_name(image))
    return len(images)


def image_bytes(prompt: Prompt) -> tuple[bytes, ...]:
    """The content of the prompt's source images; raises ConfigError if one cannot be read."""
    return tuple(_content(image, prompt.where) for image in prompt.images)


def pair_bytes(prompt: Prompt) -> tuple[bytes, ...]:
    """Likewise, of its chosen and its rejected image; empty if it has none."""
    return tuple(_content(image, prompt.where) for image in prompt.pair)


def read_images(
    contents: Sequence[bytes], where: str, height: int, width: int, rule: SourceSize
) -> tuple[Image.Image, ...]:
    """The images of a prompt for samples of this size: RGB, upright, resized by the rule.

    Transparent pixels become white. Raises ConfigError if one cannot be decoded.
    """
    return tuple(resized(_decoded(content, where), height, width, rule) for content in contents)


def resized(image: Image.Image, height: int, width: int, rule: SourceSize) -> Image.Image:
    """The image at the size of the samples (`crop`), or at about their area (`area`)."""
    if rule == "crop":
        return image if image.size == (width, height) else ImageOps.fit(image, (width, height), RESAMPLING)
    target = size_of_area(image.size, height * width)
    return image if image.size == target else image.resize(target, RESAMPLING)


def shown_source(prompt: Prompt, height: int, width: int, rule: SourceSize) -> Image.Image:
    """The prompt's first source image as it is shown beside a sample of this size; black if it has none."""
    if not prompt.images:
        return Image.new("RGB", (width, height))
    content = image_bytes(prompt)[:1]
    return ImageOps.pad(read_images(content, prompt.where, height, width, rule)[0], (width, height))


def probe_image(height: int, width: int) -> Image.Image:
    """A picture with a gradient in every color, in place of a user's."""
    across = Image.linear_gradient("L").resize((width, height))
    down = Image.linear_gradient("L").rotate(90).resize((width, height))
    return Image.merge("RGB", (across, down, ImageOps.invert(across)))


def as_png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def size_of_area(size: tuple[int, int], area: int) -> tuple[int, int]:
    """(width, height) of about this area, in the proportions of `size`, as multiples of 32.

    >>> size_of_area((1500, 1000), 1024 * 1024)
    (1248, 832)
    """
    ratio = size[0] / size[1]
    width = sqrt(area * ratio)
    return max(1, round(width / MULTIPLE)) * MULTIPLE, max(1, round(width / ratio / MULTIPLE)) * MULTIPLE


def _decoded(content: bytes, where: str, named: str = "an image of it") -> Image.Image:
    with _opened(content, where) as image:
        try:
            upright = ImageOps.exif_transpose(image)
        except (OSError, SyntaxError, ValueError) as error:
            raise ConfigError(f"{where}: {named} cannot be decoded: {one_line(error)}; replace it") from None
        if upright.mode.startswith("I"):  # 16 bits per pixel, which Pillow would cut at 255
            return upright.convert("I").point(lambda value: value * (1 / 257)).convert("L").convert("RGB")
        if not upright.has_transparency_data:
            return upright.convert("RGB")
        layers = upright.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers).convert("RGB")


def _named(metadata: Mapping[str, Any], key: str, settings: PromptSettings, where: str) -> tuple[ImageSource, ...]:
    return () if settings.path is None else tuple(images_in(metadata.get(key), key, settings, where))


def _check_headers(images: Sequence[ImageSource], where: str) -> None:
    for image in images:
        with _opened(image, where):
            pass


def _opened(image: ImageSource, where: str) -> Image.Image:
    try:
        opened = Image.open(image if isinstance(image, Path) else BytesIO(image))
        if opened.mode == "F":
            raise OSError("its pixels are floating-point numbers; save it with 8 or 16 bits per color")
        return opened
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise _unreadable(image, where, error) from None


def _content(image: ImageSource, where: str) -> bytes:
    try:
        return image.read_bytes() if isinstance(image, Path) else image
    except OSError as error:
        raise _unreadable(image, where, error) from None


def _unreadable(image: ImageSource, where: str, error: Exception) -> ConfigError:
    named = _image_name(image)
    if isinstance(error, FileNotFoundError):
        relative = "" if where.startswith("--") else "; paths are relative to the file of the prompts"
        return ConfigError(f"{where}: {named} does not exist{relative}")
    if isinstance(error, UnidentifiedImageError):
        return ConfigError(f"{where}: {named} is not an image that Pillow can read, such as PNG or JPEG")
    return ConfigError(f"{where}: {named} cannot be read: {one_line(error)}")


def _image_name(image: ImageSource) -> str:
    return f"the image {image}" if isinstance(image, Path) else f"an image of {len(image)} bytes"
