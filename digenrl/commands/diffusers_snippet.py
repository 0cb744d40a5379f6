"""Python code that loads a run's exported weights with diffusers."""

from __future__ import annotations

from pathlib import Path

from digenrl.models.family import Family
from digenrl.models.sources import ModelSource
from digenrl.run_folder.folder import RunFolder
from digenrl.worker.blueprint import source_of


def diffusers_snippet(folder: RunFolder, family: Family) -> tuple[str, ...]:
    """Lines that load a pipeline with the newest export; none if there is no export yet."""
    pipeline, source = family.pipeline_class.__name__, family.with_base(source_of(folder.recipe))
    transformer = family.full_size().transformer.cls.__name__
    dtype = "" if folder.recipe.model.dtype == "float32" else f", dtype=torch.{folder.recipe.model.dtype}"
    imports_torch = ("import torch",) if dtype else ()
    where = _pipeline_arguments(source.pipeline)
    if folder.lora.is_dir():
        from_file = (
            f'transformer = {transformer}.from_single_file("{source}", config="{source.base}", '
            f'subfolder="transformer"{dtype})'
        )
        single = source.file is not None
        return (
            *imports_torch,
            f"from diffusers import {f'{transformer}, ' if single else ''}{pipeline}",
            *([from_file] if single else []),
            f"pipe = {pipeline}.from_pretrained({where}{', transformer=transformer' if single else ''}{dtype})",
            f'pipe.load_lora_weights("{folder.lora}")',
        )
    if folder.transformer.is_dir():
        return (
            *imports_torch,
            f"from diffusers import {transformer}, {pipeline}",
            f'transformer = {transformer}.from_pretrained("{folder.transformer}"{dtype})',
            f"pipe = {pipeline}.from_pretrained({where}, transformer=transformer{dtype})",
        )
    return ()


def _pipeline_arguments(source: ModelSource) -> str:
    """The arguments of `from_pretrained` that name the pipeline; diffusers takes a subfolder of a folder only."""
    given = {"revision": source.revision if source.kind == "hub" else None, "variant": source.variant}
    location = source.location if source.kind == "hub" else str(Path(source.location, source.within))
    return ", ".join([f'"{location}"', *(f'{key}="{value}"' for key, value in given.items() if value)])
