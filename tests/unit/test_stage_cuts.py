"""Where a chain is cut into stages, and how long a step takes."""

from __future__ import annotations

import importlib.util
import random
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from digenrl.stages.partition import best_partition, cut_at, even_bounds, pipeline_seconds
from digenrl.stages.simulated import simulate_pipeline

DOCS = Path(__file__).parents[2] / "docs"
TWELVE = [1.0] * 12


@pytest.mark.parametrize(
    ("stages", "links", "micro_batches", "seconds"),
    [
        ((3, 2, 4), (1, 1), 8, 41),
        ((1, 1), (3,), 8, 29),
        ((2, 2, 2, 2), (0.5, 4, 0.5), 16, 78),
        ((1, 1), (1,), 16, 19),
        ((2,), (), 3, 6),
    ],
)
def test_a_step_takes_the_first_micro_batch_and_the_slowest_part_for_each_other(
    stages: tuple[float, ...], links: tuple[float, ...], micro_batches: int, seconds: float
) -> None:
    assert pipeline_seconds(stages, links, micro_batches) == seconds


@pytest.mark.parametrize(
    ("speeds", "rates", "bounds", "seconds"),
    [
        ((1, 1, 1, 1), (10, 10, 10), (0, 3, 6, 9, 12), 33.6),
        ((4, 2, 1, 1), (10, 10, 10), (0, 7, 10, 11, 12), 18.1),
        ((4, 2, 1, 1), (10, 0.25, 10), (0, 9, 10, 11, 12), 41.15),
    ],
)
def test_faster_devices_get_more_blocks(
    speeds: tuple[float, ...], rates: tuple[float, ...], bounds: tuple[int, ...], seconds: float
) -> None:
    cut = best_partition(TWELVE, speeds, 1.0, rates, micro_batches=8)
    assert cut.bounds == bounds
    assert cut.step_s == pytest.approx(seconds)


def test_an_equal_split_over_unequal_devices_takes_longer() -> None:
    bounds = even_bounds(12, 4)
    assert bounds == (0, 3, 6, 9, 12)
    assert cut_at(bounds, TWELVE, (4, 2, 1, 1), 1.0, (10, 10, 10), 8).step_s == pytest.approx(29.85)
    assert cut_at(bounds, TWELVE, (4, 2, 1, 1), 1.0, (10, 0.25, 10), 8).step_s == pytest.approx(44.65)
    assert even_bounds(33, 4) == (0, 9, 17, 25, 33)


def test_devices_of_one_site_in_a_row_cross_the_slow_link_once() -> None:
    interleaved = best_partition(TWELVE, (1, 1, 1, 1), 1.0, (0.2, 0.2, 0.2), 8)
    in_a_row = best_partition(TWELVE, (1, 1, 1, 1), 1.0, (10, 0.2, 10), 8)
    assert interleaved.step_s == pytest.approx(77.0)
    assert in_a_row.step_s == pytest.approx(57.4)


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_is_shorter_than_the_best(seed: int) -> None:
    draw = random.Random(seed)
    blocks = [draw.choice((0.5, 1.0, 3.0)) for _ in range(9)]
    speeds, rates = [draw.uniform(0.5, 4) for _ in range(4)], [draw.uniform(0.1, 4) for _ in range(3)]
    sizes = [draw.uniform(0.1, 3) for _ in range(8)]
    most = [draw.randint(2, 9) for _ in range(4)]

    def fits(stage: int, first: int, end: int) -> bool:
        return end - first <= most[stage]

    every = [
        cut_at((0, *inner, 9), blocks, speeds, sizes, rates, 6)
        for inner in combinations(range(1, 9), 3)
        if all(fits(i, *pair) for i, pair in enumerate(zip((0, *inner), (*inner, 9), strict=True)))
    ]
    if not every:
        with pytest.raises(ValueError, match="fit in memory"):
            best_partition(blocks, speeds, sizes, rates, 6, fits)
        return
    assert best_partition(blocks, speeds, sizes, rates, 6, fits).step_s == pytest.approx(
        min(c.step_s for c in every)
    )


def test_sixty_blocks_are_cut_for_eight_devices() -> None:
    cut = best_partition([1.0] * 60, [4, 3, 2, 1, 1, 2, 3, 4], 1.0, [5.0] * 7, 32)
    assert sum(cut.blocks) == 60
    assert max(cut.stage_s) == pytest.approx(3.0)


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="2 blocks cannot be cut into 3 stages"):
        best_partition([1.0, 1.0], (1, 1, 1), 1.0, (1, 1), 4)


@pytest.mark.parametrize(
    ("stages", "links", "micro_batches", "seconds"),
    [
        ((3, 2, 4), (1, 1), 8, 41),
        ((1, 1), (3,), 8, 29),
        ((2, 2, 2, 2), (0.5, 4, 0.5), 16, 79),
        ((1, 1), (1,), 16, 19),
    ],
)
def test_the_simulated_pipeline_is_close_to_the_estimate(
    stages: tuple[float, ...], links: tuple[float, ...], micro_batches: int, seconds: float
) -> None:
    spans = simulate_pipeline(stages, links, micro_batches)
    assert spans[-1].end_s == pytest.approx(seconds)
    assert len(spans) == 2 * len(stages) * micro_batches
    for stage in range(len(stages)):
        own = [span for span in spans if span.stage == stage]
        assert all(after.begin_s >= before.end_s for before, after in pairwise(own)), "one at a time"
        for direction in ("forward", "backward"):
            assert [span.index for span in own if span.direction == direction] == list(range(micro_batches))


def test_one_micro_batch_in_flight_leaves_all_other_stages_idle() -> None:
    assert simulate_pipeline((3, 3), (1,), 4, in_flight=1)[-1].end_s == pytest.approx(4 * 8)


def test_the_picture_in_the_docs_is_what_the_simulator_draws() -> None:
    found = importlib.util.spec_from_file_location("draw_stages", DOCS / "draw_stages.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    assert module.PICTURE.read_text() == module.draw()
