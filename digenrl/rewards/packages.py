"""Whether the packages that rewards need are installed, found without importing them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.recipe import Recipe
from digenrl.config.rewards.base import RewardSettings

# The extra of this package that installs what a reward imports.
EXTRAS = {"ocr": "ocr", "face_count": "vision", "imagenet": "vision", "http": "serve", "judge": "serve"}


def check_packages(recipe: Recipe) -> None:
    """Raises ConfigError if a reward needs a package that this machine has not.

    Rewards on servers need none. Other machines of a cluster may have what this one has not.
    """
    if recipe.topology.uses_ray:
        return
    for settings in (*recipe.rewards, *recipe.held_out_rewards):
        names = [re.split("[<>=!~]", each)[0] for each in settings.needed_packages]
        missing = [name for name in names if not is_installed(name)]
        if missing:
            raise missing_packages(settings, missing)


def is_installed(package: str) -> bool:
    """Whether there is a module or a distribution of this name; onnxruntime-gpu is only the module onnxruntime."""
    if find_spec(package.replace("-", "_")) is not None:
        return True
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def missing_packages(settings: RewardSettings, names: Sequence[str]) -> ConfigError:
    """The error that a reward's packages are not installed, with where to get them."""
    extra = EXTRAS.get(settings.name)
    install = "install them" if extra is None else f"install digenrl[{extra}]"
    elsewhere = f", or serve the reward from its own environment: digenrl reward serve {settings.name} --env DIR"
    return ConfigError(
        f"reward '{settings.name}' needs packages that are not installed: {', '.join(names)}; {install}"
        + ("" if extra == "serve" else elsewhere)
    )
