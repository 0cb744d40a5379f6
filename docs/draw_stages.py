"""Draws docs/images/stages/slow_link.svg with the simulator of pipelines: `make docs`."""

from __future__ import annotations

from pathlib import Path

from digenrl.stages.partition import Partition, best_partition, cut_at, even_bounds
from digenrl.stages.simulated import simulate_pipeline

PICTURE = Path(__file__).parent / "images" / "stages" / "slow_link.svg"
BLOCKS, SPEEDS, RATES, MICRO_BATCHES = [1.0] * 12, (4.0, 2.0, 1.0, 1.0), (10.0, 0.6, 10.0), 8
COLORS = {"forward": "#4c78a8", "backward": "#f58518"}
LEFT, PIXELS_PER_S, ROW, BAR = 150, 26, 26, 20


def rows(cut: Partition, title: str, top: int) -> list[str]:
    """A title, and a row for every stage."""
    spans = simulate_pipeline(cut.stage_s, cut.link_s, MICRO_BATCHES)
    parts = [f'<text x="10" y="{top + 14}" font-weight="bold">{title}: {spans[-1].end_s:.1f} s</text>']
    for stage, (blocks, speed) in enumerate(zip(cut.blocks, SPEEDS, strict=True)):
        y = top + ROW * (stage + 1)
        parts.append(f'<text x="10" y="{y + 14}">speed {speed:g}, blocks: {blocks}</text>')
        for span in spans:
            if span.stage == stage:
                x, width = LEFT + PIXELS_PER_S * span.begin_s, PIXELS_PER_S * (span.end_s - span.begin_s)
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{max(1.0, width - 0.6):.1f}" height="{BAR}" '
                    f'fill="{COLORS[span.direction]}"/>'
                )
    return parts


def time_axis(end_s: float, bottom: int) -> list[str]:
    """Vertical lines every 5 seconds, behind the rows, and their labels below `bottom`."""
    parts = []
    for second in range(0, int(end_s) + 1, 5):
        x = LEFT + PIXELS_PER_S * second
        parts.append(f'<path d="M{x} 26V{bottom}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{x}" y="{bottom + 14}" text-anchor="middle" fill="#6b7280">{second} s</text>')
    return parts


def draw() -> str:
    """An equal split above the best cut; the link between the second and the third card is slow."""
    equal = cut_at(even_bounds(len(BLOCKS), len(SPEEDS)), BLOCKS, SPEEDS, 1.0, RATES, MICRO_BATCHES)
    best = best_partition(BLOCKS, SPEEDS, 1.0, RATES, MICRO_BATCHES)
    height = 2 * (len(SPEEDS) + 2) * ROW + 10
    slowest_s = simulate_pipeline(equal.stage_s, equal.link_s, MICRO_BATCHES)[-1].end_s
    legend = " ".join(
        f'<rect x="{LEFT + 110 * i}" y="{height}" width="14" height="14" fill="{color}"/>'
        f'<text x="{LEFT + 110 * i + 20}" y="{height + 12}">{name}</text>'
        for i, (name, color) in enumerate(COLORS.items())
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="1020" height="{height + 24}" '
            'font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            *time_axis(slowest_s, height - 26),
            *rows(equal, "Equal split", 4),
            *rows(best, "Best cut", 4 + (len(SPEEDS) + 2) * ROW),
            legend,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw())
