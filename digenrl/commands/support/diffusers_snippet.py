"""Python code that loads a run's exported weights with diffusers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from digenrl.models.adapters.lora_files import FILE_NAME, FILE_NAME_2, diffusers_file, lora_loader
from digenrl.models.experts import EXPERTS, LOW_NOISE
from digenrl.models.family import Family
from digenrl.models.loading.sources import ModelSource
from digenrl.run_folder.folder import RunFolder
from digenrl.worker.blueprint import source_of


def diffusers_snippet(folder: RunFolder, family: Family) -> tuple[str, ...]:
    """Lines that load a pipeline with the newest export; none without an export, or for random weights."""
    if folder.recipe.model.random:
        return ()
    pipeline, source = family.pipeline_class.__name__, family.with_base(source_of(folder.recipe))
    transformer, part = family.full_size().transformer.cls.__name__, family.denoiser
    dtype = "" if folder.recipe.model.dtype == "float32" else f", dtype=torch.{folder.recipe.model.dtype}"
    where = pipeline_arguments(source.pipeline)
    imports = ["import torch"] if dtype else []
    if "snapshot_download" in where:
        imports.append("from huggingface_hub import snapshot_download")
    if folder.lora.is_dir():
        from_file = (
            f'transformer = {transformer}.from_single_file("{source}", config="{source.base}", '
            f'subfolder="transformer"{dtype})'
        )
        single = source.file is not None
        return (
            *imports,
            f"from diffusers import {f'{transformer}, ' if single else ''}{pipeline}",
            *([from_file] if single else []),
            f"pipe = {pipeline}.from_pretrained({where}{', transformer=transformer' if single else ''}{dtype})",
            *lora_loading(folder.lora, _parts_in(folder.lora), family),
        )
    if folder.transformer.is_dir():
        return (
            *imports,
            f"from diffusers import {transformer}, {pipeline}",
            f'{part} = {transformer}.from_pretrained("{folder.transformer}"{dtype})',
            f"pipe = {pipeline}.from_pretrained({where}, {part}={part}{dtype})",
        )
    return ()


def lora_loading(folder: Path, parts: Iterable[str], family: Family) -> tuple[str, ...]:
    """Lines that load the adapters of a folder, of one transformer or of two."""
    if lora_loader(family.pipeline_class) is not family.pipeline_class:
        return (f'pipe.{family.denoiser}.load_lora_adapter("{folder}", weight_name="{FILE_NAME}")',)
    second = f'pipe.load_lora_weights("{folder}", weight_name="{FILE_NAME_2}", load_into_transformer_2=True)'
    return tuple(second if part == LOW_NOISE else f'pipe.load_lora_weights("{folder}")' for part in parts)


def _parts_in(folder: Path) -> list[str]:
    return [part for part in EXPERTS["both"] if (folder / diffusers_file(part)).is_file()]


def pipeline_arguments(source: ModelSource) -> str:
    """The arguments of `from_pretrained` that name the pipeline; diffusers takes a subfolder of a folder only."""
    if source.kind == "hub" and source.within:
        revision = f', revision="{source.revision}"' if source.revision else ""
        folder = f'snapshot_download("{source.location}"{revision}) + "/{source.within.rstrip("/")}"'
        return folder + (f', variant="{source.variant}"' if source.variant else "")
    given = {"revision": source.revision if source.kind == "hub" else None, "variant": source.variant}
    location = source.location if source.kind == "hub" else str(Path(source.location, source.within))
    return ", ".join([f'"{location}"', *(f'{key}="{value}"' for key, value in given.items() if value)])
