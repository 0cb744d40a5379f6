"""The editing demo: its pictures, its reward, and its model."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import numpy
import torch
from edit_pictures import HELD_OUT, TRAINED, Edit, draw_edit
from PIL import Image
from torch import Tensor

from digenrl.config.recipes.files import read_recipe
from digenrl.demo import model_folder
from digenrl.demo.recoloring import recolored
from digenrl.prompts.source_images import image_bytes, read_images
from digenrl.prompts.sources import read_prompts

EDIT = draw_edit(Random(3))


def pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1).float() / 255


def score(edit: Edit, result: Image.Image) -> tuple[float, float, float]:
    metadata = {**json.loads(edit.as_json_line()), "source_images": (pixels(edit.source()),)}
    batch = recolored(pixels(result)[None, None], [edit.prompt], [metadata])
    return batch.values[0], batch.parts["inside"][0], batch.parts["outside"][0]


def test_a_perfect_edit_scores_one_and_mistakes_are_told_apart() -> None:
    best, _, _ = score(EDIT, EDIT.target())
    assert best > 0.99
    unchanged, inside, outside = score(EDIT, EDIT.source())
    assert unchanged < best - 0.1 and inside > 0.1 and outside < 0.02
    elsewhere, inside, outside = score(EDIT, replace(EDIT, background=(0, 0, 0)).target())
    assert elsewhere < best - 0.3 and outside > 0.3 and inside < 0.1


def test_the_files_have_different_edits_with_their_pictures() -> None:
    recipe = read_recipe("edit_demo")
    assert recipe.evaluation is not None
    train, held_out = read_prompts(recipe.prompts), read_prompts(recipe.evaluation.prompts)
    assert (len(train), len(held_out)) == (TRAINED, HELD_OUT)
    assert not {(each.text, each.images) for each in train} & {(each.text, each.images) for each in held_out}
    random = Random(0)
    first = draw_edit(random)
    (image,) = read_images(image_bytes(train[0]), "here", 32, 32, "crop")
    assert train[0].text == first.prompt and image.tobytes() == first.source().tobytes()


def test_the_model_is_small_enough_to_be_packaged() -> None:
    files = [file for file in model_folder("edit_model").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 3e6
