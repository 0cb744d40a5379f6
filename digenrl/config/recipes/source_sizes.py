"""How source images are resized for samples of a given size."""

from typing import Literal

SourceSize = Literal["crop", "area"]
