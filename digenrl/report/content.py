"""The data of the report's page: settings, headline figures, samples, curves, lanes and the recipe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import yaml

from digenrl.config.recipes.recipe import Recipe
from digenrl.report import curves, headline
from digenrl.report.grids import grids
from digenrl.report.timeline import timeline
from digenrl.run_folder.reading import RunRecord
from digenrl.telemetry.lane_shares import LaneShares, TimeWindow, lane_shares, mean_busy, steady_window
from digenrl.telemetry.lane_totals import lane_totals
from digenrl.telemetry.trace import TRAINER_LANE, TRAINER_POOL, LaneInfo, Trace


def content_of(run: RunRecord) -> dict[str, Any]:
    """The page's data, ready for JSON."""
    return {
        "name": run.info.name,
        "status": run.info.status.value,
        "started": run.info.started.isoformat(),
        "digenrl": run.info.digenrl,
        "about": about(run),
        "techniques": techniques(run.recipe),
        "headline": headline_of(run),
        "grids": grids(run),
        "curves": {
            "reward": [asdict(chart) for chart in curves.reward_charts(run)],
            "parts": [asdict(chart) for chart in curves.part_charts(run)],
            "held_out": [asdict(chart) for chart in curves.held_out_charts(run)],
            "health": [asdict(chart) for chart in curves.health_charts(run)],
            "others": [asdict(chart) for chart in curves.other_charts(run)],
        },
        "timeline": timeline(run),
        "utilization": utilization(run),
        "prediction": prediction_of(run),
        "recipe": run.recipe_text,
        "initial_state": yaml.safe_dump(run.info.initial_state, sort_keys=False) if run.info.initial_state else "",
    }


def about(run: RunRecord) -> list[tuple[str, str]]:
    """The most important settings: label and value."""
    recipe, batch = run.recipe, run.recipe.batch
    return [
        ("Model", f"{recipe.model.family}, {recipe.model.source}"),
        ("Trained", _trained(recipe)),
        ("Algorithm", recipe.algorithm.name),
        ("Rewards", _rewards(recipe)),
        ("Samples", _samples(recipe.sample_size, 0 if recipe.trains_on_pairs else recipe.sample.denoising_steps)),
        *_evaluation(recipe),
        ("Batch", f"{batch.prompts} prompts × {batch.samples_per_prompt} samples, slice {batch.slice}"),
        ("Steps", f"{len(run.steps)} of {recipe.steps} optimizer steps, seed {recipe.seed}"),
        ("Lanes", f"{recipe.mode}: {_lanes(run)}"),
    ]


def techniques(recipe: Recipe) -> list[dict[str, Any]]:
    """The techniques of the recipe's mode: their names, whether they were on, and their settings."""
    chosen = recipe.techniques
    tsp = _technique("TSP", "several (sample, time-step) pairs per forward pass", chosen.tsp)
    if recipe.topology.shares_cards:  # the others need lanes that work concurrently
        return [tsp]
    tag_on, tcss_on, both = recipe.trainer_helps, chosen.tcss > 0, recipe.shares_work
    return [
        _technique("GAP", "groups are trained as they complete", chosen.gap),
        tsp,
        _technique("TAG", "the trainer helps generate", tag_on, str(chosen.tag) if tag_on else ""),
        _technique("Assist", "generators help train, so that every card does both", both),
        _technique(
            "TCSS", "some samples start on older weights", tcss_on, f"{chosen.tcss:.0%}" if tcss_on else ""
        ),
    ]


def headline_of(run: RunRecord) -> dict[str, Any]:
    """The headline figures; None for what the run did not measure."""
    reward = None if run.recipe.rewards_are_given else headline.reward_change(run.steps)
    steady = steady_window(run.trace)
    whole = TimeWindow(0, run.trace.end_ns)
    pools = list(dict.fromkeys(lane.pool for lane in run.trace.lanes))
    shares = lane_shares(run.trace, steady or whole)
    accuracy, colocated = headline.prediction_accuracy(run.steps), run.trace.shared_cards
    return {
        "reward": asdict(reward) if reward else None,
        "reward_steps": headline.ends_averaged(len(run.steps)),
        "rewards": headline.reward_names(run.recipe),
        "held_out": {name: asdict(change) for name, change in headline.held_out_changes(run).items()},
        "samples_per_s": headline.samples_per_second(run.steps),
        "busy": mean_busy(run.trace, _cards(run.trace), shares) if run.trace.spans else None,
        "busy_of": "Card" if colocated else "Lanes",
        "busy_by_pool": {
            pool: mean_busy(run.trace, [lane for lane in run.trace.lanes if lane.pool == pool], shares)
            for pool in pools
        },
        "steady": steady is not None,
        "stale_share": None if colocated else headline.share_of_samples(run.steps, "stale_share"),
        "helped_share": None if colocated else headline.share_of_samples(run.steps, "helped_share"),
        "assisted_share": headline.share_of_samples(run.steps, "assisted_share"),
        "prediction_error": accuracy.median_error if accuracy else None,
    }


def _cards(trace: Trace) -> Sequence[LaneInfo]:
    """One lane per device: where all lanes share one device, only the trainer."""
    return [lane for lane in trace.lanes if not trace.shared_cards or lane.name == TRAINER_LANE]


def utilization(run: RunRecord) -> dict[str, Any]:
    """Every lane's shares and totals, over the whole run and in the steady state; None if it was not reached."""
    steady = steady_window(run.trace)
    return {
        "run": _shares(run, TimeWindow(0, run.trace.end_ns)),
        "steady": _shares(run, steady) if steady else None,
    }


def prediction_of(run: RunRecord) -> dict[str, Any] | None:
    """Predicted and measured step times; None if nothing was predicted."""
    accuracy = headline.prediction_accuracy(run.steps)
    if accuracy is None:
        return None
    return {**asdict(accuracy), "errors": accuracy.errors, "median_error": accuracy.median_error}


def _shares(run: RunRecord, window: TimeWindow) -> dict[str, Any]:
    return {
        "seconds": (window.end_ns - window.start_ns) / 1e9,
        "lanes": {name: _lane_entry(shares) for name, shares in lane_shares(run.trace, window).items()},
        # One card has done everything where all lanes share it.
        "totals": [] if run.trace.shared_cards else [asdict(each) for each in lane_totals(run.trace, window)],
    }


def _lane_entry(shares: LaneShares) -> dict[str, Any]:
    return {
        "works": {work.value: share for work, share in shares.works.items()},
        "elsewhere": shares.elsewhere,
        "idle": shares.idle,
        "publishing": shares.publishing,
    }


def _technique(name: str, description: str, on: bool, setting: str = "") -> dict[str, Any]:
    return {"name": name, "description": description, "on": on, "setting": setting}


def _trained(recipe: Recipe) -> str:
    lora = recipe.training.lora
    what = f"LoRA of rank {lora.rank}" if lora else "all weights"
    return f"{what}, learning rate {recipe.training.learning_rate:g}"


def _rewards(recipe: Recipe) -> str:
    control = ", shuffled within groups (control)" if recipe.shuffled_rewards else ""
    normalized = ", each normalized within groups" if recipe.reward_sum == "normalized" else ""
    return f"{headline.sum_of_rewards(recipe.rewards)}{normalized}{control}"


def _samples(size: tuple[int, int, int], denoising_steps: int) -> str:
    height, width, frames = size
    of_video = f", {frames} frames" if frames > 1 else ""
    how = f"{denoising_steps} denoising steps" if denoising_steps else "pairs of images in a file"
    return f"{width} × {height}{of_video}, {how}"


def _evaluation(recipe: Recipe) -> list[tuple[str, str]]:
    """How held-out samples are made, and their rewards if those are others than in training."""
    if recipe.evaluation is None:
        return []
    rows = [("Held-out samples", _samples(recipe.held_out_size, recipe.evaluation.denoising_steps))]
    if recipe.held_out_rewards != recipe.rewards:
        rows.insert(0, ("Held-out rewards", headline.sum_of_rewards(recipe.held_out_rewards)))
    return rows


def _lanes(run: RunRecord) -> str:
    """The lanes by pool and kind of device. The trainer counts once, without its own lanes."""
    lanes = [lane for lane in run.info.lanes if lane.pool != TRAINER_POOL or lane.name == TRAINER_LANE]
    counts = Counter((lane.pool, lane.device.partition(":")[0]) for lane in lanes)
    listed = ", ".join(
        f"{count} {pool}{f' ({device})' if device else ''}" for (pool, device), count in counts.items()
    )
    return f"{listed}; generators also train, the trainer also generates" if run.trace.shares_work else listed
