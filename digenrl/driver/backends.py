"""Finds the backend of a recipe: this process, this machine, or a Ray cluster."""

from __future__ import annotations

from pathlib import Path

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.recipe import Recipe
from digenrl.driver.placement import place
from digenrl.exchange.folder import ExchangeFolder
from digenrl.transports.contract import Backend, RunResources, Transport
from digenrl.transports.process_setup import loading_modules
from digenrl.transports.processes import ProcessTransport, prepare_fork_server, set_threads
from digenrl.transports.rank_groups import RankGroupTransport
from digenrl.worker.assignment import Machine, threads_per_worker
from digenrl.worker.checks.preflight import cores_here, inspect, inspect_here


def find_backend(recipe: Recipe) -> Backend:
    """The recipe's backend; raises ConfigError if something it needs is unavailable or unknown."""
    if recipe.topology.uses_ray:
        from digenrl.transports.ray.backend import RayBackend  # imports Ray

        return RayBackend.find(recipe)
    threads = threads_per_worker(recipe, Machine(cores_here()))
    if recipe.topology.one_process:
        set_threads(threads)
        return LocalBackend(inspect_here(recipe), recipe)
    prepare_fork_server(threads)
    return LocalBackend(inspect(recipe), recipe)


class LocalBackend:
    """This machine: worker processes, or this process in mode colocated."""

    def __init__(self, machine: Machine, recipe: Recipe) -> None:
        self.machine = machine
        place(recipe, machine, Path())

    def prepare(self, recipe: Recipe, run: Path, checkpoint: Path | None) -> RunResources:
        exchange = make_exchange(recipe)
        transport = _transport(recipe, run)

        def close() -> None:
            transport.stop()
            exchange.remove()

        return RunResources(
            transport, exchange, place(recipe, self.machine, exchange.root, checkpoint, run), close
        )

    def close(self) -> None:
        """Nothing to release."""


def make_exchange(recipe: Recipe) -> ExchangeFolder:
    """A new exchange in shared memory, or in the recipe's folder."""
    where = recipe.lanes.exchange
    if where is None:
        return ExchangeFolder.create()
    if not where.is_dir():
        raise ConfigError(f"lanes.exchange: {where} is no folder; make it, or leave the key out")
    return ExchangeFolder.create(bytes_wanted=0, places=[where])


def _transport(recipe: Recipe, run: Path) -> Transport:
    if not recipe.topology.one_process:
        return RankGroupTransport(ProcessTransport(run / "logs"))
    with loading_modules():
        from digenrl.transports.inline import InlineTransport  # imports torch

    return InlineTransport()
