"""The reward that a group is trained with if its rewards are normalised within the group. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from digenrl.algorithms.advantages import normalised_sum
from digenrl.config.recipes.recipe import Recipe


@dataclass(frozen=True, slots=True)
class RewardNormalisation:
    """The weights of the rewards by label, and the std's degrees of freedom and eps, which are the algorithm's."""

    weights: Mapping[str, float]
    ddof: int
    eps: float

    def rewards(self, parts: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
        """One reward per sample of a whole group, from the raw scores among the parts of each sample."""
        scores = [[sample[label] for sample in parts] for label in self.weights]
        return normalised_sum(scores, tuple(self.weights.values()), self.ddof, self.eps)


def normalisation_of(recipe: Recipe) -> RewardNormalisation | None:
    """None if the raw scores are added up."""
    if recipe.reward_sum == "raw":
        return None
    advantage = recipe.algorithm.settings().advantage
    weights = {reward.shown_as: reward.weight for reward in recipe.rewards}
    return RewardNormalisation(weights, advantage.ddof, advantage.eps)
