"""Before a run is timed: a worker counts a forward's operations, and attention kernels are tried. No torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from digenrl.config.recipes.attention import KINDS, Kernels, Trials, choose_kernels, described
from digenrl.config.recipes.recipe import Recipe
from digenrl.driver.dispatcher import Dispatcher
from digenrl.records import Calibrate, Calibrated, PassKind
from digenrl.worker.assignment import Duty, cards_per_sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MeasuredForwards:
    """The operations of one sample, each worker's rate of matrix products, and the chosen kernels.

    The rate is that of the cards that compute a sample together. `kernels` is None if none were tried.
    """

    generate_flop: float
    train_flop: float
    matrix_tflops: Mapping[str, float]
    kernels: Kernels | None


def measure_forwards(
    driver: Dispatcher, first_step: int = 0, notify: Callable[[str], None] = lambda message: None
) -> MeasuredForwards:
    """Counts operations, and tries attention kernels if the recipe leaves them open.

    The first lane counts for all, and others with nothing to try compute no forward. All lanes use the same
    kernels. Lanes that start later get them with their assignment.
    """
    recipe, workers = driver.stores.recipe, driver.stores.workers
    prompt = driver.stores.prompts.row(first_step, 0)
    lanes = (*workers.generators, workers.trainer)
    passes = {each.name: passes_to_try(recipe, each.duties, each.device) for each in lanes}
    if any(passes.values()):
        notify("calibrating: trying attention kernels")
    given = {name: prompt if kinds or name == lanes[0].name else None for name, kinds in passes.items()}
    results: list[Calibrated] = driver.ask(
        [
            (name, Calibrate(driver.own_job_id(), 0, "forward", given[name], passes=kinds))
            for name, kinds in passes.items()
        ]
    )
    rates = {
        each.name: cards_per_sample(each) * result.matrix_tflops
        for each, result in zip(lanes, results, strict=True)
    }
    kernels = chosen_kernels(recipe, [each.attention or {} for each in results], notify)
    if kernels is not None:
        driver.use_kernels(kernels)
        driver.ask(
            [(name, Calibrate(driver.own_job_id(), 0, "forward", kernels=dict(kernels))) for name in passes]
        )
    return MeasuredForwards(results[0].generate_flop, results[0].train_flop, rates, kernels)


def passes_to_try(recipe: Recipe, duties: Collection[Duty], device: str) -> tuple[PassKind, ...]:
    """The kinds of passes that a worker runs and whose kernels the recipe leaves open; none on a CPU."""
    if recipe.model.kernels is not None or not device.startswith("cuda"):
        return ()
    wanted: dict[PassKind, bool] = {
        "rollout": "generate" in duties,
        "replay": "train" in duties,
        "masked": "generate" in duties and recipe.evaluation is not None and recipe.evaluation.batch > 1,
    }
    return tuple(kind for kind in KINDS if wanted[kind])


def chosen_kernels(
    recipe: Recipe, trials: Sequence[Trials], notify: Callable[[str], None] = lambda message: None
) -> Kernels | None:
    """The kernels to use, which are logged; None if nothing was tried."""
    if not any(trials):
        return None
    kernels = choose_kernels(trials, same=recipe.training.old_log_probs == "rollout")
    line = described(kernels, trials)
    logger.info("%s", line)
    notify(line)
    return kernels
