"""The links between the stages of a trainer, as the recipe wants them."""

from __future__ import annotations

from digenrl.config.training import StageLinkSettings
from digenrl.stages.codec_choice import Codec, LinkCodecs
from digenrl.stages.links import LinkSettings


def link_settings(settings: StageLinkSettings) -> LinkSettings:
    """The same for all links."""
    codecs = LinkCodecs(Codec(settings.activations, settings.ratio), Codec(settings.gradients, settings.ratio))
    return LinkSettings(codecs, settings.deadline_s)
