"""The model families by name.

To add a family, write its file in `digenrl/models/families/`, list it here, and add a recipe and a tiny pipeline
(`digenrl/testing/tiny_models.py`). A family outside of this package is named by its import path instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from digenrl.config.import_paths import import_object
from digenrl.config.reading import ConfigError, nearest
from digenrl.models.families.flux import FLUX
from digenrl.models.families.flux2_dev import FLUX2_DEV
from digenrl.models.families.flux2_klein import FLUX2_KLEIN
from digenrl.models.families.flux_kontext import FLUX_KONTEXT
from digenrl.models.families.hunyuan_video import HUNYUAN_VIDEO
from digenrl.models.families.hunyuan_video_1_5 import HUNYUAN_VIDEO_1_5
from digenrl.models.families.hunyuan_video_1_5_i2v import HUNYUAN_VIDEO_1_5_I2V
from digenrl.models.families.ltx2 import LTX2
from digenrl.models.families.qwen_image import QWEN_IMAGE
from digenrl.models.families.qwen_image_2_1 import QWEN_IMAGE_2_1
from digenrl.models.families.qwen_image_edit import QWEN_IMAGE_EDIT
from digenrl.models.families.sd3 import SD3
from digenrl.models.families.sd15 import SD15
from digenrl.models.families.sdxl import SDXL
from digenrl.models.families.wan import WAN
from digenrl.models.families.wan_i2v import WAN_I2V
from digenrl.models.families.z_image import Z_IMAGE
from digenrl.models.family import Family
from digenrl.models.loading.sources import WrongPipelineError

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        SD3,
        FLUX,
        FLUX_KONTEXT,
        FLUX2_KLEIN,
        FLUX2_DEV,
        QWEN_IMAGE,
        QWEN_IMAGE_EDIT,
        QWEN_IMAGE_2_1,
        Z_IMAGE,
        SDXL,
        SD15,
        WAN,
        WAN_I2V,
        HUNYUAN_VIDEO,
        HUNYUAN_VIDEO_1_5,
        HUNYUAN_VIDEO_1_5_I2V,
        LTX2,
    )
}


@contextmanager
def naming_families(family: Family) -> Iterator[None]:
    """Adds to an error about the class of a pipeline which family takes it."""
    try:
        yield
    except WrongPipelineError as error:
        fitting = [each.name for each in FAMILIES.values() if each.pipeline_class.__name__ == error.found]
        known = ", ".join(f"{each.name} ({each.pipeline_class.__name__})" for each in FAMILIES.values())
        hint = f"set model.family={fitting[0]}" if fitting else f"no family takes it; known: {known}"
        raise ConfigError(
            f"{error.location}: holds a {error.found}, model.family={family.name} takes a {error.expected}; {hint}"
        ) from None


def find_family(name: str) -> Family:
    """The family of a registered name or of an import path, `package.module:NAME`; raises ConfigError."""
    if ":" in name:
        family = import_object(name, what="model family", kind="family")
        if not isinstance(family, Family):
            raise ConfigError(
                f"model family '{name}': expected a digenrl.models.family.Family, got {family!r}; make one with "
                "Family(...), or from an existing one with dataclasses.replace(FAMILY, model_class=...)"
            )
        if missing := family.missing():
            raise ConfigError(f"model family '{name}': {family.model_class!r} lacks {', '.join(missing)}; add it")
        return family
    if name not in FAMILIES:
        raise ConfigError(
            f"unknown model family '{name}'; {nearest(name, list(FAMILIES))}; to add one, write "
            f"digenrl/models/families/{name}.py and list it in digenrl/models/registry.py, or name your own as "
            "package.module:NAME"
        )
    return FAMILIES[name]
