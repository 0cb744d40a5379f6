"""What the planner hands back."""

from __future__ import annotations

from dataclasses import dataclass

from digenrl.config.spec import Spec
from digenrl.planning.bounds import Pace
from digenrl.planning.layout import Layout
from digenrl.planning.memory import MemoryReport
from digenrl.planning.workload import Workload


@dataclass(frozen=True)
class Plan:
    """One split with its best slices and policy, and what the simulator says of it. `spec` is ready to run.

    `step_s` is a step's time once the pipeline is full. Memory is None where a measurement shows that it fits.
    """

    layout: Layout
    pace: Pace
    spec: Spec
    makespan_s: float
    step_s: float
    samples_per_second: float
    efficiency: float
    generator_busy: float
    trainer_busy: float
    usd_per_1000_samples: float
    slices: tuple[int, ...]  # one per pool of layout.generators
    generator_memory: tuple[MemoryReport | None, ...]  # likewise
    trainer_memory: MemoryReport | None
    why: str = ""

    @property
    def step_generating_s(self) -> float:
        """What the generators alone would need for a step's samples."""
        return self.pace.samples_per_step / self.pace.generator_rate

    @property
    def step_training_s(self) -> float:
        return self.pace.step_training_s


@dataclass(frozen=True)
class PlanResult:
    """Plans, best first.

    No plan of the searched space in which all lanes make slices of one size is better than the first by more than
    `proven_gap`; slices per pool are tried on the best splits alone. `every_size` says whether that space had
    every size of the trainer, or, in large pools, a refined grid of them.
    """

    workload: Workload
    plans: tuple[Plan, ...]
    considered: int
    evaluated: int
    proven_gap: float
    every_size: bool

    @property
    def best(self) -> Plan:
        return self.plans[0]
