"""Low-rank adapters on a model's transformer: added, switched off for the reference policy, carried, saved.

A state is a plain dictionary of tensors by name ("transformer_blocks.0.attn.to_q.lora_A.weight"); it is what
travels as a version of the weights, and what a directory that `pipe.load_lora_weights` reads holds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear

from digenrl.config.reading import ConfigError
from digenrl.models.contract import DiffusionModel
from digenrl.models.registry import find_family

ADAPTER = "default"  # peft's name for the one adapter there is
FILE_NAME = "pytorch_lora_weights.safetensors"  # the name under which diffusers looks for it
PREFIX = "transformer."  # diffusers' name for the part of the pipeline that is adapted


class AdaptedLinear(LoraLinear):  # type: ignore[misc]
    """peft's layer, which computes in its input's type, though the adapters are kept in a finer one.

    peft's own would compute the adapters' part in fp32 beside a bf16 base: at a fraction of the speed, and with an
    fp32 copy of every input kept for the backward.
    """

    def forward(self, x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        """base(x) + scaling * B A x, or the base alone while adapters are disabled."""
        result: Tensor = self.base_layer(x, *arguments, **named)
        if self.disable_adapters:
            return result
        down, up = self.lora_A[ADAPTER].weight.to(x.dtype), self.lora_B[ADAPTER].weight.to(x.dtype)
        adapted: Tensor = result + linear(linear(x, down), up) * self.scaling[ADAPTER]
        return adapted


def add_lora(model: DiffusionModel, rank: int, alpha: float, seed: int) -> None:
    """Adapts the family's target layers and freezes everything else. The velocity does not change: B is zero.

    Adapters are in fp32 (fp64 in an fp64 model) whatever type the base has. The first weights depend on the seed
    alone, not on the device.
    """
    if rank < 1:
        raise ConfigError(f"LoRA rank must be at least 1, got {rank}")
    if has_lora(model):
        raise ValueError(f"{model.family} has LoRA adapters already; a model takes one set")
    targets = list(model.lora_targets)
    transformer: Any = model.transformer
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets)
    config._register_custom_module({nn.Linear: AdaptedLinear})
    transformer.add_adapter(config, ADAPTER)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in _adapter_parameters(model).items():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        if ".lora_A." in name:
            bound = 1 / sqrt(parameter.shape[1])
            first_weights = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
            parameter.data.copy_(first_weights)
        else:
            parameter.data.zero_()


def has_lora(model: DiffusionModel) -> bool:
    """Whether `add_lora` was called on it."""
    return any(isinstance(module, BaseTunerLayer) for module in model.transformer.modules())


@contextmanager
def adapters_disabled(model: DiffusionModel) -> Iterator[None]:
    """Inside, the velocity is exactly the base model's: the reference policy. May be nested."""
    layers = [module for module in model.transformer.modules() if isinstance(module, BaseTunerLayer)]
    if not layers:
        raise ValueError(f"{model.family} has no LoRA adapters to disable; call add_lora first")
    were_on = [layer for layer in layers if not layer.disable_adapters]
    # peft's switch also changes which parameters need a gradient; that is the trainer's to say.
    needed_grad = [parameter.requires_grad for parameter in _adapter_parameters(model).values()]
    for layer in were_on:
        layer.enable_adapters(enabled=False)
    try:
        yield
    finally:
        for layer in were_on:
            layer.enable_adapters(enabled=True)
        for parameter, needed in zip(_adapter_parameters(model).values(), needed_grad, strict=True):
            parameter.requires_grad_(needed)


def trainable_parameters(model: DiffusionModel) -> dict[str, nn.Parameter]:
    """The parameters that get a gradient, by name, in a fixed order: adapters, or everything without them."""
    return {name: value for name, value in model.transformer.named_parameters() if value.requires_grad}


def lora_state(model: DiffusionModel) -> dict[str, Tensor]:
    """A copy of the adapters, which later training does not change; on their device."""
    return {name: value.detach().clone() for name, value in _adapter_parameters(model).items()}


def load_lora_state(model: DiffusionModel, state: Mapping[str, Tensor]) -> None:
    """Overwrites the adapters. Everything is checked first: a state that does not fit changes nothing."""
    parameters = _adapter_parameters(model)
    missing, foreign = sorted(parameters.keys() - state.keys()), sorted(state.keys() - parameters.keys())
    if missing or foreign:
        raise ValueError(
            f"LoRA state does not fit {model.family}: {len(missing)} missing, {len(foreign)} foreign, "
            f"the first: {(missing or foreign)[0]}"
        )
    for name, parameter in parameters.items():
        if state[name].shape != parameter.shape:
            raise ValueError(
                f"LoRA state does not fit {model.family}: {name} is {tuple(state[name].shape)}, "
                f"expected {tuple(parameter.shape)}; is it of another rank?"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])


def save_lora(model: DiffusionModel, directory: Path) -> None:
    """Writes the adapters, with rank and alpha, so that `pipe.load_lora_weights(directory)` reads them.

    The file is whole or absent; one that was there before is replaced.
    """
    state = {name: value.contiguous().cpu() for name, value in lora_state(model).items()}
    transformer: Any = model.transformer
    config = transformer.peft_config[ADAPTER].to_dict()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".saving-") as partial:
        find_family(model.family).pipeline_class.save_lora_weights(
            partial, transformer_lora_layers=state, transformer_lora_adapter_metadata=config
        )
        (Path(partial) / FILE_NAME).replace(directory / FILE_NAME)


def read_lora_state(directory: Path) -> dict[str, Tensor]:
    """The state that `save_lora` wrote there, on the CPU."""
    path = directory / FILE_NAME
    if not path.is_file():
        raise ConfigError(f"{directory}: holds no LoRA weights: there is no {FILE_NAME}")
    return {name.removeprefix(PREFIX): value for name, value in load_file(path).items()}


def _adapter_parameters(model: DiffusionModel) -> dict[str, nn.Parameter]:
    """Every adapter weight, under the name it has in a state."""
    return {
        name.replace(f".{ADAPTER}.", "."): parameter
        for name, parameter in model.transformer.named_parameters()
        if ".lora_" in name
    }
