"""Checks the prompts of a recipe before anything is loaded: that rewards find what they need in them."""

from __future__ import annotations

from collections.abc import Sequence

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.prompts import PromptSettings
from digenrl.config.recipes.recipe import Recipe
from digenrl.config.rewards.base import SOURCE_IMAGES, RewardSettings, source_image_key
from digenrl.prompts.sources import Prompt, read_prompts


def check_prompts(recipe: Recipe, *, may_be_absent: bool = False) -> list[str]:
    """Warnings about the prompts; raises ConfigError for the first that is wrong, or lacks what a reward needs.

    Files that `may_be_absent` are checked only if they exist.
    """
    evaluation = recipe.evaluation
    train = () if may_be_absent and is_absent(recipe.prompts) else read_prompts(recipe.prompts)
    absent = evaluation is None or (may_be_absent and is_absent(evaluation.prompts))
    held_out = () if absent else held_out_prompts(recipe)
    _check_scored(train, recipe.rewards)
    _check_scored(held_out, recipe.held_out_rewards)
    return _overlap_warnings(train, held_out)


def held_out_prompts(recipe: Recipe) -> tuple[Prompt, ...]:
    evaluation = recipe.evaluation
    if evaluation is None:
        return ()
    prompts = read_prompts(evaluation.prompts)
    if evaluation.count is not None and evaluation.count > len(prompts):
        where = "evaluation.count"
        raise ConfigError(f"{where}: {evaluation.count}, but there are {len(prompts)} prompts; lower it", where)
    return prompts[: evaluation.count]


def is_absent(settings: PromptSettings) -> bool:
    """Whether these are prompts of a file that does not exist."""
    return settings.path is not None and not settings.path.exists()


def _check_scored(prompts: Sequence[Prompt], rewards: Sequence[RewardSettings]) -> None:
    if not all(prompt.images for prompt in prompts):
        source_image_key(rewards)
    for reward in rewards:
        for prompt in prompts:
            metadata = {**prompt.metadata, SOURCE_IMAGES: prompt.images} if prompt.images else prompt.metadata
            try:
                reward.wanted(prompt.text, metadata)
            except ConfigError:
                raise
            except ValueError as error:
                raise ConfigError(f"{prompt.where}: reward '{reward.shown_as}': {error}") from None


def _overlap_warnings(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> list[str]:
    known = {(prompt.text, prompt.images) for prompt in train}
    both = [prompt for prompt in held_out if (prompt.text, prompt.images) in known]
    if not both:
        return []
    return [
        f"evaluation.prompts: {len(both)} of {len(held_out)} prompts are also trained on, the first at "
        f"{both[0].where}; evaluations do not show what the model does with other prompts"
    ]
