"""The files of a diffusers pipeline: which ones a component needs, which are missing, and whether they are whole.

The same rules apply to a folder and to a repository of the hub: both are a listing of paths with their sizes.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from digenrl.config.reading import ConfigError, one_line

INDEX_NAME = "model_index.json"
Listing = Mapping[str, int]  # bytes of each file, by its path inside the pipeline's folder

STEMS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}  # of weight files, by library
WEIGHTS = re.compile(
    r"(?P<stem>\w+)(\.(?P<variant>\w+))?(-(?P<shard>\d{5})-of-(?P<shards>\d{5}))?(\.(?P<old_variant>\w+))?\.safetensors"
)
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
SMALL_FILES = (".json", ".txt", ".model", ".jinja")  # configurations and vocabularies
VOCABULARIES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("spiece.model",), ("tokenizer.model",))


class MissingFilesError(ConfigError):
    """Files of a pipeline are missing, as after an interrupted download, or are there in other formats only."""


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """A tensor in the header of a .safetensors file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)


def pipeline_index(text: str, where: object) -> dict[str, Any]:
    """The content of a model_index.json; raises ConfigError unless it names a pipeline class."""
    try:
        content = json.loads(text)
        if not isinstance(content["_class_name"], str | list):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{where}: does not name a pipeline class; is the file damaged?") from None
    if isinstance(content["_class_name"], list):
        raise ConfigError(f"{where}: its pipeline class is in code of its own, which is never run")
    return dict(content)


def components(index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Library and class of every component that the pipeline has, by name."""
    return {
        name: (value[0], value[1])
        for name, value in index.items()
        if not name.startswith("_") and isinstance(value, list) and all(value)
    }


def pipeline_files(
    where: object, index: Mapping[str, Any], listing: Listing, variant: str | None, without: Sequence[str] = ()
) -> dict[str, int]:
    """The files to load, with their sizes: small files of all components, weights of those not in `without`.

    Weights are .safetensors only. With a variant, a component that lacks it uses its other files, as in diffusers.
    Raises MissingFilesError for an incomplete pipeline, also if the variant does not exist or weights are pickled.
    """
    files = {INDEX_NAME: listing.get(INDEX_NAME, 0)}
    chosen: dict[str, list[str]] = {}
    for name, (library, kind) in components(index).items():
        inside = [path for path in listing if path.rpartition("/")[0] == name]
        files |= {path: listing[path] for path in inside if path.endswith(SMALL_FILES)}
        if name in without or library not in STEMS:
            continue
        _require_small_files(where, name, kind, inside)
        if has_weights(kind):
            chosen[name] = [path for path in inside if _stem(path) == STEMS[library]]
            if not chosen[name]:
                raise _no_weights(where, name, inside)
    _check_variant(where, variant, chosen, known_variants(listing))
    for name, paths in chosen.items():
        weights = [path for path in paths if _variant(path) == variant]
        weights = weights or [path for path in paths if _variant(path) is None]
        weights = _shards_or_whole(weights, inside=[path for path in listing if path.startswith(f"{name}/")])
        _require_all_shards(where, name, weights)
        files |= {path: listing[path] for path in weights}
    return files


def has_weights(kind: str) -> bool:
    """Whether a component of this class has weights: not a tokenizer, processor, scheduler or guider."""
    weightless = kind.endswith(("Scheduler", "Extractor", "Guidance"))
    return not weightless and "Processor" not in kind and "Tokenizer" not in kind


def copy_components(source: Path, target: Path, names: Sequence[str], optional: Sequence[str]) -> None:
    """Copies these components from one pipeline's folder to another's, except for optional ones with weights."""
    if not names or not (source / INDEX_NAME).is_file():
        return
    known = json.loads((source / INDEX_NAME).read_text(encoding="utf-8"))
    index = json.loads((target / INDEX_NAME).read_text(encoding="utf-8"))
    for name, (_, kind) in components(known).items():
        needed = name in names and not (name in optional and has_weights(kind))
        if needed and (source / name).is_dir():
            shutil.rmtree(target / name, ignore_errors=True)
            shutil.copytree(source / name, target / name)
            index[name] = known[name]
    (target / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def folder_listing(folder: Path) -> dict[str, int]:
    """The files of a pipeline's folder and of its components' folders."""
    paths = [*folder.glob("*"), *folder.glob("*/*")]
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths if path.is_file()}


def read_header(path: Path) -> dict[str, HeaderEntry]:
    """The tensors of a .safetensors file by name; raises ConfigError if the file is damaged or truncated."""
    try:
        with safe_open(path, framework="np") as file:
            names = file.keys()
            entries = {name: file.get_slice(name) for name in names}
            return {name: HeaderEntry(each.get_dtype(), tuple(each.get_shape())) for name, each in entries.items()}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise ConfigError(
            f"{path}: not a safetensors file, or damaged ({one_line(error)}); copy or download it again"
        ) from None


def _parts(path: str) -> re.Match[str] | None:
    return WEIGHTS.fullmatch(path.rpartition("/")[2])


def _stem(path: str) -> str | None:
    parts = _parts(path)
    return None if parts is None else parts["stem"]


def _variant(path: str) -> str | None:
    parts = _parts(path)
    return None if parts is None else parts["variant"] or parts["old_variant"]


def _require_small_files(where: object, name: str, kind: str, inside: Sequence[str]) -> None:
    names = {path.rpartition("/")[2] for path in inside}
    if "Tokenizer" in kind and not kind.startswith("ByT5"):  # whose vocabulary is the 256 bytes
        if not any(set(vocabulary) <= names for vocabulary in VOCABULARIES):
            known = " or ".join(" and ".join(vocabulary) for vocabulary in VOCABULARIES)
            raise _missing(where, f"{name} has no vocabulary ({known})")
        return
    needed = "scheduler_config.json" if kind.endswith("Scheduler") else "config.json"
    if needed not in names and kind.endswith(("Scheduler", "Model")):
        raise _missing(where, f"{name}/{needed} is not there")


def _no_weights(where: object, name: str, inside: Sequence[str]) -> ConfigError:
    pickles = [path for path in inside if path.endswith(PICKLES)]
    if pickles:
        return MissingFilesError(
            f"{where}: {pickles[0]} is pickled, which can run code; only .safetensors weights are loaded: save "
            "the pipeline again with diffusers' save_pretrained, or choose a repository that has them"
        )
    return _missing(where, f"{name} has no weights (.safetensors)")


def known_variants(listing: Listing) -> list[str]:
    """The variants of which some component has weight files."""
    weights = [path for path in listing if path.count("/") == 1 and _stem(path) in STEMS.values()]
    return sorted({variant for variant in map(_variant, weights) if variant is not None})


def _check_variant(
    where: object, variant: str | None, chosen: Mapping[str, Sequence[str]], known: Sequence[str]
) -> None:
    variants = {name: {_variant(path) for path in paths} for name, paths in chosen.items()}
    if variant is not None and chosen and variant not in known:
        hint = f"known: {', '.join(known)}" if known else "it has none; leave model.variant out"
        raise MissingFilesError(f"{where}: no weight files of the variant '{variant}'; {hint}")
    lacking = [name for name, found in variants.items() if not found & {None, variant}]
    if lacking:
        available_variants = sorted({each for each in variants[lacking[0]] if each is not None})
        raise MissingFilesError(
            f"{where}: the weights of {', '.join(lacking)} exist only as variant {', '.join(available_variants)}; "
            f"set model.variant={available_variants[0]}"
        )


def _shards_or_whole(weights: Sequence[str], inside: Sequence[str]) -> list[str]:
    """The shards if there is an index of them, as diffusers chooses, else the whole file if there is one."""
    shards = [path for path in weights if (parts := _parts(path)) is not None and parts["shards"] is not None]
    whole = [path for path in weights if path not in shards]
    if shards and whole:
        return shards if any(path.endswith(".safetensors.index.json") for path in inside) else whole
    return [*weights]


def _require_all_shards(where: object, name: str, weights: Sequence[str]) -> None:
    shards = [parts for parts in map(_parts, weights) if parts is not None and parts["shards"] is not None]
    whole = len(weights) > len(shards)
    if shards and not whole:
        count = int(shards[0]["shards"])
        absent = sorted(set(range(1, count + 1)) - {int(each["shard"]) for each in shards})
        if absent:
            raise _missing(
                where, f"{len(absent)} of {count} shards of {name} are not there, the first: {absent[0]}"
            )


def _missing(where: object, what: str) -> MissingFilesError:
    return MissingFilesError(f"{where}: incomplete: {what}; copy or download the missing files")
