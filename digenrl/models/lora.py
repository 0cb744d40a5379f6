"""LoRA adapters on a model's transformer: adding them, disabling them for the reference policy, exporting them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn.functional import linear

from digenrl.config.reading import ConfigError
from digenrl.models.contract import DiffusionModel

ADAPTER = "default"  # peft's name of the adapter set; a model has one
FILE_NAME = "pytorch_lora_weights.safetensors"  # the name that diffusers looks for


class AdaptedLinear(LoraLinear):  # type: ignore[misc]
    """peft's layer, computing in the dtype of its input although the adapters are kept in a finer one.

    peft's own would compute the adapters in fp32 beside a bf16 base: at a fraction of the speed, and with an fp32
    copy of every input kept for the backward.
    """

    def forward(self, x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        """base(x) + scaling * B A x, or base(x) while adapters are disabled."""
        result: Tensor = self.base_layer(x, *arguments, **named)
        if self.disable_adapters:
            return result
        down, up = self.lora_A[ADAPTER].weight.to(x.dtype), self.lora_B[ADAPTER].weight.to(x.dtype)
        adapted: Tensor = result + linear(linear(x, down), up) * self.scaling[ADAPTER]
        return adapted


def add_lora(model: DiffusionModel, rank: int, alpha: float, seed: int) -> None:
    """Adds adapters to the family's target layers and freezes everything else.

    B is zero, so the velocity does not change. Adapters are in fp32 (fp64 in an fp64 model) whatever the dtype of
    the base. Their initial values depend only on the seed, not on the device.
    """
    if rank < 1:
        raise ConfigError(f"LoRA rank must be at least 1, got {rank}")
    if has_lora(model):
        raise ValueError(f"{model.family} already has LoRA adapters; a model takes one set")
    targets = list(model.lora_targets)
    transformer: Any = model.transformer
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets)
    config._register_custom_module({nn.Linear: AdaptedLinear})
    transformer.add_adapter(config, ADAPTER)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapter_parameters(model).items():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
        if ".lora_A." in name:
            bound = 1 / sqrt(parameter.shape[1])
            initial = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
            parameter.data.copy_(initial)
        else:
            parameter.data.zero_()


def has_lora(model: DiffusionModel) -> bool:
    """Whether the model has LoRA adapters."""
    return any(isinstance(module, BaseTunerLayer) for module in model.transformer.modules())


@contextmanager
def adapters_disabled(model: DiffusionModel) -> Iterator[None]:
    """Inside, the model computes exactly the base model's velocity, the reference policy. Can be nested."""
    layers = [module for module in model.transformer.modules() if isinstance(module, BaseTunerLayer)]
    if not layers:
        raise ValueError(f"{model.family} has no LoRA adapters to disable; call add_lora first")
    were_on = [layer for layer in layers if not layer.disable_adapters]
    # peft's switch also changes requires_grad, which is up to the trainer.
    needed_grad = [parameter.requires_grad for parameter in adapter_parameters(model).values()]
    for layer in were_on:
        layer.enable_adapters(enabled=False)
    try:
        yield
    finally:
        for layer in were_on:
            layer.enable_adapters(enabled=True)
        for parameter, needed in zip(adapter_parameters(model).values(), needed_grad, strict=True):
            parameter.requires_grad_(needed)


def save_lora(model: DiffusionModel, directory: Path) -> None:
    """Writes the adapters, with rank and alpha, in the format of `pipe.load_lora_weights(directory)`.

    The file is replaced atomically.
    """
    state = {name: value.detach().contiguous().cpu() for name, value in adapter_parameters(model).items()}
    transformer: Any = model.transformer
    config = transformer.peft_config[ADAPTER].to_dict()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".saving-") as partial:
        model.pipeline_class.save_lora_weights(
            partial, transformer_lora_layers=state, transformer_lora_adapter_metadata=config
        )
        (Path(partial) / FILE_NAME).replace(directory / FILE_NAME)


def published_name(parameter: str) -> str:
    """A parameter's name in a published version, which leaves out peft's name of the adapter set."""
    return parameter.replace(f".{ADAPTER}.", ".") if ".lora_" in parameter else parameter


def adapter_parameters(model: DiffusionModel) -> dict[str, nn.Parameter]:
    """All adapter weights by published name; empty without LoRA."""
    parameters = model.transformer.named_parameters()
    return {published_name(name): parameter for name, parameter in parameters if ".lora_" in name}
