"""`digenrl plan`: what its words ask for, where its files go, and the search itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from digenrl.config.reading import ConfigError, nearest
from digenrl.config.recipe import Recipe
from digenrl.config.recipe_files import read_recipe
from digenrl.planning.candidates import PlanOptions
from digenrl.planning.cluster import Cluster
from digenrl.planning.evaluation import full_answer, predicted_makespan
from digenrl.planning.planner import Progress, plan
from digenrl.planning.plans import PlanResult
from digenrl.planning.recipe_workload import options_for, workload_of
from digenrl.planning.workload import WORKLOAD_KEYS, Workload, workload_for
from digenrl.telemetry.writing import check_writable

PLAN = Path("plan.yaml")


@dataclass(frozen=True, slots=True)
class PlanFiles:
    """What is written: the plan of a recipe, its SPEC, or both."""

    plan: Path | None
    spec: Path | None


def what_to_plan(words: list[str], model: str | None) -> Recipe | Workload:
    """The recipe that the words begin with, or the model's published settings that all of them change."""
    if model is not None:
        if words and "=" not in words[0]:
            raise ConfigError(
                f"--model and '{words[0]}': expected KEY=VALUE behind --model; to plan a recipe, leave --model out"
            )
        return workload_for(model, **_key_values(words))
    if not words or "=" in words[0]:
        raise ConfigError(
            "plan: give a recipe, as 'digenrl plan sd3_flow_grpo --cluster cluster.yaml', or --model FAMILY"
        )
    return read_recipe(words[0], words[1:], without_prompts=True)


def places_for(wanted: Recipe | Workload, plan: Path | None, spec: Path | None, force: bool) -> PlanFiles:
    """Where to write; complains before any work about a place that is taken or not there."""
    if isinstance(wanted, Recipe):
        files = PlanFiles(plan or PLAN, spec)
    elif plan is not None:
        raise ConfigError("--out: a plan that can be trained by needs a recipe; with --model there is --spec")
    else:
        files = PlanFiles(None, spec or PLAN)
    if files.plan == files.spec:
        raise ConfigError(f"--out and --spec: both are {files.plan}; give each a file of its own")
    for option, path in (("--out", files.plan), ("--spec", files.spec)):
        if path is not None and check_writable(path).exists() and not force:
            raise ConfigError(f"{path}: exists; add --force to write over it, or name another with {option}")
    return files


def search_plans(
    wanted: Recipe | Workload, cluster: Cluster, options: PlanOptions, progress: Progress
) -> PlanResult:
    """The best plans; those of a recipe are such as the runtime can carry out."""
    if isinstance(wanted, Recipe):
        workload, options = workload_of(wanted, cluster), options_for(wanted, options)
    else:
        workload = wanted
    return plan(workload, cluster, options, predicted_makespan, full_answer, progress)


def _key_values(pairs: list[str]) -> dict[str, Any]:
    """['frames=33', 'tuning=full'] as a mapping, values read as YAML; a wrong key names the nearest right one."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"'{pair}': expected KEY=VALUE, as prompts=8; keys: {', '.join(WORKLOAD_KEYS)}")
        if key not in WORKLOAD_KEYS:
            raise ConfigError(f"'{pair}': unknown key '{key}'; {nearest(key, WORKLOAD_KEYS)}")
        try:
            values[key] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(f"'{pair}': the value is not valid YAML") from None
    return values
