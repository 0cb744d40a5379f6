"""Fused queries, keys and values are those of the layers, norms, rotations and concatenation they replace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxAttention as Attention
from peft import inject_adapter_in_model
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from digenrl.models.adapters.lora import AdaptedLinear, lora_config
from digenrl.models.families.parts.flux_attention import FluxAttention
from digenrl.models.families.parts.qwen_attention import joint_heads
from digenrl.models.passes import joined_heads as fused
from digenrl.models.passes.joined_heads import Stream
from digenrl.models.quantized.layers import QuantizedLinear

HEADS, WIDTH, ROWS = 3, 128, 2
TOKENS = {"text": 5, "image": 7}


def attention(base: str, targets: list[str], processor: Any = None) -> nn.Module:
    """A frozen attention module of two streams, with adapters and norms that are not ones."""
    torch.manual_seed(0)
    made = Attention(48, HEADS, 16, bias=True, added_kv_proj_dim=48, eps=1e-6, processor=processor)
    for name, parameter in made.requires_grad_(False).named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
    if base != "unquantized":
        for name, layer in list(made.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(made, name, QuantizedLinear(layer, base))
    config = lora_config(rank=3, alpha=4, targets=targets)
    config._register_custom_module({nn.Linear: AdaptedLinear, QuantizedLinear: AdaptedLinear})
    config.init_lora_weights = False
    return inject_adapter_in_model(config, made)


def streams_of(attn: nn.Module, states: dict[str, Tensor]) -> tuple[Stream, ...]:
    angles = 6 * torch.rand(sum(TOKENS.values()), 8, generator=torch.Generator().manual_seed(1))
    table = torch.stack([angles.cos(), angles.sin()], dim=-1)
    return Stream.of_text(attn, states["text"], table[:5]), Stream.of_image(attn, states["image"], table[5:])


def results_and_gradients(attn: nn.Module, join: Any) -> list[Tensor]:
    states = {name: torch.randn(ROWS, tokens, 48, requires_grad=True) for name, tokens in TOKENS.items()}
    results = join(streams_of(attn, states))
    weights = [torch.linspace(-1, 2, each.numel()).view_as(each) for each in results]
    inputs = [*states.values(), *(each for each in attn.parameters() if each.requires_grad)]
    gradients = torch.autograd.grad(results, inputs, weights, materialize_grads=True)
    return [*results, *gradients]


ALL = ["to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"]


@pytest.mark.parametrize(
    ("base", "targets"), [("unquantized", ALL), ("fp8", ["to_q", "to_v"]), ("nf4", ["add_k_proj"])]
)
@pytest.mark.parametrize("adapters", ["in the kernel", "beside it", "off"])
def test_results_and_gradients_are_those_of_separate_layers(base, targets, adapters, monkeypatch):
    if adapters == "beside it":
        monkeypatch.setattr(fused, "LARGEST_RANK", 2)
    attn = attention(base, targets)
    for layer in attn.modules():
        if isinstance(layer, AdaptedLinear):
            layer._disable_adapters = adapters == "off"
    found = []
    for join in (lambda each: joint_heads(each, 16, fused=False), lambda each: fused.fused_heads(each, 16)):
        torch.manual_seed(2)
        found.append(results_and_gradients(attn, join))
    assert len(found[0]) > 5 and any(each.any() for each in found[0][5:]) == (adapters != "off")
    for one, other in zip(*found, strict=True):
        # fp8 gradients are quantized: a difference in the last bit may move a value to its neighbor.
        assert (one - other).norm() <= (1e-2 if base == "fp8" else 1e-5) * other.norm()


@pytest.mark.parametrize("trained", ["adapters", "norms"])
def test_compiled_attention_is_fused_unless_its_norms_are_trained(trained):
    attn, other = (attention("fp8", ALL, FluxAttention()) for _ in range(2))
    angles = 6 * torch.rand(sum(TOKENS.values()), 8).repeat_interleave(2, dim=1)
    states = torch.randn(ROWS, 7, 48), torch.randn(ROWS, 5, 48)

    def outputs(forward: Any) -> tuple[Tensor, Tensor]:
        return forward(*states, image_rotary_emb=(angles.cos(), angles.sin()))

    expected, graphs = outputs(attn), CompileCounterWithBackend("aot_eager")
    for each in (attn, other):
        each.processor.fused = True
        each.norm_q.requires_grad_(trained == "norms")
        found = outputs(torch.compile(each.forward, backend=graphs, fullgraph=True))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    (graph,) = graphs.graphs  # modules alike share it
    assert ("joined_heads" in graph.print_readable(print_output=False)) == (trained == "adapters")
    assert torch.equal(outputs(attn)[0], expected[0]), "not fused where it is not compiled"


def stream(tokens: int, rank: int, device: str, *, plain: bool = False) -> list[Tensor | None]:
    """As the operator takes it, in bf16; the inputs of adapters are part of a wider tensor."""
    torch.manual_seed(tokens)
    angles = 6 * torch.rand(tokens, WIDTH // 2)
    table = torch.stack([angles.cos(), angles.sin()], dim=-1).to(device)
    base, low = torch.randn(2, tokens, HEADS * WIDTH), torch.randn(2 * tokens, 2 * max(1, rank))
    up, bias, norm = torch.randn(HEADS * WIDTH, max(1, rank)), torch.randn(HEADS * WIDTH), torch.rand(WIDTH)
    base, low, up, bias, norm = (each.to(device, torch.bfloat16) for each in (base, low, up, bias, norm))
    adapters = [low[:, rank:], up] if rank else [None, None]
    if plain:
        return [base, *adapters, None, None, None]
    return [base, *adapters, bias, norm, table]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("plain", [False, True])
def test_kernels_compute_what_the_operators_on_a_cpu_compute(plain):
    def results(device: str) -> list[Tensor]:
        streams = [*stream(37, 4, device, plain=plain), *stream(64, 0, device, plain=plain)]
        torch.manual_seed(1)
        gradient = torch.randn(2, HEADS, 101, WIDTH).to(device, torch.bfloat16).transpose(1, 2)

        def computed(gradient: Tensor) -> list[Tensor]:
            joint, sums = fused.joined_heads(streams, WIDTH, 1e-6, True)
            tables = [*streams[4:6], *streams[10:]]
            return [joint, sums, *fused.joined_heads_backward(gradient, sums, tables, [37, 64], 1e-6)]

        compiled = torch.compile(computed, fullgraph=True)(gradient) if device == "cuda" else computed(gradient)
        if device == "cuda":
            assert all(map(torch.equal, compiled, computed(gradient)))
        return [each.float().cpu() for each in compiled]

    for found, expected in zip(results("cuda"), results("cpu"), strict=True):
        assert (found - expected).norm() < 0.005 * expected.norm()
