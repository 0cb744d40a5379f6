"""The costs of the parts of a run, and the gain from packing time-steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from digenrl.planning import costs
from digenrl.planning.costs import (
    TrainerLayout,
    commit_seconds,
    forward_seconds,
    gather_seconds,
    packed_pass_seconds,
    publish_seconds,
    slice_seconds,
    switch_seconds,
    training_pass_seconds,
    unit_seconds,
)
from digenrl.planning.facts.cards import find_card
from digenrl.planning.facts.cluster import CardPool
from digenrl.planning.facts.constants import CONSTANTS
from digenrl.planning.facts.workload import workload_for
from digenrl.planning.layout import memory_of_trainer
from digenrl.planning.memory import GIB, generator_memory, trainer_memory

H100S = CardPool.model_validate({"card": "H100", "nodes": 4, "per_node": 8, "network_gbit_s": 400})
A6000S = CardPool.model_validate({"card": "RTX A6000", "nodes": 4, "per_node": 8, "network_gbit_s": 200})
SMALL_CLIP = {"height": 240, "width": 416, "frames": 17}
FULL = workload_for("hunyuan", tuning="full", denoise_steps=20, trained_share=0.6, **SMALL_CLIP)
LORA = workload_for("hunyuan", tuning="lora", denoise_steps=20, trained_share=0.6, **SMALL_CLIP)


def trainer(**changes) -> TrainerLayout:
    return replace(TrainerLayout(H100S, 32, 32, 1, False), **changes)


def test_the_time_of_a_gather_is_its_bytes_over_the_slowest_link():
    sent = 2 * 2 * FULL.facts.weight_bytes  # weights twice in bf16, gradients once in fp32
    expected = sent * 31 / 32 / (400e9 / 8 * CONSTANTS.collective_share)
    assert gather_seconds(FULL, trainer()) == pytest.approx(expected, rel=0.01)


def test_shards_inside_a_node_are_gathered_over_its_faster_links():
    assert gather_seconds(FULL, trainer(shard_cards=8)) < gather_seconds(FULL, trainer()) / 5


def test_a_copy_on_every_card_gathers_nothing():
    assert gather_seconds(LORA, trainer(shard_cards=1)) == 0
    assert packed_pass_seconds(LORA, trainer(shard_cards=1), 2) == training_pass_seconds(
        LORA, H100S.card, 2, False
    )


def test_cards_of_a_replica_divide_a_pass_but_for_launches_and_exchanges():
    alone, pair = trainer(shard_cards=1), trainer(shard_cards=1, replica_cards=2)
    one, two = (packed_pass_seconds(LORA, each, 8) for each in (alone, pair))
    assert one / 2 < two < 0.7 * one
    on_two_nodes = replace(pair, pool=H100S.model_copy(update={"nodes": 32, "per_node": 1}))
    assert packed_pass_seconds(LORA, on_two_nodes, 8) > two
    memory, divided = (memory_of_trainer(LORA, each) for each in (alone, pair))
    assert divided == replace(memory, activations_gib=memory.activations_gib / 2)


def test_a_pack_gathers_the_weights_once_for_all_its_pairs():
    alone = packed_pass_seconds(FULL, trainer(), 1)
    together = packed_pass_seconds(FULL, trainer(), 4)
    assert together < 0.5 * 4 * alone


def test_gathers_overlap_with_compute_by_the_assumed_share(monkeypatch: pytest.MonkeyPatch):
    sharded = trainer()
    compute_s = training_pass_seconds(FULL, H100S.card, 1, False)
    gather_s = gather_seconds(FULL, sharded)

    def seconds(overlap: float) -> float:
        monkeypatch.setattr(costs, "CONSTANTS", replace(CONSTANTS, gather_overlap=overlap))
        return packed_pass_seconds(FULL, sharded, 1)

    never, fully = seconds(0.0), seconds(1.0)
    assert never == pytest.approx(compute_s + gather_s)
    assert fully == pytest.approx(max(compute_s, gather_s))
    assert fully < seconds(CONSTANTS.gather_overlap) < never


def test_without_time_step_parallelism_a_group_smaller_than_the_trainer_leaves_ranks_idle():
    eight_samples_on_32_ranks = unit_seconds(FULL, trainer(spread_steps=False), 8)
    assert eight_samples_on_32_ranks == pytest.approx(unit_seconds(FULL, trainer(spread_steps=False), 32))
    assert unit_seconds(FULL, trainer(), 8) == pytest.approx(eight_samples_on_32_ranks / 4)


def test_pairs_are_cut_into_packs_of_nearly_equal_size():
    one_rank = TrainerLayout(H100S, 1, 1, 5, False)
    assert LORA.pairs_per_sample == 12
    expected = 3 * packed_pass_seconds(LORA, one_rank, 4)  # 12 pairs in packs of at most 5: three of 4
    assert unit_seconds(LORA, one_rank, 1) == pytest.approx(expected)


def test_copies_reduce_their_gradients_before_the_optimizer_step():
    one_copy, four_copies = trainer(), trainer(shard_cards=8)
    network_s = 2 * 4 * FULL.facts.parameters * 3 / 4 / (50e9 * CONSTANTS.collective_share)
    assert commit_seconds(FULL, four_copies) > commit_seconds(FULL, one_copy)
    assert commit_seconds(FULL, four_copies) == pytest.approx(network_s, rel=0.1)


def test_publishing_adapters_takes_a_hundredth_of_publishing_weights():
    link = 25e9
    assert publish_seconds(FULL, link) == pytest.approx(FULL.facts.weight_bytes / link, rel=0.01)
    assert publish_seconds(LORA, link) - CONSTANTS.adapter_swap_s < publish_seconds(FULL, link) / 50


def test_a_trainer_with_adapters_and_whole_copies_switches_almost_for_free():
    assert switch_seconds(LORA, trainer(shard_cards=1), 1) == (CONSTANTS.adapter_swap_s,) * 2


def test_a_sharded_trainer_gathers_a_copy_to_help():
    switch_in, switch_out = switch_seconds(FULL, trainer(), 1)
    assert switch_in == pytest.approx(FULL.facts.weight_bytes / 40e9, rel=0.15)
    assert switch_out < switch_in


def test_the_training_state_is_offloaded_if_it_does_not_fit_together_with_a_copy():
    eight_a6000 = TrainerLayout(A6000S, 8, 8, 1, True)
    state_s = 16 * FULL.facts.parameters / 8 / (31.5e9 * CONSTANTS.host_link_share)
    roomy = TrainerLayout(A6000S, 32, 32, 1, True)
    assert switch_seconds(FULL, roomy, 1)[1] == CONSTANTS.adapter_swap_s
    assert switch_seconds(FULL, eight_a6000, 1)[1] == pytest.approx(state_s + CONSTANTS.adapter_swap_s)


def test_guidance_doubles_the_rows_only_if_it_is_batched():
    wan, flux = workload_for("wan"), workload_for("flux")
    assert (wan.branches, flux.branches) == (2, 1)
    unguided = workload_for("wan", guidance=False)
    assert unguided.branches == 1
    card = find_card("H100")
    assert slice_seconds(wan, card, 1) > 1.9 * slice_seconds(unguided, card, 1)


def test_a_vae_in_fp32_takes_the_measured_time_and_twice_the_memory_of_one_in_bf16():
    bf16, fp32 = (workload_for("sd3.5", height=1024, width=1024, float32_vae=fp32) for fp32 in (False, True))
    card, vae_gib = find_card("H100"), bf16.facts.vae_parameters * 2 / GIB
    decode_s = bf16.decode_flop / (card.bf16_tflops * 1e12 * CONSTANTS.decode_share)
    more_s = slice_seconds(fp32, card, 1) - slice_seconds(bf16, card, 1)
    assert more_s == pytest.approx((CONSTANTS.float32_decode - 1) * decode_s)
    coarse, exact = (generator_memory(each, card, 1) for each in (bf16, fp32))
    assert exact.weights_gib - coarse.weights_gib == pytest.approx(vae_gib)
    assert exact.activations_gib == 2 * coarse.activations_gib  # decoding needs more than a forward here


def test_a_model_loaded_in_bf16_keeps_some_weights_in_fp32():
    wan = workload_for("wan-1.3b")
    assert wan.weight_bytes == 2 * (wan.facts.parameters + wan.facts.float32_parameters)
    assert wan.model_copy(update={"float32_weights": True}).weight_bytes == 4 * wan.facts.parameters


def test_a_tensor_parallel_lane_is_faster_but_not_linearly():
    card = find_card("L40S")
    alone, four = (forward_seconds(FULL, card, 1, lane_cards) for lane_cards in (1, 4))
    assert alone / 4 < four < alone


def test_a_reference_forward_costs_about_a_forward():
    with_reference = LORA.model_copy(update={"reference_forward": True})
    card = find_card("H200")
    extra = training_pass_seconds(with_reference, card, 8, True) - training_pass_seconds(LORA, card, 8, True)
    assert extra == pytest.approx(forward_seconds(LORA, card, 8), rel=0.1)


def test_the_last_step_is_never_trained():
    assert workload_for("flux", denoise_steps=10, trained_share=1.0).pairs_per_sample == 9
    assert workload_for("flux", denoise_steps=1, trained_share=1.0).pairs_per_sample == 1


@pytest.mark.parametrize("model", ["flux", "qwen"])
def test_an_fp8_base_is_as_much_faster_as_measured_on_an_h200(model):
    bf16 = workload_for(model, height=512, width=512, guidance=False, compiled=True)
    fp8, card = bf16.model_copy(update={"base": "fp8"}), find_card("H200")
    forward = forward_seconds(bf16, card, 8) / forward_seconds(fp8, card, 8)
    replay = training_pass_seconds(bf16, card, 8, False) / training_pass_seconds(fp8, card, 8, False)
    measured = {"flux": (1.55, 1.60), "qwen": (1.46, 1.49)}[model]  # docs/benchmarks.md
    assert (forward, replay) == pytest.approx(measured, rel=0.09)
    assert forward_seconds(fp8, find_card("A100"), 8) == forward_seconds(bf16, find_card("A100"), 8), (
        "no fp8 units"
    )
    generates = bf16.model_copy(update={"generating_base": "fp8"})
    assert forward_seconds(generates, card, 8) == forward_seconds(fp8, card, 8)
    assert training_pass_seconds(generates, card, 8, False) == training_pass_seconds(bf16, card, 8, False)


@pytest.mark.parametrize(("copies", "bytes_per_parameter"), [(0, 16), (3, 28)])
def test_a_trainer_of_all_weights_has_room_for_copies_and_for_the_gradient_of_a_pass(copies, bytes_per_parameter):
    workload = FULL.model_copy(update={"weight_copies": copies, "height": 64, "width": 64, "frames": 1})
    report = trainer_memory(workload, find_card("H100"), 8, 1, checkpointing=True)
    parameters = workload.facts.parameters / 8
    assert report.optimizer_gib * GIB == pytest.approx(bytes_per_parameter * parameters)
    assert report.activations_gib * GIB == pytest.approx(4 * parameters), "a gradient has replaced activations"


def test_a_trainer_with_whole_weights_has_the_vae_and_one_with_shards_has_not():
    workload, card = workload_for("flux"), find_card("H100")
    whole, shards = (trainer_memory(workload, card, count, 1, checkpointing=True).weights_gib for count in (1, 2))
    weights, vae = workload.weight_bytes, workload.facts.vae_parameters * 2
    assert whole * GIB == pytest.approx(weights + vae)
    assert shards * GIB == pytest.approx(weights / 2 + 2 * weights / workload.facts.blocks)
