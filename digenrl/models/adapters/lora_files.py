"""Writes LoRA adapters in the formats of diffusers, peft and ComfyUI.

Readers differ in where they look for alpha, and use a scale of 1 if they do not find it. So the scale, alpha over
rank, is multiplied into B, and alpha is written as equal to the rank: the strength is right in every reader.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders import CogVideoXLoraLoaderMixin
from diffusers.models.normalization import AdaLayerNormContinuous
from peft import LoraConfig
from safetensors.torch import save_file
from torch import Tensor, nn

from digenrl.config.reading import ConfigError
from digenrl.models.adapters.lora import ADAPTER, Targets, adapter_parameters, lora_config
from digenrl.models.contract import ComfyuiLayers, DiffusionModel
from digenrl.models.experts import EXPERTS, LOW_NOISE, of_part, parts_of

FILE_NAME = "pytorch_lora_weights.safetensors"  # the name that diffusers looks for
FILE_NAME_2 = "pytorch_lora_weights_2.safetensors"  # for a second transformer, loaded with load_into_transformer_2
PEFT_FILE, PEFT_CONFIG = "adapter_model.safetensors", "adapter_config.json"
PEFT_PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"  # endings of published names
# Of kohya's names, in which all other dots are underscores.
KOHYA_PREFIX, KOHYA_ENDS = "lora_unet_", (".lora_down.weight", ".lora_up.weight")

LoraPair = tuple[Tensor, Tensor]
"""A (rank x inputs) and B (outputs x rank) of one layer."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """Adapters apart from a model: the update of a layer's weight is B A. Weights are on the CPU, by layer."""

    pairs: Mapping[str, LoraPair]
    rank: int
    targets: Targets

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], rank: int, alpha: float, targets: Targets) -> Adapters:
        """From weights by published name, whose update is alpha / rank * B A."""
        layers = [name.removesuffix(DOWN) for name in weights if name.endswith(DOWN)]
        scale = alpha / rank
        on_cpu = {name: value.detach().cpu() for name, value in weights.items()}
        pairs = {layer: (on_cpu[layer + DOWN], on_cpu[layer + UP] * scale) for layer in layers}
        return cls(pairs, rank, targets)

    def named(self, prefix: str = "") -> dict[str, Tensor]:
        """The weights by published name, after a prefix."""
        downs = {f"{prefix}{layer}{DOWN}": down.contiguous() for layer, (down, _) in self.pairs.items()}
        return downs | {f"{prefix}{layer}{UP}": up.contiguous() for layer, (_, up) in self.pairs.items()}

    def by_part(self) -> dict[str, Adapters]:
        """The adapters of each of two transformers by its component; of a single one under an empty name."""
        found = {part: of_part(part, self.pairs) for part in EXPERTS["both"]}
        split = {part: Adapters(pairs, self.rank, self.targets) for part, pairs in found.items() if pairs}
        return split or {"": self}


def save_lora(model: DiffusionModel, directory: Path) -> None:
    """Writes a model's adapters as `write_diffusers` does."""
    config = adapter_config(model)
    adapters = Adapters.of(adapter_parameters(model), config.r, config.lora_alpha, config.target_modules)
    write_diffusers(adapters, directory, model.pipeline_class)


def adapter_config(model: DiffusionModel) -> LoraConfig:
    adapted = [part for part in parts_of(model.transformer).values() if hasattr(part, "peft_config")]
    return adapted[0].peft_config[ADAPTER]


def write_diffusers(adapters: Adapters, directory: Path, pipeline_class: type[Any]) -> None:
    """Writes a file for `pipe.load_lora_weights(directory)`. Files are replaced atomically.

    The adapters of a second transformer are in a file of their own, in which diffusers expects the same names:
    `pipe.load_lora_weights(directory, weight_name=FILE_NAME_2, load_into_transformer_2=True)`.
    """
    component = adapted_component(pipeline_class)
    directory.mkdir(parents=True, exist_ok=True)
    for part, own in adapters.by_part().items():
        config = _written_config(own).to_dict()
        with tempfile.TemporaryDirectory(dir=directory, prefix=".saving-") as partial:
            layers = {f"{component}_lora_layers": own.named(), f"{component}_lora_adapter_metadata": config}
            lora_loader(pipeline_class).save_lora_weights(partial, **layers)
            _sort_metadata(Path(partial) / FILE_NAME)
            (Path(partial) / FILE_NAME).replace(directory / diffusers_file(part))


def diffusers_file(part: str) -> str:
    """The file of the adapters of one of two transformers, or of the only one, whose name is empty."""
    return FILE_NAME_2 if part == LOW_NOISE else FILE_NAME


def adapted_component(pipeline_class: type[Any]) -> str:
    """The component whose adapters a pipeline loads: its transformer or its UNet."""
    return "unet" if "unet" in lora_loader(pipeline_class)._lora_loadable_modules else "transformer"


def lora_loader(pipeline_class: type[Any]) -> Any:
    """The class that reads and writes the adapters of a pipeline.

    A pipeline without `load_lora_weights` loads files of the usual format: `pipe.transformer.load_lora_adapter`.
    """
    return pipeline_class if hasattr(pipeline_class, "load_lora_weights") else CogVideoXLoraLoaderMixin


def write_peft(adapters: Adapters, directory: Path, source: str) -> None:
    """Writes a folder for `peft.PeftModel.from_pretrained(transformer, directory)`.

    The adapters of two transformers are in two folders inside, named after their components.
    """
    for part, own in adapters.by_part().items():
        config, folder = _written_config(own), directory / part
        config.base_model_name_or_path, config.inference_mode = source, True
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(folder)
        save_file(own.named(PEFT_PREFIX), folder / PEFT_FILE, metadata={"format": "pt"})


def _sort_metadata(file: Path) -> None:
    """Sorts the metadata in the header of a .safetensors file, which is written in random order."""
    with file.open("r+b") as content:
        length = int.from_bytes(content.read(8), "little")
        header = json.loads(content.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length, "the same header in another order"
        content.seek(8)
        content.write(text.ljust(length))


def _written_config(adapters: Adapters) -> LoraConfig:
    """peft's configuration for a file: its sets have an order, so that equal runs write equal bytes."""
    config = lora_config(adapters.rank, adapters.rank, adapters.targets)
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)
    return config


def write_comfyui(
    adapters: Adapters, file: Path, layers: ComfyuiLayers, transformer: nn.Module, *, unet: bool = False
) -> Path:
    """Writes a file for ComfyUI's LoRA loaders, with an `.alpha` beside every pair; returns it.

    `layers` are ComfyUI's, as `DiffusionModel.comfyui_layers` describes them. The transformer is the model's; its
    weights are not read. The layers of a UNet get kohya's names, which other programs know. Raises ConfigError
    if ComfyUI has no name for an adapted layer.
    """
    pairs = dict(adapters.pairs) if not layers else _joined(adapters.pairs, layers, transformer)
    down_end, up_end = KOHYA_ENDS if unet else (DOWN, UP)
    content: dict[str, Tensor] = {}
    for layer, (down, up) in pairs.items():
        name = KOHYA_PREFIX + layer.replace(".", "_") if unet else f"{_prefix(layers)}{layer}"
        content |= {name + down_end: down.contiguous(), name + up_end: up.contiguous()}
        content[f"{name}.alpha"] = torch.tensor(float(len(down)))
    save_file(content, file, metadata={"format": "pt"})
    return file


def _prefix(layers: ComfyuiLayers) -> str:
    return "diffusion_model." if layers else "transformer."


def _joined(pairs: Mapping[str, LoraPair], layers: ComfyuiLayers, transformer: nn.Module) -> dict[str, LoraPair]:
    """The pairs of ComfyUI's layers."""
    linears = {path: each for path, each in transformer.named_modules() if isinstance(each, nn.Linear)}
    left, joined = dict(pairs), {}
    for path in pairs:
        found = comfyui_layer(path, layers)
        if found is None:
            raise ConfigError(f"ComfyUI has no name for the adapted layer {path}; export to merged instead")
        name, parts = found
        if path in left:
            own = [left.pop(part, None) for part in parts]
            down, up = _join(own, [linears[part].out_features for part in parts])
            joined[name] = down, swapped(up) if swaps_halves(transformer, path, name) else up
    return joined


def comfyui_layer(path: str, layers: ComfyuiLayers) -> tuple[str, list[str]] | None:
    """The layer of ComfyUI that contains this one, and all layers that it consists of."""
    block = next(iter(re.findall(r"\.(\d+)\.", path)), "")
    of_block = path.replace(f".{block}.", ".*.", 1)
    for name, parts in layers.items():
        if path in parts or of_block in parts:  # layers outside of blocks may have a number too
            return name.replace("*", block), [part.replace("*", block) for part in parts]
    return None


def swaps_halves(transformer: nn.Module, path: str, name: str) -> bool:
    """Whether a layer's scale and shift are in the other order under ComfyUI's name: there, the shift is first."""
    return name != path and isinstance(transformer.get_submodule(path.rpartition(".")[0]), AdaLayerNormContinuous)


def swapped(up: Tensor) -> Tensor:
    """B with its halves in the other order."""
    return torch.cat(up.chunk(2)[::-1])


def _join(parts: list[LoraPair | None], outputs: list[int]) -> LoraPair:
    """One pair for layers with the same input whose outputs are concatenated; None is a layer without adapters."""
    present = [pair for pair in parts if pair is not None]
    if len(parts) == 1:
        return present[0]
    down = torch.cat([pair[0] for pair in present])
    up = torch.zeros(sum(outputs), len(down), dtype=down.dtype)
    row = column = 0
    for pair, size in zip(parts, outputs, strict=True):
        if pair is not None:
            rank = len(pair[0])
            up[row : row + size, column : column + rank] = pair[1]
            column += rank
        row += size
    return down, up
