"""A plan as a file: what `digenrl plan` chose for a recipe, ready to be laid over it by `digenrl train --plan`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from digenrl.config.reading import ConfigError, Frozen, read_mapping, read_model
from digenrl.config.recipe import Recipe
from digenrl.config.recipe_files import read_recipe

SECTIONS = ("lanes", "cluster", "batch", "techniques")  # of a recipe; a plan has keys of these


class PlannedWork(Frozen):
    """What a plan was made for. A recipe that differs in any of it needs a plan of its own."""

    family: str
    model: str
    height: int
    width: int
    frames: int
    denoising_steps: int
    prompts: int
    samples_per_prompt: int
    algorithm: str
    lora_rank: int | None


class Prediction(Frozen):
    """What the simulator expects of the plan; `step_seconds` is a step's time once the pipeline is full."""

    samples_per_second: float
    step_seconds: float


class PlanHead(Frozen):
    """What stands in a plan beside the recipe's own keys."""

    recipe: str
    work: PlannedWork
    predicted: Prediction


class PlanFile(Frozen):
    """Keys of a recipe, which go over the recipe's own, under a head that says what they are for."""

    plan: PlanHead
    mode: Literal["ray"] = "ray"
    lanes: dict[str, Any] = Field(default={})
    cluster: dict[str, Any] = Field(default={})
    batch: dict[str, Any] = Field(default={})
    techniques: dict[str, Any] = Field(default={})


def work_of(recipe: Recipe) -> PlannedWork:
    """What a plan for this recipe is made for."""
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
    )


def read_plan(path: Path) -> PlanFile:
    """The plan in a file; raises ConfigError with one line, also where the file is something else."""
    if "plan" not in read_mapping(path):
        raise ConfigError(f"{path}: is no plan of a recipe; make one with: digenrl plan RECIPE --cluster FILE")
    return read_model(PlanFile, path)


def overrides_of(plan: PlanFile, given: Sequence[str]) -> list[str]:
    """The plan as overrides of its recipe, followed by those that were given, which have the last word."""
    keys_given = {text.partition("=")[0].strip() for text in given}
    planned: dict[str, Any] = {"mode": plan.mode}
    for section in SECTIONS:
        planned |= {f"{section}.{key}": value for key, value in getattr(plan, section).items()}
    return [f"{key}={_in_one_line(value)}" for key, value in planned.items() if key not in keys_given] + [*given]


def check_planned_for(recipe: Recipe, plan: PlanFile, path: Path) -> None:
    """Refuses a plan that was made for other work than the recipe's."""
    planned, wanted = plan.plan.work.model_dump(), work_of(recipe).model_dump()
    for key, value in wanted.items():
        if planned[key] != value:
            raise ConfigError(
                f"{path}: was made for {key} = {_said(planned[key])} ({plan.plan.recipe}), the recipe has "
                f"{_said(value)}; make a plan for it with: digenrl plan RECIPE --cluster FILE"
            )


def _said(value: Any) -> str:
    return "none" if value is None else str(value)


def _in_one_line(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**9, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def with_plan(recipe: str, overrides: list[str], plan_file: Path) -> list[str]:
    """The overrides behind those of the plan, which has to be one for this recipe with these overrides."""
    plan = read_plan(plan_file)
    together = overrides_of(plan, overrides)
    try:
        check_planned_for(read_recipe(recipe, together), plan, plan_file)
    except ConfigError as error:
        # A mistake of the recipe's own, or a recipe that the plan is not for, is told as such first.
        check_planned_for(read_recipe(recipe, overrides), plan, plan_file)
        raise ConfigError(f"{plan_file}: {error}") from None
    return together
