"""The links between the stages of a trainer, as the recipe wants them, and when their codecs are too coarse."""

from __future__ import annotations

import logging

from digenrl.config.training import CodecName, StageLinkSettings
from digenrl.stages.codec_choice import Codec, LinkCodecs
from digenrl.stages.links import LinkSettings, StageLinks

logger = logging.getLogger(__name__)

MISMATCH_SHARE = 0.1  # of the clip range
MILDER: dict[CodecName, CodecName] = {"top_k": "int4", "int4": "int8", "int8": "bf16", "bf16": "none"}


def link_settings(settings: StageLinkSettings) -> LinkSettings:
    """The same for all links."""
    if settings.activations == "top_k":
        logger.warning(
            "training.links.activations: top_k drops most of what blocks compute; a run may not learn at all, "
            "and int8 or int4 send as few bytes with far smaller errors"
        )
    codecs = LinkCodecs(Codec(settings.activations, settings.ratio), Codec(settings.gradients, settings.ratio))
    return LinkSettings(codecs, settings.deadline_s)


def fall_back(links: StageLinks, mismatch: float | None, clip_range: float | None) -> None:
    """Sends activations with a milder codec if the trained policy differs too much from the one that generated.

    `mismatch` is the mean difference of their log-probs. All stages are called with the same values.
    """
    codec = links.activations
    if codec is None or mismatch is None or clip_range is None or mismatch <= MISMATCH_SHARE * clip_range:
        return
    if codec.name in MILDER:
        links.activations = Codec(MILDER[codec.name])
        if links.is_first:
            logger.warning(
                "log_prob_mismatch is %.1e with activations in %s, more than a tenth of the clip range %.1e; "
                "activations are sent in %s from now on",
                mismatch,
                codec.name,
                clip_range,
                MILDER[codec.name],
            )
