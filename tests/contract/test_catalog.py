"""Every card and model of the catalog passes the same suite, and models without an entry are derived."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from digenrl.commands.support.derived_facts import facts_of
from digenrl.models.contract import SampleSize
from digenrl.models.registry import FAMILIES
from digenrl.planning.costs import forward_seconds, slice_seconds, training_pass_seconds
from digenrl.planning.facts.cards import Card, find_card, known_cards
from digenrl.planning.facts.model_facts import CatalogModel, ModelFacts, find_model, known_models
from digenrl.planning.facts.workload import workload_for
from digenrl.planning.memory import activation_gib, generator_memory

PROMISED_CARDS = ("RTX A6000", "A100", "H100", "H200", "H20", "L40S", "RTX PRO 6000 Blackwell")
PROMISED_MODELS = ("SD3.5-M", "FLUX.1", "Qwen-Image", "Wan2.1-1.3B", "Wan2.1-14B", "HunyuanVideo")

every_card = pytest.mark.parametrize("card", known_cards(), ids=lambda card: card.name)
every_model = pytest.mark.parametrize("model", known_models(), ids=lambda model: model.name)


def test_the_promised_cards_and_models_are_in_the_catalog():
    assert set(PROMISED_CARDS) <= {card.name for card in known_cards()}
    assert set(PROMISED_MODELS) == {model.name for model in known_models()}


def test_names_and_aliases_are_unique():
    for entries in (known_cards(), known_models()):
        names = [name.lower() for entry in entries for name in (entry.name, *entry.aliases)]
        assert len(names) == len(set(names))


@every_card
def test_a_card_is_found_by_every_name_and_alias(card: Card):
    for name in (card.name, card.name.lower(), card.name.replace(" ", "-"), *card.aliases):
        assert find_card(name) is card


@every_card
def test_the_numbers_of_a_card_have_the_documented_units(card: Card):
    assert 50 < card.bf16_tflops < 5000  # dense tensor TFLOPS, not fp32's nor sparse petaflops
    assert 16 < card.memory_gib < 300
    assert 500 < card.memory_gb_s < 10_000
    assert card.host_gb_s in (31.5, 63.0)  # PCIe 4.0 or 5.0, sixteen lanes
    assert card.card_link_gb_s >= card.host_gb_s
    assert 0 < card.usd_per_hour < 20


@every_model
def test_a_model_is_found_by_every_name_and_alias(model: CatalogModel):
    for name in (model.name, model.name.upper(), *model.aliases):
        assert find_model(name) is model


@every_model
def test_a_token_is_multiplied_with_at_most_all_parameters(model: CatalogModel):
    assert 0.25 * model.parameters < model.image_weights < model.parameters
    assert model.text_weights <= model.image_weights


@every_model
def test_attention_is_quadratic_in_the_tokens_and_matrix_products_are_linear(model: CatalogModel):
    small, large = model.tokens(256, 256, text=0), model.tokens(512, 512, text=0)
    assert large.image == 4 * small.image
    little, much = model.forward_work(small), model.forward_work(large)
    assert much.matmul_flop == pytest.approx(4 * little.matmul_flop)
    assert much.attention_flop == pytest.approx(16 * little.attention_flop)


@every_model
def test_videos_have_four_frames_per_latent_and_images_one_frame(model: CatalogModel):
    if model.frames_per_latent is not None:
        assert model.tokens(256, 256, 33).image == 9 * model.tokens(256, 256, 1).image
    else:
        with pytest.raises(ValueError, match="images"):
            model.tokens(256, 256, 33)


@every_model
def test_adapters_are_small_and_proportional_to_their_rank(model: CatalogModel):
    assert model.lora_parameters(64) == 2 * model.lora_parameters(32)
    assert 0 < model.lora_parameters(32) < 0.05 * model.parameters


@every_model
def test_the_published_settings_are_a_workload(model: CatalogModel):
    workload = workload_for(model.name)
    assert workload.facts is model
    assert 1 <= workload.pairs_per_sample < workload.denoise_steps
    assert workload.samples_per_step >= 16


@every_model
@every_card
def test_more_work_takes_longer_and_larger_batches_take_less_time_per_sample(model: CatalogModel, card: Card):
    workload = workload_for(model.name)
    forwards = [forward_seconds(workload, card, rows) for rows in (1, 2, 4, 8)]
    assert forwards == sorted(forwards)
    per_row = [seconds / rows for seconds, rows in zip(forwards, (1, 2, 4, 8), strict=True)]
    assert per_row == sorted(per_row, reverse=True)
    assert slice_seconds(workload, card, 2) > workload.denoise_steps * forwards[1]
    plain, checkpointed = (training_pass_seconds(workload, card, 1, again) for again in (False, True))
    assert forwards[0] < plain < checkpointed


@every_model
def test_full_fine_tuning_takes_more_time_and_bytes_than_adapters(model: CatalogModel):
    card = find_card("H200")
    lora, full = (workload_for(model.name, tuning=tuning) for tuning in ("lora", "full"))
    assert training_pass_seconds(full, card, 8, True) > training_pass_seconds(lora, card, 8, True)
    assert full.published_bytes > 10 * lora.published_bytes


@every_model
@pytest.mark.parametrize(
    ("base", "generating", "training"), [("fp8", 0.5, 1.0), ("int8", 0.5, 0.5), ("nf4", 0.27, 0.27)]
)
def test_a_quantized_base_needs_a_fraction_of_the_memory(
    model: CatalogModel, base: str, generating: float, training: float
):
    plain, quantized = workload_for(model.name), workload_for(model.name, base=base)
    rest = model.weight_bytes - 2 * model.block_weights
    assert 0 < rest < 0.05 * model.weight_bytes
    for size, share in ((quantized.weight_bytes, generating), (quantized.training_weight_bytes, training)):
        assert size - rest == pytest.approx(share * (plain.weight_bytes - rest), rel=0.02)
    card = find_card("H200")
    seconds, plain_seconds = forward_seconds(quantized, card, 1), forward_seconds(plain, card, 1)
    assert seconds < plain_seconds if base == "fp8" else seconds > plain_seconds


@every_model
def test_checkpointing_halves_activations_and_memory_grows_with_the_pack(model: CatalogModel):
    workload = workload_for(model.name)
    assert activation_gib(workload, 1, True) < 0.5 * activation_gib(workload, 1, False)
    assert activation_gib(workload, 4, False) == pytest.approx(4 * activation_gib(workload, 1, False))


@every_model
@every_card
def test_a_wider_lane_needs_less_memory_per_card(model: CatalogModel, card: Card):
    workload = workload_for(model.name)
    totals = [generator_memory(workload, card, 1, lane_cards).total_gib for lane_cards in (1, 2, 4)]
    assert totals == sorted(totals, reverse=True)


@every_model
def test_the_family_of_a_model_has_the_same_guidance_and_kind(model: CatalogModel):
    family = FAMILIES[model.family]
    assert (model.guidance == "batched") == family.uses_negative_prompts
    assert (model.frames_per_latent is not None) == (family.kind == "video")


@cache
def derived(family: str, size: str) -> ModelFacts:
    """The facts of a published size, counted on the meta device."""
    entry = FAMILIES[family]
    model = entry.build_full(torch.bfloat16, "meta", size)
    sample = SampleSize(512, 512, 9 if entry.kind == "video" else 1)
    return facts_of(entry, size, model, entry.full_size(size).text_shapes, sample)


def published_size(model: CatalogModel) -> str:
    """The name of the size that the catalog's model has in its family."""
    billions = round(model.parameters / 1e9, 2)
    return next(size for size, full in FAMILIES[model.family].sizes.items() if full.billions == billions)


@every_model
def test_facts_derived_from_the_layers_agree_with_the_catalog(model: CatalogModel):
    counted = derived(model.family, published_size(model))
    assert not counted.fitted
    assert counted.parameters == pytest.approx(model.parameters, rel=0.01)
    assert counted.image_weights == pytest.approx(model.image_weights, rel=0.01)
    assert counted.text_weights == pytest.approx(model.text_weights, rel=0.07)  # embeddings are counted, too
    assert counted.lora_parameters(32) == model.lora_parameters(32)
    exact = {"hidden", "blocks", "block_tokens", "guidance", "frames_per_latent", "pixels_per_token"}
    exact |= {"joint_attention_blocks", "image_attention_blocks", "cross_attention_blocks"}
    exact |= {"float32_parameters", "vae_parameters", "block_weights", "clip_text_tokens", "cuts_padding"}
    assert counted.model_dump(include=exact) == model.model_dump(include=exact)
    assert model.text_tokens <= counted.text_tokens, "the catalog has typical prompts where padding is cut"


@pytest.mark.parametrize("family", ["sd3", "qwen_image", "wan"])
def test_a_token_costs_the_same_in_a_sample_of_one_token(family: str):
    """Its layers are not taken for those of the conditioning."""
    entry, size = FAMILIES[family], next(iter(FAMILIES[family].sizes))
    shapes = entry.full_size(size).text_shapes
    one, four = (
        facts_of(entry, size, entry.build_full(torch.bfloat16, "meta", size), shapes, SampleSize(side, side))
        for side in (16, 32)
    )
    assert one.image_weights == four.image_weights > 0
    assert one.pixels_per_token == four.pixels_per_token


@every_model
def test_derived_costs_are_near_the_fitted_ones(model: CatalogModel):
    counted, card = derived(model.family, published_size(model)), find_card("H200")
    fitted = workload_for(model.name, compiled=True, text_tokens=model.text_tokens)
    estimate = fitted.model_copy(update={"model_facts": counted})
    assert slice_seconds(estimate, card, 4) == pytest.approx(slice_seconds(fitted, card, 4), rel=0.2)
    assert training_pass_seconds(estimate, card, 4, False) == pytest.approx(
        training_pass_seconds(fitted, card, 4, False), rel=0.2
    )
    fitted_gib, estimated_gib = (activation_gib(each, 4, False) for each in (fitted, estimate))
    assert 0.98 * fitted_gib < estimated_gib < 1.4 * fitted_gib, "memory is not underestimated"
