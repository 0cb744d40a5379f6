"""A transformer from a single .safetensors file, with tensor names as in diffusers or as in the original code."""

from __future__ import annotations

from pathlib import Path

import diffusers
import torch
from safetensors.torch import load_file
from torch import nn

from digenrl.config.reading import ConfigError, one_line
from digenrl.models.loading.sources import check_single_file, transformer_tensors
from digenrl.models.loading.weight_files import INDEX_NAME, pipeline_index

COMPONENT = "transformer"


def load_transformer(path: Path, base: Path, dtype: torch.dtype) -> nn.Module:
    """The transformer with the weights of `path` and the configuration of the base pipeline's transformer.

    Its dtypes are those of a transformer loaded from a folder. Raises ConfigError if the file does not fit.
    """
    check_single_file(path)
    index = pipeline_index((base / INDEX_NAME).read_text(encoding="utf-8"), base / INDEX_NAME)
    transformer_class = getattr(diffusers, index[COMPONENT][1])
    kept_in_fp32 = transformer_class._keep_in_fp32_modules or []
    try:
        transformer: nn.Module = transformer_class.from_single_file(
            transformer_tensors(load_file(path)),
            config=str(base),
            subfolder=COMPONENT,
            local_files_only=True,
            dtype=None if kept_in_fp32 else dtype,  # with a dtype, it would cast all tensors
        )
    except ValueError as error:  # a tensor of another shape
        raise _does_not_fit(path, base, one_line(error).split(". ")[0]) from None
    except (LookupError, RuntimeError):  # a name that is missing, or a weight without values after the conversion
        names = f"those of a {transformer_class.__name__}, by the names of diffusers or of the original code"
        raise _does_not_fit(path, base, f"the tensors in the file are not {names}") from None
    for name, parameter in transformer.named_parameters():
        if not set(name.split(".")) & set(kept_in_fp32):
            parameter.data = parameter.data.to(dtype)
    return transformer


def _does_not_fit(path: Path, base: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path}: does not fit the transformer of the base pipeline ({base}); if it is of another size or family, "
        f"set model.base_source or model.family: {why}"
    )
