"""`digenrl plan`: reads the request, derives missing model facts, searches plans, and shows them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import yaml
from rich.console import Console

from digenrl.config.plan_files import PlanFile, overrides_of, replaced_by
from digenrl.config.reading import ConfigError, nearest, parse_model
from digenrl.config.recipes.files import read_recipe
from digenrl.config.recipes.recipe import Recipe
from digenrl.planning.candidates import Objective, PlanOptions
from digenrl.planning.facts.cluster import CardPool, Cluster, read_cluster
from digenrl.planning.facts.model_facts import ModelFacts
from digenrl.planning.facts.recipe_workload import (
    catalog_model,
    check_profiles,
    options_for,
    unknown_model,
    with_shared_training,
    workload_of,
)
from digenrl.planning.facts.workload import WORKLOAD_KEYS, Workload, workload_for
from digenrl.planning.planner import Progress, check_ranks, plan
from digenrl.planning.results.plan_overlay import overlay, overlay_text
from digenrl.planning.results.plan_tables import (
    cost_source,
    plan_reasons,
    plans_table,
    result_as_dict,
    spec_as_dict,
)
from digenrl.planning.results.plans import PlanResult
from digenrl.planning.sites.trainer_places import places_words
from digenrl.prompts.checks import check_prompts
from digenrl.telemetry.writing import check_is_no_input, check_new_yaml, write_atomically
from digenrl.transports.process_setup import loading_modules

DEFAULT_FILE = Path("plan.yaml")


@dataclass(frozen=True, slots=True)
class PlanFiles:
    """The files to write: the plan of a recipe, its SPEC, or both."""

    plan: Path | None
    spec: Path | None


def read_request(words: list[str], model: str | None) -> Recipe | Workload:
    """The recipe in the first word with the overrides in the others, or `model` with all words as overrides."""
    if model is not None:
        if words and "=" not in words[0]:
            raise ConfigError(
                f"--model and '{words[0]}': expected KEY=VALUE after --model; to plan a recipe, leave --model out"
            )
        return workload_for(model, **_key_values(words))
    if not words or "=" in words[0]:
        raise ConfigError(
            "plan: give a recipe: 'digenrl plan sd3_flow_grpo --cluster cluster.yaml', or --model FAMILY"
        )
    recipe = read_recipe(words[0], words[1:], without_prompts=True)
    check_prompts(recipe, may_be_absent=True)
    return recipe


def output_files(
    request: Recipe | Workload, plan: Path | None, spec: Path | None, force: bool, inputs: Sequence[Path]
) -> PlanFiles:
    """The files to write; raises ConfigError if one exists, cannot be written, or is an input."""
    if isinstance(request, Recipe):
        files = PlanFiles(plan or DEFAULT_FILE, spec)
    elif plan is not None:
        raise ConfigError("--out: only the plan of a recipe can be trained; with --model use --spec")
    else:
        files = PlanFiles(None, spec or DEFAULT_FILE)
    if files.plan == files.spec:
        raise ConfigError(f"--out and --spec: both are {files.plan}; give different files")
    for option, path in (("--out", files.plan), ("--spec", files.spec)):
        if path is not None:
            check_is_no_input(path, inputs, option)
            check_new_yaml(path, force, option)
    return files


def stale_shares(request: Recipe | Workload, on_policy: bool, given: list[float] | None) -> tuple[float, ...]:
    """The stale shares to try; by default the usual ones and the recipe's own."""
    if on_policy and given:
        raise ConfigError("--on-policy and --stale-share: contradict each other; leave one out")
    for share in given or ():
        if not 0 <= share <= 1:
            raise ConfigError(f"--stale-share: must be between 0 and 1, got {share}")
    if on_policy:
        return (0.0,)
    own = request.techniques.tcss if isinstance(request, Recipe) else 0.0
    return tuple(given) if given else tuple(sorted({*PlanOptions().stale_shares, own}))


def plan_options(shares: tuple[float, ...], ranks: int | None, objective: str, keep: int) -> PlanOptions:
    """The options of the search; raises ConfigError for an unknown objective."""
    known = list(get_args(Objective))
    if objective not in known:
        raise ConfigError(f"--objective: unknown '{objective}'; {nearest(objective, known)}")
    return PlanOptions(stale_shares=shares, ranks=ranks, objective=cast(Objective, objective), keep=keep)


def read_cards(path: Path, request: Recipe | Workload) -> Cluster:
    """The cluster in a file; raises ConfigError if its profiles were measured for other work."""
    cluster = read_cluster(path)
    check_profiles(cluster, request if isinstance(request, Recipe) else None)
    return cluster


def check_search(request: Recipe | Workload, cluster: Cluster, options: PlanOptions) -> None:
    """Raises ConfigError if the options do not suit the cluster or the recipe."""
    free = [pool.name for pool in cluster.pools if not pool.usd_per_card_hour]
    if options.objective == "cost" and free:
        raise ConfigError(f"--objective cost: {free[0]} has no price; give it usd_per_hour in the cluster file")
    check_ranks(cluster, options)
    if isinstance(request, Recipe):
        options_for(request, options)


def search_plans(
    request: Recipe | Workload,
    cluster: Cluster,
    options: PlanOptions,
    progress: Progress = lambda done, total: None,
) -> PlanResult:
    """The best plans; plans of a recipe use only features that the runtime supports.

    Raises ConfigError if the options do not suit the cluster or the recipe.
    """
    check_search(request, cluster, options)
    if isinstance(request, Workload):
        return plan(request, cluster, with_shared_training(request, options), progress)
    cluster = cluster.with_memory_limit(request.lanes.memory_gib)
    workload = workload_of(request, cluster, facts_for(request, cluster))
    return plan(workload, cluster, options_for(request, options), progress)


def facts_for(recipe: Recipe, cluster: Cluster) -> ModelFacts | None:
    """The catalog's facts of the recipe's model; else facts derived from its layers if some pool needs them.

    If the recipe has custom LoRA targets, the catalog's facts are adjusted for them. Raises ConfigError if
    layers must be counted, nothing was measured, and torch is not installed.
    """
    entry = catalog_model(recipe)
    own_targets = recipe.training.lora is not None and recipe.training.lora.targets is not None
    if (entry is not None and not own_targets) or not any(_needs_model(pool) for pool in cluster.pools):
        return entry
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # no remarks about optional packages
    try:
        with loading_modules():
            from digenrl.commands.support.derived_facts import derive_facts, with_targets
    except ModuleNotFoundError as error:
        if any(pool.measured.slice_seconds for pool in cluster.pools):
            return entry
        what = (
            "training.lora.targets: counting these layers"
            if entry
            else f"{unknown_model(recipe)}; deriving its costs"
        )
        missing = f"needs the package '{error.name}', which is not installed"
        raise ConfigError(f"{what} {missing}; install digenrl[train]") from None
    return derive_facts(recipe) if entry is None else with_targets(entry, recipe)


def _needs_model(pool: CardPool) -> bool:
    return pool.card.described and not pool.measured.complete


def write_plan(
    request: Recipe | Workload, result: PlanResult, files: PlanFiles, words: list[str]
) -> dict[str, Any]:
    """Writes the best plan and its SPEC; returns all plans as plain JSON values."""
    content = result_as_dict(result)
    if isinstance(request, Recipe) and files.plan is not None:
        content["overlay"] = overlay(result.best, request, words[0])
        _check_trainable(content["overlay"], words)
        write_atomically(files.plan, overlay_text(content["overlay"], result.best))
    if files.spec is not None:
        write_atomically(files.spec, yaml.safe_dump(spec_as_dict(result.best), sort_keys=False))
    return content


def _check_trainable(planned: dict[str, Any], words: list[str]) -> None:
    """Raises ConfigError if the recipe cannot be trained with the plan."""
    recipe, *own = _words_beside(planned, words)
    try:
        read_recipe(recipe, overrides_of(parse_model(PlanFile, planned), own), without_prompts=True)
    except ConfigError as error:
        raise ConfigError(f"the best plan does not suit the recipe: {error}") from None


def _words_beside(planned: dict[str, Any], words: list[str]) -> list[str]:
    """The recipe and the overrides to train with: those that would undo the plan are left out."""
    replaced = replaced_by(parse_model(PlanFile, planned), words[1:])
    return [word for word in words if word not in replaced]


def show_plans(
    console: Console,
    result: PlanResult,
    words: list[str],
    files: PlanFiles,
    planned: dict[str, Any] | None = None,
) -> None:
    """Prints the plans, the reasons, the proven gap, caveats, and the commands that use the best plan.

    `planned` is the content of the plan file.
    """
    console.print(plans_table(result.plans, result.colocated))
    for reason in plan_reasons(result.plans):
        console.print(reason, highlight=False)
    console.print(result.comparison, highlight=False)
    if result.trainer_places:
        console.print(places_words(result.trainer_places), highlight=False)
    searched = f"{result.considered:,} plans considered, {result.evaluated} simulated"
    others = "no other split" if result.every_size else "of the trainer sizes tried, none"
    gap = f"with slices of one size is better than the first by more than {result.proven_gap:.1%}"
    console.print(f"{searched}; {others} {gap}.", style="dim")
    if cost_source(result.workload) == "derived":
        console.print(
            f"The costs of {result.workload.model} are derived from its layers with typical efficiencies, not "
            "fitted to measurements; for better ones, profile the cards (digenrl profile).",
            style="dim",
            highlight=False,
        )
    if files.plan is not None:
        own = words if planned is None else _words_beside(planned, words)
        _show_plan_file(console, result, own, files.plan)
        replaced = [word for word in words if word not in own]
        if replaced:
            console.print(f"The plan has its own values for {', '.join(replaced)}.", highlight=False)
    if files.spec is not None:
        hint = f"look at it with: digenrl simulate {files.spec}"
        console.print(f"SPEC of the first plan: {files.spec}  ({hint})", soft_wrap=True)


def _show_plan_file(console: Console, result: PlanResult, words: list[str], path: Path) -> None:
    if not result.workload.reward_seconds:
        console.print("Scoring counts as free: no pool of the cluster gives measured.score_seconds.", style="dim")
    stale = result.best.spec.policy.stale_fraction
    if stale:
        console.print(
            f"Up to {stale:.0%} of a step is generated with weights one version old (techniques.tcss={stale}), "
            "which changes the numerics; --on-policy plans without stale samples.",
            highlight=False,
        )
    command = shlex.join(["digenrl", "train", *words, "--plan", str(path)])
    console.print(f"The first plan: {path}  (start it with: {command})", soft_wrap=True, highlight=False)


def _key_values(pairs: list[str]) -> dict[str, Any]:
    """['frames=33', 'tuning=full'] as a mapping, with values parsed as YAML."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"'{pair}': expected KEY=VALUE, such as prompts=8; keys: {', '.join(WORKLOAD_KEYS)}")
        if key not in WORKLOAD_KEYS:
            raise ConfigError(f"'{pair}': unknown key '{key}'; {nearest(key, WORKLOAD_KEYS)}")
        try:
            values[key] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(f"'{pair}': the value is not valid YAML") from None
    return values
