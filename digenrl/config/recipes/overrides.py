"""`key=value` overrides of a recipe: `training.learning_rate=1e-4`, `lanes.generators=[cuda:0, cuda:1]`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel

from digenrl.config.reading import TOO_DEEP, ConfigError, check_content, model_inside, one_line
from digenrl.config.recipes.recipe import Recipe

# Keys below these are not in the schema.
OPEN_KEYS = ("rewards", "evaluation.rewards", "algorithm.options", "sample.window")
SECRET_KEYS = ("model.token",)  # values that error messages do not repeat
# Mappings that replace the old one if they have this key: settings of one kind mean nothing to another.
REPLACED_BY = {"sample.window": "kind", "algorithm": "name"}


@dataclass(frozen=True, slots=True)
class Override:
    """One override: its text as given, its dotted key, and its parsed value."""

    text: str
    key: str
    value: Any

    def keys_set(self) -> Iterator[str]:
        """The dotted keys that it sets; several if the value is a mapping."""
        yield from _leaves(self.key, self.value)


def read_overrides(texts: Sequence[str]) -> list[Override]:
    """All overrides in order; raises ConfigError for an unknown or repeated key."""
    overrides: dict[str, Override] = {}
    for text in texts:
        override = _read_override(text)
        before = overrides.get(override.key)
        if before is not None:
            raise ConfigError(
                f"{override.key}: given twice, as {before.text} and as {override.text}; leave one of them out"
            )
        overrides[override.key] = override
    return list(overrides.values())


def apply_override(config: DictConfig, override: Override) -> None:
    """Merges a mapping into an existing mapping, in place; any other value replaces the existing one."""
    try:
        before = OmegaConf.select(config, override.key, throw_on_missing=False)
        both_mappings = isinstance(before, DictConfig) and isinstance(override.value, dict)
        merge = both_mappings and REPLACED_BY.get(override.key) not in override.value
        OmegaConf.update(config, override.key, override.value, merge=merge)
    except OmegaConfBaseException as error:
        reason = _about_list(config, override.key) or omegaconf_message(error)
        raise ConfigError(f"{override.text}: {reason}") from None


def _about_list(config: DictConfig, key: str) -> str:
    """How to name an entry of the first list above a key that is in none of its entries; empty without a list."""
    parts = key.split(".")
    for depth in range(1, len(parts)):
        above, below = ".".join(parts[:depth]), parts[depth:]
        found = OmegaConf.select(config, above)
        if isinstance(found, ListConfig):
            entry = ".".join([above, "0", *(below[1:] if below[0].isdecimal() else below)])
            return f"'{above}' is a list of {len(found)}, counted from 0; write {entry}, or replace the list"
    return ""


def blame(error: ConfigError, overrides: Sequence[Override], otherwise: str) -> ConfigError:
    """The same error, prefixed with the override that caused it, or with `otherwise`."""
    where = _in_dots(error.where)
    last = {override.key: override for override in overrides}
    for override in sorted(last.values(), key=lambda each: -len(each.key)):  # the most specific one first
        if where == override.key:
            return ConfigError(f"{override.text}: {str(error).removeprefix(f'{error.where}: ')}", error.where)
        inside = where.startswith(f"{override.key}.")
        if inside or (where in OPEN_KEYS and override.key.startswith(f"{where}.")):
            return ConfigError(f"{override.text}: {error}", error.where)
        if override.key == "algorithm.name" and where.startswith("algorithm.options."):
            without = f"algorithm={{name: {override.value}}}"
            why = f"the recipe's options are those of another algorithm; to leave them out, write '{without}'"
            return ConfigError(f"{override.text}: {error}; {why}", error.where)
    return ConfigError(f"{otherwise}: {error}", error.where)


def omegaconf_message(error: Exception) -> str:
    """The first line of an OmegaConf error, or all lines of a YAML error, which describe one place."""
    return one_line(error) if isinstance(error, yaml.YAMLError) else str(error).splitlines()[0]


def _read_override(text: str) -> Override:
    name, equals, value = text.partition("=")
    key = _in_dots(name.strip())
    shown = f"{key}=..." if equals and key in SECRET_KEYS else _shortened(text)
    if not equals or not key:
        raise ConfigError(f"{shown}: not an override; expected key=value, such as seed=1")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))
        check_content(parsed)
    except (ConfigError, RecursionError) as error:
        raise ConfigError(f"{shown}: {TOO_DEEP if isinstance(error, RecursionError) else error}") from None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, OverflowError) as error:
        raise ConfigError(f"{shown}: not valid YAML after the '=': {omegaconf_message(error)}; quote it") from None
    assert isinstance(parsed, dict)
    override = Override(shown, key, parsed["value"])
    _check_key(override)
    return override


def _check_key(override: Override) -> None:
    """Raises ConfigError for a key that is not in the schema; the message names the nearest one."""
    parts = override.key.split(".")
    model: type[BaseModel] | None = Recipe
    for depth, part in enumerate(parts):
        above = ".".join(parts[:depth])
        if model is None:
            raise ConfigError(f"{override.text}: '{above}' is a single value, with no keys below it")
        if part not in model.model_fields:
            hint = _nearest_key(parts, depth, list(model.model_fields))
            raise ConfigError(f"{override.text}: unknown key; {hint}")
        annotation = model.model_fields[part].annotation
        if ".".join(parts[: depth + 1]) in OPEN_KEYS or _takes_mapping(annotation):
            return
        model = model_inside(annotation)


def _takes_mapping(annotation: Any) -> bool:
    """Whether it is a mapping such as `dict[str, float]`, alone or in a union: its keys are the user's."""
    return get_origin(annotation) is dict or any(map(_takes_mapping, get_args(annotation)))


def _nearest_key(parts: list[str], depth: int, siblings: list[str]) -> str:
    """A hint: the nearest key at the same level, or else the key anywhere whose last part is most similar."""
    known = list(all_keys(Recipe))
    near = []
    for name in difflib.get_close_matches(parts[depth], siblings, n=1):
        near += [".".join([*parts[:depth], name, *parts[depth + 1 :]]), ".".join([*parts[:depth], name])]
    by_last_part = {key.rpartition(".")[2]: key for key in reversed(known)}
    near += [by_last_part[name] for name in difflib.get_close_matches(parts[-1], by_last_part, n=1, cutoff=0.7)]
    found = next((key for key in near if key in known), "")
    did_you_mean = f"did you mean '{found}'? " if found else ""
    place = f" in {'.'.join(parts[:depth])}" if depth else ""
    return f"{did_you_mean}known{place}: {', '.join(siblings)}"


def all_keys(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Every dotted key of a settings model, in order, each section before its keys."""
    for name, field in model.model_fields.items():
        key = f"{above}{name}"
        yield key
        inside = model_inside(field.annotation)
        if inside is not None and key not in OPEN_KEYS:
            yield from all_keys(inside, f"{key}.")


def _leaves(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key


def _in_dots(key: str) -> str:
    """rewards[0].weight reads rewards.0.weight."""
    return re.sub(r"\[(\w+)\]", r".\1", key)


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 100 else f"{text[:97]}..."
