"""Every card and model family of the catalogue passes the same suite."""

from __future__ import annotations

import pytest

from digenrl.config.recipe_files import read_recipe, shipped_recipes
from digenrl.models.registry import FAMILIES
from digenrl.planning.cards import Card, find_card, known_cards
from digenrl.planning.costs import forward_seconds, slice_seconds, training_pass_seconds
from digenrl.planning.memory import activation_gib, generator_memory
from digenrl.planning.model_facts import CatalogueModel, find_model, known_models
from digenrl.planning.recipe_workload import catalogue_model
from digenrl.planning.workload import workload_for

PROMISED_CARDS = ("RTX A6000", "A100", "H100", "H200", "H20", "L40S", "RTX PRO 6000 Blackwell")
PROMISED_MODELS = ("SD3.5-M", "FLUX.1", "Qwen-Image", "Wan2.1-1.3B", "Wan2.1-14B", "HunyuanVideo")

every_card = pytest.mark.parametrize("card", known_cards(), ids=lambda card: card.name)
every_family = pytest.mark.parametrize("family", known_models(), ids=lambda family: family.name)


def test_the_promised_cards_and_families_are_there():
    assert set(PROMISED_CARDS) <= {card.name for card in known_cards()}
    assert set(PROMISED_MODELS) == {family.name for family in known_models()}


def test_no_name_or_alias_means_two_things():
    for entries in (known_cards(), known_models()):
        names = [name.lower() for entry in entries for name in (entry.name, *entry.aliases)]
        assert len(names) == len(set(names))


@every_card
def test_a_card_is_found_by_every_name_it_has(card: Card):
    for name in (card.name, card.name.lower(), card.name.replace(" ", "-"), *card.aliases):
        assert find_card(name) is card


@every_card
def test_a_cards_numbers_are_in_the_units_they_claim(card: Card):
    assert 50 < card.bf16_tflops < 5000  # dense tensor TFLOPS, not fp32's nor sparse petaflops
    assert 16 < card.memory_gib < 300
    assert 500 < card.memory_gb_s < 10_000
    assert card.host_gb_s in (31.5, 63.0)  # PCIe 4.0 or 5.0, sixteen lanes
    assert card.card_link_gb_s >= card.host_gb_s
    assert 0 < card.usd_per_hour < 20


@every_family
def test_a_family_is_found_by_every_name_it_has(family: CatalogueModel):
    for name in (family.name, family.name.upper(), *family.aliases):
        assert find_model(name) is family


@every_family
def test_a_token_meets_at_most_the_parameters_there_are(family: CatalogueModel):
    assert 0.25 * family.parameters < family.image_weights < family.parameters
    assert family.text_weights <= family.image_weights


@every_family
def test_attention_grows_with_the_square_of_the_tokens_and_products_in_proportion(family: CatalogueModel):
    small, large = family.tokens(256, 256, text=0), family.tokens(512, 512, text=0)
    assert large.image == 4 * small.image
    little, much = family.forward_work(small), family.forward_work(large)
    assert much.matmul_flop == pytest.approx(4 * little.matmul_flop)
    assert much.attention_flop == pytest.approx(16 * little.attention_flop)


@every_family
def test_frames_count_four_to_a_latent_in_videos_and_never_in_images(family: CatalogueModel):
    if family.makes_video:
        assert family.tokens(256, 256, 33).image == 9 * family.tokens(256, 256, 1).image
    else:
        with pytest.raises(ValueError, match="makes images"):
            family.tokens(256, 256, 33)


@every_family
def test_adapters_are_in_proportion_to_their_rank_and_small(family: CatalogueModel):
    assert family.lora_parameters(64) == 2 * family.lora_parameters(32)
    assert 0 < family.lora_parameters(32) < 0.05 * family.parameters


@every_family
def test_the_published_recipe_is_a_workload(family: CatalogueModel):
    workload = workload_for(family.name)
    assert workload.family is family
    assert 1 <= workload.pairs_per_sample < workload.denoise_steps
    assert workload.samples_per_step >= 16


@every_family
@every_card
def test_more_work_takes_longer_and_packing_never_costs_per_sample(family: CatalogueModel, card: Card):
    workload = workload_for(family.name)
    forwards = [forward_seconds(workload, card, rows) for rows in (1, 2, 4, 8)]
    assert forwards == sorted(forwards)
    per_row = [seconds / rows for seconds, rows in zip(forwards, (1, 2, 4, 8), strict=True)]
    assert per_row == sorted(per_row, reverse=True)
    assert slice_seconds(workload, card, 2) > workload.denoise_steps * forwards[1]
    plain, checkpointed = (training_pass_seconds(workload, card, 1, again) for again in (False, True))
    assert forwards[0] < plain < checkpointed


@every_family
def test_full_fine_tuning_costs_more_than_adapters_in_time_and_in_bytes(family: CatalogueModel):
    card = find_card("H200")
    lora, full = (workload_for(family.name, tuning=tuning) for tuning in ("lora", "full"))
    assert training_pass_seconds(full, card, 8, True) > training_pass_seconds(lora, card, 8, True)
    assert full.published_bytes > 10 * lora.published_bytes


@every_family
def test_checkpointing_saves_most_activations_and_memory_grows_with_the_pack(family: CatalogueModel):
    workload = workload_for(family.name)
    assert activation_gib(workload, 1, True) < 0.5 * activation_gib(workload, 1, False)
    assert activation_gib(workload, 4, False) == pytest.approx(4 * activation_gib(workload, 1, False))


@every_family
@every_card
def test_a_wider_lane_holds_less_on_each_card(family: CatalogueModel, card: Card):
    workload = workload_for(family.name)
    totals = [generator_memory(workload, card, 1, lane_cards).total_gib for lane_cards in (1, 2, 4)]
    assert totals == sorted(totals, reverse=True)


@every_family
def test_a_family_is_what_recipes_call_it_and_guides_as_it_does(family: CatalogueModel):
    real = FAMILIES[family.family]
    assert (family.guidance == "batched") == real.uses_negative_prompts
    assert family.makes_video == (real.kind == "video")


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if name != "demo"])
def test_every_shipped_recipe_is_of_a_size_that_the_catalogue_knows(name: str):
    recipe = read_recipe(name, without_prompts=True)
    found = catalogue_model(recipe)
    assert found is not None and found.family == recipe.model.family
