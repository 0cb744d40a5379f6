"""A trainer in stages: the weights and metrics of one process, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rank_cases import STEADY
from rank_processes import on_ranks
from scored_groups import LIVELY, Rollout, scored_groups, trainer_of
from staged_models import deep_model, train_adapters
from staged_training import StagedCase, all_trained, trained

import digenrl
from digenrl.algorithms.registry import build_algorithm
from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.recipes.recipe import Recipe
from digenrl.models.blocks import repeated_blocks
from digenrl.models.parallel.staged_blocks import keep_blocks
from digenrl.stages.codec_choice import Codec, LinkCodecs
from digenrl.testing.tiny_models import TINY_MODELS
from digenrl.training.ranks.rank_group import PeersLostError, RankGroup
from digenrl.training.trainable_state import TrainableState
from digenrl.worker.blueprint import read_blueprint
from digenrl.worker.checks.sharding import check_sharding

RECIPES = Path(digenrl.__file__).parent / "recipes"

CASES = [
    StagedCase("flow_grpo"),
    StagedCase("grpo_guard", settings={"gradient_checkpointing": 1}),  # two parts of the gradient
    StagedCase("dance_grpo", {"updates_per_batch": 2}, {"old_log_probs": "recomputed", "pack_size": "auto"}),
    StagedCase("diffusion_nft"),  # forwards of three policies
]


@pytest.fixture(scope="module")
def in_one_process() -> list[Any]:
    return all_trained(None, CASES, ())


@pytest.mark.parametrize(("bounds", "first", "end"), [((0, 2, 3), 0, len(CASES)), ((0, 1, 2, 3), 1, 2)])
def test_stages_train_to_the_weights_and_metrics_of_one_process(
    bounds: tuple[int, ...], first: int, end: int, in_one_process: list[Any], tmp_path: Path
) -> None:
    cases = CASES[first:end]
    stages = on_ranks(len(bounds) - 1, tmp_path, all_trained, cases, bounds)
    for index, case in enumerate(cases):
        expected, metrics = in_one_process[first + index]
        for weights, theirs in (stage[index] for stage in stages):
            assert weights.keys() == expected.keys()
            assert theirs == metrics, case.algorithm
            for name, value in expected.items():
                assert torch.equal(weights[name], value), (case.algorithm, name)


@pytest.mark.parametrize("adapters", [False, True])
def test_a_model_in_stages_does_not_generate(adapters: bool) -> None:
    model, algorithm = deep_model("sd3"), build_algorithm("flow_grpo", LIVELY["flow_grpo"])
    if adapters:
        train_adapters(model)
    keep_blocks(model, 0, 1)
    with pytest.raises(ValueError, match="stages"):
        TrainableState(model, algorithm, STEADY, None, helps=True)


def fails_in(ranks: RankGroup, failing: int) -> str:
    """The error of this stage if one of them cannot compute."""
    model = deep_model("sd3")
    train_adapters(model)
    algorithm = build_algorithm("flow_grpo", LIVELY["flow_grpo"])
    groups = scored_groups(
        model, algorithm, Rollout(groups=1, group_size=3, steps=3, size=TINY_MODELS["sd3"].size)
    )
    ranks.pipeline()
    keep_blocks(model, ranks.rank.index, ranks.rank.index + 1)
    trainer = trainer_of(model, algorithm, groups, STEADY, ranks=ranks)
    if ranks.rank.index == failing:
        repeated_blocks(model.transformer)[0].register_forward_pre_hook(out_of_memory)
    with pytest.raises((ConfigError, PeersLostError)) as caught:
        trainer.add_group(groups[0])
    return str(caught.value)


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("out of memory")


def test_a_stage_that_is_out_of_memory_ends_the_pass_on_all(tmp_path: Path) -> None:
    first, failed, last = on_ranks(3, tmp_path, fails_in, 1)
    assert "training.pack_size" in failed
    assert "stage 1 -> stage 0" in first
    assert "stage 1 -> stage 2" in last


def test_a_trainer_sends_activations_with_the_codec_of_its_links(
    in_one_process: list[Any], tmp_path: Path
) -> None:
    case = replace(CASES[0], codecs=LinkCodecs(activations=Codec("bf16")))
    (weights, metrics), _ = on_ranks(2, tmp_path, trained, case, (0, 1, 3))
    expected, exact = in_one_process[0]
    assert metrics[0]["log_prob_mismatch"] != exact[0]["log_prob_mismatch"], "rounded"
    assert weights.keys() == expected.keys()


@pytest.mark.parametrize(
    ("training", "lanes", "noun"),
    [
        ({"stages": "auto", "lora": {"rank": 4}}, {}, "lanes.ranks"),
        ({"stages": [1, 1], "lora": {"rank": 4}}, {"ranks": 3}, "lanes.ranks"),
        ({"stages": [1, 1]}, {"ranks": 2}, "4"),
        ({"stages": [1, 1], "lora": {"rank": 4}}, {"ranks": 2, "shard_base": True}, "lanes.shard_base"),
        ({"stages": [1, 2], "lora": {"rank": 4}}, {"ranks": 2}, "4"),
        ({"stages": "auto", "lora": {"rank": 4}}, {"ranks": 5}, "4 blocks"),
        ({"stages": [2, 2], "lora": {"rank": 4}, "links": {"activations": "int3"}}, {"ranks": 2}, "int8"),
        ({"stages": [0, 4], "lora": {"rank": 4}}, {"ranks": 2}, "training.stages"),
        ({"stages": []}, {"ranks": 2}, "two stages"),
        ({"stages": [2, 2], "links": {"deadline_s": 1e15}}, {"ranks": 2}, "deadline_s"),
    ],
)
def test_stages_that_do_not_fit_are_one_line_before_anything_is_loaded(
    training: dict[str, Any], lanes: dict[str, Any], noun: str
) -> None:
    content = yaml.safe_load((RECIPES / "demo.yaml").read_text())
    content["training"] |= training
    content["lanes"] = lanes
    with pytest.raises(ConfigError) as caught:
        check_sharding(read_blueprint(parse_model(Recipe, content)))
    assert noun in str(caught.value) and "\n" not in str(caught.value)
    assert "training." in str(caught.value)
