"""Checks that prompts have the source images that the family takes, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from digenrl.config.reading import ConfigError
from digenrl.config.recipes.prompts import PromptSettings
from digenrl.config.rewards.base import RewardSettings, source_image_key
from digenrl.models.family import Family, SourceCount
from digenrl.models.registry import FAMILIES
from digenrl.prompts.checks import is_absent
from digenrl.prompts.source_images import check_images, check_named_images
from digenrl.prompts.sources import Prompt, read_prompts
from digenrl.worker.blueprint import Blueprint, source_of

IN_FILES = "give their paths in the column `image` of a .jsonl or .parquet file, or in prompts.image_column"


def check_sources(blueprint: Blueprint, *, may_be_absent: bool = False) -> tuple[Prompt, ...]:
    """Raises ConfigError if prompts lack source images, have too many, or have some that cannot be read.

    Returns all prompts. Files that `may_be_absent` are checked only if they exist.
    """
    recipe, family, evaluation = blueprint.recipe, blueprint.family, blueprint.recipe.evaluation
    settings: list[tuple[PromptSettings, Sequence[RewardSettings]]] = [(recipe.prompts, recipe.rewards)]
    if evaluation is not None:
        settings.append((evaluation.prompts, recipe.held_out_rewards))
    found: list[Prompt] = []
    for each, rewards in settings:
        if may_be_absent and is_absent(each):
            continue
        prompts = read_prompts(each)
        column = each.image_column
        how = IN_FILES if column is None else f"give their paths in the column `{column}` (prompts.image_column)"
        check_source_counts(family, prompts, how, sources_of(blueprint))
        check_images(prompts)
        without = [prompt for prompt in prompts if not prompt.images]
        key = source_image_key(rewards) if without else None
        if key is not None and not recipe.topology.uses_ray:  # reward lanes of a cluster may have other files
            check_named_images(without, key, each)
        found += prompts
    return tuple(found)


def sources_of(blueprint: Blueprint) -> SourceCount:
    """How many source images the recipe's model takes, as far as is known before it is loaded."""
    family, model = blueprint.family, blueprint.recipe.model
    if model.random:
        return family.published_sources(family.full_size(model.random_size))
    return family.sources_of(source_of(blueprint.recipe))


def check_source_counts(
    family: Family,
    prompts: Sequence[Prompt],
    how: str = IN_FILES,
    allowed: SourceCount | None = None,
    fixed_model: bool = False,
) -> None:
    """Raises ConfigError at the first prompt with too few or too many source images.

    `how` says in the error how to give source images. `allowed` is what the model takes, if not all of its family
    take as many. The errors propose other models unless the model is that of a run.
    """

    def other(proposal: str) -> str:
        return "" if fixed_model else f", or use another {proposal}"

    allowed = family.sources if allowed is None else allowed
    for prompt in prompts:
        count = len(prompt.images)
        if family.sources.least <= count <= family.sources.most and not allowed.least <= count <= allowed.most:
            raise ConfigError(
                f"{prompt.where}: has {_images(count)}, but this model of {family.name} takes "
                f"{_images(allowed.least)}; {how}{other('model.source')}"
            )
        if count < allowed.least:
            raise ConfigError(
                f"{prompt.where}: has {_images(count)}, but {family.name} needs {_images(allowed.least)} "
                f"({' or '.join(family.tasks)}); {how}"
                f"{other('model.family' + _known('text_to_' + family.kind, family))}"
            )
        if count > allowed.most:
            takes = _images(allowed.most) if allowed.most == 0 else f"at most {_images(allowed.most)}"
            task = "image_to_video" if family.kind == "video" else "image_edit"
            raise ConfigError(
                f"{prompt.where}: has {_images(count)}, but {family.name} takes {takes} "
                f"({' or '.join(family.tasks)}); leave some out{other('model.family' + _known(task, family))}"
            )


def _images(count: int) -> str:
    return f"{count or 'no'} source image{'' if count == 1 else 's'}"


def _known(task: str, given: Family) -> str:
    """The other families with this task."""
    names = [family.name for family in FAMILIES.values() if task in family.tasks and family.name != given.name]
    return f": {', '.join(names)}" if names else ""
