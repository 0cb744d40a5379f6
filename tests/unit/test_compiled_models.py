"""Compiled blocks compute the same, and everything is compiled during calibration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo
from scored_groups import Rollout, nudge, relative_difference, scored_groups, toy, trainer_of, trajectories_of
from tiny_pipelines import tiny_model
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.exc import BackendCompilerFailed

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.recipes.training import TrainerSettings
from digenrl.models.adapters.lora import add_lora
from digenrl.models.blocks import block_kind, repeated_blocks
from digenrl.models.contract import DiffusionModel
from digenrl.models.objective import Objective
from digenrl.models.passes.compiled import compile_blocks, is_compiled
from digenrl.models.passes.cuda_graphs import GraphedForwards
from digenrl.models.registry import FAMILIES
from digenrl.models.trajectory import ScoredGroup
from digenrl.records import Encode, Encoded, JobFailed
from digenrl.testing.tiny_models import tiny_size
from digenrl.worker.stages import Stages, WorkerParts
from digenrl.worker.worker import Worker

LONG_PROMPT = 1234567  # a group's number is in its prompt
REWARDS = (0.0, 1.0, 5.0, 2.0)
DERIVED = ("wan",)  # with one kind of block: it takes time to trace


class Counting:
    """A backend that counts graphs and runs them eagerly, which is faster to compile.

    With `derives`, the backward is a graph, too, as it is for real backends.
    """

    def __init__(self, derives: bool = True) -> None:
        self.graphs, self._derives = 0, derives

    def __call__(self, graph: Any, inputs: list[Any]) -> Any:
        self.graphs += 1
        return aot_eager(graph, inputs) if self._derives and torch.is_grad_enabled() else graph.forward


@pytest.fixture(autouse=True)
def reset_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# One of each way in which blocks are called: joint attention, unpadded text, a UNet, videos.
COMPILED = ("qwen_image", "sdxl", "wan")


def adapted(family: str) -> DiffusionModel:
    model = tiny_model(family, torch.float64)
    add_lora(model, rank=2, alpha=4, seed=3, targets=r".*\.(to_q|to_qkv_mlp_proj)")  # each takes time to trace
    nudge(model, 0.05, seed=4)
    return model


def group_of(model: DiffusionModel, algorithm: Objective, rollout: Rollout, number: int) -> ScoredGroup:
    made = trajectories_of(model, algorithm, rollout, number)
    return ScoredGroup(model.encode([f"prompt {number}"]), made, REWARDS)


def same_trajectories(left: ScoredGroup, right: ScoredGroup) -> bool:
    pairs = zip(left.trajectories, right.trajectories, strict=True)
    return all(
        torch.equal(a.latents_KL, b.latents_KL) and torch.equal(a.log_prob_K, b.log_prob_K) for a, b in pairs
    )


@pytest.mark.parametrize("name", COMPILED)
def test_after_calibration_nothing_is_compiled_and_gradients_are_those_of_the_eager_model(name: str) -> None:
    """Also with a longer prompt: some families do not pad texts. Packs are filled to a size of 3."""
    family = FAMILIES[name]
    algorithm = build_algorithm(
        "flow_grpo", {"updates_per_batch": 1, "kl_weight": 0.1 if name == "wan" else 0}
    )  # once with the reference policy, with adapters off
    rollout = Rollout(groups=2, steps=3, guidance=family.default_guidance, size=tiny_size(family.name))
    settings = TrainerSettings(pack_size=3)
    eager, compiled = (adapted(name) for _ in range(2))
    expected = [group_of(eager, algorithm, rollout, number) for number in (0, LONG_PROMPT)]
    reference = trainer_of(eager, algorithm, expected, settings)

    backend = Counting(derives=name in DERIVED)
    compile_blocks(compiled, backend)
    calibrated = group_of(compiled, algorithm, rollout, 0)
    trainer = trainer_of(compiled, algorithm, expected, settings)
    trainer.calibrate(replace(calibrated, trajectories=calibrated.trajectories[:2], rewards=REWARDS[:2]))
    ways = 3 if name == "wan" else 2  # with and without gradient, and without adapters
    graphs = ways * len({block_kind(block) for block in repeated_blocks(compiled.transformer)})
    assert backend.graphs == graphs

    groups = [calibrated, group_of(compiled, algorithm, rollout, LONG_PROMPT)]
    for place, group in enumerate(groups):
        trainer.add_group(group, place)
        reference.add_group(expected[place], place)
        assert same_trajectories(group, expected[place])
    assert backend.graphs == graphs
    gradient, wanted = trainer.gradient(), reference.gradient()
    for unused in gradient.keys() - wanted.keys():
        assert not gradient.pop(unused).any()
    assert relative_difference(gradient, wanted) < 1e-9


class WatchedToy:
    """A toy model that records its batch sizes with gradient."""

    def __init__(self, compiled: bool) -> None:
        self.model, self.rows, self.room = toy(), [], 1000
        self._velocity = self.model.velocity
        self.model.velocity = self.velocity
        if compiled:
            self.model.block_state_arguments = ("latent_BSW",)
            compile_blocks(self.model, Counting(derives=False))

    def velocity(self, latents_BL: Tensor, *arguments: Any) -> Tensor:
        if torch.is_grad_enabled():
            self.rows.append(len(latents_BL))
            if len(latents_BL) > self.room:
                raise torch.OutOfMemoryError("no room")
        return self._velocity(latents_BL, *arguments)


def test_packs_of_a_compiled_model_have_one_size_and_fillers_do_not_count() -> None:
    algorithm = build_algorithm("flow_grpo", {"updates_per_batch": 1, "kl_weight": 0.1})
    eager, compiled = WatchedToy(compiled=False), WatchedToy(compiled=True)
    assert is_compiled(compiled.model) and not is_compiled(eager.model)
    groups = scored_groups(eager.model, algorithm, Rollout(groups=2), [REWARDS] * 2)  # of 16 terms
    trainers = [
        trainer_of(each.model, algorithm, groups, TrainerSettings(pack_size=7)) for each in (eager, compiled)
    ]
    for trainer in trainers:
        for group in groups:
            trainer.add_group(group)
    assert eager.rows == [7, 7, 2] * 2 and compiled.rows == [7, 7, 7] * 2
    assert relative_difference(trainers[1].gradient(), trainers[0].gradient()) < 1e-12
    plain, filled = (trainer.commit() for trainer in trainers)
    assert plain.terms == filled.terms
    for measure in ("ratio_mean", "ratio_max", "clip_fraction", "kl", "gradient_norm"):
        assert getattr(filled, measure) == pytest.approx(getattr(plain, measure), rel=1e-9), measure


def test_a_pack_is_not_filled_beyond_the_largest_group() -> None:
    algorithm = build_algorithm("flow_grpo", {"updates_per_batch": 1, "kl_weight": 0})
    watched = WatchedToy(compiled=True)
    groups = scored_groups(watched.model, algorithm, Rollout(groups=2), [REWARDS] * 2)
    trainer = trainer_of(watched.model, algorithm, groups, TrainerSettings(pack_size=64))
    trainer.calibrate(replace(groups[0], trajectories=groups[0].trajectories[:2], rewards=REWARDS[:2]))
    trainer.add_group(groups[0])
    trainer.add_group(groups[1])
    assert watched.rows == [16] * 3


def test_a_filled_pack_that_does_not_fit_is_halved_with_its_fillers() -> None:
    algorithm = build_algorithm("flow_grpo", {"updates_per_batch": 1, "kl_weight": 0})
    eager, compiled = WatchedToy(compiled=False), WatchedToy(compiled=True)
    groups = scored_groups(eager.model, algorithm, Rollout(groups=2), [REWARDS] * 2)
    trainers = [
        trainer_of(each.model, algorithm, groups, TrainerSettings(pack_size=15)) for each in (eager, compiled)
    ]
    compiled.room = 10
    for trainer in trainers:
        for group in groups:
            trainer.add_group(group)
    assert compiled.rows[:3] == [15, 8, 7] and set(compiled.rows[3:]) == {8}
    assert relative_difference(trainers[1].gradient(), trainers[0].gradient()) < 1e-12
    assert trainers[1].commit().ratio_mean == pytest.approx(trainers[0].commit().ratio_mean)


@pytest.mark.parametrize("name", ["sd3", "qwen_image"])
def test_on_a_cpu_rollout_velocity_equals_velocity(name: str) -> None:
    family = FAMILIES[name]
    model, size = adapted(name), tiny_size(name)
    conditioning = model.compact(model.encode(["a red cat"] * 2))
    latents = model.initial_latents(torch.randn(2, *model.noise_shape(size), dtype=torch.float64), size)
    given = latents, model.schedule(3, size).timesteps[[0, 1]], conditioning, family.default_guidance, size
    with torch.no_grad():
        plain, captured = model.velocity(*given), GraphedForwards(model)
        for _ in range(3):
            assert torch.equal(captured.velocity(*given), plain)
            assert torch.equal(model.rollout_velocity(*given), plain)
        model.release_rollout_memory()
        assert torch.equal(model.rollout_velocity(*given), plain)


@torch.no_grad()
def test_forwards_that_cannot_be_captured_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    model, size, tries = adapted("sd3"), tiny_size("sd3"), []
    conditioning = model.encode(["a red cat"])
    latents = model.initial_latents(torch.randn(1, *model.noise_shape(size), dtype=torch.float64), size)
    given = latents, model.schedule(3, size).timesteps[:1], conditioning, 1.0, size

    def no_room(*_arguments: Any) -> None:
        tries.append(1)
        raise torch.OutOfMemoryError("no room for another pool")

    monkeypatch.setattr(GraphedForwards, "_worth_capturing", lambda *_arguments: True)
    monkeypatch.setattr(GraphedForwards, "_capture", no_room)
    captured, expected = GraphedForwards(model), model.velocity(*given)
    for tried in (0, 1, 1, 1):  # the first runs eagerly, the second tries to capture
        assert torch.equal(captured.velocity(*given), expected)
        assert len(tries) == tried


def test_a_failure_to_compile_is_a_user_error_that_names_the_setting() -> None:
    class FailingStages(Stages):
        def encode(self, job: Encode) -> Encoded:
            raise BackendCompilerFailed(self.encode, RuntimeError("no C compiler found"), None)

    parts = WorkerParts(SimpleNamespace(recipe=SimpleNamespace(sample=SimpleNamespace(decode_rows=None))), None)
    result = Worker("generator-0", FailingStages(parts)).handle(Encode(0, 0, step=0, groups=()))
    assert isinstance(result, JobFailed) and result.user_error
    assert "no C compiler found" in result.reason and "model.compile" in result.reason
