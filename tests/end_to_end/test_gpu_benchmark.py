"""The benchmarks for one GPU run the same code paths with tiny models on a CPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def benchmark(monkeypatch: pytest.MonkeyPatch, name: str = "gpu") -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # benchmarks set it; restored afterwards
    return importlib.import_module(name)


def test_every_part_is_measured_and_a_profile_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = benchmark(monkeypatch)
    arguments = ["sd3", "--tiny", "--base", "nf4", "--whole-step", "--json"]
    arguments += ["--profiles", str(tmp_path), "--device-name", "here"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    gpu.main()
    (measured,) = json.loads(capsys.readouterr().out)
    seconds = ("baseline_forward_s", "pair_s", "baseline_pair_s", "predicted_s", "step_s", "baseline_step_s")
    assert all(measured[name] > 0 for name in seconds)
    assert measured["forward_flop"] > 2 * measured["parameters"]
    assert set(measured["forward_s"]) == {"1", "2"} and min(measured["forward_s"].values()) > 0
    assert measured["largest_log_ratio"] == 0 and measured["log_prob_mismatch"] < 1e-5
    assert measured["parts"]["train"] > 0 and measured["predicted_parts"]["training"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["here_sd3.yaml"]


def test_an_unknown_family_is_answered_with_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = benchmark(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "fluks", "--tiny"])
    with pytest.raises(SystemExit, match="unknown family 'fluks'; known: flux, qwen_image"):
        gpu.main()


def test_offloading_and_loading_state_is_timed_and_leaves_it_unchanged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offload = benchmark(monkeypatch, "offload")
    monkeypatch.setattr(sys, "argv", ["offload.py", "--tiny", "--json"])
    offload.main()
    measured = json.loads(capsys.readouterr().out)
    assert measured["unchanged"] and measured["gain"] > 0
    assert measured["offload_s"] > 0 and measured["load_s"] > 0


def test_saving_and_reading_a_checkpoint_is_timed_and_restores_its_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saving = benchmark(monkeypatch, "saving")
    monkeypatch.setattr(saving, "WIDTH", 64)
    monkeypatch.setattr(sys, "argv", ["saving.py", "--billions", "0.0001", "--out", str(tmp_path), "--json"])
    saving.main()
    measured = json.loads(capsys.readouterr().out)
    assert measured["same"] and measured["gain"] > 0
    assert measured["gigabytes"] == pytest.approx(12 * 24 * 64**2 / 1e9, rel=0.05)
    assert not list(tmp_path.iterdir())
