"""What a worker must never mix up: samples of a slice, versions, seeds, padding, and rewards that failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from live_runs import TINY
from PIL import Image
from scored_groups import lively, scored_groups, toy
from torch import Tensor

from digenrl.config.reading import parse_model
from digenrl.config.recipes.prompts import PromptSettings
from digenrl.config.recipes.recipe import Recipe
from digenrl.config.rewards.table import HttpSettings
from digenrl.exchange.folder import ExchangeFolder
from digenrl.exchange.tensors import TensorExchange
from digenrl.models.contract import DiffusionModel, TextEncoder
from digenrl.models.loading.base_weights import files_fingerprint
from digenrl.models.model_weights import weights_state
from digenrl.records import (
    Commit,
    Encode,
    Encoded,
    Evaluate,
    Evaluated,
    Generate,
    HeldOutChunk,
    JobFailed,
    PromptRow,
    Publish,
    Result,
    Score,
    Slice,
    SliceArtifact,
    pixels_name,
)
from digenrl.rewards.contract import RewardError
from digenrl.rewards.function import FunctionReward
from digenrl.testing.tiny_models import make_tiny_pipeline
from digenrl.training.packing.packs import calibration_terms, padded
from digenrl.training.ranks.rank_group import PeersLostError
from digenrl.worker.assignment import Assignment, DeviceFailed, Duty, PeersLost, StartFailed
from digenrl.worker.blueprint import Blueprint, load_model, load_text_encoders, read_blueprint
from digenrl.worker.rollouts import held_out_pixels
from digenrl.worker.stages import Stages, WorkerParts
from digenrl.worker.worker import Worker, start_worker

PROMPT = PromptRow("prompt-0", "a cat", {})


class Tiny:
    """A tiny model and everything that stages need."""

    def __init__(self, root: Path) -> None:
        make_tiny_pipeline("sd3", root / "model")
        evaluation = {"prompts": {"path": "held_out.txt"}, "denoising_steps": 2}
        settings = {"family": "sd3", "source": str(root / "model"), "guidance": 1.0}
        self.blueprint: Blueprint = read_blueprint(
            parse_model(Recipe, {**TINY, "model": settings, "evaluation": evaluation})
        )
        self.model: DiffusionModel = load_model(self.blueprint, "cpu")
        self.encoder: TextEncoder = load_text_encoders(self.blueprint, "cpu")
        (root / "exchange").mkdir()
        self.exchange = TensorExchange(ExchangeFolder(root / "exchange"))

    def stages(self, reward: Any = None) -> Stages:
        stages = Stages(WorkerParts(self.blueprint, self.exchange, self.encoder, self.model, reward))
        stages.encode(Encode(0, 0, step=0, groups=(0,), prompts=(PROMPT,)))
        return stages


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("rules"))


def brightness(pixels: Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> Tensor:
    return pixels.flatten(1).mean(dim=1)


def generate(job_id: int, version: int = 0) -> Generate:
    return Generate(job_id, 0, Slice(0, 0, 0, 2), lane=0, version=version, prompt=PROMPT)


@pytest.mark.parametrize("first", [0, 2])
def test_part_of_a_slice_is_scored_with_its_own_pictures(tiny: Tiny, first: int) -> None:
    artifact = SliceArtifact(Slice(0, 0, 4, 4), "slice-50", 0)
    pixels = torch.arange(4.0).reshape(4, 1, 1, 1, 1).expand(4, 1, 3, 2, 2) / 4
    tiny.exchange.put(pixels_name(artifact.name), {"pixels": pixels.contiguous()})
    job = Score(51, 0, Slice(0, 0, 4 + first, 2), scorer=0, artifact=artifact, prompts=(PROMPT,) * 2)
    scored = tiny.stages(FunctionReward("brightness", brightness, {})).score(job)
    assert scored.scores.values == (first / 4, (first + 1) / 4)


def test_rewards_see_the_image_that_metadata_names_for_one_of_them(tiny: Tiny, tmp_path: Path) -> None:
    def widths(pixels: Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> list[float]:
        return [float(sum(image.shape[2] for image in one.get("source_images", ()))) for one in metadata]

    Image.new("RGB", (5, 4)).save(tmp_path / "beside.png")
    recipe = tiny.blueprint.recipe.model_copy(
        update={
            "prompts": PromptSettings(path=tmp_path / "prompts.jsonl"),
            "rewards": (HttpSettings(url="http://127.0.0.1", source_image="reference"),),
        }
    )
    reward = FunctionReward("widths", widths, {})
    stages = Stages(WorkerParts(replace(tiny.blueprint, recipe=recipe), tiny.exchange, reward=reward))
    named, unnamed, absent = (
        replace(PROMPT, row=f"prompt-{index}", metadata=metadata, where=f"prompts.jsonl:{index}")
        for index, metadata in enumerate([{"reference": "beside.png"}, {}, {"reference": "absent.png"}])
    )
    assert stages.score_pixels(torch.rand(3, 1, 3, 8, 8), [named, named, unnamed]).values == (5.0, 5.0, 0.0)
    with pytest.raises(RewardError, match=r"prompts\.jsonl:2: .*absent\.png does not exist"):
        stages.score_pixels(torch.rand(2, 1, 3, 8, 8), [named, absent])


def test_a_sample_carries_the_version_that_made_it_not_the_one_that_its_job_was_issued_on(tiny: Tiny) -> None:
    stages = tiny.stages()
    assert stages.generate(generate(60)).version == 0
    adapters = {name: value for name, value in weights_state(tiny.model).items() if "lora" in name}
    stages.publish(Publish(61, 0, 3, (0,), tiny.exchange.put_weights("weights-3", adapters)))
    assert stages.generate(generate(62, version=2)).version == 3


def test_a_reward_that_fails_on_a_lane_is_a_failure_and_never_a_number(tiny: Tiny) -> None:
    def broken(pixels: Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> Tensor:
        raise ConnectionError("the scorer is away")

    generated = tiny.stages(FunctionReward("broken", broken, {})).generate(generate(70))
    assert generated.scores is None
    assert "the scorer is away" in generated.score_failure


def test_a_result_does_not_carry_the_inputs_of_its_job_back(tiny: Tiny) -> None:
    worker = Worker("encoder", tiny.stages())
    encode = Encode(80, 5, step=0, groups=(0,), prompts=(PROMPT,), images=((b"a picture",),))
    for job in (encode, replace(generate(81), hedges=7), Commit(82, 0, step=0, keeps_state=True)):
        result = worker.handle(job)  # that of Commit is a failure: this worker does not train
        assert isinstance(result, Result) and result.job == job
        data = [each.name for each in fields(job) if each.metadata.get("data")]
        assert data and not any(getattr(result.job, name) for name in data)


def test_a_rank_that_loses_the_others_has_not_failed_itself(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(_job: Encode) -> Encoded:
        raise PeersLostError("rank 0 of 2 lost the others")

    stages = tiny.stages()
    monkeypatch.setattr(stages, "encode", lose)
    result = Worker("trainer/0", stages).handle(Encode(0, 0, step=0, groups=()))
    assert isinstance(result, PeersLost) and result.reason == "rank 0 of 2 lost the others"
    assert "in lose" in result.details


def test_a_worker_whose_device_has_failed_does_not_take_it_for_a_failed_job(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = torch.AcceleratorError("CUDA error: unspecified launch failure\nCompile with TORCH_USE_CUDA_DSA")
    in_a_reward = RewardError("aesthetic", "failed")
    in_a_reward.__cause__ = RuntimeError("CUDA error: device-side assert triggered")
    others = (
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: out of memory"),
        KeyError("x"),
    )
    stages = tiny.stages()
    for error in (launch, in_a_reward, *others):

        def fail(_job: Encode, error: Exception = error) -> Encoded:
            raise error

        monkeypatch.setattr(stages, "encode", fail)
        result = Worker("generator-0", stages).handle(Encode(0, 0, step=0, groups=()))
        assert isinstance(result, JobFailed if error in others else DeviceFailed)
        if error is launch:
            assert result.reason.endswith("unspecified launch failure")  # type: ignore[union-attr]


def test_held_out_samples_depend_on_the_seed_of_the_evaluation_alone(tiny: Tiny) -> None:
    recipe, conditioning = tiny.blueprint.recipe, tiny.encoder.encode(["a cat"])

    def pixels(seed: int, own_seed: int) -> Tensor:
        assert recipe.evaluation is not None
        evaluation = recipe.evaluation.model_copy(update={"seed": own_seed})
        changed = recipe.model_copy(update={"seed": seed, "evaluation": evaluation})
        return held_out_pixels(replace(tiny.blueprint, recipe=changed), tiny.model, [conditioning], 0)

    assert torch.equal(pixels(seed=0, own_seed=5), pixels(seed=9, own_seed=5))
    assert not torch.equal(pixels(seed=0, own_seed=5), pixels(seed=0, own_seed=0))


def test_only_a_trainer_needs_to_see_the_folder_of_the_run(tiny: Tiny, tmp_path: Path) -> None:
    recipe, absent = tiny.blueprint.recipe, tmp_path / "absent"
    generator = Assignment("generator-0", frozenset[Duty](["generate"]), "cpu", recipe, None, run=absent)
    trainer = replace(generator, name="trainer", duties=frozenset[Duty](["train"]))
    worker, _ = start_worker(generator, tiny.exchange)
    assert worker is not None
    job = Evaluate(0, 0, HeldOutChunk(0, 0), lane=0, first=4, prompts=(PROMPT, PROMPT), shown=5)
    tiny.stages()  # encodes the prompt
    result = worker.handle(job)
    assert isinstance(result, Evaluated)
    ((name, content),) = result.pictures
    assert name == "0004.png" and Image.open(BytesIO(content)).size == (16, 16)
    assert not absent.exists()
    _, failure = start_worker(trainer, tiny.exchange)
    assert isinstance(failure, StartFailed) and failure.user_error and str(absent) in failure.reason


def test_padding_comes_last_and_has_no_weight() -> None:
    algorithm, model = lively("mix_grpo"), toy()
    terms = [term for job in calibration_terms(scored_groups(model, algorithm)[0], algorithm, 4) for term in job]
    filled = padded(terms, len(terms) + 3, like=terms[0])
    assert filled[: len(terms)] == terms and all(term.weight for term in terms)
    assert [term.weight for term in filled[len(terms) :]] == [0.0] * 3


def test_a_fingerprint_follows_the_content_of_weights_and_not_where_they_are(tmp_path: Path) -> None:
    weights = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    for name, values in (("a", weights), ("copy", weights), ("scaled", weights * 1.5), ("cut", weights[:-1])):
        (tmp_path / name).write_bytes(values.numpy().tobytes())
    prints = {name: files_fingerprint({"model": tmp_path / name}) for name in ("a", "copy", "scaled", "cut")}
    assert prints["a"] == prints["copy"] and len(set(prints.values())) == 3
    assert files_fingerprint({"other": tmp_path / "a"}) != prints["a"]
