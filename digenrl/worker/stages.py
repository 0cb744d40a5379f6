"""The data's way, in order: prompt, plan, generate, reward, advantage, train, publish. Each stage calls one room.

Who runs a stage, where and when is not known here; see `digenrl.workers` and `digenrl.scheduling`.
Shape legend: B = samples, F = frames, C = 3 colours, H and W = height and width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

from torch import Tensor

from digenrl.algorithms.contract import Algorithm
from digenrl.config.recipe import Recipe
from digenrl.generation.noise import normal_noise
from digenrl.generation.rollout import GeneratedSlice, decode_slice, generate_pixels, generate_slice
from digenrl.generation.row_limits import RowLimits
from digenrl.generation.windows import EulerOnly, Window, plan_rollouts
from digenrl.models.contract import Conditioning, DiffusionModel, SampleSize, Schedule
from digenrl.models.family import Family
from digenrl.models.pairs import ScoredGroup
from digenrl.models.trajectory import RolloutPlan, StepNoise, Trajectory
from digenrl.prompts.sampler import PromptSampler
from digenrl.prompts.sources import Prompt
from digenrl.records import SampleId, Slice
from digenrl.rewards.contract import Reward, RewardBatch
from digenrl.training.open_batch import BatchShape
from digenrl.training.ranks.rank_group import RankGroup
from digenrl.training.trainer import Trainer

HELD_OUT_STEP = 0  # held-out samples have ids of their own seed: always the same initial noise


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What a recipe means to the rooms; `digenrl.worker.blueprint` reads it."""

    recipe: Recipe
    family: Family
    algorithm: Algorithm
    window: Window
    noise: StepNoise
    size: SampleSize
    guidance: float

    @property
    def shape(self) -> BatchShape:
        """P groups of G samples."""
        return BatchShape(self.recipe.batch.prompts, self.recipe.batch.samples_per_prompt)

    def schedule(self, model: DiffusionModel, steps: int) -> Schedule:
        """The model's own noise levels, or those of the recipe's shift."""
        shift = self.recipe.sample.shift
        return model.schedule(steps, self.size) if shift is None else model.shifted_schedule(steps, shift)


def prompt(sampler: PromptSampler, step: int, group: int) -> Prompt:
    """1. The prompt of a group."""
    return sampler.prompt_for(step, group)


def plan(blueprint: Blueprint, model: DiffusionModel, samples: Sequence[SampleId]) -> tuple[RolloutPlan, ...]:
    """2. Which steps of each sample are stochastic, and which are kept. Every worker comes to the same."""
    return plan_rollouts(
        blueprint.window,
        samples,
        schedule=blueprint.schedule(model, blueprint.recipe.sample.denoising_steps),
        size=blueprint.size,
        noise=blueprint.noise,
        guidance=blueprint.guidance,
        run_seed=blueprint.recipe.seed,
    )


def generate(
    blueprint: Blueprint,
    model: DiffusionModel,
    conditioning: Conditioning,
    piece: Slice,
    version: int,
    limits: RowLimits | None = None,
) -> tuple[GeneratedSlice, Tensor]:
    """3. The trajectories of a slice, and its pixels_BFCHW. What fits in memory at once is kept in the limits."""
    limits = limits or row_limits(blueprint)
    made = generate_slice(
        model,
        conditioning,
        plan(blueprint, model, tuple(piece.samples())),
        piece,
        run_seed=blueprint.recipe.seed,
        version=version,
        needs=blueprint.algorithm.needs,
        same_noise_in_group=blueprint.algorithm.same_initial_noise,
        autocast=blueprint.recipe.training.autocast,
        limit=limits.denoising,
    )
    return made, decode_slice(model, made, limits.decoding)


def reward(
    scorer: Reward, pixels_BFCHW: Tensor, texts: Sequence[str], metadata: Sequence[Mapping[str, object]]
) -> RewardBatch:
    """4. One finite number per sample, or an error."""
    return scorer.score(pixels_BFCHW, texts, metadata)


def advantage(
    blueprint: Blueprint,
    conditioning: Conditioning,
    trajectories: Sequence[Trajectory],
    rewards: Sequence[float],
) -> ScoredGroup:
    """5. A whole group with its rewards; the algorithm turns them into advantages where it trains on them."""
    if blueprint.recipe.shuffled_rewards:
        rewards = shuffled(rewards, blueprint.recipe.seed, trajectories[0].sample)
    return ScoredGroup(conditioning, tuple(trajectories), tuple(rewards))


def train(trainer: Trainer, group: ScoredGroup, place: int) -> None:
    """6. The group's gradient joins that of its update."""
    trainer.add_group(group, place)


def publish(trainer: Trainer) -> dict[str, Tensor]:
    """7. The weights that the next batch is generated with, by name."""
    return trainer.published()


def make_trainer(
    blueprint: Blueprint, model: DiffusionModel, *, helps: bool, ranks: RankGroup | None = None
) -> Trainer:
    """The trainer of a recipe, one of several `ranks` or alone.

    One that also generates keeps the last version, and may leave the card to generation meanwhile.
    """
    settings = blueprint.recipe.training
    if not blueprint.recipe.techniques.tsp:
        settings = settings.model_copy(update={"pack_size": 1})
    return Trainer(
        model,
        blueprint.algorithm,
        settings,
        blueprint.shape,
        draw_noise=partial(normal_noise, blueprint.recipe.seed),
        ranks=ranks,
        helps=helps,
    )


def row_limits(blueprint: Blueprint) -> RowLimits:
    """What a worker knows of its memory when it begins: what the recipe says."""
    return RowLimits.decoding_at_most(blueprint.recipe.sample.decode_rows)


def held_out_pixels(
    blueprint: Blueprint,
    model: DiffusionModel,
    conditioning: Conditioning,
    first: int,
    limits: RowLimits | None = None,
) -> Tensor:
    """Held-out samples, pixels_BFCHW: one row of conditioning each, Euler steps, noise by their place alone."""
    evaluation = blueprint.recipe.evaluation
    assert evaluation is not None, "a recipe without evaluation has no held-out samples"
    limits = limits or row_limits(blueprint)
    samples = [SampleId(HELD_OUT_STEP, first + row, 0) for row in range(len(conditioning))]
    plans = plan_rollouts(
        EulerOnly(),
        samples,
        schedule=blueprint.schedule(model, evaluation.denoising_steps),
        size=blueprint.size,
        noise=blueprint.noise,
        guidance=blueprint.guidance if evaluation.guidance is None else evaluation.guidance,
        run_seed=evaluation.seed,
    )
    return generate_pixels(
        model,
        conditioning,
        plans,
        samples,
        run_seed=evaluation.seed,
        autocast=blueprint.recipe.training.autocast,
        limit=limits.held_out,
        decoding=limits.decoding,
    )


def shuffled(rewards: Sequence[float], seed: int, sample: SampleId) -> tuple[float, ...]:
    """The rewards of a group in an order that has nothing to do with its samples, the same every time."""
    key = f"{seed}/{sample.step}/{sample.group}/shuffled rewards"
    order = sorted(range(len(rewards)), key=lambda index: blake2b(f"{key}/{index}".encode()).digest())
    return tuple(rewards[index] for index in order)
