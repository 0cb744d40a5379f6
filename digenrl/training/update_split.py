"""Which update of a batch trains what. It depends on places alone, never on the order in which groups arrive."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from itertools import cycle
from math import ceil
from typing import Literal


class UpdateSplit:
    """The updates of a batch of `groups`, each split into `units_per_group`: samples, or pairs that are compared.

    An update trains some of the groups or, `of` samples, some units of every group. Samples at the first
    `stale_groups` places may come from older weights; updates get an equal share of these places.
    """

    def __init__(
        self,
        groups: int,
        units_per_group: int,
        updates: int,
        of: Literal["groups", "samples"] = "groups",
        stale_groups: int = 0,
    ) -> None:
        self._groups, self._units, self._updates, self._of = groups, units_per_group, updates, of
        self._update_of_place = updates_of_places(groups, updates, stale_groups)

    def places(self, update: int) -> list[int]:
        """The places of the groups that an update trains, ascending."""
        return [place for place in range(self._groups) if self.units(place, update)]

    def units(self, place: int, update: int) -> Sequence[int]:
        """The units of the group at a place that an update trains: positions in the list of its chosen units."""
        if self._of == "groups":
            return range(self._units if self._update_of_place[place] == update else 0)
        # Dealt in turn: samples of one slice, and so of one version, go to different updates.
        return range((update - place) % self._updates, self._units, self._updates)

    def last_update(self, place: int) -> int:
        """The last update that trains the group at a place."""
        return max(update for update in range(self._updates) if self.units(place, update))

    def most_units(self) -> int:
        """The most units of one group that an update trains."""
        return self._units if self._of == "groups" else -(-self._units // self._updates)


def stale_groups(stale_share: float, groups: int) -> int:
    """How many groups may have samples of older weights: those that are generated first."""
    return ceil(Decimal(repr(stale_share)) * groups)


def updates_of_places(groups: int, updates: int, stale_groups: int = 0) -> list[int]:
    """The update that each place belongs to, if an update trains whole groups.

    Groups complete roughly in the order of places, so an update gets consecutive places and can be committed
    before the batch is complete. Only the places of stale groups, which come first, are dealt in turn.

    >>> updates_of_places(groups=5, updates=2)
    [0, 0, 0, 1, 1]
    >>> updates_of_places(groups=6, updates=2, stale_groups=3)
    [0, 1, 0, 0, 1, 1]
    """
    in_order = [place * updates // groups for place in range(groups)]
    room = [in_order.count(update) for update in range(updates)]
    turns = cycle(range(updates))
    dealt: list[int] = []
    while len(dealt) < min(stale_groups, groups):
        update = next(turns)
        if room[update]:
            room[update] -= 1
            dealt.append(update)
    return dealt + [update for update in range(updates) for _ in range(room[update])]
