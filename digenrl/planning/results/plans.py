"""The planner's results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from digenrl.config.spec import Spec
from digenrl.planning.bounds import Rates
from digenrl.planning.facts.workload import Workload
from digenrl.planning.layout import Layout
from digenrl.planning.memory import MemoryReport

Kind = Literal["disaggregated", "trainer helps", "both directions", "colocated"]
Place = Literal["one site", "stages", "data parallel"]


@dataclass(frozen=True)
class Plan:
    """One split with its best slices and rules, and the simulator's prediction. `spec` is ready to simulate.

    `step_s` is the time of a step once the pipeline is full. Memory is None where a measurement shows that it
    fits.
    """

    layout: Layout
    rates: Rates
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
    def kind(self) -> Kind:
        """Who does what: each card one thing, the trainer also generates, every card does both, or in turns."""
        rules = self.spec.policy
        if rules.colocated:
            return "colocated"
        if self.spec.shares_work:
            return "both directions"
        return "disaggregated" if rules.help == "none" else "trainer helps"

    @property
    def step_generating_s(self) -> float:
        """The time that the generators alone need for the samples of a step."""
        return self.rates.samples_per_step / self.rates.samples_per_second

    @property
    def step_training_s(self) -> float:
        return self.rates.step_training_s


@dataclass(frozen=True, slots=True)
class TrainerPlace:
    """A way to train: the seconds of a step, all cards training, or None if it is impossible; and why."""

    kind: Place
    cards: str
    step_s: float | None
    why: str


@dataclass(frozen=True)
class PlanResult:
    """Plans, best first.

    No plan of the search space with one slice size for all lanes is better than the first by more than
    `proven_gap`; slice sizes per pool are tried for the best splits only. `every_size` is True if all trainer
    sizes were searched, and False if a refined grid of sizes was used (large pools). `colocated` is a comparison,
    not a plan to run. `comparison` says in words which kind of plan wins, by how much and why. `trainer_places`
    are the ways to train over several sites, fastest first.
    """

    workload: Workload
    plans: tuple[Plan, ...]
    considered: int
    evaluated: int
    proven_gap: float
    every_size: bool
    colocated: Plan | None
    comparison: str
    trainer_places: tuple[TrainerPlace, ...] = ()

    @property
    def best(self) -> Plan:
        return self.plans[0]
