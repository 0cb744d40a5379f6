"""Loads VideoReward's checkpoint: a head, adapters for Qwen2-VL's weights, and weights that replace others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from digenrl.config.reading import ConfigError
from digenrl.rewards.parts.weights import read_state_dict

HEAD = "rm_head.weight"
ADAPTER = re.compile(r"^(.*)\.lora_([AB])(?:\.default)?\.weight$")


def load_checkpoint(model: nn.Module, head: nn.Linear, folder: Path, lora: Mapping[str, Any]) -> None:
    """Loads the newest checkpoint in the folder into model and head; raises ConfigError if it does not fit."""
    steps = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    if not steps:
        raise ConfigError(f"{folder}: has no folder checkpoint-*; expected VideoReward's, as published")
    whole = steps[-1] / "model.pth"
    if whole.is_file():
        state = read_state_dict(whole)
    else:
        names = ("adapter_model.safetensors", "non_lora_state_dict.pth")
        state = {name: one for file in names for name, one in read_state_dict(steps[-1] / file).items()}
    state = {_current_name(name): tensor for name, tensor in state.items()}
    if HEAD not in state:
        raise ConfigError(f"{steps[-1]}: weight '{HEAD}' is missing")
    rank_root = lora["lora_r"] ** 0.5 if lora.get("use_rslora") else lora["lora_r"]
    with torch.no_grad():
        _load(head, {"weight": state.pop(HEAD)}, steps[-1])
        adapters = {name: state.pop(name) for name in list(state) if ADAPTER.match(name)}
        _load(model, state, steps[-1])
        _add(model, adapters, lora["lora_alpha"] / rank_root, steps[-1])


def _current_name(name: str) -> str:
    """From transformers 4.45, wrapped by peft, to the current names."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    if name.startswith("visual."):
        return f"model.{name}"
    return f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name


def _load(module: nn.Module, state: Mapping[str, Tensor], source: Path) -> None:
    """Replaces the weights that are in the state; the others stay."""
    own = module.state_dict()
    for name, tensor in state.items():
        _check(name, own, tuple(tensor.shape), source)
        own[name].copy_(tensor)


def _add(module: nn.Module, adapters: Mapping[str, Tensor], scale: float, source: Path) -> None:
    """Adds scale * B A to the weights that have adapters."""
    own = module.state_dict()
    for name in {match[1] for name in adapters if (match := ADAPTER.match(name))}:
        pair = {
            match[2]: one for key, one in adapters.items() if (match := ADAPTER.match(key)) and match[1] == name
        }
        if pair.keys() != {"A", "B"}:
            raise ConfigError(f"{source}: the adapter of '{name}' is incomplete")
        change = scale * (pair["B"].float() @ pair["A"].float())
        _check(f"{name}.weight", own, tuple(change.shape), source)
        own[f"{name}.weight"].add_(change.to(own[f"{name}.weight"].dtype))


def _check(name: str, own: Mapping[str, Tensor], shape: tuple[int, ...], source: Path) -> None:
    if name not in own:
        raise ConfigError(f"{source}: weight '{name}' is not part of the model; is `model` the right Qwen2-VL?")
    if tuple(own[name].shape) != shape:
        raise ConfigError(f"{source}: weight '{name}' has another shape: {tuple(own[name].shape)}, got {shape}")
