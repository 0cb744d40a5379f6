"""The algorithms by name."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from digenrl.algorithms.awm import Awm
from digenrl.algorithms.contract import GroupRelative
from digenrl.algorithms.dance_grpo import DanceGrpo
from digenrl.algorithms.diffusion_nft import DiffusionNft
from digenrl.algorithms.flash_grpo import FlashGrpo
from digenrl.algorithms.flow_dpo import FlowDpo
from digenrl.algorithms.flow_dppo import FlowDppo
from digenrl.algorithms.flow_grpo import FlowGrpo, FlowGrpoFast
from digenrl.algorithms.grpo_guard import GrpoGuard
from digenrl.algorithms.mix_grpo import MixGrpo
from digenrl.config.algorithms import AlgorithmSettings, import_algorithm, read_algorithm_settings
from digenrl.config.reading import ConfigError

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


def build_algorithm(name: str, options: Mapping[str, Any] | None = None) -> GroupRelative:
    """The algorithm of this name or import path with these options; raises ConfigError if it is unknown."""
    settings = read_algorithm_settings(name, options or {})
    return (ALGORITHMS.get(name) or _own_algorithm(name, settings))(settings)


def _own_algorithm(path: str, settings: AlgorithmSettings) -> type[GroupRelative]:
    """The class at an import path; raises ConfigError unless it can be built and has a loss of one argument."""
    found = import_algorithm(path)
    if not (isinstance(found, type) and issubclass(found, GroupRelative)):
        raise ConfigError(
            f"algorithm.name: '{path}': expected a subclass of digenrl.algorithms.contract.GroupRelative, "
            f"got {found!r}; derive it from that class or one of the algorithms",
            "algorithm.name",
        )
    if missing := ", ".join(sorted(found.__abstractmethods__)):
        raise ConfigError(f"algorithm.name: '{path}': the class does not implement {missing}; add it")
    for called, function, given in (
        (f"{found.__name__}(settings)", found, (settings,)),
        ("loss(self, pairs)", found.loss, (None, None)),
    ):
        try:
            signature(function).bind(*given)
        except TypeError as error:
            raise ConfigError(
                f"algorithm.name: '{path}': {error}; DigenRL calls {called}, and it takes {signature(function)}"
            ) from None
    return found
