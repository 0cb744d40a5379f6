"""Tiny pipelines that all tests of a process share, and models of which a test may change the transformer."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from copy import deepcopy
from functools import cache
from pathlib import Path

import torch

from digenrl.models.pipeline_model import PipelineModel
from digenrl.models.registry import FAMILIES
from digenrl.testing.tiny_models import make_tiny_pipeline


@cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="tiny-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@cache
def tiny_folder(family: str) -> Path:
    """The folder of a family's tiny pipeline, to be read only."""
    make_tiny_pipeline(family, _root() / family)
    return _root() / family


@cache
def shared_tiny_model(family: str, dtype: torch.dtype = torch.float32) -> PipelineModel:
    """A family's tiny model, not to be modified."""
    return FAMILIES[family].load(tiny_folder(family), dtype)


def tiny_model(family: str, dtype: torch.dtype = torch.float32) -> PipelineModel:
    """A family's tiny model whose transformer is its own. Copying it is faster than loading the pipeline."""
    return with_own_transformer(shared_tiny_model(family, dtype))


def with_own_transformer(model: PipelineModel) -> PipelineModel:
    """A copy of the model that shares all components except the transformers."""
    parts = model.pipeline.components.items()
    return deepcopy(model, {id(part): part for name, part in parts if name not in model.denoisers()})
