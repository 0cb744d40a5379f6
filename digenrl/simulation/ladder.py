"""The ladder: the same work colocated, disaggregated naively, and with one technique after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

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

    A SPEC's seconds per sample include packing. Rungs below +TSP use `unpacked_seconds`, the time per sample if
    pairs are replayed one at a time.
    """
    unpacked = spec if unpacked_seconds is None else _with_training_time(spec, unpacked_seconds)
    base = {"colocated": False, "help": "none", "stale_fraction": 0}
    packing_note = "" if unpacked_seconds else "as +GAP; see --unpacked"
    has_helper = spec.trainer.helper is not None
    stale = spec.policy.stale_fraction or DEFAULT_STALE_FRACTION
    streamed = dict(base, order="generation", stream=_streaming(spec))
    return (
        Rung("colocated", unpacked.with_rules(colocated=True))
        if has_helper
        else Rung("colocated", None, "needs trainer.helper"),
        Rung("naive", unpacked.with_rules(**base, order="batch", stream="batch")),
        Rung("+GAP", unpacked.with_rules(**streamed)),
        Rung("+TSP", spec.with_rules(**streamed), packing_note),
        Rung("+TAG", spec.with_rules(**{**streamed, "help": "auto"}), "" if has_helper else "no trainer.helper"),
        Rung("+TCSS", spec.with_rules(**{**streamed, "help": "auto", "stale_fraction": stale}), f"share {stale}"),
    )


def simulate_ladder(ladder: tuple[Rung, ...]) -> Iterator[RungResult]:
    """Simulates the rungs in order."""
    for rung in ladder:
        yield RungResult(rung, None if rung.spec is None else simulate(rung.spec).answer)


def _streaming(spec: Spec) -> str:
    return "group" if spec.policy.stream == "batch" else spec.policy.stream


def _with_training_time(spec: Spec, seconds_per_sample: Decimal) -> Spec:
    return spec.with_changes(trainer={**spec.trainer.model_dump(), "seconds_per_sample": seconds_per_sample})
