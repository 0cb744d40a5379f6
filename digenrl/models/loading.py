"""Loads diffusers pipelines from a directory or the hub, and builds components directly on a device."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging
from torch import nn
from transformers.utils import logging as transformers_logging

from digenrl.config.reading import ConfigError
from digenrl.models.tokenizers import use_tokenizer_files

INDEX_NAME = "model_index.json"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def load_pipeline(
    pipeline_class: type[Any],
    source: str | Path,
    dtype: torch.dtype | Mapping[str, torch.dtype],
    without: Sequence[str] = (),
    optional: Sequence[str] = (),
) -> Any:
    """Loads a pipeline from a directory or hub id, on the CPU, without the components named in `without`.

    `dtype` may differ by component, with one for "default". The pipeline may lack the components named in
    `optional`. Tokenizers split text as their files say. Remote code is never run. Raises ConfigError if the
    source is not usable; for a directory, before any weights are read.
    """
    arguments: dict[str, Any] = {"dtype": dtype, "trust_remote_code": False}
    arguments |= dict.fromkeys(without)
    path = Path(source)
    check_source(pipeline_class, path)
    if path.exists():
        with without_progress_bars():
            return _from_pretrained(pipeline_class, path, arguments, optional, local_files_only=True)
    hub_id = str(source)
    try:
        return _from_pretrained(pipeline_class, hub_id, arguments, optional, local_files_only=True)
    except OSError:  # not in the local cache, or incomplete
        pass
    try:
        return _from_pretrained(pipeline_class, hub_id, arguments, optional)
    except OSError as error:
        reason = shorten(str(error), width=160, placeholder=" ...")
        raise ConfigError(f"{hub_id}: no such directory, and not available from the hub: {reason}") from None


def _from_pretrained(
    pipeline_class: type[Any],
    source: str | Path,
    arguments: Mapping[str, Any],
    optional: Sequence[str],
    **where: Any,
) -> Any:
    absent = absent_components(pipeline_class.load_config(source, **where))
    needed = set(absent) - {*arguments, *optional, *pipeline_class._optional_components}
    if needed:
        raise ConfigError(
            f"{source}: has no {' and no '.join(sorted(needed))} (null in {INDEX_NAME}), which "
            f"{pipeline_class.__name__} needs; use a complete pipeline"
        )
    pipeline = pipeline_class.from_pretrained(source, **where, **(dict.fromkeys(absent) | dict(arguments)))
    use_tokenizer_files(pipeline)
    return pipeline


def absent_components(index: Mapping[str, Any]) -> tuple[str, ...]:
    """The components that a pipeline's `model_index.json` lists as null: it was saved without them."""
    return tuple(name for name, entry in index.items() if entry == [None, None])


def check_source(pipeline_class: type[Any], source: str | Path) -> None:
    """Raises ConfigError unless this is a pipeline directory of the class or a hub id; uses no network."""
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


def component_names(pipeline_class: type[Any], prefix: str) -> tuple[str, ...]:
    """The pipeline's components whose name begins with this, such as all tokenizers."""
    names = inspect.signature(pipeline_class.__init__).parameters
    return tuple(name for name in names if name.startswith(prefix))


def pipeline_without(pipeline_class: type[Any], **parts: Any) -> Any:
    """A pipeline with only these components; all others are None."""
    parameters = inspect.signature(pipeline_class.__init__).parameters.values()
    others = {
        parameter.name: None
        for parameter in parameters
        if parameter.default is inspect.Parameter.empty and parameter.name != "self"
    }
    return pipeline_class(**(others | parts))


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Inside, diffusers and transformers show no progress bars."""
    enabled = [each for each in (diffusers_logging, transformers_logging) if each.is_progress_bar_enabled()]
    for each in enabled:
        each.disable_progress_bar()
    try:
        yield
    finally:
        for each in enabled:
            each.enable_progress_bar()


@contextmanager
def building_on(dtype: torch.dtype, device: torch.device | str) -> Iterator[None]:
    """Modules built inside have their weights in this dtype and on this device from the start.

    Building in place, rather than on "meta" and filling later, keeps plain tensors and non-persistent buffers
    (such as rotary tables) correct.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def keep_fp32_modules(model: nn.Module) -> None:
    """Casts the weights to fp32 that diffusers keeps in fp32 when it loads this class in another dtype."""
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in model.named_parameters():
        if kept.intersection(name.split(".")):
            parameter.data = parameter.data.float()
