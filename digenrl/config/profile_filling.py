"""Fills the times that a SPEC leaves out from a profile. Works on the SPEC's mapping, before validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from digenrl.config.profiles import Profile
from digenrl.config.reading import ConfigError


def filled_in(content: Mapping[str, Any], profile: Profile, name: str) -> dict[str, Any]:
    """The SPEC with missing times taken from the profile called `name`; times in the SPEC take precedence.

    Raises ConfigError if the profile lacks a missing time or does not cover a slice size. A malformed SPEC is left
    for validation to reject.
    """
    filling = _Filling(content, profile, name)
    filled = dict(content)
    pools = content.get("generators")
    if isinstance(pools, list):
        filled["generators"] = [filling.pool(pool, index) for index, pool in enumerate(pools)]
    filled["trainer"] = filling.trainer(content.get("trainer", {}))
    _add(filled, "publish", profile.publish_seconds)
    reward = content.get("reward")
    if isinstance(reward, Mapping) and reward.get("lanes") and "seconds" not in reward:
        if profile.score_seconds is None:
            raise filling.missing("reward.seconds", "score_seconds")
        filled["reward"] = {**reward, "seconds": profile.score_seconds}
    colocate = content.get("colocate", {})
    if isinstance(colocate, Mapping):
        filled["colocate"] = dict(colocate)
        _add(filled["colocate"], "switch", profile.switch_seconds)
    return filled


@dataclass(frozen=True, slots=True)
class _Filling:
    """A profile whose errors name the keys of the SPEC."""

    spec: Mapping[str, Any]
    profile: Profile
    name: str

    def pool(self, pool: Any, index: int) -> Any:
        if not isinstance(pool, Mapping) or "seconds" in pool:
            return pool
        own = {f"generators[{index}].slice": pool["slice"]} if isinstance(pool.get("slice"), int) else {}
        return {**pool, "seconds": self._table(f"generators[{index}].seconds", own)}

    def trainer(self, trainer: Any) -> Any:
        if not isinstance(trainer, Mapping):
            return trainer
        filled = dict(trainer)
        if "seconds_per_sample" not in trainer:
            if self.profile.training is None:
                raise self.missing("trainer.seconds_per_sample", "training")
            filled["seconds_per_sample"] = self.profile.training.seconds_per_sample / _cards(trainer)
        _add(filled, "commit", self.profile.shared_commit_seconds)
        if isinstance(trainer.get("helper"), Mapping):
            filled["helper"] = self._helper(dict(trainer["helper"]))
        return filled

    def missing(self, where: str, what: str) -> ConfigError:
        return ConfigError(f"{where}: missing, and the profile {self.name} has no {what}; give it", where)

    def _helper(self, helper: dict[str, Any]) -> dict[str, Any]:
        if "seconds" not in helper:
            helper["seconds"] = self._table("trainer.helper.seconds", {})
        _add(helper, "switch_in", self.profile.switch_in_seconds)
        _add(helper, "switch_out", self.profile.switch_out_seconds)
        return helper

    def _table(self, where: str, own: Mapping[str, int]) -> dict[int, float]:
        """The times by slice size, which have to cover the SPEC's slice and the sizes in `own`, by key."""
        table = self.profile.slice_seconds
        if not table:
            raise self.missing(where, "slices")
        key = "samples_per_prompt" if self.spec.get("slice") == "auto" else "slice"  # auto tries every divisor
        for slice_key, size in {key: self.spec.get(key), **own}.items():
            if isinstance(size, int) and not self.profile.covers(size):
                raise ConfigError(
                    f"{slice_key}: {size} samples together, but the profile {self.name} covers slices of "
                    f"{min(table)} to {max(table)}; choose such a slice, or give {where}",
                    slice_key,
                )
        return table


def _cards(trainer: Mapping[str, Any]) -> int:
    """Of the trainer, which share its work: one for each lane of its helper."""
    helper = trainer.get("helper")
    lanes = helper.get("lanes", 1) if isinstance(helper, Mapping) else 1
    return lanes if isinstance(lanes, int) and lanes > 0 else 1


def _add(content: dict[str, Any], key: str, value: float | None) -> None:
    if key not in content and value is not None:
        content[key] = value
