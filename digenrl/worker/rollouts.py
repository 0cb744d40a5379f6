"""From a recipe's blueprint to rollouts: training slices and held-out samples.

Shape legend: B = samples, F = frames, C = 3 colors, H and W = height and width.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import groupby

import torch
from torch import Tensor

from digenrl.config.algorithms import TRAINING_LEVELS
from digenrl.config.recipes.windows import EulerOnly
from digenrl.generation.rollout import (
    GeneratedSlice,
    RolloutSettings,
    encode_slice,
    generate_pixels,
    generate_slice,
)
from digenrl.generation.row_limits import RowLimits
from digenrl.generation.windows import plan_rollouts
from digenrl.models.contract import Conditioning, DiffusionModel
from digenrl.models.trajectory import RolloutPlan
from digenrl.records import SampleId, Slice
from digenrl.worker.blueprint import Blueprint

HELD_OUT_NOISE_STEP = 0  # held-out samples use their own seed and always the same initial noise


def row_limits(blueprint: Blueprint, several_ranks: bool = False) -> RowLimits:
    """How many rows fit into memory at once, as far as the recipe says so. Out-of-memory errors lower them.

    Unless `several_ranks` denoise together.
    """
    return RowLimits.decoding_at_most(blueprint.recipe.sample.decode_rows, several_ranks)


def plan(blueprint: Blueprint, model: DiffusionModel, samples: Sequence[SampleId]) -> tuple[RolloutPlan, ...]:
    """Which steps of each sample are stochastic and which are kept. It depends on the samples' ids alone."""
    draws_levels = blueprint.algorithm.levels == "logit_normal"
    return plan_rollouts(
        blueprint.window,
        samples,
        schedule=blueprint.schedule(model),
        size=blueprint.size,
        noise=blueprint.noise,
        guidance=blueprint.guidance,
        run_seed=blueprint.recipe.seed,
        last_step_noise=blueprint.recipe.sample.last_step_noise,
        training_schedule=blueprint.schedule(model, TRAINING_LEVELS) if draws_levels else None,
    )


def roll_out(
    blueprint: Blueprint,
    model: DiffusionModel,
    conditioning: Conditioning,
    piece: Slice,
    version: int,
    limits: RowLimits | None = None,
) -> GeneratedSlice:
    """The trajectories of a slice. Its samples are not decoded."""
    limits = limits or row_limits(blueprint)
    return generate_slice(
        model,
        conditioning,
        plan(blueprint, model, tuple(piece.samples())),
        piece,
        RolloutSettings(
            run_seed=blueprint.recipe.seed,
            needs=blueprint.algorithm.needs,
            same_noise_in_group=blueprint.same_initial_noise,
            autocast=blueprint.recipe.training.autocast,
        ),
        version=version,
        limit=limits.denoising,
    )


def encode_images(
    blueprint: Blueprint, model: DiffusionModel, pixels_BFCHW: Tensor, piece: Slice, version: int
) -> GeneratedSlice:
    """Given images as the samples of a slice."""
    plans = plan(blueprint, model, tuple(piece.samples()))
    return encode_slice(model, pixels_BFCHW, plans, piece, version=version)


def held_out_pixels(
    blueprint: Blueprint,
    model: DiffusionModel,
    rows: Sequence[Conditioning],
    first: int,
    limits: RowLimits | None = None,
) -> Tensor:
    """Held-out samples as pixels_BFCHW, one per row: Euler steps, noise by index alone.

    Rows are generated together, unless their source images have different sizes.
    """
    pixels: list[Tensor] = []
    for _, alike in groupby(rows, key=Conditioning.shapes):
        conditioning = Conditioning.joined(list(alike))
        pixels.append(_held_out_batch(blueprint, model, conditioning, first, limits))
        first += len(conditioning)
    return torch.cat(pixels) if len(pixels) > 1 else pixels[0]


def _held_out_batch(
    blueprint: Blueprint, model: DiffusionModel, conditioning: Conditioning, first: int, limits: RowLimits | None
) -> Tensor:
    evaluation = blueprint.recipe.evaluation
    assert evaluation is not None, "a recipe without evaluation has no held-out samples"
    limits = limits or row_limits(blueprint)
    samples = [SampleId(HELD_OUT_NOISE_STEP, first + row, 0) for row in range(len(conditioning))]
    plans = plan_rollouts(
        EulerOnly(),
        samples,
        schedule=blueprint.held_out_schedule(model),
        size=blueprint.held_out_size,
        noise=blueprint.noise,
        guidance=blueprint.held_out_guidance,
        run_seed=evaluation.seed,
    )
    return generate_pixels(
        model,
        conditioning,
        plans,
        samples,
        RolloutSettings(evaluation.seed, autocast=blueprint.recipe.training.autocast),
        denoising=limits.held_out_denoising,
        decoding=limits.held_out_decoding,
    )


def shuffled(rewards: Sequence[float], seed: int, sample: SampleId) -> tuple[float, ...]:
    """The rewards of a group in an order unrelated to its samples, the same every time."""
    key = f"{seed}/{sample.step}/{sample.group}/shuffled rewards"
    order = sorted(range(len(rewards)), key=lambda index: blake2b(f"{key}/{index}".encode()).digest())
    return tuple(rewards[index] for index in order)
