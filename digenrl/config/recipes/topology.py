"""What each mode of a recipe means for the processes and cards of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["colocated", "local", "ray"]


@dataclass(frozen=True, slots=True)
class Topology:
    """Where the workers of a run live, and what they share.

    With `one_process` the trainer also generates and encodes, inside the driver's process. With `shares_cards`
    generation and training take turns on the same device. A topology that `publishes` sends each new weight
    version to the generators; one that `keeps_state` can replace a lost trainer from the state of its last commit.
    """

    uses_ray: bool
    one_process: bool
    shares_cards: bool
    publishes: bool
    keeps_state: bool


TOPOLOGIES: dict[Mode, Topology] = {
    "colocated": Topology(uses_ray=False, one_process=True, shares_cards=True, publishes=False, keeps_state=False),
    "local": Topology(uses_ray=False, one_process=False, shares_cards=False, publishes=True, keeps_state=True),
    "ray": Topology(uses_ray=True, one_process=False, shares_cards=False, publishes=True, keeps_state=True),
}
