"""How plans are judged: by the production scheduler on a virtual clock."""

from __future__ import annotations

from digenrl.config.spec import Spec
from digenrl.simulation.answer import Answer
from digenrl.simulation.quick import quick_makespan
from digenrl.simulation.simulator import simulate


def predicted_makespan(spec: Spec) -> float:
    """Seconds until the last commit, from the scheduler's own forecast: milliseconds a SPEC."""
    return quick_makespan(spec)


def full_answer(spec: Spec) -> Answer:
    """Everything the simulator says about a SPEC."""
    return simulate(spec).answer
