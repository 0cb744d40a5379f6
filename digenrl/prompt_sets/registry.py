"""All prompt sets by name. To add one, write its grammar in this package and list it here."""

from __future__ import annotations

from digenrl.prompt_sets.contract import PromptSet
from digenrl.prompt_sets.motions import MOTIONS
from digenrl.prompt_sets.objects import COLORS, COUNTS, OBJECTS, POSITIONS
from digenrl.prompt_sets.scenes import SCENES
from digenrl.prompt_sets.signs import OCR_SIGNS

PROMPT_SETS: dict[str, PromptSet] = {
    each.name: each for each in (OCR_SIGNS, OBJECTS, COUNTS, COLORS, POSITIONS, SCENES, MOTIONS)
}
