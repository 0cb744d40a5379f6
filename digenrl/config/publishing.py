"""How new weight versions are sent to generators."""

from __future__ import annotations

from typing import Literal

from digenrl.config.reading import Frozen


class PublishSettings(Frozen):
    """The precision of published weights.

    With `auto`, weights that the model rounds to bfloat16 before every use are sent in bfloat16, which changes
    nothing. With `bfloat16`, all adapters are: a version has half the bytes, or a fifth as a patch. The trainer
    keeps float32 and recomputes the old log-probs, so the importance ratio is 1 before the first update; samples
    come from a slightly different policy.
    """

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
