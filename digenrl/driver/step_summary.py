"""The metrics of one optimizer step, from its rewards and updates. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from digenrl.records import SampleId

AVERAGED = (
    *("gradient_norm", "ratio_mean", "clip_fraction", "kl", "log_prob_mismatch"),
    *("stale_weight", "stale_weight_capped", "preferred"),
)
SHOWN_OTHERWISE = {*AVERAGED, "ratio", "clipped"}  # measures of algorithms that have metrics of their own


NO_SPREAD = (
    "the rewards of every group differ by less than a millionth of their size, which counts as rounding, so "
    "nothing was learned; subtract from the reward what all samples have in common"
)


@dataclass(frozen=True, slots=True)
class StepSummary:
    """One step's metrics by the names in `metrics.jsonl`, and a warning about them."""

    step: int
    values: Mapping[str, float]
    warning: str = ""


def step_summary(
    step: int,
    rewards: Mapping[SampleId, float],
    parts: Mapping[str, Sequence[float]],
    updates: Sequence[Mapping[str, Any]],
    publish_bytes: int,
    publish_s: float = 0.0,
) -> StepSummary:
    """Means over the step's updates, and maxima of maxima. Metrics that an algorithm lacks are absent."""
    mean = fmean(rewards.values())
    values: dict[str, float] = {
        "reward_mean": mean,
        "reward_std": math.sqrt(fmean((reward - mean) ** 2 for reward in rewards.values())),
        "updates": len(updates),
        "publish_bytes": publish_bytes,
        "publish_s": publish_s,
    }
    values |= {f"reward/{name}": fmean(numbers) for name, numbers in sorted(parts.items())}
    for name in AVERAGED:
        known = [update[name] for update in updates if update.get(name) is not None]
        if known:
            values[name] = fmean(known)
    measures = [update.get("measures", {}) for update in updates]
    for name in sorted({name for each in measures for name in each} - SHOWN_OTHERWISE):
        values[f"measure/{name}"] = fmean(each[name] for each in measures if name in each)
    ratios = [update["ratio_max"] for update in updates if update["ratio_max"] is not None]
    if ratios:
        values["ratio_max"] = max(ratios)
    retries = [update["memory_retries"] for update in updates if update["memory_retries"] is not None]
    if retries:
        values["memory_retries"] = sum(retries)
    skipped = sum(update.get("skipped", 0) for update in updates)
    if skipped:
        values["skipped_updates"] = skipped
    values["zero_spread_groups"] = sum(update["zero_spread_groups"] for update in updates)
    values["pack_size"] = updates[-1]["pack_size"]
    return StepSummary(step, values, NO_SPREAD if _all_differ_too_little(rewards, values) else "")


def _all_differ_too_little(rewards: Mapping[SampleId, float], values: Mapping[str, float]) -> bool:
    """Whether no group has a spread, although some rewards of a group differ."""
    by_group: dict[int, set[float]] = {}
    for sample, reward in rewards.items():
        by_group.setdefault(sample.group, set()).add(reward)
    differ = any(len(different) > 1 for different in by_group.values())
    return differ and values["zero_spread_groups"] >= len(by_group)
