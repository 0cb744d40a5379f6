"""What makes compiled blocks faster changes no result: rotations, adapters with one input, GELU, row kernels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
from diffusers.models.attention import FeedForward
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from peft import LoraConfig, inject_adapter_in_model
from scored_groups import nudge, relative_difference
from tiny_pipelines import tiny_model
from torch import Tensor, nn
from torch._inductor.runtime.hints import ReductionHint

from digenrl.models.adapters.lora import ADAPTER, AdaptedLinear, add_lora, outputs_of
from digenrl.models.blocks import repeated_blocks
from digenrl.models.contract import DiffusionModel
from digenrl.models.families.parts.qwen_attention import rotated
from digenrl.models.passes.fused_gelu import LinearWithGelu, fuse_gelus, gelu_by_sigmoid
from digenrl.models.passes.own_outputs import own_outputs
from digenrl.models.passes.row_kernels import LONGEST_ROW, is_row
from digenrl.testing.tiny_models import tiny_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rotations_are_bitwise_those_of_pairs_with_and_without_gradient(dtype: torch.dtype) -> None:
    value, table = torch.randn(2, 5, 3, 8).to(dtype), torch.randn(5, 4, 2)
    exact = value.to(torch.promote_types(dtype, torch.float32))
    first, second = exact.unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = table.unsqueeze(-3).unbind(-1)
    expected = torch.stack([first * cosine - second * sine, first * sine + second * cosine], dim=-1)
    for gradient in (True, False):
        with torch.set_grad_enabled(gradient):
            assert torch.equal(rotated(value, table), expected.flatten(-2).to(dtype))


def velocity_of(model: DiffusionModel) -> Tensor:
    size, generator = tiny_size(model.family), torch.Generator().manual_seed(3)
    noise = torch.randn(2, *model.noise_shape(size), generator=generator, dtype=torch.float64)
    latents = model.initial_latents(noise, size)
    times = model.schedule(4, size).timesteps[[0, 2]]
    return model.velocity(latents, times, model.encode(["a cat", "a sign"]), 3.5, size)


def test_flux_attends_as_in_diffusers() -> None:
    model = tiny_model("flux", torch.float32)
    ours = velocity_of(model)
    for block in repeated_blocks(model.transformer):
        block.attn.set_processor(FluxAttnProcessor())
    torch.testing.assert_close(ours, velocity_of(model), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["qwen_image", "flux"])
def test_adapters_with_one_input_have_the_outputs_and_gradients_of_single_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found = tiny_model(name, torch.float64), []
    add_lora(model, rank=2, alpha=4, seed=3)
    nudge(model, 0.05, seed=4)
    adapters = {n: p for n, p in model.transformer.named_parameters() if ".lora_" in n}
    for _ in range(2):
        velocity = velocity_of(model)
        gradients = torch.autograd.grad(velocity.square().sum(), [*adapters.values()], allow_unused=True)
        used = {n: g for n, g in zip(adapters, gradients, strict=True) if g is not None}
        found.append((velocity.detach(), used))
        monkeypatch.setattr(
            "digenrl.models.families.parts.qwen_attention.outputs_of",
            lambda layers, x: [layer(x) for layer in layers],
        )
    (together, gradients_together), (single, gradients_single) = found
    torch.testing.assert_close(together, single, rtol=1e-6, atol=1e-9)
    assert gradients_together.keys() == gradients_single.keys() != set()
    assert relative_difference(gradients_together, gradients_single) < 1e-6


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_of_adapters_with_one_input_take_no_more_memory_than_the_adapters(backend: str) -> None:
    torch._dynamo.reset()
    layers = nn.ModuleDict({name: nn.Linear(6, 4, dtype=torch.bfloat16) for name in ("q", "k", "v")})
    config = LoraConfig(r=2, target_modules=[*layers], init_lora_weights=False)
    config._register_custom_module({nn.Linear: AdaptedLinear})
    inject_adapter_in_model(config, layers, ADAPTER)
    adapters = [p.requires_grad_() for name, p in layers.named_parameters() if ".lora_" in name]
    for each in adapters:
        each.data = each.data.float()
    outputs = torch.compile(lambda x: outputs_of([*layers.values()], x), backend=backend)
    sum(outputs(torch.randn(5, 6, dtype=torch.bfloat16))).square().sum().backward()
    gradients = [each.grad for each in adapters if each.grad is not None]
    assert len(gradients) == 6
    for gradient in gradients:  # not views of one gradient of all
        assert gradient.untyped_storage().nbytes() == gradient.nbytes and gradient.dtype == torch.float32


def test_a_layer_without_adapters_or_with_disabled_ones_is_called_as_it_is() -> None:
    layers = nn.ModuleDict({name: nn.Linear(6, 4) for name in ("q", "k")})
    config = LoraConfig(r=2, target_modules=["q"])
    config._register_custom_module({nn.Linear: AdaptedLinear})
    inject_adapter_in_model(config, layers, ADAPTER)
    x = torch.randn(3, 5, 6)
    for each, alone in zip(outputs_of([*layers.values()], x), layers.values(), strict=True):
        assert torch.equal(each, alone(x))
    layers["q"].enable_adapters(enabled=False)
    assert torch.equal(outputs_of([layers["q"]], x)[0], layers["q"].base_layer(x))


class Single(nn.Module):
    """As in the blocks of FLUX with one stream."""

    def __init__(self) -> None:
        super().__init__()
        self.proj_mlp, self.act_mlp = nn.Linear(6, 8), nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.act_mlp(self.proj_mlp(x))


@pytest.mark.parametrize("make", [Single, lambda: FeedForward(6, 6, activation_fn="gelu-approximate")])
def test_fused_gelus_keep_names_results_and_gradients(make: type[nn.Module]) -> None:
    torch._dynamo.reset()
    block, x = make(), torch.randn(4, 6, requires_grad=True)
    names, expected = [*block.state_dict()], block(x)
    (wanted,) = torch.autograd.grad(expected.square().sum(), x)
    fuse_gelus(block)
    assert [*block.state_dict()] == names and torch.equal(block(x), expected)
    assert any(isinstance(layer, LinearWithGelu) for layer in block.modules())
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    output = compiled(x)
    (gradient,) = torch.autograd.grad(output.square().sum(), x)
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), expected, rtol=1e-6, atol=1e-6)


def test_the_exact_gelu_is_left_as_it_is_and_a_sigmoid_gives_the_one_by_tanh() -> None:
    block = FeedForward(6, 6, activation_fn="gelu")
    fuse_gelus(block)
    assert not any(isinstance(layer, LinearWithGelu) for layer in block.modules())
    x = torch.linspace(-12, 12, 999, dtype=torch.float64)
    torch.testing.assert_close(
        gelu_by_sigmoid(x), nn.functional.gelu(x, approximate="tanh"), rtol=1e-12, atol=1e-14
    )


@pytest.mark.parametrize("family", ["flux", "hunyuan_video"])
def test_blocks_with_own_outputs_return_the_values_and_gradients_of_slices(family: str) -> None:
    model, found = tiny_model(family, torch.float32), []
    single = repeated_blocks(model.transformer)[-1]
    add_lora(model, rank=2, alpha=4, seed=3)
    adapters = [p for n, p in model.transformer.named_parameters() if ".lora_" in n]
    outputs: list[Tensor] = []
    single.register_forward_hook(lambda _block, _inputs, output: outputs.extend(output))
    for _ in range(2):
        velocity = velocity_of(model)
        found.append([velocity, *torch.autograd.grad(velocity.square().sum(), adapters, materialize_grads=True)])
        own_outputs(single)
    sliced, own = outputs[:2], outputs[2:]
    assert all(each._is_view() for each in sliced) and not any(each._is_view() for each in own)
    assert all(each.is_contiguous() for each in own)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("hint", "length", "expected"),
    [
        (ReductionHint.INNER, 3072, True),
        (ReductionHint.INNER, LONGEST_ROW + 1, False),
        (ReductionHint.OUTER, 3072, False),
        (ReductionHint.INNER, SimpleNamespace(is_number=False), False),
    ],
)
def test_only_rows_of_a_known_length_stay_in_registers(
    hint: ReductionHint, length: object, expected: bool
) -> None:
    assert is_row(SimpleNamespace(get_reduction_hint=lambda: hint, reduction_numel=length)) is expected
