"""What a run can be trained on, looked for by its recipe: this process, this machine, or a Ray cluster."""

from __future__ import annotations

from pathlib import Path

from digenrl.config.reading import ConfigError
from digenrl.config.recipe import Recipe
from digenrl.driver.placement import place
from digenrl.exchange.folder import ExchangeFolder
from digenrl.transports.contract import Backend, RunResources, Transport
from digenrl.transports.processes import ProcessTransport, prepare_fork_server, set_threads
from digenrl.transports.rank_groups import RankGroupTransport
from digenrl.worker.assignment import Machine, threads_per_worker
from digenrl.worker.preflight import cores_here, inspect, inspect_here


def find_backend(recipe: Recipe) -> Backend:
    """Where the recipe can be trained; raises ConfigError where something of it is not to be had, or not known."""
    if recipe.topology.uses_ray:
        from digenrl.transports.ray.backend import RayBackend  # brings Ray along

        return RayBackend.find(recipe)
    threads = threads_per_worker(recipe, Machine(cores_here()))
    if recipe.topology.one_process:
        set_threads(threads)
        return LocalBackend(inspect_here(recipe), recipe)
    prepare_fork_server(threads)
    return LocalBackend(inspect(recipe), recipe)


class LocalBackend:
    """This machine: worker processes, or in mode colocated this very process."""

    def __init__(self, machine: Machine, recipe: Recipe) -> None:
        self.machine = machine
        place(recipe, machine, Path())

    def prepare(self, recipe: Recipe, run: Path, checkpoint: Path | None) -> RunResources:
        """With a fresh exchange in shared memory, or where the recipe wants it."""
        exchange = make_exchange(recipe)
        transport = _transport(recipe, run)

        def close() -> None:
            transport.stop()
            exchange.remove()

        return RunResources(
            transport, exchange, place(recipe, self.machine, exchange.root, checkpoint, run), close
        )

    def close(self) -> None:
        """There is nothing to let go of."""


def make_exchange(recipe: Recipe) -> ExchangeFolder:
    """A fresh one in shared memory, or where the recipe wants it."""
    where = recipe.lanes.exchange
    if where is None:
        return ExchangeFolder.create()
    if not where.is_dir():
        raise ConfigError(f"lanes.exchange: {where} is no folder; make it, or leave the key out")
    return ExchangeFolder.create(bytes_wanted=0, places=[where])


def _transport(recipe: Recipe, run: Path) -> Transport:
    if not recipe.topology.one_process:
        return RankGroupTransport(ProcessTransport(run / "logs"))
    from digenrl.transports.inline import InlineTransport  # brings torch along

    return InlineTransport()
