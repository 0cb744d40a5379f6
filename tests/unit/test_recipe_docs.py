"""docs/recipes.md lists every key with its default, and its example is a recipe."""

from __future__ import annotations

import json
import re

import yaml
from doc_pages import DOCS, DocPage
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from digenrl.config.reading import model_inside, parse_model
from digenrl.config.recipes.files import NOT_IN_FINGERPRINT
from digenrl.config.recipes.overrides import OPEN_KEYS, all_keys
from digenrl.config.recipes.recipe import Recipe

RECIPES = DocPage(DOCS / "recipes.md")


def schema_rows() -> dict[str, str]:
    """Every key that has a value, or that can be absent as a whole, with its default as it is shown."""
    keys = list(all_keys(Recipe))
    whole = {key for key in keys if any(other.startswith(f"{key}.") for other in keys)}
    shown = {key: field_of(key) for key in keys}
    return {key: default_of(field) for key, field in shown.items() if key not in whole or field.default is None}


def field_of(key: str) -> FieldInfo:
    model: type[BaseModel] = Recipe
    *parts, last = key.split(".")
    for part in parts:
        model = model_inside(model.model_fields[part].annotation) or model
    return model.model_fields[last]


def default_of(field: FieldInfo) -> str:
    """The default as the table shows it."""
    if field.is_required():
        return "required"
    default = field.default
    return f"`{default if isinstance(default, str | float) else json.dumps(default)}`"


def table(first_heading: str) -> dict[str, list[str]]:
    """The other cells of each row of a table, by the name in the first."""
    return {cells[0].strip("`"): cells[1:] for cells in RECIPES.table(first_heading)}


def test_the_table_of_keys_has_them_all_with_their_defaults() -> None:
    assert {key: cells[0] for key, cells in table("key").items()} == schema_rows()


def test_the_example_is_a_recipe() -> None:
    (example,) = RECIPES.blocks("yaml")
    assert parse_model(Recipe, yaml.safe_load(example)).batch.samples_per_prompt == 8


def test_what_the_fingerprint_leaves_out_exists_and_is_documented() -> None:
    (passage,) = re.findall(r"^A checkpoint is refused.*?(?=\n\n)", RECIPES.text, re.M | re.S)
    known = set(all_keys(Recipe))
    for key, left_out in NOT_IN_FINGERPRINT.items():
        assert key in known
        parts = left_out if isinstance(left_out, set) else {""}
        for part in parts if key != "rewards" else ():
            assert (f"{key}.{part}" if part else key) in known
            assert f"`{part or key}`" in passage or f"`{key}.{part}`" in passage, (key, part)
    assert OPEN_KEYS[0] == "rewards"
