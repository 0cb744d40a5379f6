"""The SPEC of cards that both generate and train, each on its own (`assist: both`)."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from digenrl.config.spec import ScheduleRules, Spec
from digenrl.planning.costs import GB, TrainerLayout, lone_switch_seconds, reduce_seconds, unit_seconds
from digenrl.planning.facts.constants import CONSTANTS
from digenrl.planning.facts.workload import Workload
from digenrl.planning.layout import Layout
from digenrl.planning.publication import slowest_link
from digenrl.planning.spec_builder import build_spec, rounded


def build_shared_spec(
    workload: Workload, layout: Layout, slices: tuple[int, ...], job_samples: int, steps: int
) -> Spec:
    """The SPEC of `steps` on-policy steps on a layout whose generators can train.

    `slices` are the common unit, and then the sizes of the generator pools if they differ from it.

    The help rule is `search`, which a run uses as well: `auto` would also consider colocated cards, which the
    simulator lets train with perfect scaling.
    """
    rules = ScheduleRules(help="search", assist="both", dispatch="earliest_finish")
    unit, *by_pool = slices
    spec = build_spec(workload, layout, unit, rules, steps, tuple(by_pool))
    assert spec.trainer.helper is not None, "the trainer's card generates as well"
    switch_in, switch_out = lone_switch_seconds(workload, layout.trainer)
    helper = spec.trainer.helper.model_copy(
        update={"switch_in": rounded(switch_in), "switch_out": rounded(switch_out)}
    )
    trainer = spec.trainer.model_copy(
        update={
            "seconds_per_sample": _sample_seconds(workload, layout.trainer, job_samples),
            "job": job_samples,
            "reduce": rounded(gathering_seconds(workload, layout)),
            "helper": helper,
        }
    )
    generators = tuple(
        pool if alone is None else pool.model_copy(update=_training(workload, alone, job_samples))
        for pool, alone in zip(spec.generators, layout.alone, strict=True)
    )
    return spec.model_copy(update={"trainer": trainer, "generators": generators})


def gathering_seconds(workload: Workload, layout: Layout) -> float:
    """The time of a step in which the trainer's card adds up the gradients of all others."""
    cards = sum(
        generator.cards
        for generator, alone in zip(layout.generators, layout.alone, strict=True)
        if alone is not None
    )
    return reduce_seconds(workload, cards, _exchange_link(layout))


def _exchange_link(layout: Layout) -> float:
    """Bandwidth to the trainer's card: its host link on one node, else the slowest network."""
    pool = layout.trainer.pool
    if pool.nodes == 1 and {generator.pool for generator in layout.generators} == {pool}:
        return pool.card.host_gb_s * GB * CONSTANTS.host_link_share
    return slowest_link(layout)


def _sample_seconds(workload: Workload, alone: TrainerLayout, job_samples: int) -> Decimal:
    return rounded(unit_seconds(workload, alone, job_samples) / job_samples)


def _training(workload: Workload, alone: TrainerLayout, job_samples: int) -> dict[str, Any]:
    return {
        "train_seconds": _sample_seconds(workload, alone, job_samples),
        "switch": rounded(max(lone_switch_seconds(workload, alone))),
    }
