"""Reads diffusers pipelines from a directory or a hub id, and builds parts in place on a device."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from digenrl.config.reading import ConfigError

INDEX_NAME = "model_index.json"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def load_pipeline(
    pipeline_class: type[Any], source: str | Path, dtype: torch.dtype, without: Sequence[str] = ()
) -> Any:
    """The diffusers pipeline at a directory or hub id, on the CPU; parts named in `without` are left out.

    Code that comes with weights is never run. Every complaint about the source is a ConfigError, raised before any
    weights are read where the source is a directory.
    """
    arguments: dict[str, Any] = {"dtype": dtype, "trust_remote_code": False}
    arguments |= dict.fromkeys(without)
    path = Path(source)
    check_source(pipeline_class, path)
    if path.exists():
        with without_progress_bars():
            return pipeline_class.from_pretrained(path, local_files_only=True, **arguments)
    hub_id = str(source)
    try:
        return pipeline_class.from_pretrained(hub_id, local_files_only=True, **arguments)
    except OSError:  # not in the local cache, or not all of it
        pass
    try:
        return pipeline_class.from_pretrained(hub_id, **arguments)
    except OSError as error:
        reason = shorten(str(error), width=160, placeholder=" ...")
        raise ConfigError(f"{hub_id}: no such directory, and not to be had from the hub: {reason}") from None


def check_source(pipeline_class: type[Any], source: str | Path) -> None:
    """Raises ConfigError if this is no pipeline directory of the class and no hub id; asks no network."""
    if Path(source).exists():
        check_pipeline_directory(pipeline_class, Path(source))
    elif HUB_ID.fullmatch(str(source)) is None:
        raise ConfigError(f"{source}: no such directory, and not a hub id of the form owner/name")


def check_pipeline_directory(pipeline_class: type[Any], directory: Path) -> None:
    """Raises ConfigError unless the directory holds a pipeline of this class."""
    index_path = directory / INDEX_NAME
    if not index_path.is_file():
        raise ConfigError(f"{directory}: not a diffusers pipeline directory: it has no {INDEX_NAME}")
    try:
        found = json.loads(index_path.read_text(encoding="utf-8"))["_class_name"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{index_path}: does not name a pipeline class; is the file damaged?") from None
    if found != pipeline_class.__name__:
        raise ConfigError(
            f"{directory}: holds a {found}, expected a {pipeline_class.__name__}; "
            "name its own family or another directory"
        )


def pipeline_without(pipeline_class: type[Any], **parts: Any) -> Any:
    """A pipeline of these parts alone; all others it asks for are None."""
    asked = inspect.signature(pipeline_class.__init__).parameters.values()
    absent = {
        parameter.name: None
        for parameter in asked
        if parameter.default is inspect.Parameter.empty and parameter.name != "self"
    }
    return pipeline_class(**(absent | parts))


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Inside, diffusers and transformers read and write files without drawing on the terminal."""
    drawing = [room for room in (diffusers_logging, transformers_logging) if room.is_progress_bar_enabled()]
    for room in drawing:
        room.disable_progress_bar()
    try:
        yield
    finally:
        for room in drawing:
            room.enable_progress_bar()


@contextmanager
def building_on(dtype: torch.dtype, device: torch.device | str) -> Iterator[None]:
    """Modules made inside have their weights in this type and on this device from the start.

    Building in place, rather than on "meta" and filling later, keeps plain tensors and non-persistent buffers
    (such as rotary tables) right.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
