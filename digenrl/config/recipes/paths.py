"""Finds recipes and profiles by name or path, and resolves the paths in a recipe."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from digenrl.config.import_paths import has_module
from digenrl.config.reading import ConfigError, nearest
from digenrl.config.rewards.judge import TEMPLATES

PACKAGE = Path(__file__).parents[2]
DEMO = "demo"  # the folder of prompts in the package
DEMO_MODELS = {DEMO: "model", "edit_demo": "edit_model"}  # in the package, by source: their folders
RANDOM = "random"  # a model with random weights
DEMO_PROMPTS = PACKAGE / "demo" / "prompts"
FILE_ENDINGS = (".yaml", ".yml", ".json")
LONGEST_NAME, LONGEST_PATH = 255, 4_000  # in bytes, of one part and of all
REWARD_FILES = (
    *("model", "processor", "checkpoint", "tokenizer", "head", "template"),
    *("config", "detector", "prompt", "ca_file"),
)
REWARD_FOLDERS = ("cache",)  # made if they do not exist


def names_in(shipped: Path) -> list[str]:
    """The names of the YAML files in a folder of the package."""
    return sorted(path.stem for path in shipped.glob("*.yaml"))


def find_file(kind: str, where: str, shipped: Path, folder: Path = Path()) -> Path:
    """The file `where`, relative to `folder`, if it has a file ending or a slash; else the shipped file."""
    known = names_in(shipped)
    _check_length(where)
    if Path(where).suffix in FILE_ENDINGS or "/" in where or os.sep in where:
        path = folder / where
        if not path.exists() and path.stem in known:
            raise ConfigError(f"{where}: no such file; for the shipped {kind}, write {path.stem}")
        return path
    if where not in known:
        longer = [name for name in known if where and name.startswith(where)]
        hint = f"known, with this beginning: {', '.join(longer)}" if longer else nearest(where, known)
        endings = ", ".join(FILE_ENDINGS)
        raise ConfigError(f"unknown {kind} '{where}'; {hint}; or give a file, which ends in {endings}")
    return shipped / f"{where}.yaml"


def place_paths(content: dict[str, Any], folder: Path, given_here: set[str]) -> None:
    """Makes a recipe's relative paths absolute, in place.

    They are relative to the recipe's `folder`, or to the current one if their dotted keys are in `given_here`. The
    source of a model or reward that does not exist as a path is left unchanged: it may be a hub id. The folders of
    modules that are given by import path are added to `python_path`, so that a resumed run finds them again.
    """
    here, there = Path.cwd(), folder.absolute()
    for above in ("prompts", "evaluation.prompts"):
        prompts, key = _mapping_at(content, above), f"{above}.path"
        if isinstance(prompts.get("path"), str):
            prompts["path"] = _prompts_path(prompts["path"], here if key in given_here else there, key)
    model = _mapping_at(content, "model")
    for name in ("source", "base_source"):
        if isinstance(model.get(name), str) and not is_made_here(model[name]):
            model[name] = _where_it_exists(model[name], here if f"model.{name}" in given_here else there)
    lora, key = _mapping_at(content, "training.lora"), "training.lora.start_from"
    if isinstance(lora.get("start_from"), str):
        lora["start_from"] = str((here if key in given_here else there) / _from_home(lora["start_from"]))
    for reward, key in _rewards(content):
        for name in (*REWARD_FILES, *REWARD_FOLDERS):
            if isinstance(reward, dict) and isinstance(reward.get(name), str) and not _is_name(reward, name):
                base = here if _given(f"{key}.{name}", given_here) else there
                placed = str(base / _from_home(reward[name]))
                reward[name] = placed if name in REWARD_FOLDERS else _where_it_exists(reward[name], base)
    base = here if "python_path" in given_here else there
    found = []
    for path, key in _import_paths(content):
        places = (here, there) if _given(key, given_here) else (there, here)
        found += [str(place) for place in places if has_module(place, path)][:1]
    content["python_path"] = _python_path(content.get("python_path", []), base, found)


def _python_path(listed: Any, base: Path, found: list[str]) -> Any:
    """The listed folders as absolute paths, and those where modules were found. What is no list stays as it is."""
    folders = [listed] if isinstance(listed, str) else listed
    if not isinstance(folders, list) or not all(isinstance(folder, str) for folder in folders):
        return listed
    return list(dict.fromkeys([*(str(base / _from_home(folder)) for folder in folders), *found]))


def is_made_here(source: str) -> bool:
    """Whether a model needs no path: it is in the package or has random weights."""
    return source in DEMO_MODELS or source.partition(":")[0] == RANDOM


def _prompts_path(text: str, base: Path, key: str) -> str:
    """Resolves the path of prompts; `demo/` is the folder of prompts in the package."""
    if not text.startswith(f"{DEMO}/"):
        return str(base / _from_home(text))
    path = DEMO_PROMPTS / text.removeprefix(f"{DEMO}/")
    if not path.is_file():
        known = [f"{DEMO}/{found.name}" for found in sorted(DEMO_PROMPTS.iterdir())]
        hint = f"{nearest(text, known)}; for your own file, write ./{text}"
        raise ConfigError(f"{key}: {text} is not in the package; {hint}", key)
    return str(path)


def _where_it_exists(text: str, base: Path) -> str:
    path = base / _from_home(text)
    return str(path) if path.exists() or text.startswith((".", "~")) else text


def _from_home(text: str) -> Path:
    _check_length(text)
    return Path.home() / text[2:] if text.startswith("~/") else Path(text)


def _check_length(text: str) -> None:
    """Raises ConfigError for a text that no file system accepts as a path."""
    longest = max((len(part.encode(errors="replace")) for part in text.split("/")), default=0)
    if longest > LONGEST_NAME or len(text) > LONGEST_PATH or "\0" in text:
        raise ConfigError(f"{text[:60]!r}... is not a path or name: it is too long, or has a null character")


def _rewards(content: dict[str, Any]) -> Iterator[tuple[Any, str]]:
    """All rewards of training and evaluation as they are written, each with its dotted key."""
    for above in ("", "evaluation"):
        rewards, key = _mapping_at(content, above).get("rewards"), f"{above}.rewards".lstrip(".")
        if isinstance(rewards, list):
            yield from ((reward, f"{key}.{index}") for index, reward in enumerate(rewards))
        else:
            yield rewards, key


def _is_name(reward: dict[str, Any], key: str) -> bool:
    """Whether a judge's value is never a path: the name of a template, or of the model on its server."""
    return reward.get("name") == "judge" and (key == "model" or (key == "template" and reward[key] in TEMPLATES))


def _import_paths(content: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Everything that is given by an import path, each with its dotted key."""
    names = [(_mapping_at(content, "algorithm").get("name"), "algorithm.name")]
    names.append((_mapping_at(content, "model").get("family"), "model.family"))
    for reward, key in _rewards(content):
        if isinstance(reward, dict):
            names += [(reward.get(name), f"{key}.{name}") for name in ("name", "target")]
        else:
            names.append((reward, key))
    given = [(name, key) for name, key in names if isinstance(name, str) and ":" in name]
    for name, _ in given:
        _check_length(name)
    yield from given


def _given(key: str, given_here: set[str]) -> bool:
    """Whether the value of a dotted key was given here, by itself or as part of a larger value."""
    parts = key.split(".")
    return any(".".join(parts[:length]) in given_here for length in range(1, len(parts) + 1))


def _mapping_at(content: dict[str, Any], key: str) -> dict[str, Any]:
    for part in key.split(".") if key else ():
        inner = content.get(part)
        content = inner if isinstance(inner, dict) else {}
    return content
