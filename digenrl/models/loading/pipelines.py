"""Loads diffusers pipelines from their sources, and builds components directly on a device."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers.utils import logging as diffusers_logging
from torch import nn
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from digenrl.config.reading import ConfigError, one_line
from digenrl.models.loading.single_file import COMPONENT, load_transformer
from digenrl.models.loading.sources import ModelSource, open_pipeline
from digenrl.models.loading.tokenizers import use_tokenizer_files
from digenrl.models.loading.weight_files import INDEX_NAME, folder_listing, known_variants

CPU = torch.device("cpu")


def load_pipeline(
    pipeline_class: type[Any],
    source: str | Path | ModelSource,
    dtypes: Mapping[str, torch.dtype],
    without: Sequence[str] = (),
    optional: Sequence[str] = (),
    processors: Sequence[str] = (),
) -> Any:
    """Loads a pipeline on the CPU, without the components named in `without`.

    `dtypes` are by component, with one for "default". The pipeline may lack the components named in `optional`.
    `processors` are components, for texts and images, in whose place their tokenizers are loaded. Tokenizers split
    text as their files say. Remote code is never run, and nothing is unpickled.

    Raises ConfigError if the source is not usable: before any weights are read and, if it holds a pipeline of
    another class, before anything large is downloaded.
    """
    source = ModelSource.of(source)
    from_file = source.file is not None and COMPONENT not in without
    folder = open_pipeline(pipeline_class, source, (*without, COMPONENT) if from_file else without)
    absent = absent_components(pipeline_class.load_config(folder, local_files_only=True))
    needed = set(absent) - {*without, *optional, *pipeline_class._optional_components}
    if needed:
        raise ConfigError(
            f"{source}: has no {' and no '.join(sorted(needed))} (null in {INDEX_NAME}), which "
            f"{pipeline_class.__name__} needs; use a complete pipeline"
        )
    parts: dict[str, Any] = dict.fromkeys((*absent, *without))
    parts |= dict.fromkeys(processors)
    with without_progress_bars():
        if from_file:
            dtype = dtypes.get(COMPONENT, dtypes["default"])
            parts[COMPONENT] = load_transformer(Path(source.location), folder, dtype)
        try:
            pipeline = pipeline_class.from_pretrained(
                folder,
                dtype=dict(dtypes),
                variant=source.variant if source.variant in known_variants(folder_listing(folder)) else None,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                **parts,
            )
        except (AttributeError, ValueError) as error:  # an unknown class, or a tensor of another shape
            raise ConfigError(f"{source}: diffusers cannot load it: {one_line(error)}") from error
    _check_complete(source, pipeline)
    for name in set(processors) - set(without):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / name, local_files_only=True)
        pipeline.register_modules(**{name: tokenizer})
    use_tokenizer_files(pipeline)
    return pipeline


def _check_complete(source: ModelSource, pipeline: Any) -> None:
    """Raises ConfigError if a component of diffusers has parameters that its weight files lack."""
    for component, part in pipeline.components.items():
        named = part.named_parameters() if isinstance(part, nn.Module) else ()
        absent = [name for name, parameter in named if parameter.is_meta]
        if absent:
            raise ConfigError(
                f"{source}: the weight files of {component} lack {len(absent)} tensors of its config.json, the "
                f"first: {absent[0]}; use a complete pipeline"
            )


def absent_components(index: Mapping[str, Any]) -> tuple[str, ...]:
    """The components that a pipeline's `model_index.json` lists as null: it was saved without them."""
    return tuple(name for name, entry in index.items() if entry == [None, None])


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


@contextmanager
def building_without_weights(dtype: torch.dtype) -> Iterator[None]:
    """Modules built inside have parameters of this dtype on the meta device, and buffers on the CPU.

    This is how diffusers builds a model before it loads weights: plain tensors and all buffers are correct.
    """
    with building_on(dtype, CPU), init_empty_weights(include_buffers=False):
        yield


def keep_fp32_modules(model: nn.Module) -> None:
    """Casts the weights to fp32 that diffusers keeps in fp32 when it loads this class in another dtype."""
    for name, parameter in model.named_parameters():
        if _stays_in_fp32(model, name):
            parameter.data = parameter.data.float()


def cast_stored_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts the buffers that weight files contain as diffusers does when it loads them; others do not change."""
    parameters = dict(model.named_parameters())
    for name, value in model.state_dict().items():
        if name not in parameters and value.is_floating_point():
            owner, _, buffer = name.rpartition(".")
            cast = value.to(torch.float32 if _stays_in_fp32(model, name) else dtype)
            setattr(model.get_submodule(owner), buffer, cast)


def _stays_in_fp32(model: nn.Module, name: str) -> bool:
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    return not set(kept).isdisjoint(name.split("."))
