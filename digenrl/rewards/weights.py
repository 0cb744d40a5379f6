"""A reward's weights, from a directory, a file or a hub id. Code that comes with weights is never run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from digenrl.config.reading import ConfigError

Loaded = TypeVar("Loaded")
HUB_ID_PARTS = 2  # owner/name


def is_directory(model: str) -> bool:
    """True for a directory, False for what may be a hub id; a path that is not there is an error."""
    path = Path(model).expanduser()
    if path.is_dir():
        return True
    if model.startswith((".", "/", "~")) or len(path.parts) > HUB_ID_PARTS or path.exists():
        raise ConfigError(f"{model}: no such directory; expected a directory of weights, or a hub id (owner/name)")
    return False


def load_pretrained(load: Callable[..., Loaded], model: str, **options: Any) -> Loaded:
    """`load` is some `from_pretrained`; a directory is loaded with no look at the network."""
    local = is_directory(model)
    where = str(Path(model).expanduser()) if local else model
    try:
        return load(where, local_files_only=local, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{model}: cannot be loaded: {reason}") from error


def load_whole_model(load: Callable[..., Any], model: str, **options: Any) -> Any:
    """A model whose every weight was in its files: transformers would fill a missing one with random numbers."""
    loaded, told = load_pretrained(load, model, output_loading_info=True, **options)
    absent = [*told["missing_keys"], *(key[0] for key in told["mismatched_keys"])]
    if absent:
        raise ConfigError(
            f"{model}: {len(absent)} weights are missing or of another shape, '{sorted(absent)[0]}' first"
        )
    return loaded


def find_file(model: str, name: str) -> Path:
    """A file of a directory, or of a hub id's repository."""
    if is_directory(model):
        path = Path(model).expanduser() / name
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; {model} must hold it, as published")
        return path
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, name))
    except OSError as error:
        raise ConfigError(f"{model}: cannot fetch {name}: {' '.join(str(error).split())}") from error


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Tensors by name from .safetensors, or from a torch file read as plain tensors: no pickled code is run."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; expected .safetensors, .pt or .pth")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each format has its own family of errors; all mean the same to the user
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{path}: cannot be read as tensors: {reason}") from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ConfigError(f"{path}: expected tensors by name, got something else")
    return dict(content)


def load_into(module: nn.Module, state: Mapping[str, Tensor], source: object) -> None:
    """Every weight is there, has its shape, and none is left over; otherwise ConfigError names the first."""
    expected = module.state_dict()
    missing = [name for name in expected if name not in state]
    foreign = [name for name in state if name not in expected]
    if missing or foreign:
        what = f"weight '{missing[0]}' is missing" if missing else f"weight '{foreign[0]}' is not of this model"
        raise ConfigError(f"{source}: {what} ({len(missing)} missing, {len(foreign)} foreign of {len(expected)})")
    for name, tensor in expected.items():
        if tensor.shape != state[name].shape:
            shapes = f"expected {tuple(tensor.shape)}, got {tuple(state[name].shape)}"
            raise ConfigError(f"{source}: weight '{name}' has another shape: {shapes}")
    module.load_state_dict(state)


def pick_device(device: str) -> torch.device:
    """`auto` is the first CUDA device where there is one, and the CPU elsewhere."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {device!r}: {str(error).splitlines()[0]}") from None
