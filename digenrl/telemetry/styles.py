"""The style of each kind of work: a letter, colors and a label, the same in every chart."""

from __future__ import annotations

import math
from dataclasses import dataclass

from digenrl.telemetry.trace import Span, Work


@dataclass(frozen=True, slots=True)
class WorkStyle:
    """The letter for charts without color, the legend's label, and the colors."""

    letter: str
    label: str
    fill: str
    ink: str
    stale: bool = False


_FRESH = {  # in the order of the legends: that of a sample's life
    Work.GENERATE: WorkStyle("g", "generate", fill="#4f86d9", ink="#ffffff"),
    Work.HELP: WorkStyle("h", "trainer helps generate", fill="#17876f", ink="#ffffff"),
    Work.SCORE: WorkStyle("r", "score (reward)", fill="#b694d8", ink="#2b1b3d"),
    Work.TRAIN: WorkStyle("T", "train", fill="#f2a541", ink="#3d2600"),
    Work.SEND: WorkStyle("d", "send gradients", fill="#c65d2e", ink="#ffffff"),
    Work.COMMIT: WorkStyle("C", "commit (optimizer step)", fill="#2f3640", ink="#ffffff"),
    Work.SWITCH: WorkStyle("x", "switch of role", fill="#8d96a3", ink="#ffffff"),
    Work.PUBLISH: WorkStyle("p", "publish weights", fill="#d6487b", ink="#ffffff"),
    Work.EVALUATE: WorkStyle("e", "evaluate", fill="#3fa7b5", ink="#06292e"),
    Work.SAVE: WorkStyle("w", "save (write a checkpoint)", fill="#8a5a3c", ink="#ffffff"),
    Work.RESTORE: WorkStyle("R", "restore a lost trainer", fill="#6b7a2f", ink="#ffffff"),
    Work.CALIBRATE: WorkStyle("k", "calibrate a new lane", fill="#c9b458", ink="#2e2700"),
}
_STALE = {
    Work.GENERATE: WorkStyle("s", "generate, stale weights", fill="#a9c4ee", ink="#12305f", stale=True),
    Work.HELP: WorkStyle("H", "trainer helps, stale weights", fill="#8cc9b9", ink="#063b30", stale=True),
}
LEGEND_ORDER = tuple(styles[work] for work in _FRESH for styles in (_FRESH, _STALE) if work in styles)


def style_of(span: Span) -> WorkStyle:
    return _STALE[span.work] if span.stale else _FRESH[span.work]


def fresh_style(work: Work) -> WorkStyle:
    """The style of a kind of work on weights that are not stale."""
    return _FRESH[work]


def styles_in(spans: tuple[Span, ...]) -> tuple[WorkStyle, ...]:
    """The styles that occur in these spans, in the legend's order."""
    present = {style_of(span) for span in spans}
    return tuple(style for style in LEGEND_ORDER if style in present)


def percent(share: float) -> str:
    """A share in whole percent, halves rounded up, as in the report; only exact values read 0 % or 100 %.

    >>> percent(0.9999), percent(1.0), percent(0.123), percent(0.125)
    ('99 %', '100 %', '12 %', '13 %')
    """
    rounded = math.floor(100 * share + 0.5)
    if rounded == 100 and share < 1:
        rounded = 99
    if rounded == 0 and share > 0:
        rounded = 1
    return f"{rounded} %"
