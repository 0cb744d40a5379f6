"""Conditioning and trajectories are bitwise the same after a round trip through named tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scored_groups import RUN_SEED, Rollout, lively, toy, trajectories_of
from tiny_pipelines import tiny_folder
from torch import Tensor

from digenrl.config.recipes.windows import read_window
from digenrl.exchange.folder import ExchangeFolder
from digenrl.exchange.tensors import TensorExchange
from digenrl.generation.windows import plan_rollouts
from digenrl.models.contract import Conditioning
from digenrl.models.objective import Objective
from digenrl.models.registry import FAMILIES, find_family
from digenrl.models.trajectory import Trajectory
from digenrl.worker import tensor_files
from digenrl.worker.tensor_files import conditioning_of, conditioning_tensors, trajectory_tensors

WINDOWS = {
    "chain": {"kind": "all"},
    "part of a chain": {"kind": "fast", "width": 2},
    "random subsets": {"kind": "random_subset", "fraction": 0.5},
    "no steps": {"kind": "none"},
}


def same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.dtype is right.dtype and left.shape == right.shape and torch.equal(left, right)


def round_trip(
    trajectories: tuple[Trajectory, ...], window: dict[str, object], rollout: Rollout, exchange: TensorExchange
) -> tuple[Trajectory, ...]:
    """Puts trajectories into the exchange and reads them back; the reader makes the plans again."""
    exchange.put("slice", trajectory_tensors(trajectories))
    samples = [trajectory.sample for trajectory in trajectories]
    plan = trajectories[0].plan
    plans = plan_rollouts(
        read_window(window),
        samples,
        schedule=plan.schedule,
        size=plan.size,
        noise=plan.noise,
        guidance=plan.guidance,
        run_seed=RUN_SEED,
    )
    return tensor_files.trajectories_of(exchange.get("slice"), samples, plans, trajectories[0].version)


@pytest.mark.parametrize(
    ("window", "algorithm"),
    [
        *((window, lively("flow_grpo")) for window in WINDOWS if window != "no steps"),
        ("no steps", lively("diffusion_nft")),
        ("random subsets", lively("flow_grpo_fast")),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_trajectories_are_bitwise_the_same_after_a_round_trip(
    window: str, algorithm: Objective, tmp_path: Path
) -> None:
    rollout = Rollout(steps=8, version=3)
    made = trajectories_of(toy(torch.float32), algorithm, rollout, group=2, window=WINDOWS[window])
    back = round_trip(made, WINDOWS[window], rollout, TensorExchange(ExchangeFolder(tmp_path)))
    for before, after in zip(made, back, strict=True):
        assert (after.sample, after.version) == (before.sample, 3)
        assert (after.plan.kept_steps, after.plan.stochastic_steps) == (
            before.plan.kept_steps,
            before.plan.stochastic_steps,
        )
        for name in ("latents_KL", "next_latents_KL", "log_prob_K", "mean_KL", "final_L"):
            assert same(getattr(before, name), getattr(after, name)), name


def test_each_latent_of_consecutive_steps_is_stored_once() -> None:
    made = trajectories_of(toy(torch.float32), lively("flow_grpo"), Rollout(steps=8), 0, {"kind": "all"})
    tensors = trajectory_tensors(made)
    assert tensors["chain"].shape[:2] == (4, 8)
    assert not {"latents", "next_latents"} & tensors.keys()


def test_a_text_argument_that_is_none_stays_none() -> None:
    row = Conditioning({"mask": None, "embeds": torch.randn(1, 3, 4)}, {"mask": None, "embeds": torch.zeros(1, 2)})
    back = conditioning_of(conditioning_tensors(row))
    assert back.negative is not None
    assert back.positive["mask"] is None and back.negative["mask"] is None
    assert same(back.positive["embeds"], row.positive["embeds"])
    without = conditioning_of(conditioning_tensors(Conditioning({"embeds": torch.ones(1, 2)}, None)))
    assert without.negative is None


@pytest.mark.parametrize("name", list(FAMILIES))
def test_rows_of_every_family_survive_a_round_trip(name: str, tmp_path: Path) -> None:
    family = find_family(name)
    encoders = family.load_text_encoders(tiny_folder(name))
    (tmp_path / "exchange").mkdir()
    exchange = TensorExchange(ExchangeFolder(tmp_path / "exchange"))
    for negative in (None, ["blurred"]) if family.uses_negative_prompts else (None,):
        with torch.no_grad():
            row = encoders.encode(["a red cube"], negative)
        exchange.put("row", conditioning_tensors(row.to("cpu")))
        back = conditioning_of(exchange.get("row"))
        for before, after in ((row.positive, back.positive), (row.negative or {}, back.negative or {})):
            assert before.keys() == after.keys()
            assert all(same(before[key], after[key]) for key in before)
