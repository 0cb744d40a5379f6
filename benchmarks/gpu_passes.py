"""Forward passes of rollouts and replayed pairs of a loaded model: compiled and packed, and in eager mode."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from gpu_cases import Case, Loaded, window
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor

from digenrl.config.recipes.attention import Kernels
from digenrl.config.recipes.recipe import Recipe
from digenrl.driver.forwards import chosen_kernels, passes_to_try
from digenrl.models.adapters.lora import AdaptedLinear
from digenrl.models.contract import DiffusionModel
from digenrl.models.families.parts.flux_attention import FluxAttention
from digenrl.models.families.parts.qwen_attention import JointAttention, RealRotations
from digenrl.models.trajectory import ScoredGroup, Trajectory
from digenrl.models.transfers import synchronize
from digenrl.records import Kernel, PassKind, Slice
from digenrl.training.trainer import Trainer
from digenrl.worker.blueprint import make_trainer, read_blueprint
from digenrl.worker.forward_trial import sample_forward, try_attention
from digenrl.worker.rollouts import roll_out

SAMPLES = 4  # replayed, at most

PROCESSORS: dict[type, Any] = {
    JointAttention: QwenDoubleStreamAttnProcessor2_0,
    FluxAttention: FluxAttnProcessor,
}  # diffusers' own

# How a replay is done without this package: pairs in a forward, and whether all blocks are checkpointed.
EAGER_REPLAYS = {"1 checkpointed": (1, True), "4 checkpointed": (4, True), "4": (4, False)}


def seconds_of(work: Callable[[], object], device: torch.device, warm_ups: int, times: int) -> float:
    for _ in range(warm_ups):
        work()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    synchronize(device)
    return (time.perf_counter() - began) / times


@contextmanager
def eager_mode(model: DiffusionModel) -> Iterator[None]:
    """Inside, blocks run eagerly, with the layers of diffusers and peft. CUDA graphs are not used."""
    model.release_rollout_memory()
    with torch.compiler.set_stance("force_eager"), diffusers_layers(model):
        yield


@contextmanager
def diffusers_layers(model: DiffusionModel) -> Iterator[None]:
    """Inside, attention and adapters are those of diffusers and peft."""
    transformer = model.transformer
    attention = [each for each in transformer.modules() if type(getattr(each, "processor", None)) in PROCESSORS]
    adapted = [each for each in transformer.modules() if type(each) is AdaptedLinear]
    own = [each.processor for each in attention]
    rotations = getattr(transformer, "pos_embed", None)
    for each in attention:
        each.processor = PROCESSORS[type(each.processor)]()
    for each in adapted:
        each.__class__ = LoraLinear
    if isinstance(rotations, RealRotations):
        transformer.pos_embed = rotations.tables
    try:
        yield
    finally:
        if isinstance(rotations, RealRotations):
            transformer.pos_embed = rotations
        for each in adapted:
            each.__class__ = AdaptedLinear
        for each, processor in zip(attention, own, strict=True):
            each.processor = processor


def use_tried_kernels(loaded: Loaded) -> tuple[Kernels | None, Mapping[PassKind, Mapping[Kernel, float]]]:
    """Tries attention kernels as the calibration of a run does, and uses the chosen ones."""
    blueprint, model, row = loaded.blueprint, loaded.model, loaded.row
    passes = passes_to_try(loaded.recipe, {"generate", "train"}, model.device.type)
    trials = try_attention(blueprint, model, row, sample_forward(blueprint, model, row), passes)
    kernels = chosen_kernels(loaded.recipe, [trials])
    if kernels is not None:
        model.use_attention(kernels)
    return kernels, {kind: {**times} for kind, times in trials.items()}


def forward_of(loaded: Loaded, rows: int, *, rollout: bool = True) -> Callable[[], Tensor]:
    """A denoising step of that many samples, as in a rollout, or as in a replay but without gradient."""
    model, blueprint = loaded.model, loaded.blueprint
    noise_B = torch.randn(rows, *model.noise_shape(blueprint.size), device=model.device)
    latents_BL = model.initial_latents(noise_B, blueprint.size)
    timesteps_B = blueprint.schedule(model).timesteps[:1].repeat(rows).to(model.device)
    texts, velocity = loaded.row.repeated(rows), model.rollout_velocity if rollout else model.velocity

    @torch.no_grad()
    def forward() -> Tensor:
        return velocity(latents_BL, timesteps_B, texts, blueprint.guidance, blueprint.size)

    return forward


def forward_seconds(loaded: Loaded, rows: int) -> float:
    """Seconds of a compiled denoising step."""
    work = forward_of(loaded, rows)
    assert torch.isfinite(work()).all(), "the random weights overflow"
    return seconds_of(work, loaded.model.device, warm_ups=3, times=_repeats(loaded))


def eager_forward_seconds(loaded: Loaded, rows: int) -> float:
    with eager_mode(loaded.model):
        work = forward_of(loaded, rows, rollout=False)
        return seconds_of(work, loaded.model.device, warm_ups=1, times=max(1, _repeats(loaded) // 4))


def _repeats(loaded: Loaded) -> int:
    return 10 if loaded.model.device.type == "cuda" and loaded.blueprint.size.frames == 1 else 2


def replay_of(loaded: Loaded, case: Case) -> tuple[Trainer, Callable[[], float]]:
    """A trainer with the recipe's packing, and the replay of a few samples, which returns its share of a group."""
    samples = min(SAMPLES, case.group)
    at_once = max(size for size in case.slices if size <= samples)
    trajectories: list[Trajectory] = []
    for first in range(0, samples, at_once):
        piece = Slice(0, 0, first, at_once)
        trajectories += roll_out(loaded.blueprint, loaded.model, loaded.row, piece, 0).trajectories
    loaded.model.release_rollout_memory()
    group = ScoredGroup(loaded.row, tuple(trajectories[:samples]), tuple(map(float, range(samples))))
    trainer = make_trainer(loaded.blueprint, loaded.model, helps=False)
    return trainer, lambda: trainer.calibrate(group)


def replay_seconds(loaded: Loaded, case: Case) -> tuple[float, int, int, int]:
    """Seconds of one compiled pair in the chosen pack, the pack size, and the number of checkpointed blocks.

    And how often torch's allocator had to return memory to the GPU and try again, which slows replays down.
    """
    trainer, replay = replay_of(loaded, case)
    share = replay()
    before = _allocation_retries(loaded.model.device)
    seconds = seconds_of(replay, loaded.model.device, warm_ups=1, times=2)
    retries = _allocation_retries(loaded.model.device) - before
    assert trainer.plan is not None, "a replay makes a plan"
    pairs = share * case.group * case.trained_steps
    return seconds / pairs, trainer.plan.pack_size, trainer.plan.checkpointed, retries


def _allocation_retries(device: torch.device) -> int:
    return torch.cuda.memory_stats(device)["num_alloc_retries"] if device.type == "cuda" else 0


def eager_replay_seconds(loaded: Loaded) -> dict[str, float | None]:
    """Seconds of one pair in eager mode, by kind; None if it does not fit in memory."""
    return {
        name: _eager_pair_seconds(loaded, pack, checkpointed)
        for name, (pack, checkpointed) in EAGER_REPLAYS.items()
    }


def _eager_pair_seconds(loaded: Loaded, pack: int, checkpointed: bool) -> float | None:
    """Samples with one trained step each, in packs of this size."""
    sample = loaded.recipe.sample.model_copy(update={"denoising_steps": 3, "window": window(1, 3)})
    recipe = packed(loaded.recipe, pack, checkpointed)
    training = recipe.training.model_copy(update={"autocast": "bf16"})  # the adapters are in fp32
    recipe = recipe.model_copy(update={"sample": sample, "training": training})
    recipe = recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"samples_per_prompt": SAMPLES})})
    blueprint, samples = read_blueprint(recipe), max(2, pack)
    with eager_mode(loaded.model):
        generated = roll_out(blueprint, loaded.model, loaded.row, Slice(0, 0, 0, samples), 0)
        group = ScoredGroup(loaded.row, generated.trajectories, tuple(map(float, range(samples))))
        trainer = make_trainer(blueprint, loaded.model, helps=False)
        try:
            seconds = seconds_of(lambda: trainer.calibrate(group), loaded.model.device, warm_ups=1, times=1)
        except torch.OutOfMemoryError:
            return None
    halved = trainer.plan is None or trainer.plan.pack_size < pack
    return None if halved else seconds / samples


def packed(recipe: Recipe, pack: int, checkpointed: bool) -> Recipe:
    """The recipe with packs of this size, and all blocks checkpointed or none."""
    training = recipe.training.model_copy(update={"pack_size": pack, "gradient_checkpointing": checkpointed})
    return recipe.model_copy(update={"training": training})
