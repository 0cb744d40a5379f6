"""The scheduler: pure functions. No clock, no randomness, no I/O, no torch, no Ray."""

from digenrl.scheduling.decide import decide
from digenrl.scheduling.state import SchedulerState, initial_state
from digenrl.scheduling.terms import Costs, Terms

__all__ = ["Costs", "SchedulerState", "Terms", "decide", "initial_state"]
