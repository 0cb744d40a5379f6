"""The pictures and prompts of the editing demo: a shape on a plain background, to be painted in another color.

python tools/demo/edit_pictures.py digenrl/demo/prompts     # writes edits.jsonl and edits_held_out.jsonl
"""

from __future__ import annotations

import argparse
import base64
import json
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from random import Random

import numpy
import torch
from PIL import Image, ImageDraw
from torch import Tensor

SIDE, OVERSAMPLING = 32, 4
SHAPES = ("circle", "square", "triangle")
COLORS = {
    "red": (214, 48, 49),
    "green": (39, 174, 96),
    "blue": (41, 98, 220),
    "yellow": (241, 196, 15),
    "purple": (142, 68, 173),
    "orange": (236, 122, 28),
}
TRAINED, HELD_OUT = 600, 128
WORDS = ("paint", "the", *SHAPES, *COLORS)

Color = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Edit:
    """One case: a shape of a color on a background, and the color it is to get."""

    shape: str
    x: float
    y: float
    radius: float
    background: Color
    old: str
    new: str

    @property
    def prompt(self) -> str:
        return f"paint the {self.shape} {self.new}"

    def source(self) -> Image.Image:
        """The picture with smooth edges."""
        large = Image.new("RGB", (SIDE * OVERSAMPLING,) * 2, self.background)
        x, y, r = (value * OVERSAMPLING for value in (self.x, self.y, self.radius))
        pen, color = ImageDraw.Draw(large), COLORS[self.old]
        if self.shape == "circle":
            pen.ellipse((x - r, y - r, x + r, y + r), fill=color)
        elif self.shape == "square":
            pen.rectangle((x - r, y - r, x + r, y + r), fill=color)
        else:
            pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=color)
        return large.resize((SIDE, SIDE), Image.Resampling.BOX)

    def target(self) -> Image.Image:
        """The picture after the edit."""
        return replace(self, old=self.new).source()

    def as_json_line(self) -> str:
        """A line of a file of prompts; the picture is part of it."""
        file = BytesIO()
        self.source().save(file, format="PNG", optimize=True)
        image = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        colors = {"background": self.background, "from": COLORS[self.old], "to": COLORS[self.new]}
        return json.dumps({"prompt": self.prompt, **colors, "image": image})


def draw_edit(random: Random) -> Edit:
    """A random case."""
    radius = random.uniform(6, 11)
    x, y = (random.uniform(radius + 1, SIDE - radius - 1) for _ in range(2))
    old, new = random.sample(list(COLORS), 2)
    light = random.randint(150, 235)
    red, green, blue = (min(255, light + random.randint(-15, 15)) for _ in range(3))
    return Edit(random.choice(SHAPES), x, y, radius, (red, green, blue), old, new)


def as_pixels(images: list[Image.Image]) -> Tensor:
    """Input of a VAE: (N, 3, 32, 32) in [-1, 1]."""
    pixels_NHWC = numpy.stack([numpy.asarray(image) for image in images])
    return torch.from_numpy(pixels_NHWC).permute(0, 3, 1, 2).float() / 127.5 - 1


def main() -> None:
    """Writes both files of prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    random = Random(0)
    for name, count in (("edits", TRAINED), ("edits_held_out", HELD_OUT)):
        lines = [draw_edit(random).as_json_line() for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
