"""The algorithms by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from digenrl.algorithms.awm import Awm
from digenrl.algorithms.contract import Algorithm, GroupRelative
from digenrl.algorithms.dance_grpo import DanceGrpo
from digenrl.algorithms.diffusion_nft import DiffusionNft
from digenrl.algorithms.flash_grpo import FlashGrpo
from digenrl.algorithms.flow_dpo import FlowDpo
from digenrl.algorithms.flow_dppo import FlowDppo
from digenrl.algorithms.flow_grpo import FlowGrpo, FlowGrpoFast
from digenrl.algorithms.grpo_guard import GrpoGuard
from digenrl.algorithms.mix_grpo import MixGrpo
from digenrl.config.algorithms import import_algorithm, read_algorithm_settings

ALGORITHMS: dict[str, type[GroupRelative]] = {
    "flow_grpo": FlowGrpo,
    "flow_grpo_fast": FlowGrpoFast,
    "dance_grpo": DanceGrpo,
    "mix_grpo": MixGrpo,
    "grpo_guard": GrpoGuard,
    "flow_dppo": FlowDppo,
    "flash_grpo": FlashGrpo,
    "diffusion_nft": DiffusionNft,
    "awm": Awm,
    "flow_dpo": FlowDpo,
}


def build_algorithm(name: str, options: Mapping[str, Any] | None = None) -> Algorithm:
    """The algorithm of this name or import path with these options; raises ConfigError if it is unknown."""
    settings = read_algorithm_settings(name, options or {})
    algorithm: Algorithm = (ALGORITHMS.get(name) or import_algorithm(name))(settings)
    return algorithm
