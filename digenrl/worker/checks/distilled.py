"""Warns about settings that are known to destroy models which were distilled to a few steps, or to no guidance."""

from __future__ import annotations

from digenrl.worker.blueprint import Blueprint

LARGEST_LEVEL = 0.5  # of the noise; reports of destroyed samples begin at 0.7


def distilled_warnings(blueprint: Blueprint) -> list[str]:
    """One line for each setting of the recipe that does not suit a distilled model."""
    model = blueprint.family.distilled_as(blueprint.recipe.model.source)
    if model is None:
        return []
    how = [
        *([] if model.steps is None else [f"to {model.steps} steps"]),
        *(["to no guidance"] if model.guidance == 1 else []),
    ]
    complaints = [] if model.steps is None else _about_steps(blueprint, model.steps)
    if model.guidance == 1 and blueprint.guidance > 1:
        complaints.append(f"model.guidance={blueprint.guidance:g}; set it to 1")
    return [f"{model.name} was distilled {' and '.join(how)}: {complaint}" for complaint in complaints]


def _about_steps(blueprint: Blueprint, steps: int) -> list[str]:
    sample, renoised = blueprint.recipe.sample, blueprint.algorithm.settings.replays == "renoised"
    complaints = {
        f"sample.denoising_steps={sample.denoising_steps} is far from that; use about {steps}": (
            sample.denoising_steps > 2 * steps
        ),
        f"algorithm.name={blueprint.recipe.algorithm.name} trains with a flow-matching loss, which undoes the "
        "distillation and blurs samples; use flow_grpo": renoised,
        f"sample.noise.level={sample.noise.level:g} destroys its samples; use {LARGEST_LEVEL:g} or less": (
            not renoised and sample.noise.level > LARGEST_LEVEL
        ),
    }
    return [complaint for complaint, applies in complaints.items() if applies]
