"""What the driver knows about a run: prompts, samples, weight versions, lanes and costs. Needs no torch."""

from __future__ import annotations

from digenrl.config.recipes.recipe import Recipe
from digenrl.driver.cost_tracker import CostTracker
from digenrl.driver.lanes import LaneTable
from digenrl.driver.prompt_store import PromptStore
from digenrl.driver.reward_sum import normalization_of
from digenrl.driver.sample_store import SampleStore
from digenrl.driver.weight_versions import WeightVersions
from digenrl.records import pixels_name
from digenrl.transports.contract import ArtifactStore
from digenrl.worker.assignment import Workers


class DriverStores:
    """The stores of one run. `costs` is set when the run has been calibrated, with the `slice_size`."""

    def __init__(self, recipe: Recipe, workers: Workers, artifacts: ArtifactStore, prompts: PromptStore) -> None:
        self.recipe, self.workers, self.artifacts, self.prompts = recipe, workers, artifacts, prompts
        self.lanes = LaneTable(workers)
        self.samples = SampleStore(normalization_of(recipe))
        self.versions = WeightVersions(recipe, artifacts)
        self.costs: CostTracker | None = None
        self.slice_size = 0
        self.pack_size = 0  # the trainer's, as calibrated

    @property
    def evaluation_chunks(self) -> int:
        """The jobs that an evaluation is divided into."""
        evaluation = self.recipe.evaluation
        return 0 if evaluation is None else -(-len(self.prompts.held_out) // evaluation.chunk)

    def drop_slice(self, name: str) -> None:
        """Frees a slice's trajectories and pixels."""
        self.artifacts.drop(name)
        self.artifacts.drop(pixels_name(name))
