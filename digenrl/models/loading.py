"""Loads diffusers pipelines from their sources, and builds components directly on a device."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

from digenrl.models.single_file import COMPONENT, load_transformer
from digenrl.models.sources import ModelSource, open_pipeline


def load_pipeline(
    pipeline_class: type[Any], source: str | Path | ModelSource, dtype: torch.dtype, without: Sequence[str] = ()
) -> Any:
    """Loads a pipeline on the CPU, without the components named in `without`.

    Remote code is never run, and nothing is unpickled. Raises ConfigError if the source is not usable: before any
    weights are read and, if it holds a pipeline of another class, before anything large is downloaded.
    """
    source = ModelSource.of(source)
    arguments: dict[str, Any] = {"dtype": dtype, "trust_remote_code": False, "use_safetensors": True}
    arguments |= {"variant": source.variant, **dict.fromkeys(without)}
    from_file = source.file is not None and COMPONENT not in without
    folder = open_pipeline(pipeline_class, source, (*without, COMPONENT) if from_file else without)
    with without_progress_bars():
        if from_file:
            arguments[COMPONENT] = load_transformer(Path(source.location), folder, dtype)
        return pipeline_class.from_pretrained(folder, local_files_only=True, **arguments)


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
