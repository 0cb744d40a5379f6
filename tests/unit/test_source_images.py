"""Source images of prompts: read from files, checked, resized, sent to the encoder."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path

import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from source_pictures import picture
from tiny_pipelines import shared_tiny_model

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.prompts import PromptSettings
from digenrl.driver.prompt_store import PromptStore
from digenrl.models.registry import FAMILIES
from digenrl.prompts.sampler import PromptSampler
from digenrl.prompts.source_images import (
    as_png,
    check_images,
    check_named_images,
    image_bytes,
    named_images,
    read_images,
    resized,
)
from digenrl.prompts.sources import Prompt, read_prompts
from digenrl.records import HELD_OUT_STEP
from digenrl.worker.checks.sources import check_source_counts

PNG = as_png(picture(0, 8, 12))


def prompts_in(folder: Path, *records: dict[str, object], **settings: str) -> tuple[Prompt, ...]:
    path = folder / "edits.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records))
    return read_prompts(PromptSettings(path=path, **settings))


def decoded(content: bytes, height: int = 8, width: int = 12) -> Image.Image:
    (image,) = read_images((content,), "here", height, width, "crop")
    return image


def test_images_are_paths_beside_the_file_and_no_metadata(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    one, two, none = prompts_in(
        tmp_path,
        {"prompt": "redder", "image": "a.png", "level": 3},
        {"prompt": "join them", "images": ["a.png", str(tmp_path / "a.png")]},
        {"prompt": "a cat", "image": None},
    )
    assert image_bytes(one) == (PNG,) and one.metadata == {"level": 3}
    assert image_bytes(two) == (PNG, PNG) and two.metadata == {}
    assert none.images == ()
    (named,) = prompts_in(tmp_path, {"prompt": "redder", "photo": "a.png"}, image_column="photo")
    assert image_bytes(named) == (PNG,)


def test_images_that_metadata_names_for_rewards_are_beside_the_file_and_keep_their_size(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    one, none, absent = prompts_in(
        tmp_path,
        {"prompt": "redder", "reference": "a.png"},
        {"prompt": "a cat"},
        {"prompt": "a dog", "reference": "absent.png"},
    )
    settings = PromptSettings(path=tmp_path / "edits.jsonl")
    (image,) = named_images(one.metadata, "reference", settings, one.where)
    assert (image.size, image.mode) == ((12, 8), "RGB")
    assert named_images(none.metadata, "reference", settings, none.where) == ()
    check_named_images((one, none), "reference", settings)
    with pytest.raises(ConfigError, match=r"edits\.jsonl:3: .*absent\.png does not exist"):
        check_named_images((one, none, absent), "reference", settings)


def test_parquet_may_hold_the_images_themselves(tmp_path: Path) -> None:
    rows = {"prompt": ["one", "two"], "image": [PNG, PNG], "huggingface": [{"bytes": PNG, "path": "a.png"}] * 2}
    parquet.write_table(pyarrow.table(rows), tmp_path / "edits.parquet")
    for column in ("image", "huggingface"):
        prompts = read_prompts(PromptSettings(path=tmp_path / "edits.parquet", image_column=column))
        assert [image_bytes(prompt) for prompt in prompts] == [(PNG,), (PNG,)]
        check_images(prompts)


@pytest.mark.parametrize("value", [3, "", ["a.png", 4], {"path": None}])
def test_what_is_no_path_is_refused_with_its_line(tmp_path: Path, value: object) -> None:
    with pytest.raises(ConfigError, match=r"edits\.jsonl:1: 'image'"):
        prompts_in(tmp_path, {"prompt": "redder", "image": value})


def test_a_missing_or_unreadable_image_is_found_before_a_run(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no image")
    Image.new("F", (4, 4)).save(tmp_path / "depth.tiff")
    for name, why in (
        ("absent.png", "does not exist"),
        ("text.png", "PNG or JPEG"),
        (".", "cannot be read"),
        ("depth.tiff", "floating-point"),
    ):
        (prompt,) = prompts_in(tmp_path, {"prompt": "redder", "image": name})
        with pytest.raises(ConfigError, match=rf"edits\.jsonl:1: .*{why}"):
            check_images([prompt])
    with pytest.raises(ConfigError, match=r"edits\.jsonl:1: .* decoded"):
        read_images((PNG[:60],), "edits.jsonl:1", 8, 8, "crop")


def test_images_are_upright_and_opaque() -> None:
    red = Image.new("RGBA", (4, 2), (255, 0, 0, 0))
    red.putpixel((0, 0), (255, 0, 0, 255))
    image = decoded(as_png(red), 2, 4)
    assert image.mode == "RGB" and image.getpixel((0, 0)) == (255, 0, 0) and image.getpixel((1, 1)) == (255,) * 3
    turned, exif = picture(1, 2, 4), Image.Exif()
    exif[0x0112] = 6  # to be rotated by a quarter when it is shown
    file = BytesIO()
    turned.save(file, format="PNG", exif=exif)
    assert decoded(file.getvalue(), 4, 2).tobytes() == turned.rotate(-90, expand=True).tobytes()


def test_the_shades_of_an_image_with_16_bits_are_kept() -> None:
    depth = Image.new("I;16", (3, 1))
    for column, value in enumerate((0, 128 * 257, 65535)):
        depth.putpixel((column, 0), value)
    assert decoded(as_png(depth), 1, 3).tobytes() == bytes([0, 0, 0, 128, 128, 128, 255, 255, 255])


def test_cropping_keeps_the_center_and_the_area_keeps_the_aspect_ratio() -> None:
    wide = Image.new("RGB", (300, 100), "white")
    wide.paste("black", (100, 0, 200, 100))
    cropped = resized(wide, 50, 50, "crop")
    assert cropped.size == (50, 50) and max(high for _, high in cropped.getextrema()) < 20
    assert resized(wide, 256, 256, "area").size == (448, 160)
    assert resized(wide, 32, 32, "area").size == (64, 32)
    assert resized(Image.new("RGB", (1000, 10)), 64, 64, "area").size == (640, 32)


def test_a_family_says_which_tasks_it_has_and_refuses_other_prompts() -> None:
    image, text = Prompt(0, "redder", images=(PNG,), where="edits.jsonl:1"), Prompt(0, "a cat", where="cats.txt:1")
    both = Prompt(0, "join", images=(PNG, PNG), where="edits.jsonl:2")
    assert FAMILIES["flux"].tasks == ("text_to_image",) and FAMILIES["wan"].tasks == ("text_to_video",)
    assert FAMILIES["flux_kontext"].tasks == ("image_edit",)
    check_source_counts(FAMILIES["flux"], [text])
    check_source_counts(FAMILIES["flux_kontext"], [image])
    for family, prompt, known in (("flux", image, "flux_kontext"), ("flux_kontext", text, "sd3")):
        with pytest.raises(ConfigError, match=rf"{prompt.where}: .*{family} .*model.family: .*{known}"):
            check_source_counts(FAMILIES[family], [prompt])
    with pytest.raises(ConfigError, match="2 source images, but flux_kontext takes at most 1 "):
        check_source_counts(FAMILIES["flux_kontext"], [both])
    with pytest.raises(ConfigError) as error:
        check_source_counts(FAMILIES["flux_kontext"], [text], fixed_model=True)
    assert "model.family" not in str(error.value), "the model of a run cannot be replaced"


def test_only_the_encoder_gets_image_files_of_a_prompt(tmp_path: Path) -> None:
    training = [Prompt(0, "a cat"), Prompt(1, "redder", images=(PNG,))]
    held_out = [Prompt(0, "bluer", images=(PNG, PNG))]
    store = PromptStore(PromptSampler(training, 2, seed=0, shuffle=False), lambda row: None, held_out)
    rows = store.missing(0, (0, 1))
    assert [(row.sources, row.held_out) for row in rows] == [(0, False), (1, False)]
    assert store.images(rows) == ((), (PNG,)) and store.images(rows[:1]) == ()
    (row,) = store.missing(HELD_OUT_STEP, (0,))
    assert row.held_out and store.images([row]) == ((PNG, PNG),)


@torch.no_grad()
def test_qwen_reads_a_source_image_by_rows_and_columns() -> None:
    """As transformers 4 did from the token ids alone; version 5 has to be told which tokens are of an image."""
    model = shared_tiny_model("qwen_image_edit")
    pipeline, image = model.whole_pipeline(), picture(3, 56, 112)
    encoded_1TD, _ = pipeline.encode_prompt(["make it red"], image=[image])
    picture_1 = "Picture 1: <|vision_start|><|image_pad|><|vision_end|>"
    text = pipeline.prompt_template_encode.format(picture_1 + "make it red")
    inputs = pipeline.processor(text=[text], images=[image], padding=True, return_tensors="pt")
    is_image_T = (inputs["input_ids"][0] == pipeline.text_encoder.config.image_token_id).tolist()
    rows, columns = (inputs["image_grid_thw"][0, 1:] // pipeline.processor.image_processor.merge_size).tolist()
    first = is_image_T.index(True)
    seen = [(first, first + row, first + column) for row in range(rows) for column in range(columns)]
    after = range(first + max(rows, columns), first + max(rows, columns) + len(is_image_T) - first - len(seen))
    positions_T3 = [(at,) * 3 for at in range(first)] + seen + [(at,) * 3 for at in after]
    expected = pipeline.text_encoder(
        **inputs, position_ids=torch.tensor(positions_T3).T[:, None], output_hidden_states=True
    )
    start = pipeline.prompt_template_encode_start_idx
    torch.testing.assert_close(encoded_1TD, expected.hidden_states[-1][:, start:])
