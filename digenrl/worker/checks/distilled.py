"""Warns about settings that are known to destroy models which were distilled to a few steps."""

from __future__ import annotations

from digenrl.models.family import Distilled
from digenrl.worker.blueprint import Blueprint

LARGEST_LEVEL = 0.5  # of the noise; reports of destroyed samples begin at 0.7


def distilled_model(blueprint: Blueprint) -> Distilled | None:
    """The distilled model that the recipe trains, if the name of its source is one's."""
    source = blueprint.recipe.model.source.lower()
    found = (each for each in blueprint.family.distilled if each.name.lower() in source)
    return next(found, None)


def distilled_warnings(blueprint: Blueprint) -> list[str]:
    """One line for each setting of the recipe that does not suit a distilled model."""
    model, sample = distilled_model(blueprint), blueprint.recipe.sample
    if model is None:
        return []
    without = " without guidance" if model.guidance == 1 else ""
    renoised = blueprint.algorithm.settings.replays == "renoised"
    complaints = {
        f"sample.denoising_steps={sample.denoising_steps} is far from that; use about {model.steps}": (
            sample.denoising_steps > 2 * model.steps
        ),
        f"model.guidance={blueprint.guidance:g}; set it to 1": bool(without) and blueprint.guidance > 1,
        f"algorithm.name={blueprint.recipe.algorithm.name} trains with a flow-matching loss, which undoes the "
        "distillation and blurs samples; use flow_grpo": renoised,
        f"sample.noise.level={sample.noise.level:g} destroys its samples; use {LARGEST_LEVEL:g} or less": (
            not renoised and sample.noise.level > LARGEST_LEVEL
        ),
    }
    about = f"{model.name} was distilled to {model.steps} steps{without}"
    return [f"{about}: {complaint}" for complaint, applies in complaints.items() if applies]
