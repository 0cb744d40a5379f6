"""LoRA adapters on the tiny SD3: what is trained, published, exported and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from safetensors.torch import load_file

from digenrl.config.reading import ConfigError
from digenrl.models.adapters.lora import (
    ADAPTER,
    AdaptedLinear,
    adapter_parameters,
    adapters_disabled,
    add_lora,
    check_targets,
    has_lora,
    target_layers,
)
from digenrl.models.adapters.lora_files import (
    DOWN,
    FILE_NAME,
    PEFT_CONFIG,
    UP,
    Adapters,
    save_lora,
    write_diffusers,
    write_peft,
)
from digenrl.models.contract import DiffusionModel
from digenrl.models.families.parts.helpers import JOINT_ATTENTION
from digenrl.models.model_weights import load_weights, weights_state
from digenrl.models.registry import find_family
from digenrl.testing.tiny_models import make_tiny_pipeline, tiny_size

FAMILY = find_family("sd3")
SIZE = tiny_size(FAMILY.name)
# As in Flow-GRPO's scripts.
ATTENTION = [f"attn.{name}" for name in JOINT_ATTENTION]
FLUX_MLPS = ["ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"]
QWEN_MLPS = ["img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lora") / "sd3"
    make_tiny_pipeline("sd3", path)
    return path


@pytest.fixture
def model(directory: Path) -> DiffusionModel:
    return FAMILY.load(directory, torch.float32, "cpu")


def velocity_of(model: DiffusionModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    latents = model.initial_latents(torch.randn(2, *model.noise_shape(SIZE), generator=generator), SIZE)
    times = model.schedule(4, SIZE).timesteps[[0, 2]]
    return model.velocity(latents, times, model.encode(["a cat", "a sign"]), guidance=1.0, size=SIZE)


def shake_adapters(model: DiffusionModel, seed: int = 5) -> None:
    generator = torch.Generator().manual_seed(seed)
    load_weights(
        model, {name: torch.randn(v.shape, generator=generator) * 0.1 for name, v in weights_state(model).items()}
    )


def test_new_adapters_do_not_change_the_velocity_and_freeze_the_base(model: DiffusionModel) -> None:
    before = velocity_of(model)
    add_lora(model, rank=4, alpha=8, seed=0)
    assert torch.equal(velocity_of(model), before)
    trained = {name for name, p in model.transformer.named_parameters() if p.requires_grad}
    assert trained and trained == {name for name, _ in model.transformer.named_parameters() if ".lora_" in name}


def test_every_target_layer_of_every_block_is_adapted(model: DiffusionModel) -> None:
    targets = [
        name
        for name, module in model.transformer.named_modules()
        if isinstance(module, torch.nn.Linear) and name.endswith(model.lora_targets)
    ]
    add_lora(model, rank=4, alpha=8, seed=0)
    expected = {f"{name}.lora_{side}.weight" for name in targets for side in "AB"}
    assert weights_state(model).keys() == expected


@pytest.mark.parametrize(
    ("base", "adapters"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_adapters_are_fp32_whatever_the_base_is_and_fp64_only_in_an_fp64_model(
    directory: Path, base: torch.dtype, adapters: torch.dtype
) -> None:
    model = FAMILY.load(directory, base, "cpu")
    add_lora(model, rank=2, alpha=2, seed=0)
    assert {value.dtype for value in weights_state(model).values()} == {adapters}
    assert model.transformer.get_submodule("proj_out").weight.dtype == base


def test_the_initial_weights_depend_only_on_the_seed(directory: Path) -> None:
    states = []
    for seed, disturbance in ((1, 10), (1, 11), (2, 10)):
        torch.manual_seed(disturbance)
        model = FAMILY.load(directory, torch.float32, "cpu")
        add_lora(model, rank=4, alpha=8, seed=seed)
        states.append(weights_state(model))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_disabling_gives_exactly_the_base_and_restores_everything_after(model: DiffusionModel) -> None:
    base = velocity_of(model)
    add_lora(model, rank=4, alpha=8, seed=0)
    shake_adapters(model)
    adapted = velocity_of(model)
    assert not torch.equal(adapted, base)
    next(iter(adapter_parameters(model).values())).requires_grad_(False)
    trained = [parameter.requires_grad for parameter in adapter_parameters(model).values()]
    with adapters_disabled(model):
        assert torch.equal(velocity_of(model), base)
        with adapters_disabled(model):
            pass
        assert torch.equal(velocity_of(model), base)
    assert torch.equal(velocity_of(model), adapted)
    assert [parameter.requires_grad for parameter in adapter_parameters(model).values()] == trained


def test_adapters_are_enabled_again_if_the_reference_forward_raises(model: DiffusionModel) -> None:
    add_lora(model, rank=4, alpha=8, seed=0)
    shake_adapters(model)
    adapted = velocity_of(model)
    with pytest.raises(KeyError), adapters_disabled(model):
        raise KeyError("from inside")
    assert torch.equal(velocity_of(model), adapted)


def test_a_gradient_reaches_the_adapters_through_a_forward_made_before_disabling(model: DiffusionModel) -> None:
    add_lora(model, rank=4, alpha=8, seed=0)
    shake_adapters(model)
    velocity = velocity_of(model)
    with adapters_disabled(model), torch.no_grad():
        reference = velocity_of(model)
    (velocity - reference).square().mean().backward()
    grads = [parameter.grad for parameter in adapter_parameters(model).values()]
    assert sum(float(grad.abs().sum()) for grad in grads if grad is not None) > 0


def test_with_a_bf16_base_adapters_compute_in_bf16_and_agree_with_peft_in_fp32() -> None:
    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=16, init_lora_weights=False)
    layer, theirs = (
        kind(torch.nn.Linear(64, 32), ADAPTER, config=config, r=8, lora_alpha=16)
        for kind in (AdaptedLinear, LoraLinear)
    )
    theirs.load_state_dict(layer.state_dict())
    for each in (layer, theirs):
        each.base_layer.to(torch.bfloat16).requires_grad_(False)
    inputs = torch.randn(50, 64, dtype=torch.bfloat16, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value) or value, lambda value: value):
        result = layer(inputs)
    expected = theirs(inputs)
    assert result.dtype == expected.dtype == torch.bfloat16
    assert {value.dtype for value in kept if value.shape == inputs.shape} == {torch.bfloat16}
    torch.testing.assert_close(result.float(), expected.float(), rtol=0.02, atol=0.02)
    for each, value in ((layer, result), (theirs, expected)):
        value.float().square().mean().backward()
        for weight in (each.lora_A[ADAPTER].weight, each.lora_B[ADAPTER].weight):
            assert weight.dtype == torch.float32 and weight.grad is not None
    for side in ("lora_A", "lora_B"):
        ours, wanted = (getattr(each, side)[ADAPTER].weight.grad for each in (layer, theirs))
        assert (ours - wanted).norm() < 0.02 * wanted.norm()


def test_a_state_is_a_copy_and_restores_the_velocity(model: DiffusionModel) -> None:
    add_lora(model, rank=4, alpha=8, seed=0)
    shake_adapters(model, seed=5)
    state, velocity = weights_state(model), velocity_of(model)
    shake_adapters(model, seed=6)
    assert not torch.equal(velocity_of(model), velocity)
    load_weights(model, state)
    assert torch.equal(velocity_of(model), velocity)


def test_a_state_that_does_not_fit_changes_nothing(model: DiffusionModel, directory: Path) -> None:
    add_lora(model, rank=4, alpha=8, seed=0)
    before = weights_state(model)
    name = next(iter(before))
    other_rank = FAMILY.load(directory, torch.float32, "cpu")
    add_lora(other_rank, rank=2, alpha=8, seed=0)
    lacking = {n: v + 1 for n, v in before.items() if n != name}
    with pytest.raises(ValueError, match=f"1 tensors missing.*{name}"):
        load_weights(model, lacking)
    with pytest.raises(ValueError, match=r"1 unexpected.*something"):
        load_weights(model, before | {"something": torch.zeros(1)})
    with pytest.raises(ValueError, match="rank"):
        load_weights(model, weights_state(other_rank))
    after = weights_state(model)
    assert all(torch.equal(before[n], after[n]) for n in before)


def test_a_saved_directory_has_one_file_with_the_same_weights_and_the_scale_in_b(
    model: DiffusionModel, tmp_path: Path
) -> None:
    add_lora(model, rank=4, alpha=8, seed=0)
    shake_adapters(model)
    save_lora(model, tmp_path / "lora")
    save_lora(model, tmp_path / "lora")  # replaces the first
    assert [path.name for path in (tmp_path / "lora").iterdir()] == [FILE_NAME]
    saved, state = load_file(tmp_path / "lora" / FILE_NAME), weights_state(model)
    read = {name.removeprefix("transformer."): value for name, value in saved.items()}
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], state[name] * (2 if ".lora_B." in name else 1)) for name in state)


@pytest.mark.parametrize(
    ("family", "size", "targets", "rank", "layers", "millions"),
    [
        ("flux", "1-dev", [*ATTENTION, *FLUX_MLPS], 64, 342, 179.3),
        ("flux", "1-dev", ["to_q", "to_k", "to_v", "to_out.0"], 128, 190, 149.4),
        ("qwen_image", None, [*ATTENTION, *QWEN_MLPS], 64, 720, 424.7),
        ("sd3", "3.5-medium", ATTENTION, 32, 191, 18.8),
    ],
)
def test_published_targets_have_the_published_number_of_parameters(
    family: str, size: str | None, targets: list[str], rank: int, layers: int, millions: float
) -> None:
    transformer = find_family(family).build_transformer(torch.float32, "meta", size)
    check_targets(transformer, targets)
    found = [transformer.get_submodule(path) for path in target_layers(transformer, targets)]
    assert len(found) == layers
    widths = [each.in_features + each.out_features for each in found if isinstance(each, torch.nn.Linear)]
    assert sum(widths) * rank / 1e6 == pytest.approx(millions, abs=0.05)


@pytest.mark.parametrize(
    "targets",
    [["attn.to_q", "ff.net.2"], r"transformer_blocks\.1\..*(to_out\.0|ff\.net\.2)", None],
    ids=["names", "expression", "default"],
)
def test_the_adapted_layers_are_those_that_peft_adapts(
    model: DiffusionModel, directory: Path, targets: list[str] | str | None
) -> None:
    theirs = FAMILY.load(directory, torch.float32, "cpu").transformer
    theirs.add_adapter(LoraConfig(r=2, target_modules=targets or list(model.lora_targets)))  # type: ignore[operator]
    expected = [name for name, each in theirs.named_modules() if isinstance(each, LoraLinear)]
    assert expected == target_layers(model.transformer, targets or model.lora_targets)
    add_lora(model, rank=2, alpha=2, seed=0, targets=targets)
    assert weights_state(model).keys() == {f"{name}.lora_{side}.weight" for name in expected for side in "AB"}


@pytest.mark.parametrize(
    ("targets", "complaint"),
    [
        (["to_q", "too_k"], "'too_k' matches no layer.*attn.to_k"),
        (["attn"], "attn, which is not a linear layer"),
        (r".*to_q2", "matches no layer"),
    ],
)
def test_targets_that_match_no_linear_layer_are_refused(
    model: DiffusionModel, targets: list[str] | str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        add_lora(model, rank=2, alpha=2, seed=0, targets=targets)
    assert not has_lora(model)


def test_gaussian_adapters_have_a_standard_deviation_of_one_over_the_rank(directory: Path) -> None:
    states = []
    for disturbance in (10, 11):
        torch.manual_seed(disturbance)
        model = FAMILY.load(directory, torch.float32, "cpu")
        add_lora(model, rank=32, alpha=8, seed=1, init="gaussian")
        states.append(weights_state(model))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    downs = torch.cat([value.flatten() for name, value in states[0].items() if ".lora_A." in name])
    assert float(downs.std()) == pytest.approx(1 / 32, rel=0.05)
    assert float(downs.abs().max()) > 3 / 32, "a uniform distribution would end earlier"
    assert not any(value.any() for name, value in states[0].items() if ".lora_B." in name)


def test_mistakes_are_reported(model: DiffusionModel) -> None:
    with pytest.raises(ValueError, match="no LoRA adapters"), adapters_disabled(model):
        pass
    with pytest.raises(ConfigError, match="rank"):
        add_lora(model, rank=0, alpha=8, seed=0)
    assert not has_lora(model)
    add_lora(model, rank=4, alpha=8, seed=0)
    with pytest.raises(ValueError, match="already"):
        add_lora(model, rank=4, alpha=8, seed=0)


def test_equal_adapters_are_written_as_equal_bytes_whatever_the_order_of_sets(tmp_path: Path) -> None:
    layers = [f"blocks.{index}.to_q" for index in range(12)]
    weights = {f"{layer}{end}": torch.ones(2, 2) for layer in layers for end in (DOWN, UP)}
    adapters = Adapters.of(weights, rank=2, alpha=2.0, targets=layers)
    pipeline_class = find_family("sd3").pipeline_class
    write_diffusers(adapters, tmp_path, pipeline_class)
    content = (tmp_path / FILE_NAME).read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert list(header["__metadata__"]) == sorted(header["__metadata__"])
    assert json.loads(header["__metadata__"]["lora_adapter_metadata"])["transformer.target_modules"] == sorted(
        layers
    )
    write_peft(adapters, tmp_path, "source")
    assert json.loads((tmp_path / PEFT_CONFIG).read_text())["target_modules"] == sorted(layers)
    assert load_file(tmp_path / FILE_NAME).keys() == {f"transformer.{name}" for name in weights}
