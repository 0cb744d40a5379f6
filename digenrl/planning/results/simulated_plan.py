"""A plan from a layout and its SPEC: the simulator's prediction, prices and memory."""

from __future__ import annotations

from digenrl.config.spec import Spec
from digenrl.planning.bounds import Rates
from digenrl.planning.costs import TrainerLayout
from digenrl.planning.facts.workload import Workload
from digenrl.planning.layout import GeneratorLayout, Layout, memory_of_shared_card, memory_of_trainer
from digenrl.planning.memory import MemoryReport, generator_memory
from digenrl.planning.results.plans import Plan
from digenrl.simulation.answer import Answer
from digenrl.simulation.simulator import simulate


def simulated_plan(workload: Workload, layout: Layout, rates: Rates, spec: Spec, slices: tuple[int, ...]) -> Plan:
    """The plan of a SPEC; `slices` are those of the layout's generator pools."""
    answer = simulate(spec).answer
    assert isinstance(spec.slice, int), "a plan fixes the slice size"
    alone = layout.alone or (None,) * len(layout.generators)
    return Plan(
        layout=layout,
        rates=rates,
        spec=spec,
        makespan_s=answer.makespan,
        step_s=_steady_step_s(answer),
        samples_per_second=answer.throughput,
        efficiency=answer.efficiency,
        generator_busy=1 - answer.generator_idle,
        trainer_busy=1 - answer.trainer_idle,
        usd_per_1000_samples=1000 * layout.usd_per_hour / 3600 / answer.throughput,
        slices=slices,
        generator_memory=tuple(
            _lane_memory(workload, generator, trains, own)
            for generator, trains, own in zip(layout.generators, alone, slices, strict=True)
        ),
        trainer_memory=_trainer_memory(workload, layout, spec.slice),
    )


def _steady_step_s(answer: Answer) -> float:
    """The mean time between two commits once the pipeline is full."""
    ends = answer.step_end
    return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else ends[0]


def _lane_memory(
    workload: Workload, generator: GeneratorLayout, alone: TrainerLayout | None, slice_size: int
) -> MemoryReport | None:
    """None if slices of this size, or training as well, were measured, and thus fit."""
    pool = generator.pool
    if pool.measured.slice_seconds is not None:
        return None
    if alone is None:
        return generator_memory(workload, pool.card, slice_size, generator.lane_cards)
    if pool.measured.train_seconds_per_sample is not None:
        return None
    return memory_of_shared_card(workload, alone, slice_size)


def _trainer_memory(workload: Workload, layout: Layout, slice_size: int) -> MemoryReport | None:
    trainer = layout.trainer
    if trainer.pool.measured.train_seconds_per_sample is not None:
        return None
    if layout.alone:
        return memory_of_shared_card(workload, trainer, slice_size)
    return memory_of_trainer(workload, trainer)
