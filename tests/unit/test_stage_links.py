"""Stages in several processes: the gradient of one process, and links that fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_processes import on_ranks
from stage_processes import (
    INT8,
    Worsening,
    fail_in_the_middle,
    gradients,
    over_worsening_links,
    small_batches,
    small_chain,
    train_small_chain,
)
from torch.nn import functional

from digenrl.stages.links import LinkSettings


def one_process(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    modules = small_chain()
    losses = []
    for _ in range(steps):
        for value, target in zip(*small_batches(7), strict=True):
            for module in modules:
                value = module(value)
            loss = functional.mse_loss(value, target)
            loss.backward()
            losses.append(float(loss.detach()))
    return losses, gradients(modules)


@pytest.mark.parametrize(
    ("bounds", "in_flight", "settings"),
    [
        ((0, 3, 6), 1, LinkSettings()),
        ((0, 1, 5, 6), None, LinkSettings(bytes_per_s=1e6)),
    ],
    ids=["one in flight", "paced"],
)
def test_stages_have_the_gradient_of_one_process(
    bounds: tuple[int, ...], in_flight: int | None, settings: LinkSettings, tmp_path: Path
) -> None:
    stages = on_ranks(len(bounds) - 1, tmp_path, train_small_chain, bounds, in_flight, settings, 2)
    losses, expected = one_process(2)
    assert [float(loss) for step in stages[-1]["losses"] for loss in step] == losses
    ours = {name: value for stage in stages for name, value in stage["gradients"].items()}
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name
    sent = 2 * sum(4 * value.numel() for value in small_batches(7)[0])
    assert stages[0]["sent"] == {"forward": sent}
    assert stages[-1]["sent"] == {"backward": sent}


@pytest.mark.parametrize("seconds", [(2.0, 0.0), (0.0, 2.0)], ids=["in a forward", "queued on the device"])
def test_a_stage_that_computes_for_longer_than_the_deadline_is_not_lost(
    seconds: tuple[float, float], tmp_path: Path
) -> None:
    settings = LinkSettings(deadline_s=1.5)
    stages = on_ranks(2, tmp_path, train_small_chain, (0, 5, 6), 1, settings, 1, *seconds)
    assert [float(loss) for loss in stages[1]["losses"][0]] == one_process(1)[0]


def test_codecs_make_messages_smaller_and_the_gradient_similar(tmp_path: Path) -> None:
    bounds = (0, 3, 6)
    first, last = on_ranks(2, tmp_path, train_small_chain, bounds, None, INT8, 1)
    values = sum(value.numel() for value in small_batches(7)[0])
    assert first["sent"]["forward"] < 2 * values
    assert last["sent"]["backward"] == 8 * sum(value.numel() // 4 for value in small_batches(7)[0])
    _, expected = one_process(1)
    for name, value in expected.items():
        ours = (first if name in first["gradients"] else last)["gradients"][name]
        assert not torch.equal(ours, value)
        assert float(functional.cosine_similarity(ours.flatten(), value.flatten(), dim=0)) > 0.5, name


@pytest.mark.parametrize("how", ["dies", "stalls", "error"])
def test_a_lost_stage_is_reported_with_the_link_on_both_sides(how: str, tmp_path: Path) -> None:
    lost = frozenset() if how == "error" else frozenset({1})
    before, failed, after = on_ranks(3, tmp_path, fail_in_the_middle, how, 2.0, die=lost)
    assert "stage 1 -> stage 0" in before or "stage 0 -> stage 1" in before
    assert "stage 1 -> stage 2" in after or "stage 2 -> stage 1" in after
    if how == "stalls":
        assert "Timed out" in before, "the stage was killed only after the deadline"
    if how == "error":
        assert failed == "this stage is broken"


def test_a_link_that_drops_to_a_tenth_within_a_pack_changes_nothing_but_the_time(tmp_path: Path) -> None:
    _, losses = on_ranks(2, tmp_path, over_worsening_links, Worsening())
    assert losses == one_process(1)[0]


def test_a_link_that_falls_silent_within_a_pack_is_reported_by_its_name(tmp_path: Path) -> None:
    silent = Worsening(slower=1.0, silent_s=4.0, deadline_s=1.0)
    before, after = on_ranks(2, tmp_path, over_worsening_links, silent)
    assert "stage 0 -> stage 1" in after and "Timed out" in after
    assert "stage 0 -> stage 1" in before or "stage 1 -> stage 0" in before
