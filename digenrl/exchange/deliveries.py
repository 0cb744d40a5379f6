"""Messages between the driver, the sender and the receivers of a broadcast. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

STALL_TIMEOUT_S = 15.0
SLOWEST_BYTES_PER_S = 0.25e6  # of a link over which nothing was sent yet


@dataclass(frozen=True, slots=True)
class BroadcastLimits:
    """How long a broadcast may take, its members may take to join, and it may make no progress after that."""

    timeout_s: float
    join_timeout_s: float
    stall_timeout_s: float = STALL_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Delivery:
    """A broadcast that all receivers have confirmed: bytes sent to each, and seconds in all and after joining."""

    bytes: int
    seconds: float
    sending_s: float
