"""The ladder: the same work colocated, disaggregated naively, and with one technique after another.

If generators can train, there are two more rungs: an idealized colocated run (packed, with free switches), and
cards that do both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

from digenrl.config.limits import SIMULATED_SEARCH_BUDGET
from digenrl.config.spec import Spec
from digenrl.simulation.answer import Answer
from digenrl.simulation.simulator import simulate

DEFAULT_STALE_FRACTION = Decimal("0.5")


@dataclass(frozen=True, slots=True)
class Rung:
    """One configuration of the run; `spec` is None if the SPEC lacks something, which `note` names."""

    name: str
    spec: Spec | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class RungResult:
    """A rung and its simulated result."""

    rung: Rung
    answer: Answer | None


def rungs(spec: Spec, unpacked_seconds: Decimal | None = None) -> tuple[Rung, ...]:
    """Colocated, naive, +GAP, +TSP, +TAG, +TCSS; each rung keeps the techniques of the previous one.

    "colocated, best" trains with packing and changes roles for free, and "both directions" is the last rung if a
    generator has `train_seconds`.

    A SPEC's seconds per sample include packing. Rungs below +TSP use `unpacked_seconds`, the time per sample if
    pairs are replayed one at a time.
    """
    unpacked = spec
    if unpacked_seconds is not None:
        trainer = {**spec.trainer.model_dump(), "seconds_per_sample": unpacked_seconds}
        unpacked = spec.with_changes(trainer=trainer)
    base = {"colocated": False, "help": "none", "assist": "trainer", "stale_fraction": 0}
    packing_note = "" if unpacked_seconds else "as +GAP; see --unpacked"
    has_helper = spec.trainer.helper is not None
    stale = spec.policy.stale_fraction or DEFAULT_STALE_FRACTION
    stream = "group" if spec.policy.stream == "batch" else spec.policy.stream
    streamed = dict(base, order="generation", stream=stream)
    everything = {**streamed, "help": "auto", "stale_fraction": stale}
    trains = has_helper and any(pool.train_seconds is not None for pool in spec.generators)
    best = spec.with_changes(colocate={"switch": 0}).with_rules(colocated=True) if trains else None
    both = spec.with_rules(**{**everything, "assist": "both", "stream": "group"}) if trains else None
    return (
        Rung("colocated", unpacked.with_rules(colocated=True))
        if has_helper
        else Rung("colocated", None, "needs trainer.helper"),
        *((Rung("colocated, best", best, "packed, free switches"),) if best else ()),
        Rung("naive", unpacked.with_rules(**base, order="batch", stream="batch")),
        Rung("+GAP", unpacked.with_rules(**streamed)),
        Rung("+TSP", spec.with_rules(**streamed), packing_note),
        Rung("+TAG", spec.with_rules(**{**streamed, "help": "auto"}), "" if has_helper else "no trainer.helper"),
        Rung("+TCSS", spec.with_rules(**everything), f"share {stale}"),
        *((Rung("both directions", both),) if trains else ()),
    )


def simulate_ladder(
    ladder: tuple[Rung, ...], search_budget: int = SIMULATED_SEARCH_BUDGET
) -> Iterator[RungResult]:
    for rung in ladder:
        yield RungResult(rung, None if rung.spec is None else simulate(rung.spec, search_budget).answer)
