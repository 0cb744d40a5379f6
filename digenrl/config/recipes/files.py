"""Recipe files: found by name or path, merged with `key=value` overrides, read, written and fingerprinted.

OmegaConf merges and interpolates (`${seed}`), pydantic validates. Every error is one line that names the file or
the override that is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from digenrl.config.import_paths import add_to_python_path
from digenrl.config.reading import ConfigError, check_content, mapped, parse_model, read_mapping
from digenrl.config.recipes.overrides import Override, apply_override, blame, omegaconf_message, read_overrides
from digenrl.config.recipes.paths import PACKAGE, find_file, names_in, place_paths
from digenrl.config.recipes.prompts import PromptSettings
from digenrl.config.recipes.recipe import Recipe

SHIPPED = PACKAGE / "recipes"
EXAMPLES = {"prompts.path": "prompts.txt", "evaluation.prompts.path": "held_out.txt"}

# Keys that do not change the computed update, except for the rounding of its sums. All other keys count.
NOT_IN_FINGERPRINT: dict[str, Any] = {
    **dict.fromkeys(("name", "steps", "mode", "lanes", "cluster", "evaluation", "checkpoint", "logging"), True),
    "python_path": True,
    "model": {"attention", "compile", "deterministic", "token"},
    "sample": {"decode_rows"},
    "training": {
        *("pack_size", "largest_pack", "memory_share", "job_samples"),
        *("gradient_checkpointing", "sum_in_order", "offload", "skipped_steps", "stages", "links"),
    },
    "techniques": {"gap", "tsp", "tag", "assist", "dispatch"},
    "rewards": {
        "__all__": {
            *("label", "device", "batch_size", "threads"),
            *("token_env", "ca_file", "timeout_s", "retries", "backoff_s", "max_backoff_s"),
            *("isolated", "memory_gb", "concurrency", "cache"),
        }
    },
}


RESOLVER = re.compile(r"(?<!\\)\$\{[^{}]*:")


def shipped_recipes() -> list[str]:
    return names_in(SHIPPED)


def read_recipe(where: str, overrides: Sequence[str] = (), *, without_prompts: bool = False) -> Recipe:
    """The recipe in a file or of a shipped name, with overrides such as `training.learning_rate=1e-4`.

    A mapping as a value is merged into the existing mapping, any other value replaces it. Relative paths become
    absolute: they are relative to the recipe's file, or, in overrides, to the current folder. `without_prompts`
    accepts a recipe whose prompts are still `???`, for callers that draw none. Modules that the recipe names by
    import path are found in the current folder and in that of the recipe; from here on they can be imported.
    """
    path = find_file("recipe", where, SHIPPED)
    given = read_overrides(overrides)
    config = _overridden(_load(path), given)
    if without_prompts:
        _fill_in_examples(config)
    _refuse_missing(config, where)
    return _parsed(config, given, path)


def recipe_for_model(content: Mapping[str, Any], overrides: Sequence[str], where: str) -> Recipe:
    """A recipe that is not in a file, such as that of a model alone; `where` names it in error messages."""
    given = read_overrides(overrides)
    return _parsed(_overridden(OmegaConf.create(dict(content)), given), given, Path(where))


def _overridden(config: DictConfig, given: Sequence[Override]) -> DictConfig:
    for override in given:
        apply_override(config, override)
    _keep_newest_source(config, _keys_in(given))
    return config


def _keys_in(given: Sequence[Override]) -> set[str]:
    return {key for override in given for key in override.keys_set()}


def _parsed(config: DictConfig, given: Sequence[Override], path: Path) -> Recipe:
    try:
        content = _resolved(config)
        check_content(content)
        place_paths(content, path.parent, _keys_in(given))
        recipe = parse_model(Recipe, content)
    except ConfigError as error:
        raise blame(error, given, otherwise=str(path)) from None
    add_to_python_path(recipe.python_path)
    return recipe


def write_recipe(recipe: Recipe) -> str:
    """The recipe as YAML that reads back equal, with all defaults, in the order of the schema.

    The paths of a recipe that was read are absolute.
    """
    return OmegaConf.to_yaml(OmegaConf.create(mapped(recipe.model_dump(mode="json"), _escaped)))


def fingerprint(recipe: Recipe) -> str:
    """A hash of everything that changes the computed update; NOT_IN_FINGERPRINT lists what does not.

    Prompts count by the content of their file (by its path if it does not exist), and those of a prompt set as if
    they were in a file; all else counts by value.
    """
    content = recipe.model_dump(mode="json", exclude=NOT_IN_FINGERPRINT)
    if recipe.publish.dtype != "bfloat16":
        del content["publish"]  # the others change no bit
    prompts = recipe.prompts
    content["prompts"] = {
        "path": _digest(_prompt_content(prompts)),
        "column": prompts.column,
        "shuffle": prompts.shuffle,
        **({} if prompts.image_column is None else {"image_column": prompts.image_column}),
        **({} if prompts.pair_columns is None else {"pair_columns": list(prompts.pair_columns)}),
        **({} if prompts.count is None or prompts.path is None else {"count": prompts.count}),
    }
    return _digest(json.dumps(mapped(content, _canonical), sort_keys=True).encode())


def evaluation_fingerprint(recipe: Recipe) -> str:
    """A hash of what decides the result of an evaluation, apart from the weights. A resumed run may change it."""
    exclude = {"evaluation": {"every", "batch", "shown"}, "rewards": NOT_IN_FINGERPRINT["rewards"]}
    content = recipe.model_dump(mode="json", include={"evaluation", "rewards"}, exclude=exclude)
    return _digest(json.dumps(content, sort_keys=True).encode())[:12]


def _prompt_content(settings: PromptSettings) -> bytes:
    """The content of the file with the prompts, or of the .jsonl file that a prompt set would have."""
    if settings.prompt_set is not None:
        prompts = settings.prompt_set.prompts(settings.split, settings.count, settings.seed)
        return "".join(f"{prompt.as_json_line()}\n" for prompt in prompts).encode()
    assert settings.path is not None
    return settings.path.read_bytes() if settings.path.is_file() else str(settings.path).encode()


def _keep_newest_source(config: DictConfig, given_here: set[str]) -> None:
    """A file of prompts given as an override replaces the recipe's prompt set, and the other way round."""
    for above in ("prompts", "evaluation.prompts"):
        for given, other in (("path", "name"), ("name", "path")):
            replaced = f"{above}.{other}"
            if f"{above}.{given}" in given_here and replaced not in given_here:
                OmegaConf.update(config, replaced, None)


def _load(path: Path) -> DictConfig:
    content = read_mapping(path)
    if path.suffix == ".json":
        return OmegaConf.create(content)
    try:
        # Parse the text again: OmegaConf's YAML reads 1e-4 as a number.
        config = OmegaConf.create(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, OverflowError) as error:
        raise ConfigError(f"{path}: {omegaconf_message(error)}") from None
    assert isinstance(config, DictConfig), "read_mapping returned a mapping"
    return config


def _fill_in_examples(config: DictConfig) -> None:
    for key in _missing_keys(config):
        if key in EXAMPLES:
            OmegaConf.update(config, key, EXAMPLES[key])


def _refuse_missing(config: DictConfig, where: str) -> None:
    missing = _missing_keys(config)
    if missing:
        example = " ".join(f"{key}={EXAMPLES.get(key, '...')}" for key in missing)
        raise ConfigError(f"{where}: {' and '.join(missing)} must be given: digenrl train {where} {example}")


def _missing_keys(config: DictConfig) -> list[str]:
    """The dotted keys with the value `???`."""
    return [key for key, value in _values(OmegaConf.to_container(config)) if value == "???"]


def _values(content: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """All values that are no mapping and no list, with their dotted keys."""
    if isinstance(content, dict):
        for name, inner in content.items():
            yield from _values(inner, f"{key}.{name}".lstrip("."))
    elif isinstance(content, list):
        for index, inner in enumerate(content):
            yield from _values(inner, f"{key}.{index}")
    else:
        yield key, content


def _resolved(config: DictConfig) -> dict[str, Any]:
    _refuse_resolvers(config)
    try:
        content = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        key = str(error.full_key)
        raise ConfigError(f"{key}: {omegaconf_message(error)}", key) from None
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def _refuse_resolvers(config: DictConfig) -> None:
    """Raises ConfigError for `${oc.env:NAME}` and the like: a recipe may refer to its own keys only."""
    for key, value in _values(OmegaConf.to_container(config)):
        if isinstance(value, str) and (found := RESOLVER.search(value)):
            raise ConfigError(
                f"{key}: {found[0]}...}} is not allowed: a recipe may refer to its own keys, as ${{seed}}, and "
                "reads no environment variables",
                key,
            )


def _escaped(value: Any) -> Any:
    """A value with `${` escaped, so that it is not read as an interpolation."""
    if not isinstance(value, str):
        return value
    return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)


def _canonical(value: Any) -> Any:
    """1.0 is written as 1, so that both have the same hash."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()
