"""Codecs of the links between stages: chosen by measurements, made milder, and kept in the trainer's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rank_cases import train
from rank_processes import on_ranks
from staged_training import StagedCase, trainer_and_batches

from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.recipes.training import StageLinkSettings, TrainerSettings
from digenrl.stages.codec_choice import Codec, LinkCodecs
from digenrl.stages.links import LinkSettings, Traffic
from digenrl.training.checkpoint.state_tensors import state_as_tensors, state_of_tensors
from digenrl.training.ranks.rank_group import RankGroup
from digenrl.training.ranks.stage_links import LinkControl, StageReport, choose_codecs, milder_codecs

VALUES = 1_000_000
AUTO = parse_model(StageLinkSettings, "auto")


def reports(*rates: float, stage_s: float = 1.0) -> list[StageReport]:
    """Stages of which the slowest takes `stage_s`, and links of these bytes per second in both directions."""
    sent = [Traffic(VALUES, 4.0)] * len(rates)
    return [
        StageReport(
            stage_s / (1 + index),
            forward=Traffic(VALUES, 4.0, rates[index - 1] if index else 0.0),
            backward=Traffic(VALUES, 4.0, rates[index] if index < len(sent) else 0.0),
        )
        for index in range(len(rates) + 1)
    ]


def names(codecs: tuple[LinkCodecs, ...]) -> list[tuple[str, str]]:
    return [(each.activations.name, each.gradients.name) for each in codecs]


def test_each_link_gets_the_mildest_codec_that_makes_it_no_slower_than_the_slowest_stage() -> None:
    codecs = choose_codecs(AUTO, reports(4e6, 3.9e6, 1.9e6, 1e6))
    assert names(codecs) == [("none", "none"), ("bf16", "bf16"), ("int8", "int8"), ("int4", "int4")]
    assert codecs[-1].gradients.payload_bytes(VALUES, 4) <= 1e6


def test_a_codec_that_the_recipe_names_is_not_chosen_by_measurements() -> None:
    settings = StageLinkSettings(activations="auto", gradients="int8")
    assert names(choose_codecs(settings, reports(4e6, 1e6))) == [("none", "int8"), ("int4", "int8")]


def test_links_over_which_nothing_was_sent_stay_exact() -> None:
    assert names(choose_codecs(AUTO, [StageReport(1.0), StageReport(1.0)])) == [("none", "none")]


def test_the_coarsest_links_become_milder_by_one_codec() -> None:
    codecs = tuple(LinkCodecs(Codec(name)) for name in ("int8", "none", "int8", "bf16"))
    seen = [names(codecs)]
    for _ in range(3):
        codecs = milder_codecs(codecs)
        seen.append(names(codecs))
    assert [[activations for activations, _ in each] for each in seen[1:]] == [
        ["bf16", "none", "bf16", "bf16"],
        ["none"] * 4,
        ["none"] * 4,
    ]


def codecs_after(ranks: RankGroup, codec: Codec, mismatches: list[float | None]) -> list[str]:
    """How activations are sent after batches with these differences of log-probs."""
    links = ranks.pipeline(LinkSettings(LinkCodecs(activations=codec))).links
    control = LinkControl(ranks, StageLinkSettings(activations="int4"))
    found = []
    for mismatch in mismatches:
        control.note_mismatch(mismatch)
        control.finish_batch(clip_range=1e-3)
        found.append(links.codecs[0].activations.name)
    return found


def test_a_codec_is_used_while_log_probs_differ_by_less_than_a_tenth_of_the_clip_range(tmp_path: Path) -> None:
    mismatches = [9e-5, 2e-4, 1e-4, None, 2e-3, 1.0, 1.0]
    for found in on_ranks(2, tmp_path, codecs_after, Codec("int4"), mismatches):
        assert found == ["int4", "int8", "int8", "int8", "bf16", "none", "none"]


def decided(ranks: RankGroup) -> list[list[tuple[str, str]]]:
    """The codecs before and after the first batch, after the second, and of a trainer with that state."""
    case = StagedCase("diffusion_nft", settings={"links": "auto"}, batches=2, rates=(None, 3e4))
    trainer, batches = trainer_and_batches(ranks, case, (0, 1, 2, 3))
    links = ranks.pipeline().links
    seen = [names(links.codecs)]
    for groups in batches:
        train(trainer, groups)
        seen.append(names(links.codecs))
    state = state_of_tensors(state_as_tensors(trainer.state_at_last_version()))
    other, _ = trainer_and_batches(ranks, case, (0, 1, 2, 3))
    links.use_codecs((LinkCodecs(),) * 2)
    other.load_state(state)
    return [*seen, names(links.codecs)]


def test_a_slow_link_is_measured_in_the_first_batch_and_the_decision_is_part_of_the_state(tmp_path: Path) -> None:
    stages = on_ranks(3, tmp_path, decided)
    assert stages[0] == stages[1] == stages[2], "all stages know the codecs of all links"
    before, after, later, restored = stages[0]
    assert before == [("none", "none")] * 2
    assert after[0] == ("none", "none"), "fast"
    assert "none" not in after[1], "slow"
    assert later == restored == after


def kept(ranks: RankGroup, state: dict[str, Any], settings: StageLinkSettings) -> list[tuple[str, str]]:
    """The codecs after a decision was loaded."""
    ranks.pipeline()
    control = LinkControl(ranks, settings)
    control.load(state)
    return names(ranks.pipeline().links.codecs)


def test_a_decision_for_other_settings_is_not_kept(tmp_path: Path) -> None:
    one_link = [{"activations": {"name": "int8", "ratio": 10.0}, "gradients": {"name": "bf16", "ratio": 10.0}}]
    wanted = AUTO.model_dump(include={"activations", "gradients", "ratio"})
    kept_one, _ = on_ranks(2, tmp_path, kept, {"wanted": wanted, "codecs": one_link}, AUTO)
    assert kept_one == [("int8", "bf16")]
    other, _ = on_ranks(2, tmp_path, kept, {"wanted": wanted, "codecs": one_link}, StageLinkSettings())
    assert other == [("none", "none")]


def test_auto_stands_for_both_directions_and_another_word_is_refused() -> None:
    assert TrainerSettings(links="auto").links == StageLinkSettings(activations="auto", gradients="auto")
    with pytest.raises(ConfigError, match=r"links.*use auto"):
        parse_model(TrainerSettings, {"links": "all"})
