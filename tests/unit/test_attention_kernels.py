"""Attention kernels: the choice among those that were tried, the trial in its own process, and their use."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_pipelines import tiny_model
from torch import Tensor
from torch._inductor import config as compiler

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.attention import CANDIDATES, choose_kernels, described, fixed_kernels
from digenrl.config.recipes.files import read_recipe
from digenrl.models.contract import Conditioning, DiffusionModel
from digenrl.models.passes import attention_trial
from digenrl.models.passes.attention import without_copies
from digenrl.models.passes.attention_trial import main, try_kernels
from digenrl.models.passes.determinism import WORKSPACE, use_deterministic_kernels
from digenrl.models.passes.forward_record import AttentionCall, record_forward
from digenrl.models.registry import FAMILIES
from digenrl.records import Kernel
from digenrl.testing.tiny_models import make_tiny_pipeline, tiny_size
from digenrl.worker.blueprint import check_attention

CPU = torch.device("cpu")
FAST, SLOW = {"flash": 1.0, "cudnn": 2.0}, {"flash": 9.0, "cudnn": 1.0, "math": 0.5}


def test_the_fastest_kernel_that_works_on_every_lane_is_chosen() -> None:
    chosen = choose_kernels([{"rollout": FAST}, {"rollout": SLOW, "replay": SLOW}], same=False)
    assert chosen == {"rollout": "cudnn", "replay": "math", "masked": "native"}


def test_rollouts_and_replays_share_a_kernel_if_log_probs_must_agree() -> None:
    trials = [{"rollout": {"flash": 1.0, "cudnn": 2.0}, "replay": {"flash": 9.0, "cudnn": 3.0}}]
    assert choose_kernels(trials, same=False)["rollout"] == "flash"
    assert choose_kernels(trials, same=True) == {"rollout": "cudnn", "replay": "cudnn", "masked": "native"}


def test_the_choice_is_described_with_the_times_of_the_slowest_device() -> None:
    trials = [{"rollout": FAST}, {"rollout": SLOW}]
    line = described(choose_kernels(trials, same=False), trials)
    assert "rollout cudnn" in line and "flash 9e+03 ms" in line and "replay" not in line


def test_flash_is_never_used_with_a_mask() -> None:
    assert fixed_kernels("flash") == {"rollout": "flash", "replay": "flash", "masked": "native"}
    assert fixed_kernels({"replay": "math"}) == {"rollout": "native", "replay": "math", "masked": "native"}


def test_a_recipe_names_one_kernel_or_one_per_kind_of_pass() -> None:
    assert read_recipe("demo").model.kernels is None
    assert read_recipe("demo", ["model.attention={replay: math}"]).model.kernels == fixed_kernels(
        {"replay": "math"}
    )
    with pytest.raises(ConfigError, match="fash") as error:
        read_recipe("demo", ["model.attention=fash"])
    assert "flash" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "device", "why"),
    [
        ("cudnn", "cpu", "cudnn needs a GPU, got cpu; known here: flash, math, native"),
        ("{masked: efficient}", "cpu", "efficient needs a GPU"),
        ("flash", "cuda:0", "flash computes in 16 bits only, .* float32; known here: efficient, math,"),
        ("{replay: cudnn}", "cuda:0 in bf16", "cudnn is not deterministic.* known here: flash, efficient"),
    ],
)
def test_a_kernel_that_a_device_lacks_is_refused_before_anything_is_loaded(
    override: str, device: str, why: str
) -> None:
    device, _, bf16 = device.partition(" ")
    overrides = ["model.deterministic=true", *(["training.autocast=bf16"] if bf16 else [])]
    recipe = read_recipe("demo", [f"model.attention={override}", *overrides])
    with pytest.raises(ConfigError, match=why) as error:
        check_attention(recipe, device)
    assert error.value.where == "model.attention"
    check_attention(read_recipe("demo", ["model.attention=math", *overrides]), device)


MASK = torch.tensor([[True] * 12, [True] * 7 + [False] * 5])[:, None, None, :]
PLAIN = AttentionCall(rows=1, heads=2, queries=20, keys=12, width=8, dtype=torch.float32, count=3)
MASKED = AttentionCall(rows=2, heads=2, queries=20, keys=12, width=8, dtype=torch.float32, mask=MASK)


def test_kernels_that_this_device_has_agree_with_the_reference_and_the_others_are_left_out() -> None:
    tried = try_kernels({"replay": [PLAIN], "masked": [MASKED]}, CPU)
    assert set(tried["replay"]) == {"flash", "math"}  # the others need a GPU
    assert set(tried["masked"]) == {"math"}
    assert all(seconds > 0 for times in tried.values() for seconds in times.values())


def test_a_kind_of_pass_without_calls_is_left_out_and_gets_torchs_own_choice() -> None:
    """As of a row whose attention is all masked, which flash cannot compute."""
    tried = try_kernels({"rollout": [], "replay": [], "masked": [MASKED]}, CPU)
    assert tried.keys() == {"masked"}
    assert choose_kernels([tried], same=True) == {"rollout": "native", "replay": "native", "masked": "math"}


STUB = """
import os, sys
for trial in sys.argv[3:]:
    if trial.endswith("efficient"): os.abort()
    if trial.endswith("math"): print('{"why": "off by 9"}', flush=True); continue
    print('{"seconds": 2.5}', flush=True)
"""


def test_a_kernel_that_crashes_the_trial_is_left_out_and_the_others_are_tried(tmp_path: Path) -> None:
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    tried = try_kernels({"rollout": [PLAIN], "replay": [PLAIN]}, CPU, [sys.executable, str(stub)])
    assert tried == {kind: {"flash": 2.5, "cudnn": 2.5} for kind in ("rollout", "replay")}


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, this process uses deterministic kernels."""
    monkeypatch.setenv(WORKSPACE, ":4096:8")
    before = compiler.deterministic, compiler.triton.autotune_pointwise
    use_deterministic_kernels()
    yield
    torch.use_deterministic_algorithms(False)
    compiler.deterministic, compiler.triton.autotune_pointwise = before


def test_deterministic_kernels_are_chosen_without_timing_and_are_those_that_are_tried(
    deterministic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiler.deterministic and not compiler.triton.autotune_pointwise
    tried: list[bool] = []

    def trial(command: Sequence[str], _timeout_s: float) -> tuple[list[dict[str, Any]], str]:
        main(command[-6], command[-5])  # of this process, without kernels to try
        tried.append(torch.load(command[-6], weights_only=True)["deterministic"])
        return [{"seconds": 1.0}] * 4, ""

    monkeypatch.setattr(attention_trial, "_run", trial)
    assert try_kernels({"rollout": [PLAIN]}, CPU) == {"rollout": dict.fromkeys(CANDIDATES, 1.0)}
    assert tried == [True] and torch.are_deterministic_algorithms_enabled()


def test_cudnn_gets_its_inputs_without_copies_and_gradients_of_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = []
    layouts: list[tuple[int, ...]] = []

    def kernel(query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor, mask: None) -> Tensor:
        given.extend((query_BHTD, key_BHTD, value_BHTD))
        output_BHTD = query_BHTD * 1
        output_BHTD.register_hook(lambda gradient: layouts.append(gradient.stride()))
        return output_BHTD

    monkeypatch.setattr("digenrl.models.passes.attention.scaled_dot_product_attention", kernel)
    attention = without_copies(lambda *arguments, **named: None)
    inputs, wide = torch.randn(3, 2, 5, 3, 4, requires_grad=True).unbind(), torch.randn(2, 5, 2, 3, 4)
    for gradient in (wide[:, :, 0], wide[:, :, 0].contiguous()):
        (found,) = torch.autograd.grad(attention(*inputs), inputs[0], gradient)
        assert torch.equal(found, gradient)
    assert layouts == [torch.empty(2, 5, 3, 4).transpose(1, 2).stride()] * 2
    assert [each.data_ptr() for each in given] == [each.data_ptr() for each in inputs] * 2


def test_a_trial_that_hangs_leaves_its_kernel_out(tmp_path: Path) -> None:
    stub = tmp_path / "stub.py"
    stub.write_text("import time; time.sleep(60)")
    assert try_kernels({"rollout": [PLAIN]}, CPU, [sys.executable, str(stub)], timeout_s=0.3) == {"rollout": {}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DiffusionModel:
    folder = tmp_path_factory.mktemp("hunyuan")
    make_tiny_pipeline("hunyuan_video", folder)
    return FAMILIES["hunyuan_video"].load(folder)


def forward(model: DiffusionModel, rows: Conditioning, *, rollout: bool) -> Tensor:
    size = tiny_size(model.family)
    noise_B = torch.randn(len(rows), *model.noise_shape(size), generator=torch.Generator().manual_seed(1))
    latents_BL = model.initial_latents(noise_B, size)
    velocity = model.rollout_velocity if rollout else model.velocity
    with torch.no_grad():
        return velocity(latents_BL, torch.full((len(rows),), 500.0), model.compact(rows), 6.0, size)


def test_a_recorded_forward_has_the_calls_and_masks_that_the_model_makes(model: DiffusionModel) -> None:
    rows = model.encode(["a cat", "a very long prompt about a dog"])
    one = record_forward(lambda: forward(model, rows.rows(slice(1)), rollout=False))
    both = record_forward(lambda: forward(model, rows, rollout=False))
    longest, masked = (max(each.attention, key=lambda call: call.queries) for each in (one, both))
    assert one.flop > sum(call.flop for call in one.attention) > 0 and longest.mask is None
    assert masked.mask is not None and masked.mask.shape == (2, 1, 1, masked.keys) and not masked.mask.all()


def test_each_kind_of_pass_uses_its_own_kernel(model: DiffusionModel) -> None:
    def kernels_used(rows: Conditioning, *, rollout: bool) -> set[str]:
        names = {"scaled_dot_product_attention_math": "math", "flash": "flash"}
        with torch.profiler.profile() as profiler:
            forward(model, rows, rollout=rollout)
        events = " ".join(event.key for event in profiler.key_averages())
        return {kernel for name, kernel in names.items() if name in events}

    rows = model.encode(["a cat", "a very long prompt about a dog"])
    plain = forward(model, rows.rows(slice(1)), rollout=True)
    model.use_attention({"rollout": "math", "replay": "flash", "masked": "math"})
    used = [
        kernels_used(rows.rows(slice(1)), rollout=True),
        kernels_used(rows.rows(slice(1)), rollout=False),
        kernels_used(rows, rollout=True),
    ]
    assert "math" in used[0] and "math" in used[2] and "flash" in used[1]
    assert torch.allclose(forward(model, rows.rows(slice(1)), rollout=True), plain, atol=1e-5)
    model.use_attention({})


@pytest.mark.parametrize("prompt", ["a red cat", 'a sign that says "hello"'])
@pytest.mark.parametrize("kernel", ["flash", "math", "native"])
def test_a_prompt_with_quoted_text_runs_unmasked_with_every_kernel_in_rollouts_and_replays(
    kernel: Kernel, prompt: str
) -> None:
    model = tiny_model("hunyuan_video_1_5")
    rows = model.encode([prompt]).repeated(2)
    expected = forward(model, rows, rollout=False)
    model.use_attention(kernel)
    rollout, replay = (forward(model, rows, rollout=rollout) for rollout in (True, False))
    assert torch.equal(rollout, replay) and torch.allclose(replay, expected, atol=1e-5)
    calls = record_forward(lambda: forward(model, rows, rollout=False)).attention
    assert max(calls, key=lambda call: call.queries).mask is None


def test_a_rollout_whose_negative_prompts_alone_are_padded_is_masked() -> None:
    model = tiny_model("hunyuan_video_1_5")
    rows = model.encode(["a cat", "a cat"], ["ugly", "a very ugly picture of a dog"])
    expected = forward(model, rows, rollout=True)
    model.use_attention("flash")  # which takes no mask
    assert torch.allclose(forward(model, rows, rollout=True), expected, atol=1e-5)


def test_every_kernel_but_torchs_own_choice_is_a_candidate() -> None:
    assert set(CANDIDATES) == set(fixed_kernels("cudnn").values()) | {"flash", "efficient", "math"}
