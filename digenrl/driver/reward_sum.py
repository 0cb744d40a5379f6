"""The reward that a group is trained with if its rewards are normalized within the group. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from digenrl.algorithms.advantages import normalized_sum
from digenrl.config.recipes.recipe import Recipe

# One reward per sample of a whole group, from the raw scores by label among the parts of each sample.
Normalization = Callable[[Sequence[Mapping[str, float]]], tuple[float, ...]]


def normalization_of(recipe: Recipe) -> Normalization | None:
    """Normalizes with the degrees of freedom and the eps of the algorithm; None if raw scores are added up."""
    if recipe.reward_sum == "raw":
        return None
    advantage = recipe.algorithm.settings().advantage
    weights = {reward.shown_as: reward.weight for reward in recipe.rewards}

    def normalized(parts: Sequence[Mapping[str, float]]) -> tuple[float, ...]:
        scores = [[sample[label] for sample in parts] for label in weights]
        return normalized_sum(scores, tuple(weights.values()), advantage.ddof, advantage.eps)

    return normalized
