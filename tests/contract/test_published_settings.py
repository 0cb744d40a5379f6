"""Published recipes have the published values: each is equal, or a deviation that is stated with its reason."""

from __future__ import annotations

import re

import pytest
from recipe_tables import (
    ABSENT,
    PUBLISHED_PAGE,
    RECIPES_PAGE,
    derived_recipes,
    effective_settings,
    published_page,
    published_runs,
    shipped_recipe,
    tables,
    with_tables,
    without_counterpart,
)

from digenrl.config.recipes.files import SHIPPED, shipped_recipes

RUNS, DERIVED = published_runs(), derived_recipes()
NO_COUNTERPART = without_counterpart()

each_published = pytest.mark.parametrize("name", RUNS)
each_derived = pytest.mark.parametrize("name", DERIVED)


def comparable(name: str) -> dict[str, object]:
    """The settings of a shipped recipe that published code has, too."""
    settings = effective_settings(shipped_recipe(name))
    return {key: value for key, value in settings.items() if not any_of(key, NO_COUNTERPART)}


def any_of(key: str, keys: set[str]) -> bool:
    """Whether a key or a section that contains it is among these keys."""
    parts = key.split(".")
    return any(".".join(parts[:count]) in keys for count in range(1, len(parts) + 1))


def header(name: str) -> str:
    """The first lines of a recipe's file, which are comments."""
    lines = (SHIPPED / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return "\n".join(lines[: next(index for index, line in enumerate(lines) if not line.startswith("#"))])


def test_every_recipe_but_the_demos_is_published_or_derived_from_published_ones() -> None:
    assert sorted([*RUNS, *DERIVED, "demo", "edit_demo", "pairs_demo"]) == shipped_recipes()


@each_published
def test_its_values_are_the_published_ones_or_stated_deviations(name: str) -> None:
    run, ours = RUNS[name], effective_settings(shipped_recipe(name))
    found = {key: (run.published[key], ours.get(key)) for key in run.differing(shipped_recipe(name))}
    assert sorted(found) == sorted(run.deviations), found


@each_published
def test_every_setting_that_counts_has_a_published_value(name: str) -> None:
    run = RUNS[name]
    known = {*run.published, *run.unused}
    assert {key for key in comparable(name) if not any_of(key, known)} == set()


@each_published
def test_its_first_lines_name_the_run_and_every_deviation(name: str) -> None:
    run, text = RUNS[name], header(name)
    assert run.name in text
    assert [key for key in run.deviations if not re.search(rf"(?<![\w.]){re.escape(key)}\b", text)] == []


@each_derived
def test_a_derived_recipe_has_the_values_of_its_parents_or_states_the_change(name: str) -> None:
    derived = DERIVED[name]
    parents = [effective_settings(shipped_recipe(parent)) for parent in derived.parents]
    own = {
        key for key, value in comparable(name).items() if all(each.get(key, ABSENT) != value for each in parents)
    }
    assert sorted(own) == sorted(derived.changed)
    assert all(parent in header(name) for parent in derived.parents)


def test_places_are_files_and_lines() -> None:
    for run in RUNS.values():
        assert all(re.fullmatch(r"[\w./-]+:\d+", place) for place in [run.at, *run.places.values()])


def test_the_generated_tables_are_up_to_date() -> None:
    page = RECIPES_PAGE.read_text(encoding="utf-8")
    assert page == with_tables(page), "run `make docs`"
    assert PUBLISHED_PAGE.read_text(encoding="utf-8") == published_page(), "run `make docs`"


def test_every_recipe_for_one_gpu_is_listed_by_the_memory_of_its_gpu() -> None:
    table = tables()["recipes for one GPU"]
    names = [name for name in shipped_recipes() if name.endswith(("_24gb", "_one_gpu"))]
    assert sorted(re.findall("`(.+?)`", table)) == sorted(names)
    assert "| 24 GB | `flux_24gb`, " in table
