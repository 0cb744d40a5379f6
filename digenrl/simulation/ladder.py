"""The ladder: the same work colocated, disaggregated naively, and with one technique after the other."""

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
    """One way to run the work; `spec` is None where the SPEC lacks what it takes, and `note` says what."""

    name: str
    spec: Spec | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Climbed:
    """A rung with what it cost."""

    rung: Rung
    answer: Answer | None


def rungs(spec: Spec, unpacked_seconds: Decimal | None = None) -> tuple[Rung, ...]:
    """Colocated, naive, +GAP, +TSP, +TAG, +TCSS: each keeps what the one before it has.

    A SPEC's seconds per sample are after packing. `unpacked_seconds`, the time when pairs are replayed one at a
    time, is what the rungs below +TSP train with.
    """
    unpacked = spec if unpacked_seconds is None else _training_in(spec, unpacked_seconds)
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


def climb(ladder: tuple[Rung, ...]) -> Iterator[Climbed]:
    """Simulates the rungs from the lowest to the highest."""
    for rung in ladder:
        yield Climbed(rung, None if rung.spec is None else simulate(rung.spec).answer)


def _streaming(spec: Spec) -> str:
    return "group" if spec.policy.stream == "batch" else spec.policy.stream


def _training_in(spec: Spec, seconds_per_sample: Decimal) -> Spec:
    return spec.with_changes(trainer={**spec.trainer.model_dump(), "seconds_per_sample": seconds_per_sample})
