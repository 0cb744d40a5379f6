"""Recipes as files: found by name or path, merged with `key=value` overrides, read, written, and told apart.

OmegaConf merges and interpolates (`${seed}`), pydantic validates. Every mistake is one line that names the file or
the override it is in.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from digenrl.config.reading import ConfigError, nearest, parse_model, read_mapping
from digenrl.config.recipe import Recipe
from digenrl.config.recipe_overrides import apply_override, blame, in_one_line, read_overrides
from digenrl.config.recipe_paths import PACKAGE, place_paths

SHIPPED = PACKAGE / "recipes"
FILE_ENDINGS = (".yaml", ".yml", ".json")
EXAMPLES = {"prompts.path": "prompts.txt", "evaluation.prompts.path": "held_out.txt"}

# What the computed update does not depend on, but for the rounding of its sums. All other keys count.
NOT_IN_FINGERPRINT: dict[str, Any] = {
    **dict.fromkeys(("name", "steps", "mode", "lanes", "cluster", "evaluation", "checkpoint", "logging"), True),
    "model": {"compile"},
    "sample": {"decode_rows"},
    "training": {"pack_size", "largest_pack", "memory_share", "gradient_checkpointing", "sum_in_order", "offload"},
    "techniques": {"gap", "tsp", "tag", "dispatch"},
    "rewards": {
        "__all__": {
            *("label", "device", "batch_size", "threads"),
            *("token_env", "timeout_s", "retries", "backoff_s", "max_backoff_s"),
        }
    },
}


def shipped_recipes() -> list[str]:
    """The names of the recipes that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def read_recipe(where: str, overrides: Sequence[str] = (), *, without_prompts: bool = False) -> Recipe:
    """The recipe of a file or of a shipped name, with overrides such as `training.learning_rate=1e-4`.

    A mapping given as a value is merged into what is there, anything else replaces it. Relative paths are relative
    to the recipe's file, those of overrides to the current folder; they come out absolute. `without_prompts` reads
    a recipe that leaves its prompts open, for who will not draw any.
    """
    path = find_recipe(where)
    given = read_overrides(overrides)
    config = _load(path)
    for override in given:
        apply_override(config, override)
    if without_prompts:
        _fill_in_examples(config)
    _refuse_missing(config, where)
    try:
        content = _resolved(config)
        place_paths(content, path.parent, {key for override in given for key in override.keys_set()})
        return parse_model(Recipe, content)
    except ConfigError as error:
        raise blame(error, given, otherwise=str(path)) from None


def find_recipe(where: str) -> Path:
    """A file, if it is written as one (with an ending or a folder); else the shipped recipe of this name."""
    path = Path(where)
    known = shipped_recipes()
    if path.suffix in FILE_ENDINGS or "/" in where or os.sep in where:
        if not path.exists() and path.stem in known:
            raise ConfigError(f"{where}: no such file; for the recipe that comes with DigenRL, write {path.stem}")
        return path
    if where not in known:
        or_a_file = f"or name a file, which ends in {', '.join(FILE_ENDINGS)}"
        raise ConfigError(f"unknown recipe '{where}'; {nearest(where, known)}; {or_a_file}")
    return SHIPPED / f"{where}.yaml"


def write_recipe(recipe: Recipe) -> str:
    """The whole recipe as YAML, defaults too, in the schema's order; read again, it is an equal recipe.

    Paths are written as they are, which is absolute in every recipe that was read.
    """
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(recipe.model_dump(mode="json"))))


def fingerprint(recipe: Recipe) -> str:
    """Differs where anything differs that changes the computed update; see NOT_IN_FINGERPRINT for what does not.

    Prompts count by what their file holds, wherever it is (by its path while there is none), all else by value.
    """
    content = recipe.model_dump(mode="json", exclude=NOT_IN_FINGERPRINT)
    prompts = recipe.prompts.path
    content["prompts"]["path"] = _digest(prompts.read_bytes() if prompts.is_file() else str(prompts).encode())
    return _digest(json.dumps(_canonical(content), sort_keys=True).encode())


def _load(path: Path) -> DictConfig:
    content = read_mapping(path)
    if path.suffix == ".json":
        return OmegaConf.create(content)
    try:
        # Again from the text: OmegaConf's YAML knows 1e-4 for a number, and refuses a key that is there twice.
        config = OmegaConf.create(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {in_one_line(error)}") from None
    assert isinstance(config, DictConfig), "the mapping that was read before"
    return config


def _fill_in_examples(config: DictConfig) -> None:
    for key in _missing_keys(OmegaConf.to_container(config), ""):
        if key in EXAMPLES:
            OmegaConf.update(config, key, EXAMPLES[key])


def _refuse_missing(config: DictConfig, where: str) -> None:
    missing = list(_missing_keys(OmegaConf.to_container(config), ""))
    if missing:
        example = " ".join(f"{key}={EXAMPLES.get(key, '...')}" for key in missing)
        raise ConfigError(f"{where}: {' and '.join(missing)} must be given: digenrl train {where} {example}")


def _missing_keys(content: Any, key: str) -> Iterator[str]:
    """The dotted keys whose value is `???`."""
    if isinstance(content, dict):
        for name, inner in content.items():
            yield from _missing_keys(inner, f"{key}.{name}".lstrip("."))
    elif isinstance(content, list):
        for index, inner in enumerate(content):
            yield from _missing_keys(inner, f"{key}.{index}")
    elif content == "???":
        yield key


def _resolved(config: DictConfig) -> dict[str, Any]:
    try:
        content = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        key = str(error.full_key)
        raise ConfigError(f"{key}: {in_one_line(error)}", key) from None
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def _escaped(value: Any) -> Any:
    """The same content, in which a text that looks like an interpolation is a text."""
    if isinstance(value, Mapping):
        return {key: _escaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
    return value


def _canonical(value: Any) -> Any:
    """The same content, in which 1 and 1.0 are one number."""
    if isinstance(value, Mapping):
        return {str(key): _canonical(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_canonical(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()
