"""The links between the stages of a trainer: which codecs they use, and when these are too coarse."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from digenrl.config.recipes.training import CodecChoice, CodecName, StageLinkSettings
from digenrl.stages.codec_choice import ACTIVATION_CODECS, GRADIENT_CODECS, Codec, LinkCodecs, mildest_codec
from digenrl.stages.links import LinkSettings, Traffic
from digenrl.training.ranks.rank_group import RankGroup

logger = logging.getLogger(__name__)

MISMATCH_SHARE = 0.1  # of the clip range
MILDER: dict[CodecName, CodecName] = {
    "bf16": "none",
    "int8": "bf16",
    "int4": "int8",
    "top_k": "int4",
    "sampled": "int4",
}


@dataclass(frozen=True, slots=True)
class StageReport:
    """What a stage has measured: the seconds of a pack, and both directions of its links."""

    computing_s: float
    forward: Traffic = Traffic()  # noqa: RUF009  it is frozen
    backward: Traffic = Traffic()  # noqa: RUF009

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> StageReport:
        """The inverse of `asdict`."""
        return cls(content["computing_s"], Traffic(**content["forward"]), Traffic(**content["backward"]))


def link_settings(settings: StageLinkSettings) -> LinkSettings:
    """The same for all links. With `auto`, nothing is coded before the links were measured."""
    if settings.activations in ("top_k", "sampled"):
        logger.warning(
            "training.links.activations: %s drops most of what blocks compute; a run may not learn at all, "
            "and int8 or int4 send as few bytes with far smaller errors",
            settings.activations,
        )
    first = LinkCodecs(_first(settings.activations, settings.ratio), _first(settings.gradients, settings.ratio))
    return LinkSettings(first, settings.deadline_s)


def choose_codecs(settings: StageLinkSettings, reports: Sequence[StageReport]) -> tuple[LinkCodecs, ...]:
    """For each link the mildest codecs with which it is no slower than the slowest stage, where they are `auto`.

    The reports are of all stages, without codecs where they are to be chosen.
    """
    slowest = max(report.computing_s for report in reports)

    def chosen(wanted: CodecChoice, names: Sequence[CodecName], sent: Traffic, received: Traffic) -> Codec:
        if wanted != "auto":
            return _first(wanted, settings.ratio)
        if not (sent.values and received.bytes_per_s):
            return Codec()
        return mildest_codec(names, round(sent.values), round(sent.value_bytes), received.bytes_per_s, slowest)

    return tuple(
        LinkCodecs(
            chosen(settings.activations, ACTIVATION_CODECS, before.forward, after.forward),
            chosen(settings.gradients, GRADIENT_CODECS, after.backward, before.backward),
        )
        for before, after in pairwise(reports)
    )


def milder_codecs(codecs: Sequence[LinkCodecs]) -> tuple[LinkCodecs, ...]:
    """One codec milder for the activations of the links whose codec is the coarsest."""
    order = ["none", *MILDER]
    coarsest = max(order.index(each.activations.name) for each in codecs)
    return tuple(
        replace(each, activations=Codec(MILDER[each.activations.name]))
        if coarsest and order.index(each.activations.name) == coarsest
        else each
        for each in codecs
    )


class LinkControl:
    """Decides how the links of a trainer's stages code what they send; all stages decide the same.

    Codecs change only between batches, and are part of the trainer's state: a batch that is trained again, also by
    a resumed run, has the same ones.
    """

    def __init__(self, ranks: RankGroup, settings: StageLinkSettings) -> None:
        self._ranks, self._settings, self._pipeline = ranks, settings, ranks.pipeline()
        self._given = self._pipeline.links.codecs
        self._mismatch: float | None = None
        self._set_decided(not settings.measures)

    def note_mismatch(self, mismatch: float | None) -> None:
        """The mean difference of log-probs from those of the rollout, if an update has it; equal on all stages."""
        self._mismatch = self._mismatch if mismatch is None else mismatch

    def finish_batch(self, clip_range: float | None) -> None:
        """Chooses codecs that were not known yet; takes milder ones if log-probs differ too much. A collective."""
        mismatch, self._mismatch = self._mismatch, None
        links = self._pipeline.links
        if not self._decided:
            links.use_codecs(choose_codecs(self._settings, self._reports()))
            self._set_decided(True)
            self._log("training.links: measured; links are coded as %s", _shown(links.codecs))
            return
        if mismatch is None or clip_range is None or mismatch <= MISMATCH_SHARE * clip_range:
            return
        milder = milder_codecs(links.codecs)
        if milder != links.codecs:
            self._log(
                "log_prob_mismatch is %.1e, more than a tenth of the clip range %.1e; links were coded as %s, and "
                "are as %s from now on",
                *(mismatch, clip_range, _shown(links.codecs), _shown(milder)),
            )
            links.use_codecs(milder)

    def state(self) -> dict[str, Any] | None:
        """The decision, as content that JSON can represent; None before there is one."""
        if not self._decided:
            return None
        return {"wanted": self._wanted(), "codecs": [asdict(each) for each in self._pipeline.links.codecs]}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Takes a decision that was made for the same settings and as many links; else starts over."""
        known = state if state is not None and state["wanted"] == self._wanted() else None
        if known is not None and len(known["codecs"]) == len(self._given):
            codecs = [
                LinkCodecs(Codec(**each["activations"]), Codec(**each["gradients"])) for each in known["codecs"]
            ]
            self._pipeline.links.use_codecs(tuple(codecs))
            self._set_decided(True)
            return
        self._pipeline.links.use_codecs(self._given)
        self._set_decided(not self._settings.measures)

    def _set_decided(self, decided: bool) -> None:
        self._decided, self._pipeline.measures = decided, not decided

    def _reports(self) -> list[StageReport]:
        own = StageReport(self._pipeline.computing_s, **self._pipeline.links.traffic)
        return [StageReport.from_json(each) for each in self._ranks.gather(asdict(own))]

    def _wanted(self) -> dict[str, Any]:
        return self._settings.model_dump(include={"activations", "gradients", "ratio"})

    def _log(self, text: str, *values: Any) -> None:
        if self._ranks.rank.is_first:
            logger.warning(text, *values)


def _first(wanted: CodecChoice, ratio: float) -> Codec:
    return Codec() if wanted == "auto" else Codec(wanted, ratio)


def _shown(codecs: Sequence[LinkCodecs]) -> str:
    """For each link, activations and gradients."""
    return ", ".join(f"{each.activations} / {each.gradients}" for each in codecs)
