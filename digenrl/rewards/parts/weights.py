"""Loads the weights of rewards from a directory, a file or a hub id. Code in their repositories is never run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from digenrl.config.reading import ConfigError, errors_in, one_line
from digenrl.config.rewards.base import RewardSettings
from digenrl.logs import without_hub_warnings

Loaded = TypeVar("Loaded")
HUB_ID_PARTS = 2  # owner/name
WEIGHTS = ("model", "processor", "tokenizer", "detector")  # settings that name a directory or a hub id
FILES = ("checkpoint", "head", "config", "prompt")  # settings that name a file or folder, never a hub id


def check_paths(settings: RewardSettings) -> None:
    """Raises ConfigError if a path of weights or files in the settings does not exist. Hub ids are accepted."""
    for key in (*WEIGHTS, *FILES):
        path = getattr(settings, key, None)
        if not isinstance(path, str) or path.startswith(("http://", "https://")):
            continue
        with errors_in(f"reward '{settings.shown_as}': {key}"):
            if key in WEIGHTS:
                is_directory(path)
            elif not Path(path).expanduser().exists():
                raise ConfigError(f"{path}: no such file or folder; relative paths start at the recipe's folder")


def is_directory(model: str) -> bool:
    """True for a directory, False for a possible hub id; raises ConfigError for a path that does not exist."""
    path = Path(model).expanduser()
    if path.is_dir():
        return True
    if model.startswith((".", "/", "~")) or len(path.parts) > HUB_ID_PARTS or path.exists():
        raise ConfigError(f"{model}: no such directory; expected a directory of weights, or a hub id (owner/name)")
    return False


def load_pretrained(load: Callable[..., Loaded], model: str, **options: Any) -> Loaded:
    """Calls `load`, a `from_pretrained` method; a directory is loaded without network access.

    Code that a repository contains is not run, unless `options` allow it.
    """
    local = is_directory(model)
    where = str(Path(model).expanduser()) if local else model
    try:
        with without_hub_warnings():
            return load(where, **{"local_files_only": local, "trust_remote_code": False, **options})
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        what = "cannot be loaded" if local else "no such directory, and as a hub id it cannot be loaded"
        raise ConfigError(f"{model}: {what}: {one_line(error)}") from error


def load_whole_model(load: Callable[..., Any], model: str, **options: Any) -> Any:
    """Loads a model; raises ConfigError if a weight is missing, which transformers would initialize randomly."""
    loaded, info = load_pretrained(load, model, output_loading_info=True, **options)
    absent = [*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])]
    if absent:
        raise ConfigError(
            f"{model}: {len(absent)} weights are missing or have another shape, the first is '{sorted(absent)[0]}'"
        )
    return loaded


def find_file(model: str, name: str) -> Path:
    """A file in a directory or in the repository of a hub id."""
    if is_directory(model):
        path = Path(model).expanduser() / name
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; {model} must hold it, as published")
        return path
    from huggingface_hub import hf_hub_download

    try:
        with without_hub_warnings():
            return Path(hf_hub_download(model, name))
    except OSError as error:
        raise ConfigError(
            f"{model}: no such directory, and the hub does not give {name}: {one_line(error)}"
        ) from error


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Tensors by name from a .safetensors or torch file; pickled code is not run."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; expected .safetensors, .pt or .pth")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each format has its own errors, which mean the same to the user
        raise ConfigError(f"{path}: cannot be read as tensors: {one_line(error)[:300]}") from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ConfigError(f"{path}: expected tensors by name, got something else")
    return dict(content)


def load_into(module: nn.Module, state: Mapping[str, Tensor], source: object) -> None:
    """Loads all weights; raises ConfigError naming the first that is missing, unexpected or of another shape."""
    expected = module.state_dict()
    missing = [name for name in expected if name not in state]
    unexpected = [name for name in state if name not in expected]
    if missing or unexpected:
        what = (
            f"weight '{missing[0]}' is missing"
            if missing
            else f"weight '{unexpected[0]}' is not part of the model"
        )
        raise ConfigError(
            f"{source}: {what} ({len(missing)} missing, {len(unexpected)} unexpected of {len(expected)})"
        )
    for name, tensor in expected.items():
        if tensor.shape != state[name].shape:
            shapes = f"expected {tuple(tensor.shape)}, got {tuple(state[name].shape)}"
            raise ConfigError(f"{source}: weight '{name}' has another shape: {shapes}")
    module.load_state_dict(state)


def pick_device(device: str) -> torch.device:
    """The torch device; `auto` is the first CUDA device if there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device {device!r}: {str(error).splitlines()[0]}") from None
