"""Plan files: what `digenrl plan` chose for a recipe, as overrides for `digenrl train --plan`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from digenrl.config.profiles import PlannedWork, shown_value
from digenrl.config.reading import ConfigError, Frozen, read_mapping, read_model
from digenrl.config.recipes.files import read_recipe
from digenrl.config.recipes.recipe import Recipe

SECTIONS = ("lanes", "cluster", "batch", "techniques")  # the sections of a recipe that a plan sets


class PlanPrediction(Frozen):
    """What the simulator predicts for the plan; `step_seconds` is a step's time once the pipeline is full."""

    samples_per_second: float
    step_seconds: float


class PlanHead(Frozen):
    """The part of a plan that is not a key of the recipe."""

    recipe: str
    work: PlannedWork
    predicted: PlanPrediction


class PlanFile(Frozen):
    """Keys that override those of a recipe, and a head that says which work they are for."""

    plan: PlanHead
    mode: Literal["ray"] = "ray"
    lanes: dict[str, Any] = Field(default={})
    cluster: dict[str, Any] = Field(default={})
    batch: dict[str, Any] = Field(default={})
    techniques: dict[str, Any] = Field(default={})


def work_of(recipe: Recipe) -> PlannedWork:
    """The work of a recipe that a plan depends on."""
    sample, lora = recipe.sample, recipe.training.lora
    return PlannedWork(
        family=recipe.model.family,
        model=Path(recipe.model.source).name,
        height=sample.height,
        width=sample.width,
        frames=sample.frames,
        denoising_steps=sample.denoising_steps,
        prompts=recipe.batch.prompts,
        samples_per_prompt=recipe.batch.samples_per_prompt,
        algorithm=recipe.algorithm.name,
        lora_rank=None if lora is None else lora.rank,
        lora_targets=None if lora is None else lora.targets,
        pairs=recipe.trains_on_pairs,
    )


def read_plan(path: Path) -> PlanFile:
    """The plan in a file; raises ConfigError if the file is not a plan."""
    if "plan" not in read_mapping(path):
        raise ConfigError(f"{path}: is not a plan for a recipe; make one with: digenrl plan RECIPE --cluster FILE")
    return read_model(PlanFile, path)


def overrides_of(plan: PlanFile, given: Sequence[str]) -> list[str]:
    """The plan as overrides of its recipe, then the user's own overrides, which take precedence."""
    keys_given = {text.partition("=")[0].strip() for text in given}
    planned = _planned(plan).items()
    return [f"{key}={_flow_yaml(value)}" for key, value in planned if key not in keys_given] + [*given]


def replaced_by(plan: PlanFile, given: Sequence[str]) -> list[str]:
    """Those of the user's overrides that replace values of the plan."""
    return [text for text in given if text.partition("=")[0].strip() in _planned(plan)]


def _planned(plan: PlanFile) -> dict[str, Any]:
    """The plan's values by the recipe's keys."""
    planned: dict[str, Any] = {"mode": plan.mode}
    for section in SECTIONS:
        planned |= {f"{section}.{key}": value for key, value in getattr(plan, section).items()}
    return planned


def check_planned_for(recipe: Recipe, plan: PlanFile, path: Path) -> None:
    """Raises ConfigError if the plan was made for other work than the recipe's."""
    planned, wanted = plan.plan.work.model_dump(), work_of(recipe).model_dump()
    for key, value in wanted.items():
        if planned[key] != value:
            raise ConfigError(
                f"{path}: was made for {key} = {shown_value(planned[key])} ({plan.plan.recipe}), the recipe has "
                f"{shown_value(value)}; make a plan for it with: digenrl plan RECIPE --cluster FILE"
            )


def _flow_yaml(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**9, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def with_plan(recipe: str, overrides: list[str], plan_file: Path) -> list[str]:
    """The plan's overrides followed by the user's; raises ConfigError if the plan is for another recipe."""
    plan = read_plan(plan_file)
    combined = overrides_of(plan, overrides)
    try:
        check_planned_for(read_recipe(recipe, combined), plan, plan_file)
    except ConfigError as error:
        # If the recipe is wrong without the plan, or the plan is for another recipe, report that instead.
        check_planned_for(read_recipe(recipe, overrides), plan, plan_file)
        raise ConfigError(f"{plan_file}: {error}") from None
    return combined
