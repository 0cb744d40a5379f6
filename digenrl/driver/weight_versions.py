"""The weight versions in the exchange, and the trainer's state at the newest. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable

from digenrl.config.recipes.recipe import Recipe
from digenrl.records import NO_WEIGHTS, Job, Publish, Train, WeightsReference, state_name
from digenrl.transports.contract import ArtifactStore


class WeightVersions:
    """The newest version. Older ones stay in the exchange until no pending job loads them."""

    def __init__(self, recipe: Recipe, artifacts: ArtifactStore) -> None:
        self._artifacts = artifacts
        self.keeps_state = recipe.checkpoint.in_memory and recipe.topology.keeps_state
        self._state_parts = recipe.lanes.ranks if recipe.sharded else 1
        self.newest, self.newest_version = NO_WEIGHTS, 0
        self.kept_state: int | None = None  # the version from which a replacement trainer can continue
        self._exported: list[str] = []  # names in the exchange, the newest last
        self.of_update = NO_WEIGHTS  # the trained weights after the last update inside the open step
        self._updates: list[str] = []  # names of such weights in the exchange

    def take(self, version: int, weights: WeightsReference) -> None:
        """A version was exported, with the trainer's state if that is kept."""
        self.newest, self.newest_version = weights, version
        if weights.name and weights.name not in self._exported:
            self._exported.append(weights.name)
        if self.keeps_state:
            if self.kept_state not in (None, version):
                for rank in range(self._state_parts):
                    self._artifacts.drop(state_name(self.kept_state or 0, rank))
            self.kept_state = version

    def take_outdated(self, weights: WeightsReference) -> None:
        """An older version was exported again, after a newer one."""
        if weights.name and weights.name not in self._exported:
            self._exported.insert(0, weights.name)

    def take_update(self, weights: WeightsReference) -> None:
        """The weights for the next update of the open step; none if a step begins, or begins again."""
        self.of_update = weights
        if weights.name:
            self._updates.append(weights.name)

    def drop_old(self, pending: Iterable[Job]) -> None:
        """Frees older versions, and weights of older updates, that none of these jobs loads."""
        wanted = {job.weights.name for job in pending if isinstance(job, Publish | Train)} | {self.of_update.name}
        for names, kept in ((self._exported, self._exported[-1:]), (self._updates, [])):
            for name in [name for name in names if name not in wanted and name not in kept]:
                self._artifacts.drop(name)
                names.remove(name)
