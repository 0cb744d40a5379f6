"""Checks a recipe and this machine before anything is loaded, in a separate process."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.recipe import Recipe
from digenrl.config.rewards.table import (
    FunctionSettings,
    HttpSettings,
    JudgeSettings,
    ServerSettings,
    judge_template,
)
from digenrl.host_memory import total_host_bytes
from digenrl.worker.assignment import Machine

logger = logging.getLogger(__name__)


def cores_here() -> tuple[int, ...]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def inspect(recipe: Recipe) -> Machine:
    """This machine, after checking the recipe; raises ConfigError for mistakes, and logs warnings.

    The fork server must be running.
    """
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(recipe, theirs), daemon=True)
    try:
        process.start()
    except (EOFError, ConnectionError):  # the fork server has ended, and has printed why
        raise ConfigError(
            "the packages for training cannot be imported, see the error above; install digenrl[train] again"
        ) from None
    theirs.close()
    try:
        complaint, warnings, cuda_devices = ours.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the check of the recipe ended with exit code {process.exitcode}") from None
    finally:
        ours.close()
    process.join()
    if complaint is not None:
        raise ConfigError(complaint)
    _log(warnings)
    return Machine(cores_here(), cuda_devices)


def inspect_here(recipe: Recipe) -> Machine:
    """Like `inspect`, but in this process, which needs torch anyway."""
    warnings, cuda_devices = _checked(recipe)
    _log(warnings)
    return Machine(cores_here(), cuda_devices)


def _checked(recipe: Recipe) -> tuple[list[str], int]:
    """Warnings about the recipe, and how many GPUs there are; raises ConfigError for mistakes in it."""
    try:
        import torch

        from digenrl.models.loading.hub import HubUnreachableError
        from digenrl.rewards.function import import_target
        from digenrl.rewards.parts.weights import check_paths
        from digenrl.worker.blueprint import (
            check_adapters,
            check_base,
            check_cards_per_sample,
            check_hub_model,
            check_sizes_without_weights,
            read_blueprint,
        )
        from digenrl.worker.checks.distilled import distilled_warnings
        from digenrl.worker.checks.experts import check_experts
        from digenrl.worker.checks.memory import check_host_memory
        from digenrl.worker.checks.sharding import check_sharding
        from digenrl.worker.checks.sources import check_sources
    except ModuleNotFoundError as error:
        missing = f"training needs the package '{error.name}', which is not installed"
        raise ConfigError(f"{missing}; install digenrl[train]") from None
    blueprint = read_blueprint(recipe)
    check_sizes_without_weights(blueprint)
    check_sources(blueprint)
    for settings in (*recipe.rewards, *recipe.held_out_rewards):
        if isinstance(settings, FunctionSettings) and not settings.isolated:
            import_target(settings)
        if isinstance(settings, JudgeSettings):
            judge_template(settings)
        if isinstance(settings, ServerSettings):
            _check_server(settings, recipe.topology.uses_ray)
        elif not recipe.topology.uses_ray:  # other machines of a cluster may have what this one has not
            check_paths(settings)
    try:
        check_experts(blueprint, check_hub_model(blueprint))
    except HubUnreachableError:
        if not recipe.topology.uses_ray:  # other machines of a cluster may reach the hub
            raise
    check_adapters(blueprint)
    check_base(blueprint)
    check_sharding(blueprint)
    check_cards_per_sample(blueprint)
    cuda_devices = torch.cuda.device_count()
    if not cuda_devices and not recipe.topology.uses_ray:
        check_host_memory(blueprint, total_host_bytes())
    updates = recipe.steps * blueprint.algorithm.updates_per_batch
    return [*distilled_warnings(blueprint), *_average_warnings(recipe, updates)], cuda_devices


def _average_warnings(recipe: Recipe, updates: int) -> list[str]:
    """A warning if a run of this many optimizer updates is too short for its moving average."""
    ema = recipe.training.ema
    if ema is None or updates >= ema.every_updates:
        return []
    return [
        f"training.ema.every_updates: {ema.every_updates}, but the run takes {updates} optimizer updates: its "
        "moving average, which is exported, stays the initial policy; lower it, or set training.ema=null"
    ]


def _check_server(settings: ServerSettings, uses_ray: bool) -> None:
    """Raises ConfigError if the token is missing, or a reward server refuses it.

    Machines of a cluster may have the token and the HTTP library where this one has none.
    """
    if uses_ray and settings.token_env not in os.environ:
        return
    settings.read_token()
    if isinstance(settings, HttpSettings):
        with suppress(ModuleNotFoundError):  # said when the reward is built
            from digenrl.rewards.http import check_server

            check_server(settings)


def _log(warnings: Sequence[str]) -> None:
    for warning in warnings:
        logger.warning("%s", warning)


def _report(recipe: Recipe, connection: Connection) -> None:
    report: tuple[str | None, list[str], int]
    try:
        report = (None, *_checked(recipe))
    except ConfigError as error:
        report = (str(error), [], 0)
    with suppress(BrokenPipeError):  # the command was interrupted
        connection.send(report)
