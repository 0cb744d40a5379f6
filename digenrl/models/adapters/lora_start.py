"""Starts training from an existing LoRA: a file or folder of diffusers, peft, kohya or ComfyUI."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from math import sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from diffusers.utils import convert_unet_state_dict_to_peft
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from digenrl.config.reading import ConfigError, one_line
from digenrl.models.adapters.lora import adapter_parameters, layer_kind
from digenrl.models.adapters.lora_files import (
    DOWN,
    FILE_NAME,
    KOHYA_ENDS,
    KOHYA_PREFIX,
    PEFT_CONFIG,
    PEFT_FILE,
    PEFT_PREFIX,
    UP,
    LoraPair,
    adapted_component,
    adapter_config,
    comfyui_layer,
    lora_loader,
    swapped,
    swaps_halves,
)
from digenrl.models.contract import DiffusionModel
from digenrl.models.model_weights import load_weights

KEY = "training.lora.start_from"
SIDES = (KOHYA_ENDS, (DOWN, UP), (".lora.down.weight", ".lora.up.weight"))
METADATA = "lora_adapter_metadata"  # where diffusers keeps rank and alpha
PREFIXES = ("", "transformer.", "unet.", "diffusion_model.", "model.diffusion_model.")  # before names with dots
# Before names with underscores: kohya and musubi-tuner, OneTrainer, LyCORIS.
UNDERSCORE_PREFIXES = (KOHYA_PREFIX, "lora_unet__", "lora_transformer_", "lycoris_")
KNOWN_NAMES = (
    "LAYER.lora_A.weight, LAYER.lora_down.weight and LAYER.lora.down.weight, also after base_model.model., "
    "transformer., unet. or diffusion_model., and lora_unet_LAYER.lora_down.weight"
)
SET_NAME = re.compile(r"(\.lora_[AB])\.[^.]+(\.weight)$")  # peft's name of the adapter set
UNSUPPORTED = {
    "DoRA": r"\.(dora_scale|lora_magnitude_vector)\b",
    "LoKr": r"\.lokr_",
    "LoHa": r"\.hada_",
    "OFT": r"\.oft_",
    "Tucker decomposition": r"\.lora_mid\b",
    "difference of whole weights": r"\.diff(_b)?$",
    "bias": r"\.(lora_[AB]|lora_down|lora_up)\.bias$",
}  # what a file holds besides plain adapters, or instead of them, by the names of tensors
UNET_CONFIG = SimpleNamespace(layers_per_block=2)  # of SD 1.5 and SDXL, for kohya's names of blocks


def start_from(model: DiffusionModel, source: Path) -> None:
    """Overwrites a model's adapters with those of a LoRA file or folder.

    It must adapt the same layers with the same rank. Its strength is kept: B is scaled for the model's own alpha.
    Raises ConfigError, and changes nothing, if it cannot be read or does not fit.
    """
    config = adapter_config(model)
    adapted = {name.removesuffix(DOWN) for name in adapter_parameters(model) if name.endswith(DOWN)}
    original = original_layers(type(model), model.transformer)
    pairs = fitted(read_lora(source, model.pipeline_class, original), adapted, config.r)
    scale = config.lora_alpha / config.r
    weights = {layer + DOWN: down for layer, (down, _) in pairs.items()}
    weights |= {layer + UP: up / scale for layer, (_, up) in pairs.items()}
    try:
        load_weights(model, weights)
    except ValueError as error:
        raise _wrong(source, str(error)) from None


def fitted(pairs: Mapping[str, LoraPair], layers: set[str], rank: int) -> dict[str, LoraPair]:
    """The pairs for these layers, with this rank. Raises ConfigError if they have other layers or another rank.

    Left out is what adds nothing to a weight, as in the parts of a layer that was fused for ComfyUI.
    """
    pairs = {layer: pair for layer, pair in pairs.items() if layer in layers or pair[1].any()}
    if pairs.keys() != layers:
        kinds = sorted({layer_kind(layer) for layer in pairs})
        missing, more = sorted(layers - pairs.keys()), sorted(pairs.keys() - layers)
        first = f"{missing[0]} is missing" if missing else f"{more[0]} is not adapted by the recipe"
        raise ConfigError(
            f"{KEY}: adapts {len(pairs)} layers, the recipe {len(layers)}: {first}; to adapt the same layers, set "
            f"training.lora.targets=[{', '.join(kinds)}]",
            KEY,
        )
    fitting = {layer: _with_rank(pair, rank) for layer, pair in pairs.items()}
    if any(len(down) != rank for down, _ in fitting.values()):
        least = min(len(down) for down, _ in pairs.values())
        ranks = sorted({len(_with_rank(pair, least)[0]) for pair in pairs.values()})
        found = " and ".join(str(each) for each in ranks)
        hint = f"set training.lora.rank={ranks[0]}" if len(ranks) == 1 else "give a LoRA with one rank"
        raise ConfigError(f"{KEY}: has rank {found}, the recipe {rank}; {hint}", KEY)
    return fitting


def _with_rank(pair: LoraPair, rank: int) -> LoraPair:
    """The pair without columns of B that are zero, down to this rank; unchanged if too few are."""
    down, up = pair
    used = up.any(dim=0)
    if len(down) <= rank or used.sum() > rank:
        return pair
    kept = used.logical_not().argsort(stable=True)[:rank].sort().values
    return down[kept], up[:, kept]


class OriginalLayer(NamedTuple):
    """What a layer in a file consists of: the outputs of layers of diffusers, by path."""

    outputs: Mapping[str, int]
    swaps_halves: bool = False


OriginalLayers = Mapping[str, OriginalLayer]
"""Layers of a model by the name in a file."""


def original_layers(model_class: type[DiffusionModel], transformer: nn.Module) -> OriginalLayers:
    """The names that a LoRA file may have for the layers of a model: those of the original code, and of diffusers.

    The transformer is the model's, with or without adapters; its weights are not read.
    """
    layers = {**(model_class.comfyui_layers or {}), **model_class.fused_layers}
    linears = {
        path.removesuffix(".base_layer"): module.out_features
        for path, module in transformer.named_modules()
        if isinstance(module, nn.Linear) and ".lora_" not in path
    }
    found = {}
    for path in linears:
        name, parts = comfyui_layer(path, layers) or (path, [path])
        outputs = {part: linears[part] for part in parts}
        found[name] = OriginalLayer(outputs, swaps_halves(transformer, path, name))
        found[path] = OriginalLayer({path: linears[path]})
    return found


def read_lora(source: Path, pipeline_class: type[Any], original: OriginalLayers) -> dict[str, LoraPair]:
    """The pairs of a LoRA by layer of the diffusers transformer, with its scale multiplied into B."""
    file = _file_of(source)
    tensors, metadata = _read(file)
    _check_kind(source, tensors)
    by_peft = file.name == PEFT_FILE or any(name.startswith(PEFT_PREFIX) for name in tensors)
    tensors = {name.removeprefix(PEFT_PREFIX): value for name, value in tensors.items()}
    ranks = _apply_alphas(tensors)
    if not tensors:
        raise _wrong(source, f"has no adapters; known names: {KNOWN_NAMES}")
    scale = 1.0
    if not ranks:
        scale = _peft_scale(file.with_name(PEFT_CONFIG)) if by_peft else _metadata_scale(source, metadata)
    pairs, unread = _pairs_by_name(source, tensors, original, scale)
    if unread:
        pairs = _pairs_by_conversion(source, tensors, ranks, pipeline_class, scale, unread)
        _check_layers(source, pairs, original, unread)
    return pairs


def _pairs_by_name(
    source: Path, tensors: Mapping[str, Tensor], original: OriginalLayers, scale: float
) -> tuple[dict[str, LoraPair], list[str]]:
    """The pairs of layers that have one of the known names, and the names of all other tensors."""
    left, pairs = dict(tensors), dict[str, LoraPair]()
    for name, (outputs, swaps) in original.items():
        underscored = name.replace(".", "_")
        spellings = [prefix + name for prefix in PREFIXES]
        spellings += [prefix + underscored for prefix in UNDERSCORE_PREFIXES]
        for down, up in ((each + a, each + b) for each in spellings for a, b in SIDES):
            if down in left and up in left:
                low, high = left.pop(down), left.pop(up)
                if len(high) != sum(outputs.values()):
                    raise _wrong(source, f"{up} has {len(high)} rows, expected {sum(outputs.values())}")
                rows = torch.split(swapped(high) if swaps else high, list(outputs.values()))
                pairs |= {part: (low, own * scale) for part, own in zip(outputs, rows, strict=True)}
    return pairs, sorted(left)


def _pairs_by_conversion(
    source: Path,
    tensors: Mapping[str, Tensor],
    ranks: Mapping[str, Tensor],
    pipeline_class: type[Any],
    scale: float,
    unread: Sequence[str],
) -> dict[str, LoraPair]:
    """The pairs of a file whose names diffusers converts.

    Some layouts are converted only without alphas, and others recognized by them: `ranks`, which do not scale.
    """
    try:
        return _pairs(source, _converted(source, tensors, pipeline_class, unread), scale, unread)
    except ConfigError:
        if not ranks:
            raise
    return _pairs(source, _converted(source, {**tensors, **ranks}, pipeline_class, unread), scale, unread)


def _check_layers(
    source: Path, pairs: Mapping[str, LoraPair], original: OriginalLayers, unread: Sequence[str]
) -> None:
    """Raises ConfigError if names were converted to layers that the model does not have."""
    known = {part for layer in original.values() for part in layer.outputs}
    more = [layer for layer, (_, up) in pairs.items() if layer not in known and up.any()]
    if original and more:
        raise _wrong(source, f"{more[0]} is no linear layer of the transformer; {_remedy(unread)}")


def _remedy(unread: Sequence[str]) -> str:
    return f"{unread[0]} is the first tensor that is not known by its name; known: {KNOWN_NAMES}"


def _converted(
    source: Path, tensors: Mapping[str, Tensor], pipeline_class: type[Any], unread: Sequence[str]
) -> dict[str, Tensor]:
    """The tensors with the names that peft gives them in the diffusers transformer or UNet."""
    component = adapted_component(pipeline_class)
    unet = {"unet_config": UNET_CONFIG} if component == "unet" else {}
    try:
        read = lora_loader(pipeline_class).lora_state_dict(dict(tensors), **unet)
        named = read[0] if isinstance(read, tuple) else read  # some add alphas, which have been applied already
        if component == "unet":
            named = convert_unet_state_dict_to_peft(named)
    except (KeyError, ValueError, RuntimeError, NotImplementedError, IndexError, AssertionError):
        raise _wrong(source, f"not a LoRA of {pipeline_class.__name__}; {_remedy(unread)}") from None
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
            names = {name: SET_NAME.sub(r"\1\2", name) for name in content.keys()}  # noqa: SIM118
            if len(set(names.values())) < len(names):
                raise _wrong(file, "has several sets of adapters; give a LoRA with one")
            tensors = {own: content.get_tensor(name).float() for name, own in names.items()}
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
            if layer + down in tensors and layer + up in tensors:
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
        why = "is missing or damaged; it has the strength of the LoRA: put peft's beside the weights"
        raise _wrong(file, why) from None
    return _scale(file, config, rank, alpha)


def _scale(file: Path, config: Mapping[str, Any], rank: float, alpha: float) -> float:
    """The strength of a LoRA by peft's configuration, which must be that of a plain one."""
    _check_plain(file, config)
    return float(alpha / (sqrt(rank) if config.get("use_rslora") else rank))


def _check_kind(file: Path, names: Iterable[str]) -> None:
    """Raises ConfigError if tensors are not those of plain adapters."""
    for name in sorted(names):
        for kind, pattern in UNSUPPORTED.items():
            if re.search(pattern, name):
                raise _wrong(file, f"has {name} ({kind}), which is not supported; give a plain LoRA")


def _check_plain(file: Path, config: Mapping[str, Any]) -> None:
    unknown = [key for key in ("use_dora", "rank_pattern", "alpha_pattern") if config.get(key)]
    if unknown:
        raise _wrong(file, f"has {unknown[0]}, which is not supported; give a plain LoRA")


def _pairs(source: Path, named: Mapping[str, Tensor], scale: float, unread: Sequence[str]) -> dict[str, LoraPair]:
    layers = [name.removesuffix(DOWN) for name in named if name.endswith(DOWN)]
    others = sorted(named.keys() - {layer + side for layer in layers for side in (DOWN, UP)})
    incomplete = [layer for layer in layers if layer + UP not in named]
    if others or incomplete or not layers:
        raise _wrong(source, f"not only pairs of A and B for linear layers of the transformer; {_remedy(unread)}")
    return {layer: (named[layer + DOWN], named[layer + UP].to(torch.float32) * scale) for layer in layers}


def _wrong(source: Path, what: str) -> ConfigError:
    return ConfigError(f"{KEY}: {source}: {what}", KEY)
