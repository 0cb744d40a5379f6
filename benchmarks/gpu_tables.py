"""The tables that `gpu.py` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpu_measured import Measured
from rich.table import Table


def passes_table(results: Sequence[Measured]) -> Table:
    """One row per family and kind of pass; ratios compare with the best of the eager baselines."""
    table = _table(
        "shares of the GPU's matrix rate by counted operations, and eager baselines",
        (
            "family",
            "pass",
            "share",
            "ms",
            "over best eager",
            "eager ms",
            "over --against",
            "2 x parameters x tokens",
        ),
    )
    for each in results:
        for rows in each.forward_s:
            largest = rows == max(each.forward_s)
            seconds = each.forward_s[rows]
            table.add_row(
                f"{each.family} at {each.matrix_tflops:.3g} TFLOPS",
                f"forward of {rows}",
                f"{each.forward_share(rows):.2f}",
                _milliseconds(seconds),
                _ratio(each.eager_forward_s, seconds) if largest else "-",
                _milliseconds(each.eager_forward_s) if largest and each.eager_forward_s else "-",
                _ratio(each.forward_against_s.get(rows), seconds),
                f"{each.parameter_share(rows):.2f}",
            )
        if each.pair_s and each.forward_flop:
            eager = ", ".join(f"{name}: {_milliseconds(s)}" for name, s in each.eager_pair_s.items())
            table.add_row(
                each.family,
                f"replayed pair, pack {each.pack_size}, {each.checkpointed_blocks} checkpointed",
                f"{each.pair_share:.2f}",
                _milliseconds(each.pair_s),
                _ratio(each.best_eager_pair_s, each.pair_s),
                eager or "-",
                _ratio(each.pair_against_s, each.pair_s),
                "",
            )
        for kind, times in each.attention_s.items():
            chosen = (each.kernels or {}).get(kind, "-")
            listed = ", ".join(f"{kernel}: {_milliseconds(s)}" for kernel, s in times.items())
            table.add_row(each.family, f"attention kernel of {kind}: {chosen}", "", listed, "", "", "", "")
    return table


def steps_table(results: Sequence[Measured]) -> Table:
    """Whole steps, predicted and measured."""
    headings = (
        *("family", "predicted s", "measured s", "error", "samples/s", "over baseline"),
        *("GiB predicted from one pair", "error", "planned GiB", "error", "peak GiB"),
        *("largest |log ratio|", "|rollout - replay|", "profile s"),
    )
    table = _table("whole steps and memory: predicted and measured", headings)
    for each in results:
        if each.predicted_s is None and each.step_s is None:
            continue
        table.add_row(
            each.family,
            _formatted(each.predicted_s, ".2f"),
            _formatted(each.step_s, ".2f"),
            _error(each.predicted_s, each.step_s),
            _formatted(each.samples_per_second, ".2f"),
            _ratio(each.baseline_step_s, each.step_s),
            _formatted(each.predicted_gib or None, ".1f"),
            _error(each.predicted_gib, each.peak_gib),
            _formatted(each.planned_gib or None, ".1f"),
            _error(each.planned_gib, each.peak_gib),
            _formatted(each.peak_gib or None, ".1f"),
            _formatted(each.largest_log_ratio, ".1e"),
            _formatted(each.log_prob_mismatch, ".1e"),
            _formatted(each.profile_s, ".0f"),
        )
    return table


def parts_table(results: Sequence[Measured]) -> Table:
    """The work of a step, predicted and measured."""
    table = _table("seconds of a step by kind of work", ("family", "predicted", "measured"))
    for each in results:
        if each.parts or each.predicted_parts:
            cells = (
                ", ".join(f"{name} {s:.2f}" for name, s in parts.items())
                for parts in (each.predicted_parts, each.parts)
            )
            table.add_row(each.family, *cells)
    return table


def _table(title: str, headings: Iterable[str]) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("family", "pass") else "right")
    return table


def _milliseconds(seconds: float | None) -> str:
    return "does not fit" if seconds is None else f"{seconds * 1e3:.1f}"


def _ratio(baseline: float | None, seconds: float | None) -> str:
    return "-" if not baseline or not seconds else f"{baseline / seconds:.2f}x"


def _formatted(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _error(expected: float | None, measured: float | None) -> str:
    return "-" if not expected or not measured else f"{expected / measured - 1:+.1%}"
