"""Python code that loads a run's exported weights with diffusers."""

from __future__ import annotations

from digenrl.models.family import Family
from digenrl.run_folder.folder import RunFolder
from digenrl.worker.blueprint import source_of


def diffusers_snippet(folder: RunFolder, family: Family) -> tuple[str, ...]:
    """Lines that load a pipeline with the newest export; none if there is no export yet."""
    pipeline, source = family.pipeline_class.__name__, str(source_of(folder.recipe))
    dtype = "" if folder.recipe.model.dtype == "float32" else f", dtype=torch.{folder.recipe.model.dtype}"
    imports_torch = ("import torch",) if dtype else ()
    if folder.lora.is_dir():
        return (
            *imports_torch,
            f"from diffusers import {pipeline}",
            f'pipe = {pipeline}.from_pretrained("{source}"{dtype})',
            f'pipe.load_lora_weights("{folder.lora}")',
        )
    if folder.transformer.is_dir():
        transformer = family.full_size().transformer.cls.__name__
        return (
            *imports_torch,
            f"from diffusers import {transformer}, {pipeline}",
            f'transformer = {transformer}.from_pretrained("{folder.transformer}"{dtype})',
            f'pipe = {pipeline}.from_pretrained("{source}", transformer=transformer{dtype})',
        )
    return ()
