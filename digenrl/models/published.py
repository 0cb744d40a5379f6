"""The weights that make a version: read off a model that is trained, loaded into one that generates.

Names are those of `digenrl.models.lora.lora_state` where the model has adapters, else the transformer's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor

from digenrl.models.contract import DiffusionModel
from digenrl.models.lora import ADAPTER, has_lora, load_lora_state, lora_state
from digenrl.models.shards import gathered, is_sharded, local_shard


def weights_state(
    model: DiffusionModel,
    device: torch.device | str | None = None,
    instead: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """A copy of the adapters, or of all weights of a transformer without them; on their own device by default.

    Some are given `instead` of the model's own, as they are. Of a sharded model all ranks ask, and the first gets
    whole weights, on its CPU; the others get none.
    """
    if is_sharded(model.transformer):
        return gathered_weights(model, instead)
    own = lora_state(model) if has_lora(model) else dict(model.transformer.named_parameters())
    copied = {name: value.detach() for name, value in own.items() if name not in instead}
    return {name: value.to(device or value.device, copy=True) for name, value in copied.items()} | dict(instead)


def gathered_weights(model: DiffusionModel, instead: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All weights of a sharded model, with some parts `instead` of its own, as `gathered` gives them."""
    weights = dict(model.transformer.named_parameters())
    parts = {name: local_shard(value.detach()) for name, value in weights.items()}
    return gathered(weights, parts | dict(instead))


def published_name(parameter: str) -> str:
    """A parameter's name in a version; adapters leave out what peft calls the set they belong to."""
    return parameter.replace(f".{ADAPTER}.", ".") if ".lora_" in parameter else parameter


def load_published(model: DiffusionModel, state: Mapping[str, Tensor]) -> None:
    """Overwrites the weights. Everything is checked first: a state that does not fit changes nothing."""
    if has_lora(model):
        load_lora_state(model, state)
        return
    weights = dict(model.transformer.named_parameters())
    check_fits(f"state of {model.family}", state, weights)
    with torch.no_grad():
        for name, parameter in weights.items():
            parameter.copy_(state[name])


@contextmanager
def weights_replaced(model: DiffusionModel, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the model has these weights; its own wait on the CPU."""
    own = weights_state(model, "cpu")
    load_published(model, state)
    try:
        yield
    finally:
        load_published(model, own)


def check_fits(what: str, state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless the state has the expected names and shapes."""
    missing, foreign = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    if missing or foreign:
        raise ValueError(
            f"{what} does not fit: {len(missing)} missing, {len(foreign)} foreign, "
            f"the first: {(missing or foreign)[0]}"
        )
    for name, value in expected.items():
        if state[name].shape != value.shape:
            raise ValueError(
                f"{what} does not fit: {name} is {tuple(state[name].shape)}, expected {tuple(value.shape)}"
            )
