"""Profiles: their file, and how a SPEC, a plan and a prediction use one."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from digenrl.commands.plan import search_plans
from digenrl.config import profiles
from digenrl.config.profiles import (
    Profile,
    SliceCost,
    find_profile,
    read_profile,
    rounded,
    write_profile,
)
from digenrl.config.reading import ConfigError, parse_model
from digenrl.config.recipes.files import read_recipe
from digenrl.config.recipes.paths import names_in
from digenrl.config.spec import Spec, read_spec
from digenrl.models.registry import FAMILIES
from digenrl.planning.candidates import PlanOptions
from digenrl.planning.facts.cluster import read_cluster
from digenrl.planning.facts.recipe_workload import check_profiles, profiled_work, same_costs
from digenrl.simulation.single_device import predict_single_device

ROOT = Path(__file__).parents[2]
DEMO = read_recipe("demo")
PROFILE = parse_model(
    Profile,
    {
        "device": {
            "name": "NVIDIA H200",
            "memory_bytes": 150_000_000_000,
            "bf16_tflops": 766.0,
            "torch": "2.13.0",
        },
        "work": profiled_work(DEMO),
        "weights_bytes": 5_000_000,
        "slices": {1: {"seconds": 0.5, "peak_bytes": 7}, 4: {"seconds": 1.1}, 12: {"seconds": 2.0}},
        "training": {"seconds_per_sample": 0.25, "pack_size": 8, "checkpointed_blocks": 2},
        "commit_seconds": 0.3,
        "publish_seconds": 0.2,
        "switch_in_seconds": 0.1,
        "switch_out_seconds": 0.5,
        "score_seconds": 0.01,
    },
)
BARE = {
    "profile": "card.yaml",
    "steps": 2,
    "prompts": 8,
    "samples_per_prompt": 12,
    "slice": 4,
    "generators": [{"name": "h200", "count": 2}],
}


def written(folder: Path, content: dict[str, Any], name: str = "spec.yaml", profile: Profile = PROFILE) -> Path:
    """A file beside the profile card.yaml."""
    (folder / "card.yaml").write_text(write_profile(profile))
    (folder / name).write_text(yaml.safe_dump(content))
    return folder / name


def without(profile: Profile, *names: str) -> Profile:
    return profile.model_copy(update={name: {} if name == "slices" else None for name in names})


# --- The file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", [(), ("training", "score_seconds"), ("slices", "commit_seconds")])
def test_a_written_profile_reads_back_equal(tmp_path: Path, absent: tuple[str, ...]) -> None:
    profile = without(PROFILE, *absent).model_copy(update={"remarks": ("scoring: no server",)})
    as_yaml, as_json = tmp_path / "a.yaml", tmp_path / "a.json"
    as_yaml.write_text(write_profile(profile))
    as_json.write_text(json.dumps(profile.model_dump(mode="json")))
    assert read_profile(str(as_yaml)) == read_profile("a.json", tmp_path) == profile


def test_the_page_about_profiles_shows_one_and_names_every_key() -> None:
    page = (ROOT / "docs" / "profiling.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S)
    assert parse_model(Profile, yaml.safe_load(shown)).work == PROFILE.work
    assert not [name for name in Profile.model_fields if f"`{name}`" not in page]


def test_measured_times_are_rounded_to_significant_digits() -> None:
    assert [rounded(value) for value in (1.23456789, 0.0123456, 1.6e-7, 123.456)] == [1.235, 0.01235, 0.0, 123.5]


def test_shipped_profiles_are_readable_and_packaged() -> None:
    assert {read_profile(name).work.family for name in names_in(profiles.SHIPPED)} <= set(FAMILIES)
    for name in names_in(profiles.SHIPPED):
        assert predict_single_device(read_profile(name), name).step_seconds > 0, name
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "profiles/*.yaml" in settings["tool"]["setuptools"]["package-data"]["digenrl"]


def test_a_profile_is_found_by_name_and_the_error_for_an_unknown_one_names_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "SHIPPED", tmp_path)
    (tmp_path / "h200_demo.yaml").write_text(write_profile(PROFILE))
    assert read_profile("h200_demo") == PROFILE
    with pytest.raises(ConfigError, match="'h200_demo'"):
        find_profile("h200demo")
    with pytest.raises(ConfigError, match=r"h200_demo\.yaml: no such file"):
        read_profile("./h200_demo.yaml", Path("nowhere"))
    (tmp_path / "in_ns.yaml").write_text(write_profile(PROFILE.model_copy(update={"commit_seconds": 3e8})))
    with pytest.raises(ConfigError, match=r"in_ns\.yaml: commit_seconds: .*got 300000000"):
        read_profile("in_ns")


# --- A SPEC ----------------------------------------------------------------------------------------------------


def test_a_spec_takes_missing_times_from_its_profile(tmp_path: Path) -> None:
    given = {**BARE, "reward": {"lanes": 1}, "trainer": {"helper": {"lanes": 2}}, "policy": {"colocated": True}}
    table = {1: 0.5, 4: 1.1, 12: 2.0}
    helper = {"lanes": 2, "seconds": table, "switch_in": 0.1, "switch_out": 0.5}
    meant = {
        **{key: value for key, value in given.items() if key != "profile"},
        "generators": [{"name": "h200", "count": 2, "seconds": table}],
        "reward": {"lanes": 1, "seconds": 0.01},
        "trainer": {"seconds_per_sample": 0.125, "commit": 0.3, "helper": helper},
        "publish": 0.2,
        "colocate": {"switch": 0.3},
    }
    assert read_spec(written(tmp_path, given)) == parse_model(Spec, meant)


def test_times_in_a_spec_take_precedence_over_the_profile(tmp_path: Path) -> None:
    own = {
        **BARE,
        "slice": 3,
        "generators": [{"seconds": {1: 9.0}}, {"name": "measured"}],
        "reward": {"lanes": 1, "seconds": 7.0},
        "trainer": {"seconds_per_sample": 6.0, "commit": 5.0},
        "publish": 0,
        "colocate": {"switch": 4.0},
    }
    spec = read_spec(written(tmp_path, own))
    tables = [{size: float(seconds) for size, seconds in pool.seconds.items()} for pool in spec.generators]
    assert tables == [{1: 9.0}, {1: 0.5, 4: 1.1, 12: 2.0}]
    assert (spec.reward.seconds, spec.trainer.seconds_per_sample, spec.trainer.commit) == (7, 6, 5)
    assert (spec.publish, spec.colocate.switch, spec.trainer.helper) == (0, 4, None)


def test_the_option_takes_precedence_over_the_profile_that_the_spec_names(tmp_path: Path) -> None:
    slower = PROFILE.model_copy(update={"slices": {4: SliceCost(seconds=8.0)}})
    (tmp_path / "slower.yaml").write_text(write_profile(slower))
    spec = read_spec(written(tmp_path, BARE), str(tmp_path / "slower.yaml"))
    assert dict(spec.generators[0].seconds) == {4: 8}


@pytest.mark.parametrize(
    ("changes", "absent", "where", "noun"),
    [
        ({"slice": 24, "samples_per_prompt": 24}, (), "slice", "1 to 12"),
        ({"slice": "auto", "samples_per_prompt": 24}, (), "samples_per_prompt", "1 to 12"),
        ({"samples_per_prompt": 24, "generators": [{"slice": 24}]}, (), "generators[0].slice", "1 to 12"),
        ({}, ("slices",), "generators[0].seconds", "slices"),
        ({}, ("training",), "trainer.seconds_per_sample", "training"),
        ({"reward": {"lanes": 1}}, ("score_seconds",), "reward.seconds", "score_seconds"),
        ({"profile": 3}, (), "profile", "3"),
        ({"profile": "nowhere"}, (), "", "'nowhere'"),
        ({"prompt": 3}, (), "prompt", "'prompts'"),
    ],
)
def test_a_time_that_neither_the_spec_nor_the_profile_has_is_an_error(
    tmp_path: Path, changes: dict[str, Any], absent: tuple[str, ...], where: str, noun: str
) -> None:
    path = written(tmp_path, {**BARE, **changes}, profile=without(PROFILE, *absent))
    with pytest.raises(ConfigError, match=noun) as error:
        read_spec(path)
    assert error.value.where == where
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


# --- A run on one card -------------------------------------------------------------------------------------------


def test_a_step_on_one_card_is_the_sum_of_its_parts() -> None:
    predicted = predict_single_device(PROFILE, "card")
    # 8 groups in one slice of 12 each, 96 samples scored and trained, one commit, two role switches.
    assert predicted.slice == 12
    assert predicted.step_seconds == pytest.approx(8 * 2.0 + 96 * 0.01 + 96 * 0.25 + 0.3 + 0.6)
    assert sum(predicted.parts.values()) == pytest.approx(predicted.step_seconds)


def test_an_automatic_slice_is_the_one_with_the_least_time_per_sample() -> None:
    open_slice = PROFILE.work.model_copy(update={"slice": "auto"})
    slices = {1: SliceCost(seconds=0.5), 4: SliceCost(seconds=1.0), 12: SliceCost(seconds=3.6)}
    profile = PROFILE.model_copy(update={"work": open_slice, "slices": slices})
    assert predict_single_device(profile, "card").slice == 4
    with pytest.raises(ConfigError, match="training"):
        predict_single_device(without(PROFILE, "training"), "card")


# --- A plan ------------------------------------------------------------------------------------------------------


def test_a_pool_with_a_profile_is_planned_like_one_with_the_same_measured_costs(tmp_path: Path) -> None:
    measured = {
        "slice_seconds": {1: 0.5, 4: 1.1, 12: 2.0},
        "train_seconds_per_sample": 0.25,
        "commit_seconds": 0.3,
        "publish_seconds": 0.2,
        "score_seconds": 0.01,
        "switch_seconds": 0.3,
    }
    size = {"nodes": 1, "per_node": 3}
    by_profile = read_cluster(written(tmp_path, {"pools": [{"profile": "card.yaml", **size}]}))
    by_hand = read_cluster(
        written(tmp_path, {"pools": [{"card": "H200", "measured": measured, **size}]}, "b.yaml")
    )
    assert by_profile.pools[0].card.name == "H200", "the profile's device, not the shorter H20"
    assert by_profile.pools[0].measured == by_hand.pools[0].measured
    plans = [
        search_plans(DEMO, cluster, PlanOptions(stale_shares=(0.0,), ranks=1)).best.spec
        for cluster in (by_profile, by_hand)
    ]
    assert plans[0] == plans[1]


def test_a_device_without_a_data_sheet_gives_its_name_to_the_pool(tmp_path: Path) -> None:
    unknown = PROFILE.model_copy(update={"device": PROFILE.device.model_copy(update={"name": "lab card"})})
    content = {"pools": [{"profile": "card.yaml"}, {"profile": "card.yaml", "name": "other"}]}
    pools = read_cluster(written(tmp_path, content, profile=unknown)).pools
    assert [(pool.name, pool.card.described) for pool in pools] == [("lab card", False), ("other", False)]


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("sample.height=64", "height = 32 .* 64"),
        ("sample.denoising_steps=20", "denoising_steps = 8 .* 20"),
        ("model.guidance=4", "guidance = 1.0 .* 4.0"),
        ("model.source=owner/another", "model = demo .* another"),
        ("training.lora={rank: 8}", "lora_rank = none .* 8"),
        ("algorithm.options.kl_weight=0.1", "reference_forward = False .* True"),
        ("sample.window={kind: fast, width: 2}", "trained_steps = 3 .* 2"),
    ],
)
def test_a_profile_of_other_work_is_an_error(tmp_path: Path, override: str, complaint: str) -> None:
    cluster = read_cluster(written(tmp_path, {"pools": [{"profile": "card.yaml"}]}))
    with pytest.raises(ConfigError, match=complaint) as error:
        check_profiles(cluster, read_recipe("demo", [override]))
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="plan a recipe"):
        check_profiles(cluster, None)


def test_a_profile_covers_other_batches_and_random_weights_of_the_published_size(tmp_path: Path) -> None:
    work = PROFILE.work.model_copy(update={"model": "random", "guidance": 0.5})
    profile = PROFILE.model_copy(update={"work": work})
    cluster = read_cluster(written(tmp_path, {"pools": [{"profile": "card.yaml"}]}, profile=profile))
    check_profiles(cluster, read_recipe("demo", ["batch.prompts=16", "batch.slice=4"]))


@pytest.mark.parametrize(
    ("pool", "complaint"),
    [
        ({"profile": "card.yaml", "measured": {"commit_seconds": 1}}, r"pools\[0\]: .*measured"),
        ({"profile": "card"}, r"pools\[0\].profile: unknown profile 'card'"),
        ({"profile": 3}, r"pools\[0\]: profile: expected a name or a file, got 3"),
        ({"profile": "no.yaml"}, r"pools\[0\]: .*no.yaml: "),
    ],
)
def test_an_error_in_the_profile_of_a_pool_names_the_pool(
    tmp_path: Path, pool: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as error:
        read_cluster(written(tmp_path, {"pools": [pool]}, "cluster.yaml"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("measured", "wanted", "same"),
    [
        ("random", "Wan2.1-T2V-14B-Diffusers", True),
        ("random:2.1-14b", "Wan2.1-T2V-14B-Diffusers", True),
        ("random:2.1-14b", "Wan2.1-T2V-1.3B-Diffusers", False),
        ("Wan2.1-T2V-1.3B-Diffusers", "random:2.1-1.3b", True),
        ("Wan2.1-T2V-1.3B-Diffusers", "Wan2.1-T2V-14B-Diffusers", False),
    ],
)
def test_a_model_with_random_weights_costs_the_same_as_one_of_its_size(
    measured: str, wanted: str, same: bool
) -> None:
    assert same_costs("model", measured, wanted) == same
