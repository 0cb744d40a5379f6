"""Pairs of a chosen and a rejected image in a file: read, checked, encoded, scored, planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pyarrow
import pytest
import torch
from pyarrow import parquet
from source_pictures import picture

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.files import fingerprint, read_recipe
from digenrl.config.recipes.prompts import PromptSettings
from digenrl.config.rewards.table import parse_reward
from digenrl.driver.prompt_store import PromptStore
from digenrl.generation.rollout import encode_slice
from digenrl.models.loading.hub import HubRepository
from digenrl.planning.costs import slice_seconds
from digenrl.planning.facts.cards import find_card
from digenrl.planning.facts.workload import workload_for
from digenrl.prompts.sampler import PromptSampler
from digenrl.prompts.source_images import as_png, check_images, pair_bytes, read_images
from digenrl.prompts.sources import Prompt, read_prompts
from digenrl.records import HELD_OUT_STEP, Encode, Slice
from digenrl.rewards.building import build_reward
from digenrl.rewards.contract import PREFERRED, RewardError
from digenrl.testing.tiny_models import make_tiny_pipeline
from digenrl.worker.blueprint import load_model, read_blueprint
from digenrl.worker.checks.preflight import inspect_here
from digenrl.worker.rollouts import plan
from digenrl.worker.stages import Stages, WorkerParts
from digenrl.worker.tensor_files import PAIR, image_tensors, images_of

GOOD, BAD = as_png(picture(0, 16, 16)), as_png(picture(1, 40, 20))
COLUMNS = ("chosen", "rejected")


def pairs_in(folder: Path, *records: dict[str, object], columns: tuple[str, str] = COLUMNS) -> tuple[Prompt, ...]:
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records))
    return read_prompts(PromptSettings(path=path, pair_columns=columns))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "good.png").write_bytes(GOOD)
    (tmp_path / "bad.png").write_bytes(BAD)
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "wide.ppm").write_text("P6 wide 1 255 ")
    return tmp_path


def test_a_pair_is_two_columns_which_are_no_metadata(folder: Path) -> None:
    record = {"prompt": "a cat", "chosen": "good.png", "rejected": "bad.png", "image": "bad.png", "level": 3}
    (prompt,) = pairs_in(folder, record)
    assert pair_bytes(prompt) == (GOOD, BAD) and prompt.metadata == {"level": 3} and len(prompt.images) == 1
    parquet.write_table(pyarrow.table({"prompt": ["a cat"], "w": [GOOD], "l": [BAD]}), folder / "pairs.parquet")
    (prompt,) = read_prompts(PromptSettings(path=folder / "pairs.parquet", pair_columns=("w", "l")))
    assert pair_bytes(prompt) == (GOOD, BAD) and prompt.metadata == {}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"chosen": "good.png"}, r"pairs\.jsonl:1: no images in 'rejected'.*known: prompt, chosen.*pair_columns"),
        ({"chosen": ["good.png", "bad.png"], "rejected": "bad.png"}, r"pairs\.jsonl:1: 2 images in 'chosen'"),
        ({"chosen": 3, "rejected": "bad.png"}, r"pairs\.jsonl:1: 'chosen' must be"),
        ({"chosen": "good.png", "rejected": "absent.png"}, r"pairs\.jsonl:1: .*absent\.png does not exist"),
        ({"chosen": "text.png", "rejected": "bad.png"}, r"pairs\.jsonl:1: .*text\.png is not an image"),
        ({"chosen": "wide.ppm", "rejected": "bad.png"}, r"pairs\.jsonl:1: .*wide\.ppm cannot be read"),
    ],
)
def test_a_bad_pair_is_refused_with_its_line(folder: Path, record: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_images(pairs_in(folder, {"prompt": "a cat", **record}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "prompts.txt", "pair_columns": COLUMNS}, r"\.jsonl or \.parquet.*prompts\.txt"),
        ({"name": "scenes", "pair_columns": COLUMNS}, r"\.jsonl or \.parquet.*scenes"),
        ({"path": "p.jsonl", "pair_columns": ("chosen", "chosen")}, r"two columns.*\['chosen', 'chosen'\]"),
        ({"path": "p.jsonl", "pair_columns": ("prompt", "rejected")}, "two columns"),
        ({"path": "p.jsonl", "pair_columns": ("image", "rejected")}, "two columns"),
    ],
)
def test_columns_of_pairs_are_two_columns_of_their_own(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptSettings.model_validate(settings)


def test_the_driver_sends_pairs_of_training_prompts_after_their_source_images(folder: Path) -> None:
    record = {"prompt": "a cat", "chosen": "good.png", "rejected": "bad.png", "image": "bad.png"}
    prompts = pairs_in(folder, record)
    store = PromptStore(PromptSampler(prompts, 1, seed=0), lambda row: None, held_out=prompts)
    row, held_out = store.row(0, 0), store.row(HELD_OUT_STEP, 0)
    assert (row.paired, row.sources, held_out.paired) == (True, 1, False)
    assert store.images([row, held_out]) == ((BAD, GOOD, BAD), (BAD,))


def test_a_damaged_image_is_named_by_the_line_of_its_pair(folder: Path) -> None:
    """Images are decoded when they are encoded; before that, their headers are read."""
    (folder / "cut.png").write_bytes(BAD[:-100])
    prompts = pairs_in(folder, {"prompt": "a cat", "chosen": "good.png", "rejected": "cut.png"})
    check_images(prompts)
    store = PromptStore(PromptSampler(prompts, 1, seed=0), lambda row: None)
    row, unused = store.row(0, 0), cast(Any, object())
    stages = Stages(WorkerParts(read_blueprint(read_recipe("pairs_demo")), unused, encoder=unused))
    with pytest.raises(ConfigError, match=r"pairs\.jsonl:1: .*cannot be decoded.*replace"):
        stages.encode(Encode(0, 0, step=0, groups=(0,), prompts=(row,), images=store.images([row])))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["batch.samples_per_prompt=4"], r"batch\.samples_per_prompt.* 4, .*set it to 2"),
        (["algorithm={name: flow_grpo}"], r"prompts\.pair_columns: flow_grpo .*flow_dpo"),
        (["sample.window={kind: all}"], r"sample\.window: all, .*no denoising steps"),
        (["prompts.pair_columns=null"], r"rewards.*'preference'.*prompts\.pair_columns"),
        (["evaluation.rewards=null"], r"evaluation\.rewards.*'preference'"),
        (
            ["model={family: wan, source: random}", "sample.frames=5"],
            r"sample\.frames.* 5, .*set it to 1",
        ),
        (["model={family: wan, source: random}"], r"prompts\.pair_columns: .*wan makes videos"),
        (["prompts.pair_columns=[best, worst]"], r"pairs\.jsonl:1: no images in 'best'.*known: prompt, chosen"),
    ],
)
def test_mistakes_are_found_before_anything_is_loaded(
    overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(self: HubRepository, name: str) -> Path:
        raise AssertionError(f"{name} was fetched")

    monkeypatch.setattr(HubRepository, "fetch", fetch)
    with pytest.raises(ConfigError, match=message):
        inspect_here(read_recipe("pairs_demo", overrides))


def test_pairs_belong_to_what_a_resumed_run_must_have() -> None:
    swapped = read_recipe("pairs_demo", ["prompts.pair_columns=[rejected, chosen]"])
    assert fingerprint(swapped) != fingerprint(read_recipe("pairs_demo"))


def test_the_preference_is_1_for_the_chosen_image_and_0_for_the_other() -> None:
    reward, pixels = build_reward(parse_reward("preference")), torch.zeros(2, 1, 3, 8, 8)
    assert reward.score(pixels, ["a"] * 2, [{PREFERRED: True}, {PREFERRED: False}]).values == (1.0, 0.0)
    with pytest.raises(RewardError, match="pair_columns") as error:
        reward.score(pixels, ["a"] * 2, [{PREFERRED: True}, {}])
    assert error.value.samples == (1,)


def test_images_become_the_same_latents_however_slices_are_cut(tmp_path: Path) -> None:
    make_tiny_pipeline("sd3", tmp_path / "model")
    blueprint = read_blueprint(read_recipe("pairs_demo", [f"model.source={tmp_path / 'model'}"]))
    model, size = load_model(blueprint, "cpu"), blueprint.size
    images = read_images((GOOD, BAD), "here", size.height, size.width, "crop")
    pixels_BFCHW = torch.stack(images_of(image_tensors(images, PAIR), PAIR)).unsqueeze(1)

    def latents(piece: Slice) -> list[torch.Tensor]:
        plans = plan(blueprint, model, tuple(piece.samples()))
        given_BFCHW = pixels_BFCHW[piece.first : piece.first + piece.size]
        return [t.final_L for t in encode_slice(model, given_BFCHW, plans, piece, version=3).trajectories]

    both = latents(Slice(0, 0, 0, 2))
    assert [latents(Slice(0, 0, index, 1))[0].equal(both[index]) for index in (0, 1)] == [True, True]
    assert both[0].shape == model.noise_shape(size) and not both[0].equal(both[1])


def test_a_plan_knows_that_pairs_are_not_denoised() -> None:
    card = find_card("H200")
    generated = workload_for("SD3.5-M")
    assert (
        slice_seconds(generated.model_copy(update={"pairs": True}), card, 2)
        < slice_seconds(generated, card, 2) / 4
    )
