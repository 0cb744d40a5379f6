"""The algorithms by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from digenrl.algorithms.contract import Algorithm, AlgorithmSettings, GroupRelative
from digenrl.algorithms.dance_grpo import DanceGrpo, DanceGrpoSettings
from digenrl.algorithms.diffusion_nft import DiffusionNft, DiffusionNftSettings
from digenrl.algorithms.flow_dpo import FlowDpo, FlowDpoSettings
from digenrl.algorithms.flow_grpo import FlowGrpo, FlowGrpoFast, FlowGrpoFastSettings, FlowGrpoSettings
from digenrl.algorithms.grpo_guard import GrpoGuard, GrpoGuardSettings
from digenrl.algorithms.mix_grpo import MixGrpo, MixGrpoSettings
from digenrl.config.reading import ConfigError, nearest, parse_model


@dataclass(frozen=True, slots=True)
class Entry:
    """An algorithm, and the settings it takes."""

    algorithm: type[GroupRelative]
    settings: type[AlgorithmSettings]


ALGORITHMS: dict[str, Entry] = {
    "flow_grpo": Entry(FlowGrpo, FlowGrpoSettings),
    "flow_grpo_fast": Entry(FlowGrpoFast, FlowGrpoFastSettings),
    "dance_grpo": Entry(DanceGrpo, DanceGrpoSettings),
    "mix_grpo": Entry(MixGrpo, MixGrpoSettings),
    "grpo_guard": Entry(GrpoGuard, GrpoGuardSettings),
    "diffusion_nft": Entry(DiffusionNft, DiffusionNftSettings),
    "flow_dpo": Entry(FlowDpo, FlowDpoSettings),
}


def build_algorithm(name: str, options: Mapping[str, Any] | None = None) -> Algorithm:
    """The algorithm of this name with these settings; what is wrong is a ConfigError of one line."""
    entry = ALGORITHMS.get(name)
    if entry is None:
        raise ConfigError(f"unknown algorithm '{name}'; {nearest(name, list(ALGORITHMS))}")
    try:
        settings = parse_model(entry.settings, dict(options or {}))
    except ConfigError as error:
        raise ConfigError(f"algorithm {name}: {error}") from None
    return entry.algorithm(settings)
