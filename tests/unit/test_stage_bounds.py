"""`training.stages: auto`: cuts by the work of blocks and the speed and memory of cards."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rank_processes import on_ranks

import digenrl
from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.recipes.recipe import Recipe
from digenrl.models.adapters.lora import add_lora
from digenrl.models.blocks import repeated_blocks
from digenrl.models.parallel.block_costs import ChainCosts, block_work, chain_costs
from digenrl.models.registry import FAMILIES
from digenrl.testing.tiny_models import TINY_MODELS
from digenrl.training.ranks.cards import CardFacts, relative_speeds, with_recorded_rates
from digenrl.training.ranks.rank_group import RankGroup
from digenrl.worker.blueprint import read_blueprint, transformer_without_weights
from digenrl.worker.stage_bounds import bytes_per_parameter, cut_for_cards, stage_bounds

DEMO = Path(digenrl.__file__).parent / "recipes" / "demo.yaml"
GIB = 2**30
EQUAL_BLOCKS = ChainCosts((1.0,) * 12, (GIB // 4,) * 12, GIB // 4)


def card(tflops: float, free_gib: float | None = None, name: str = "") -> CardFacts:
    return CardFacts(name or f"card of {tflops}", tflops, None if free_gib is None else int(free_gib * GIB))


def blocks_of(bounds: tuple[int, ...]) -> list[int]:
    return [end - first for first, end in pairwise(bounds)]


def recipe_with(**training: Any) -> Recipe:
    content = yaml.safe_load(DEMO.read_text())
    content["training"] |= training
    content["lanes"] = {"ranks": 2}
    return parse_model(Recipe, content)


def test_equal_cards_get_equally_many_blocks() -> None:
    assert blocks_of(cut_for_cards(EQUAL_BLOCKS, [card(100)] * 4, 4)) == [3, 3, 3, 3]


def test_faster_cards_get_more_blocks() -> None:
    bounds = cut_for_cards(EQUAL_BLOCKS, [card(400), card(200), card(100), card(100)], 4)
    assert blocks_of(bounds) == [7, 3, 1, 1]


def test_a_fast_card_gets_only_what_fits_in_its_memory() -> None:
    bounds = cut_for_cards(EQUAL_BLOCKS, [card(400, free_gib=5), card(100, free_gib=16)], 4)
    assert blocks_of(bounds) == [4, 8], "four blocks of 1 GiB, and 1 GiB outside of the chain"


def test_a_model_that_fits_nowhere_is_refused_with_what_it_takes_and_what_is_free() -> None:
    with pytest.raises(ConfigError) as caught:
        cut_for_cards(EQUAL_BLOCKS, [card(100, free_gib=4), card(100, free_gib=5)], 4)
    assert "14.0 GiB" in str(caught.value) and "4.0 + 5.0 GiB" in str(caught.value)
    assert "training.stages" in str(caught.value) and "\n" not in str(caught.value)


def test_cards_of_one_name_are_equally_fast_whatever_was_measured() -> None:
    cards = [card(95, name="A"), card(50, name="B"), card(105, name="A")]
    assert relative_speeds(cards) == (1.0, 0.5, 1.0)
    assert relative_speeds([card(100), card(0.1)])[1] > 0


def test_a_run_that_starts_again_has_the_rates_of_its_cards_that_were_measured_first(tmp_path: Path) -> None:
    file = tmp_path / "cards.json"
    measured = [card(95, name="A"), card(50, free_gib=4, name="B")]
    assert with_recorded_rates(measured, file) == measured
    again = with_recorded_rates([card(90, name="A"), card(60, free_gib=3, name="B")], file)
    assert again == [card(95, name="A"), card(50, free_gib=3, name="B")], "memory is that of now"
    others = [card(80, name="A"), card(70, name="C")]
    assert with_recorded_rates(others, file) == others
    file.write_text("{")
    assert with_recorded_rates(measured, file) == measured == with_recorded_rates(measured, file)


def test_blocks_with_two_streams_have_the_work_of_blocks_with_one() -> None:
    transformer = FAMILIES["flux"].build_transformer(torch.bfloat16, "meta", None)
    double, single = (
        getattr(transformer, each)[0] for each in ("transformer_blocks", "single_transformer_blocks")
    )
    assert block_work(double) == pytest.approx(block_work(single), rel=0.01)
    count = sum(weight.numel() for weight in double.parameters())
    assert count > 2 * sum(weight.numel() for weight in single.parameters()), "by weights they differ"


def test_adapters_are_not_counted() -> None:
    model = FAMILIES["sd3"].model_class(TINY_MODELS["sd3"].build())
    before = chain_costs(model.transformer, ())
    assert sum(before.parameters) + before.others == sum(p.numel() for p in model.transformer.parameters())
    assert len(before.work) == len(repeated_blocks(model.transformer))
    add_lora(model, rank=2, alpha=4, seed=3)
    assert chain_costs(model.transformer, ()) == before


def test_a_stage_holds_weights_in_the_dtype_of_the_model() -> None:
    adapters = recipe_with(stages="auto", lora={"rank": 4})
    assert bytes_per_parameter(adapters) == 4
    half = adapters.model_copy(update={"model": adapters.model.model_copy(update={"dtype": "bfloat16"})})
    assert bytes_per_parameter(half) == 2


def bounds_of(ranks: RankGroup, recipe: Recipe) -> tuple[list[CardFacts], tuple[int, ...]]:
    blueprint = read_blueprint(recipe)
    transformer = transformer_without_weights(blueprint)
    return ranks.cards(), stage_bounds(recipe, transformer, (), ranks)


def test_ranks_measure_their_cards_and_agree_about_the_cut(tmp_path: Path) -> None:
    recipe = recipe_with(stages="auto", lora={"rank": 4})
    (cards, bounds), theirs = on_ranks(2, tmp_path, bounds_of, recipe)
    assert (cards, bounds) == theirs
    assert len(cards) == 2 and all(each.tflops > 0 for each in cards)
    assert bounds == (0, 2, 4)
