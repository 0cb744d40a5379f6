"""Counts the parameters and the work of a model on torch's meta device: shapes only, no weights and no arithmetic.

Two forwards, the second with a shorter text, tell text tokens from image tokens without knowledge of the
family: only sequences with text tokens become shorter. Of equal blocks, only the first two are run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from math import isqrt
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from digenrl.config.reading import ConfigError
from digenrl.models.adapters.lora import Targets, add_lora, target_layers
from digenrl.models.blocks import block_kind, block_positions, repeated_blocks
from digenrl.models.contract import Conditioning, SampleSize
from digenrl.models.passes.attention import AttentionCalls
from digenrl.models.pipeline_model import PipelineModel
from digenrl.models.quantized.replacing import block_weights

ADAPTER_RANK = 32
MOST_FRAMES_PER_LATENT = 32
LARGEST_TOKEN = 64  # pixels

TextShapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class WorkCount:
    """The size of a model and the work of one forward; sizes are numbers of parameters.

    `float32_parameters` of the transformer stay in fp32 when it is loaded in bf16. `block_weights` are those of
    the blocks' linear layers, which can be quantized. `clip_text_tokens` is the part of the text whose length is
    fixed; `cuts_padding` says whether a text is cut to the length of its prompt.
    `image_weights` and `text_weights` multiply one image or text token. Blocks are counted by their attention:
    over all tokens (joint), over image tokens, or from image to text tokens (cross). `lora_linears` are the LoRA
    target layers in units of hidden x hidden layers. `activations` is what a block saves for its backward in LoRA
    training, per token that passes through it and in units of its hidden state.
    """

    parameters: int
    float32_parameters: int
    vae_parameters: int
    block_weights: int
    hidden: int
    blocks: int
    image_weights: int
    text_weights: int
    joint_attention_blocks: int
    image_attention_blocks: int
    cross_attention_blocks: int
    text_tokens: int
    clip_text_tokens: int
    cuts_padding: bool
    pixels_per_token: int
    source_images: int
    frames_per_latent: int | None
    lora_linears: float
    activations: float


@dataclass(slots=True)
class _Forward:
    """The linear layers, the convolutions of a UNet and the attention calls of one forward, in order."""

    linears: list[tuple[int, int]] = field(default_factory=list)  # sequence length, parameters
    attention: list[tuple[int, int]] = field(default_factory=list)  # query length, key length
    hidden: int = 0  # width of the attention
    saved_bytes: int = 0  # by the repeated blocks, for their backward


def count_work(
    model: PipelineModel,
    text_shapes: TextShapes,
    size: SampleSize,
    targets: Targets | None = None,
    sources: int = 0,
) -> WorkCount:
    """Counts the work of one sample of this size. The model is on the meta device, in bf16, and gets adapters.

    `text_shapes` are the shapes of one row of every text argument. `targets` are the adapted layers, by default
    the family's. The sample is made from this many `sources`, which have its height and width.
    """
    size = _with_a_sequence(model, size)
    weights, quantizable = list(model.transformer.parameters()), block_weights(model.transformer)
    adapters = _add_adapters(model, targets)
    padded = next(shape[0] for shape in text_shapes.values() if len(shape) > 1)
    text, less = padded + sources * model.tokens_beside_text, padded - model.text_multiple
    shorter_shapes = {
        name: (less, *shape[1:]) if shape[0] == padded else shape for name, shape in text_shapes.items()
    }
    images = model.image_shapes([SampleSize(size.height, size.width)] * sources, size)
    forward, shorter = (_forward(model, shapes, images, size) for shapes in (text_shapes, shorter_shapes))
    audio = model.audio_tokens(size)
    image, kinds = _attention_kinds(forward, shorter, text, audio)
    blocks, through_blocks = len(block_positions(model.transformer)), image + (text if "joint" in kinds else 0)
    linears = [
        (length, weights, length != less)
        for (length, weights), (less, _) in zip(forward.linears, shorter.linears, strict=True)
    ]
    frames = model.latent_frames(size)
    in_sequence = sources if model.sources_are_tokens else 0
    pixels = size.height * size.width * ((frames or 1) + in_sequence)
    return WorkCount(
        parameters=sum(weight.numel() for weight in weights),
        float32_parameters=sum(weight.numel() for weight in weights if weight.dtype != model.dtype),
        vae_parameters=sum(weight.numel() for weight in model.vae.parameters()),
        block_weights=quantizable,
        hidden=forward.hidden,
        blocks=blocks,
        image_weights=sum(
            weights if has_text else weights * length // image
            for length, weights, has_text in linears
            if length == image + text or (not has_text and length > 1)
        ),
        text_weights=sum(weights for _, weights, has_text in linears if has_text),
        joint_attention_blocks=kinds.count("joint"),
        image_attention_blocks=kinds.count("image"),
        cross_attention_blocks=kinds.count("cross"),
        text_tokens=text,
        clip_text_tokens=0 if model.text_length is None else text - model.text_tokens,
        cuts_padding=model.text_mask is not None,
        pixels_per_token=isqrt(pixels // image) if model.text_multiple == 1 else _smallest_side(model),
        source_images=in_sequence,
        frames_per_latent=_frames_per_latent(model, size) if frames is not None else None,
        lora_linears=adapters / ADAPTER_RANK / (2 * forward.hidden),
        activations=forward.saved_bytes / (blocks * through_blocks * forward.hidden * model.dtype.itemsize),
    )


def lora_linears(transformer: nn.Module, targets: Targets, hidden: int) -> float:
    """The target layers in units of hidden x hidden layers, from their shapes alone."""
    layers = [transformer.get_submodule(path) for path in target_layers(transformer, targets)]
    widths = [each.in_features + each.out_features for each in layers if isinstance(each, nn.Linear)]
    return sum(widths) / (2 * hidden)


def added_activations(transformer: nn.Module, targets: Targets, usual: Targets, hidden: int) -> float:
    """What blocks save for their backward in addition if they have these targets instead of the usual ones.

    An adapted layer saves its input. In a block with a stream for images and one for texts, a token passes through
    half of the layers. The unit is that of `WorkCount.activations`.
    """
    paths = set(target_layers(transformer, targets)) - set(target_layers(transformer, usual))
    more = {transformer.get_submodule(path) for path in paths}
    blocks, widths = repeated_blocks(transformer), 0.0
    for block in blocks:
        added = [each.in_features for each in block.modules() if isinstance(each, nn.Linear) and each in more]
        streams = 2 if any(name.endswith("add_q_proj") for name, _ in block.named_modules()) else 1
        widths += sum(added) / streams
    return widths / (len(blocks) * hidden)


def _add_adapters(model: PipelineModel, targets: Targets | None) -> int:
    """Adds adapters, the only weights with a gradient; returns their number of parameters."""
    add_lora(model, ADAPTER_RANK, alpha=ADAPTER_RANK, seed=0, targets=targets)
    parameters = 0
    for name, weight in model.transformer.named_parameters():
        weight.requires_grad_("lora_" in name)
        parameters += weight.numel() if "lora_" in name else 0
    return parameters


def _attention_kinds(forward: _Forward, shorter: _Forward, text: int, audio: int) -> tuple[int, list[str]]:
    """The number of image tokens, and the kind of every attention call.

    Calls over text tokens alone, and those from or to the few tokens of an audio track, are left out.
    """
    image, kinds = 0, []
    for (query, key), (less_query, less_key) in zip(forward.attention, shorter.attention, strict=True):
        if audio and audio in (query, key):
            continue
        image_queries = query - text if query != less_query else query
        image = max(image, image_queries)
        if query != less_query:
            kinds += ["joint"] if image_queries > 0 else []
        elif key == less_key:
            kinds.append("image")
        else:
            kinds.append("cross" if key == text else "joint")
    return image, kinds


def _with_a_sequence(model: PipelineModel, size: SampleSize) -> SampleSize:
    """The size, or two tokens instead of one: layers over a single token look like those of conditioning."""
    side = _smallest_side(model)
    return SampleSize(2 * side, side) if size == SampleSize(side, side) else size


def _smallest_side(model: PipelineModel) -> int:
    """The side of a sample of one token, for models that pad image tokens as well."""
    for side in range(1, LARGEST_TOKEN + 1):
        with suppress(ConfigError):  # not a size that the model can generate
            model.noise_shape(SampleSize(side, side))
            return side
    raise AssertionError(f"{model.family}: a token has more than {LARGEST_TOKEN} pixels")


def _frames_per_latent(model: PipelineModel, size: SampleSize) -> int:
    for frames in range(2, MOST_FRAMES_PER_LATENT + 2):
        with suppress(ConfigError):  # not a number of frames that the model can generate
            if model.latent_frames(SampleSize(size.height, size.width, frames)) == 2:
                return frames - 1
    raise AssertionError(f"{model.family}: a latent frame has more than {MOST_FRAMES_PER_LATENT} frames")


def _forward(
    model: PipelineModel, text_shapes: TextShapes, image_shapes: TextShapes, size: SampleSize
) -> _Forward:
    images = {
        name: torch.zeros(1, *shape, dtype=model.dtype, device="meta") for name, shape in image_shapes.items()
    }
    text = {
        name: None if "mask" in name else torch.zeros(1, *shape, dtype=model.dtype, device="meta")
        for name, shape in text_shapes.items()
    }
    noise_B = torch.zeros(1, *model.noise_shape(size), dtype=model.dtype, device="meta")
    latents_BL = model.initial_latents(noise_B, size)
    forward = _Forward()
    with (
        _recording_linears(model.transformer, forward),
        _AttentionRecorder(forward),
        _counting_saved(model, forward),
        _repeating_counts(model.transformer, forward),
    ):
        conditioning = Conditioning(text, images=images)
        model.velocity(latents_BL, torch.zeros(1, device="meta"), conditioning, guidance=1.0, size=size)
    return forward


@dataclass(slots=True)
class _BlockRecord:
    """What one block returned and added to the counts."""

    output: Any
    linears: list[tuple[int, int]]
    attention: list[tuple[int, int]]
    saved_bytes: int


@contextmanager
def _repeating_counts(transformer: nn.Module, forward: _Forward) -> Iterator[None]:
    """Counts the second of equal blocks again for all that follow it, since operations on "meta" are slow.

    The first one also saves what it shares with the others, which is counted once.
    """
    records: dict[Any, list[_BlockRecord]] = {}

    def repeating(block: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            shapes = [each.shape for each in tree_leaves((arguments, named)) if isinstance(each, Tensor)]
            known = records.setdefault((block_kind(block), *shapes), [])
            if len(known) == 2:
                forward.linears += known[1].linears
                forward.attention += known[1].attention
                forward.saved_bytes += known[1].saved_bytes
                return known[1].output
            linears, attention, saved = len(forward.linears), len(forward.attention), forward.saved_bytes
            output = run(*arguments, **named)
            added = forward.linears[linears:], forward.attention[attention:], forward.saved_bytes - saved
            known.append(_BlockRecord(output, *added))
            return output

        return call

    blocks = repeated_blocks(transformer)
    for block in blocks:
        block.forward = repeating(block, block.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


@contextmanager
def _recording_linears(transformer: nn.Module, forward: _Forward) -> Iterator[None]:
    def record(layer: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer, nn.Linear | nn.Conv2d)
        x = arguments[0]
        length = output.shape[2:].numel() if isinstance(layer, nn.Conv2d) else x.shape[-2] if x.ndim > 2 else 1
        forward.linears.append((length, layer.weight.numel()))

    kinds = (nn.Linear, nn.Conv2d) if isinstance(transformer, UNet2DConditionModel) else nn.Linear
    linears = [layer for layer in transformer.modules() if isinstance(layer, kinds)]
    with ExitStack() as hooks:
        for layer in linears:
            hooks.enter_context(layer.register_forward_hook(record))
        yield


class _AttentionRecorder(AttentionCalls):
    """Records attention calls. They save what a fused kernel saves; torch's own on "meta" is not fused."""

    def __init__(self, forward: _Forward) -> None:
        super().__init__()
        self._forward = forward

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *further: Any, **named: Any) -> Tensor:
        self._forward.hidden = max(self._forward.hidden, query.shape[1] * query.shape[3])
        self._forward.attention.append((query.shape[2], key.shape[2]))
        output: Tensor = _FusedAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
        return output


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor) -> Tensor:
        output_BHTD = torch.empty_like(query_BHTD)
        ctx.save_for_backward(query_BHTD, key_BHTD, value_BHTD, output_BHTD)
        return output_BHTD


@contextmanager
def _counting_saved(model: PipelineModel, forward: _Forward) -> Iterator[None]:
    """Counts the storage that repeated blocks save for their backward, once each, without weights."""
    weights = {weight.untyped_storage()._cdata for weight in model.transformer.parameters()}
    kept: dict[int, Tensor] = {}  # keeps storages alive, so that their addresses stay unique
    inside = False

    def enter(*_: Any) -> None:
        nonlocal inside
        inside = True

    def leave(*_: Any) -> None:
        nonlocal inside
        inside = False

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if inside and storage._cdata not in weights and storage._cdata not in kept:
            kept[storage._cdata] = tensor
            forward.saved_bytes += storage.nbytes()
        return tensor

    with ExitStack() as hooks:
        for block in repeated_blocks(model.transformer):
            hooks.enter_context(block.register_forward_pre_hook(enter))
            hooks.enter_context(block.register_forward_hook(leave))
        hooks.enter_context(saved_tensors_hooks(pack, lambda tensor: tensor))
        yield
