"""The weights of a policy version: read from the model that is trained, loaded into one that generates.

With LoRA these are the adapters alone, else all parameters of the transformer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor, nn

from digenrl.models.adapters.lora import ADAPTER, AdaptedLinear, adapter_parameters
from digenrl.models.contract import DiffusionModel
from digenrl.models.parallel.shards import any_sharded, gather_to_first_rank, local_shard


def weights_state(
    model: DiffusionModel,
    device: torch.device | str | None = None,
    instead: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """A copy of the weights, on the given device or else on their own.

    Tensors in `instead` replace the model's own and are not copied. If these weights are sharded, this is a
    collective: rank 0 gets them whole on its CPU, the other ranks get none.
    """
    parameters = _parameters(model)
    if any_sharded(parameters.values()):
        return gathered_weights(model, instead)
    copied = {name: value.detach() for name, value in parameters.items() if name not in instead}
    return {name: value.to(device or value.device, copy=True) for name, value in copied.items()} | dict(instead)


def merged_weights(model: DiffusionModel) -> dict[str, Tensor]:
    """All weights of the transformer on the CPU, with adapters merged, under the names of a model without them.

    The update of a layer is computed in fp32, or in fp64, and then rounded to the dtype of its weight.
    """
    weights = {
        name.replace(".base_layer.", "."): value.detach().cpu()
        for name, value in model.transformer.named_parameters()
        if ".lora_" not in name
    }
    for path, layer in model.transformer.named_modules():
        if isinstance(layer, AdaptedLinear):
            update = layer.get_delta_weight(ADAPTER).cpu()
            base = weights[f"{path}.weight"]
            weights[f"{path}.weight"] = (base.to(update.dtype) + update).to(base.dtype)
    return weights


def gathered_weights(model: DiffusionModel, instead: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All weights of a sharded model, as `gather_to_first_rank` returns them; `instead` replaces some shards."""
    weights = dict(model.transformer.named_parameters())
    shards = {name: local_shard(value.detach()) for name, value in weights.items()}
    return gather_to_first_rank(weights, shards | dict(instead))


def load_weights(model: DiffusionModel, state: Mapping[str, Tensor]) -> None:
    """Overwrites the weights; raises ValueError, and changes nothing, if the state does not fit the model."""
    parameters = _parameters(model)
    check_fits(f"state of {model.family}", state, parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])


@contextmanager
def weights_replaced(model: DiffusionModel, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the model has these weights; its own are kept on the CPU and restored afterwards."""
    own = weights_state(model, "cpu")
    load_weights(model, state)
    try:
        yield
    finally:
        load_weights(model, own)


def check_fits(what: str, state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless the state has the expected names and shapes; `what` names it in the message."""
    missing, unexpected = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    if missing or unexpected:
        raise ValueError(
            f"{what} does not fit: {len(missing)} tensors missing, {len(unexpected)} unexpected, "
            f"the first: {(missing or unexpected)[0]}"
        )
    for name, value in expected.items():
        if state[name].shape != value.shape:
            raise ValueError(
                f"{what} does not fit: {name} is {tuple(state[name].shape)}, expected {tuple(value.shape)}; "
                "does it come from another model or LoRA rank?"
            )


def _parameters(model: DiffusionModel) -> dict[str, nn.Parameter]:
    return adapter_parameters(model) or dict(model.transformer.named_parameters())
