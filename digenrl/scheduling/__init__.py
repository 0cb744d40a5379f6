"""The scheduler: pure functions. No clock, no randomness, no I/O, no torch, no Ray."""

from digenrl.scheduling.decide import decide
from digenrl.scheduling.state import RecordedStep, SchedulerState, initial_state
from digenrl.scheduling.terms import Costs, SharedWorkRule, Terms

__all__ = ["Costs", "RecordedStep", "SchedulerState", "SharedWorkRule", "Terms", "decide", "initial_state"]
