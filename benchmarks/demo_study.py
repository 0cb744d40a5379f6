"""Does the demo learn, for every seed, with and without stale starts, and only because of its reward?

    python benchmarks/demo_study.py runs/study     # 3 seeds on-policy, 3 with TCSS, a control: half an hour
    python benchmarks/demo_study.py runs/study --picture docs/images/demo_curves.svg

Runs that the folder already contains are not repeated. The control trains on rewards that are shuffled within each
group: the images and reward values are the same, but there is nothing to learn. Accuracy is the share of
200 held-out numbers that the OCR model reads exactly.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from rich.console import Console
from rich.progress import track
from rich.table import Table

METRIC = "reward/ocr/exact"
SEEDS = (0, 1, 2)
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 380, 56, 16, 150, 44


@dataclass(frozen=True)
class Study:
    """One kind of run, with several seeds."""

    name: str
    overrides: tuple[str, ...]
    seeds: tuple[int, ...]
    color: str
    dashes: str = ""


STUDIES = (
    Study("on-policy", ("techniques.tcss=0",), SEEDS, "#1f5fbf"),
    Study("TCSS 0.5", ("techniques.tcss=0.5",), SEEDS, "#c2571a"),
    Study("shuffled rewards", ("techniques.tcss=0", "shuffled_rewards=true"), (0,), "#6b7280", "5 4"),
)


@dataclass(frozen=True)
class Curve:
    """One run's accuracy by optimizer step, its duration and its share of stale samples."""

    study: Study
    seed: int
    points: tuple[tuple[int, float], ...]
    seconds: float
    stale_share: float

    @property
    def gain(self) -> float:
        return self.points[-1][1] - self.points[0][1]


def run(study: Study, seed: int, folder: Path) -> None:
    command = [sys.executable, "-c", "from digenrl.cli import main; main()", "train", "demo", f"seed={seed}"]
    subprocess.run([*command, *study.overrides, "--out", str(folder)], check=True, stdout=subprocess.DEVNULL)


def finished(folder: Path) -> bool:
    info = folder / "run.json"
    return info.is_file() and json.loads(info.read_text())["status"] == "finished"


def read(study: Study, seed: int, folder: Path) -> Curve:
    evaluations = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    points = tuple((each["step"], each[METRIC]) for each in evaluations)
    return Curve(study, seed, points, steps[-1]["at_s"], fmean(step["stale_share"] for step in steps))


def table(curves: Sequence[Curve]) -> Table:
    shown = Table(title="exact match on 200 held-out numbers", title_justify="left")
    for heading in ("", "seed", "before", "after", "gain", "best", "training s", "stale"):
        shown.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for curve in curves:
        values = [value for _, value in curve.points]
        cells = (f"{values[0]:.3f}", f"{values[-1]:.3f}", f"{100 * curve.gain:+.1f}", f"{max(values):.3f}")
        times = (f"{curve.seconds:.0f}", f"{curve.stale_share:.0%}")
        shown.add_row(curve.study.name, str(curve.seed), *cells, *times)
    return shown


def comparison(curves: Sequence[Curve]) -> str:
    """Compares the final accuracy of on-policy and stale runs, in one line."""
    words = []
    for study in STUDIES[:2]:
        last = [curve.points[-1][1] for curve in curves if curve.study is study]
        words.append(f"{study.name} {fmean(last):.3f} (s.d. {stdev(last):.3f})")
    return "accuracy at the end, mean of the seeds: " + ", ".join(words)


def picture(curves: Sequence[Curve]) -> str:
    """All curves in one SVG."""
    steps = max(step for curve in curves for step, _ in curve.points)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / steps

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        'font-size="12" role="img" aria-label="Accuracy on held-out numbers over optimizer steps">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for tick in (0, 0.2, 0.4, 0.6, 0.8, 1):
        parts.append(f'<path d="M{x(0):.1f} {y(tick):.1f}H{x(steps):.1f}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{x(0) - 8:.1f}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.0%}</text>')
    for step in range(0, steps + 1, 20):
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - 24}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{x(steps / 2):.1f}" y="{HEIGHT - 6}" text-anchor="middle">optimizer steps</text>')
    for curve in curves:
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in curve.points)
        title = f"<title>{curve.study.name}, seed {curve.seed}</title>"
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{curve.study.color}" stroke-width="2" '
            f'stroke-dasharray="{curve.study.dashes}">{title}</polyline>'
        )
    for row, study in enumerate(STUDIES):
        at = TOP + 14 + 20 * row
        parts.append(
            f'<path d="M{x(steps) + 12:.1f} {at}h22" stroke="{study.color}" stroke-width="2" '
            f'stroke-dasharray="{study.dashes}"/><text x="{x(steps) + 40:.1f}" y="{at + 4}">{study.name}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Runs the missing runs, prints the table and draws the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    plan = [(study, seed) for study in STUDIES for seed in study.seeds]
    folders = {(study, seed): options.folder / f"{study.name.replace(' ', '_')}-{seed}" for study, seed in plan}
    missing = [each for each in plan if not finished(folders[each])]
    for study, seed in track(missing, "training", disable=not sys.stderr.isatty()):
        run(study, seed, folders[study, seed])
    curves = [read(study, seed, folders[study, seed]) for study, seed in plan]
    console = Console()
    console.print(table(curves))
    console.print(comparison(curves))
    if options.picture is not None:
        options.picture.write_text(picture(curves), encoding="utf-8")


if __name__ == "__main__":
    main()
