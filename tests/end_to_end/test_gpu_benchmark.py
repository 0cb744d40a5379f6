"""The benchmarks for one GPU run the same code paths with tiny models on a CPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from digenrl.driver.calibration import memory_plan_message
from digenrl.records import Calibrate, Calibrated

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def benchmark(monkeypatch: pytest.MonkeyPatch, name: str = "gpu") -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # benchmarks set it; restored afterwards
    return importlib.import_module(name)


def test_every_part_is_measured_and_a_profile_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = benchmark(monkeypatch)
    arguments = ["sd3", "--tiny", "--only", "forward,eager,replay,profile,run", "--json"]
    arguments += ["--pack", "4", "--profiles", str(tmp_path), "--device-name", "here"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    gpu.main()
    (measured,) = json.loads(capsys.readouterr().out)
    seconds = ("eager_forward_s", "pair_s", "predicted_s", "step_s")
    assert all(measured[name] > 0 for name in seconds)
    assert set(measured["eager_pair_s"]) == {"1 checkpointed", "4 checkpointed", "4"}
    assert min(measured["eager_pair_s"].values()) > 0
    assert measured["forward_flop"] > 2 * measured["parameters"]
    assert set(measured["forward_s"]) == {"2"} and min(measured["forward_s"].values()) > 0
    assert measured["largest_log_ratio"] == 0 and measured["log_prob_mismatch"] < 1e-5
    assert measured["parts"]["train"] > 0 and measured["predicted_parts"]["training"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["here_sd3.yaml"]


def test_the_tables_compare_with_the_best_eager_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, tables = benchmark(monkeypatch), benchmark(monkeypatch, "gpu_tables")
    measured = gpu.Measured(
        "flux", forward_flop=1e12, matrix_tflops=100.0, forward_s={1: 0.02}, pair_s=0.025, pack_size=4
    )
    measured.eager_pair_s = {"1 checkpointed": 0.5, "4 checkpointed": None, "4": 0.1}
    assert measured.forward_share(1) == pytest.approx(0.5) and measured.pair_share == pytest.approx(0.8)
    table = tables.passes_table([measured])
    ratios = next(list(column.cells) for column in table.columns if column.header == "over best eager")
    assert ratios == ["-", "4.00x"]


def test_the_kernels_of_a_pass_are_listed_by_group(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel_profile = benchmark(monkeypatch, "kernel_profile")
    monkeypatch.setattr(sys, "argv", ["kernel_profile.py", "sd3", "--tiny", "--pass", "replay", "--pack", "4"])
    kernel_profile.main()
    printed = capsys.readouterr().out
    assert "sd3, replay, pack " in printed
    rows = {row.split("│")[1].strip(): row for row in printed.splitlines() if row.count("│") == 6}
    assert int(rows["matrix products"].split("│")[4]) > 0 and int(rows["attention"].split("│")[4]) > 0
    names = {"nvjet_tst_128": "matrix products", "cudnn_generated_fort_native_sdpa_sm90": "attention"}
    names |= {"triton_red_fused_native_layer_norm_1": "fused norms", "triton_poi_fused_gelu_2": "fused pointwise"}
    names |= {"Memcpy DtoD": "copies", "vectorized_elementwise_kernel": kernel_profile.UNFUSED}
    assert {name: kernel_profile.KernelTime(name, 1, 1.0).group for name in names} == names


def test_an_unknown_family_is_answered_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = benchmark(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "fluks", "--tiny"])
    with pytest.raises(SystemExit, match="unknown family 'fluks'; known: flux, qwen_image"):
        gpu.main()


def test_the_memory_plan_is_read_from_the_message_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = {"peak_bytes": {1: 3 * 2**30}, "planned_bytes": 2**32}
    trained = Calibrated(0, Calibrate(1, 0, "train"), pack_size=6, checkpointed_blocks=4, **memory)
    found = benchmark(monkeypatch, "recipe_steps").PLAN.search(memory_plan_message(trained))
    assert found is not None and found.groups() == ("6", "4", "4.0", "3.0")


def test_offloading_and_loading_state_is_timed_and_leaves_it_unchanged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offload = benchmark(monkeypatch, "offload")
    monkeypatch.setattr(sys, "argv", ["offload.py", "--tiny", "--json"])
    offload.main()
    measured = json.loads(capsys.readouterr().out)
    assert measured["unchanged"]


def test_saving_and_reading_a_checkpoint_is_timed_and_restores_its_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saving = benchmark(monkeypatch, "saving")
    monkeypatch.setattr(saving, "WIDTH", 64)
    monkeypatch.setattr(sys, "argv", ["saving.py", "--billions", "0.0001", "--out", str(tmp_path), "--json"])
    saving.main()
    measured = json.loads(capsys.readouterr().out)
    assert measured["same"]
    assert measured["gigabytes"] == pytest.approx(12 * 24 * 64**2 / 1e9, rel=0.05)
    assert not list(tmp_path.iterdir())
