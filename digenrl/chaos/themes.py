"""Themes of worlds: settings and faults that only together reach a rare state of the scheduler or the driver."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Theme:
    """The kinds of faults that strike, and what is fixed in a world; None is drawn."""

    kinds: tuple[str, ...] = ()
    shares_work: bool | None = None  # lanes generate and train
    scorers: tuple[int, ...] = (0, 1, 2, 2)  # numbers of reward lanes to draw from
    stale_shares: tuple[float, ...] = (0.0, 0.0, 0.25, 0.5, 1.0)
    wide_slices: bool = False  # a generator that makes two slices in parallel, each scored by itself
    evaluates: bool = False  # after every step
    least_generators: int = 1
    least_steps: int = 1
    publish_slices: tuple[float, ...] = (0, 0.1, 1, 5)  # times of a publication to draw from, in slices
    reserve: tuple[int, ...] = (0, 0, 1, 2)  # numbers of generators that may join


PLAIN = Theme()
THEMES = (
    Theme(("slice_loss", "slice_loss", "slow", "crash"), shares_work=False, scorers=(2, 3), wide_slices=True),
    Theme(
        ("chunk_loss", "chunk_loss", "slow"),
        shares_work=False,
        scorers=(1,),
        stale_shares=(1.0,),
        evaluates=True,
        least_generators=2,
        least_steps=3,
        publish_slices=(1, 5),
    ),
    Theme(("trainer_crash", "crash", "hang", "stop"), shares_work=True),
    Theme(
        ("weights_loss", "weights_loss", "late_export", "late_export", "crash"),
        shares_work=False,
        stale_shares=(1.0,),
        least_generators=2,
        least_steps=3,
    ),
    Theme(("reward_error", "reward_nan", "out_of_memory", "slow"), scorers=(0, 0, 1), least_generators=2),
    Theme(
        ("join", "join", "slow", "leave", "flap", "broken"),
        least_generators=2,
        least_steps=2,
        publish_slices=(1, 5),
        reserve=(1, 2),
    ),
)
THEMED_SHARE = 0.5  # of all small worlds


def draw_theme(dice: Random) -> Theme:
    """The theme of a small world; most often none."""
    return dice.choice(THEMES) if dice.random() < THEMED_SHARE else PLAIN
