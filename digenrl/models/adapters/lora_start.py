"""Starts training from an existing LoRA: a file or folder of diffusers, peft, kohya or ComfyUI."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.utils import convert_unet_state_dict_to_peft
from safetensors import SafetensorError, safe_open
from torch import Tensor

from digenrl.config.reading import ConfigError, one_line
from digenrl.models.adapters.lora import adapter_parameters, layer_kind, published_name
from digenrl.models.adapters.lora_files import (
    DOWN,
    FILE_NAME,
    PEFT_CONFIG,
    PEFT_FILE,
    PEFT_PREFIX,
    UP,
    LoraPair,
    adapted_component,
    adapter_config,
    lora_loader,
)
from digenrl.models.contract import DiffusionModel
from digenrl.models.model_weights import load_weights

KEY = "training.lora.start_from"
SIDES = ((".lora_down.weight", ".lora_up.weight"), (DOWN, UP), (".lora.down.weight", ".lora.up.weight"))
METADATA = "lora_adapter_metadata"  # where diffusers keeps rank and alpha
UNET_CONFIG = SimpleNamespace(layers_per_block=2)  # of SD 1.5 and SDXL, for kohya's names of blocks


def start_from(model: DiffusionModel, source: Path) -> None:
    """Overwrites a model's adapters with those of a LoRA file or folder.

    It must adapt the same layers with the same rank. Its strength is kept: B is scaled for the model's own alpha.
    Raises ConfigError, and changes nothing, if it cannot be read or does not fit.
    """
    pairs = read_lora(source, model.pipeline_class)
    config = adapter_config(model)
    adapted = {name.removesuffix(DOWN) for name in adapter_parameters(model) if name.endswith(DOWN)}
    check_start(pairs, adapted, config.r)
    scale = config.lora_alpha / config.r
    weights = {layer + DOWN: down for layer, (down, _) in pairs.items()}
    weights |= {layer + UP: up / scale for layer, (_, up) in pairs.items()}
    try:
        load_weights(model, weights)
    except ValueError as error:
        raise _wrong(source, str(error)) from None


def check_start(pairs: Mapping[str, LoraPair], layers: set[str], rank: int) -> None:
    """Raises ConfigError unless the pairs belong to these layers and have this rank."""
    if pairs.keys() != layers:
        kinds = sorted({layer_kind(layer) for layer in pairs})
        missing, more = sorted(layers - pairs.keys()), sorted(pairs.keys() - layers)
        first = f"{missing[0]} is missing" if missing else f"{more[0]} is not adapted by the recipe"
        raise ConfigError(
            f"{KEY}: adapts {len(pairs)} layers, the recipe {len(layers)}: {first}; to adapt the same layers, set "
            f"training.lora.targets=[{', '.join(kinds)}]",
            KEY,
        )
    ranks = sorted({len(down) for down, _ in pairs.values()})
    if ranks != [rank]:
        found = " and ".join(str(each) for each in ranks)
        hint = f"set training.lora.rank={ranks[0]}" if len(ranks) == 1 else "give a LoRA with one rank"
        raise ConfigError(f"{KEY}: has rank {found}, the recipe {rank}; {hint}", KEY)


def read_lora(source: Path, pipeline_class: type[Any]) -> dict[str, LoraPair]:
    """The pairs of a LoRA by layer of the diffusers transformer, with its scale multiplied into B."""
    file = _file_of(source)
    tensors, metadata = _read(file)
    if any(name.startswith(PEFT_PREFIX) for name in tensors):
        scale = _peft_scale(file.with_name(PEFT_CONFIG))
        named = {name.removeprefix(PEFT_PREFIX): value for name, value in tensors.items()}
        return _pairs(source, named, scale)
    _check_plain(source, {key: True for name in tensors if (key := name.rpartition(".")[2]) == "dora_scale"})
    ranks = _apply_alphas(tensors)
    if not ranks:
        return _pairs(source, _converted(source, tensors, pipeline_class), _metadata_scale(source, metadata))
    try:  # some layouts are converted only without alphas, and others recognized by them
        return _pairs(source, _converted(source, tensors, pipeline_class), 1.0)
    except ConfigError:
        return _pairs(source, _converted(source, tensors | ranks, pipeline_class), 1.0)


def _converted(source: Path, tensors: Mapping[str, Tensor], pipeline_class: type[Any]) -> dict[str, Tensor]:
    """The tensors with the names that peft gives them in the diffusers transformer or UNet."""
    component = adapted_component(pipeline_class)
    unet = {"unet_config": UNET_CONFIG} if component == "unet" else {}
    try:
        read = lora_loader(pipeline_class).lora_state_dict(dict(tensors), **unet)
        named = read[0] if isinstance(read, tuple) else read  # some add alphas, which have been applied already
        if component == "unet":
            named = convert_unet_state_dict_to_peft(named)
    except KeyError as error:
        raise _wrong(source, f"not a LoRA of {pipeline_class.__name__}: the tensor {error} is missing") from None
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise _wrong(source, f"not a LoRA of {pipeline_class.__name__}: {one_line(error)}") from None
    of_text = [name for name in named if name.startswith("text_encoder")]
    if of_text:
        raise _wrong(
            source, f"adapts a text encoder ({of_text[0]}), which is not trained; give a LoRA without one"
        )
    return {name.removeprefix(f"{component}."): value for name, value in named.items()}


def _file_of(source: Path) -> Path:
    if source.is_file():
        return source
    if not source.is_dir():
        raise _wrong(source, "no such file or folder")
    files = {path.name: path for path in sorted(source.glob("*.safetensors"))}
    only = next(iter(files.values())) if len(files) == 1 else None
    found = files.get(FILE_NAME) or files.get(PEFT_FILE) or only
    if found is None:
        what = f"has {len(files)} .safetensors files; name one of them" if files else "has no .safetensors file"
        raise _wrong(source, what)
    return found


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(file, framework="pt") as content:
            names = content.keys()
            tensors = {published_name(name): content.get_tensor(name).float() for name in names}
            return tensors, content.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise _wrong(file, f"cannot be read: {one_line(error)}; only .safetensors files are") from None


def _apply_alphas(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Multiplies the scales that `.alpha` tensors stand for into B, and removes them.

    Returns the alphas with which the new B have a scale of 1: their ranks.
    """
    alphas = {name.removesuffix(".alpha"): tensors.pop(name) for name in list(tensors) if name.endswith(".alpha")}
    ranks = {}
    for layer, alpha in alphas.items():
        for down, up in SIDES:
            if layer + up in tensors:
                rank = len(tensors[layer + down])
                tensors[layer + up] = tensors[layer + up] * (float(alpha) / rank)
                ranks[f"{layer}.alpha"] = torch.tensor(float(rank))
    return ranks


def _metadata_scale(source: Path, metadata: Mapping[str, str]) -> float:
    try:
        config = json.loads(metadata.get(METADATA, "{}"))
        values = {key.rpartition(".")[2]: value for key, value in config.items()}
    except (ValueError, AttributeError):
        raise _wrong(source, f"its metadata are damaged ({METADATA})") from None
    rank, alpha = values.get("r"), values.get("lora_alpha")
    return _scale(source, values, rank, alpha) if rank and alpha else 1.0


def _peft_scale(file: Path) -> float:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        rank, alpha = config["r"], config["lora_alpha"]
    except (OSError, ValueError, KeyError, TypeError):
        raise _wrong(file, "peft's configuration is missing or damaged") from None
    return _scale(file, config, rank, alpha)


def _scale(file: Path, config: Mapping[str, Any], rank: float, alpha: float) -> float:
    """The strength of a LoRA by peft's configuration, which must be that of a plain one."""
    _check_plain(file, config)
    return float(alpha / (sqrt(rank) if config.get("use_rslora") else rank))


def _check_plain(file: Path, config: Mapping[str, Any]) -> None:
    unknown = [key for key in ("use_dora", "dora_scale", "rank_pattern", "alpha_pattern") if config.get(key)]
    if unknown:
        raise _wrong(file, f"has {unknown[0]}, which is not supported; give a plain LoRA")


def _pairs(source: Path, named: Mapping[str, Tensor], scale: float) -> dict[str, LoraPair]:
    layers = [name.removesuffix(DOWN) for name in named if name.endswith(DOWN)]
    others = sorted(named.keys() - {layer + side for layer in layers for side in (DOWN, UP)})
    incomplete = [layer for layer in layers if layer + UP not in named]
    if others or incomplete or not layers:
        first = (others or incomplete or ["no adapters"])[0]
        raise _wrong(source, f"has {first}; only pairs of A and B for linear layers of the transformer are known")
    return {layer: (named[layer + DOWN], named[layer + UP].to(torch.float32) * scale) for layer in layers}


def _wrong(source: Path, what: str) -> ConfigError:
    return ConfigError(f"{KEY}: {source}: {what}", KEY)
