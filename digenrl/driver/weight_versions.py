"""The weights' versions as the driver knows them: what lies in the exchange, who serves what. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from digenrl.config.recipe import Recipe
from digenrl.exchange.folder import WeightsReference
from digenrl.transports.contract import ArtifactStore
from digenrl.worker.orders import EvaluatePrompts, LoadWeights, Order, state_name


class WeightVersions:
    """The newest version and the trainer's state at it; older ones until nobody is about to load them."""

    def __init__(self, recipe: Recipe, shelf: ArtifactStore) -> None:
        self._shelf = shelf
        self.keeps_state = recipe.checkpoint.in_memory and recipe.topology.keeps_state
        self._state_parts = recipe.lanes.ranks if recipe.sharded else 1
        self.newest: tuple[int, WeightsReference] | None = None
        self.kept_state: int | None = None  # the version of the state that a new trainer can go on from
        self.served: dict[str, int] = {}  # by worker
        self._laid_out: list[str] = []  # names of versions in the exchange, the newest last

    def take(self, version: int, weights: WeightsReference) -> None:
        """A new version lies in the exchange, and the trainer's state at it where that is kept."""
        self.newest = (version, weights)
        if weights.name and weights.name not in self._laid_out:
            self._laid_out.append(weights.name)
        if self.keeps_state:
            self._drop_state(but=version)
            self.kept_state = version

    def drop_old(self, orders: Iterable[Order]) -> None:
        """Frees the versions that none of these orders loads."""
        awaited = {order.weights.name for order in orders if isinstance(order, LoadWeights | EvaluatePrompts)}
        for name in self._laid_out[:-1]:
            if name not in awaited:
                self._shelf.drop(name)
                self._laid_out.remove(name)

    def _drop_state(self, but: int) -> None:
        if self.kept_state is not None and self.kept_state != but:
            for rank in range(self._state_parts):
                self._shelf.drop(state_name(self.kept_state, rank))
