"""One forward of a worker's model: its operations, and the attention kernels that could compute it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from digenrl.models.contract import Conditioning, DiffusionModel, SampleSize
from digenrl.models.passes.attention_trial import try_kernels
from digenrl.models.passes.forward_record import AttentionCall, ForwardRecord, record_forward
from digenrl.records import Kernel, PassKind
from digenrl.worker.blueprint import Blueprint

NO_GUIDANCE = 1.0  # a loss against data is computed without classifier-free guidance
SMALLEST_FLOP = 1e11  # attention of a forward below this is not worth a trial


def sample_forward(blueprint: Blueprint, model: DiffusionModel, row: Conditioning) -> ForwardRecord:
    """The forward of one sample at the recipe's size, with all its guidance branches."""
    return _recorded(blueprint, model, row, blueprint.size, blueprint.guidance)


def train_flop(blueprint: Blueprint, model: DiffusionModel, row: Conditioning, sampled: ForwardRecord) -> float:
    """The operations of training one generated sample, without what checkpointing computes again.

    A replayed pair has a forward and the gradient of its activations, that of trained weights, and forwards of the
    reference and the old policy, as far as they are needed. The forward is the `sampled` one if its guidance is.
    """
    recipe, settings = blueprint.recipe, blueprint.algorithm.settings
    guidance = blueprint.guidance if blueprint.algorithm.replays == "steps" else NO_GUIDANCE
    if guidance != blueprint.guidance:
        sampled = _recorded(blueprint, model, row, blueprint.size, guidance)
    passes = 2 + (recipe.training.lora is None) + settings.needs.reference + settings.needs.old_policy
    steps = settings.trained_steps(recipe.sample.denoising_steps, blueprint.window)
    group = recipe.batch.samples_per_prompt
    return sampled.flop * passes * steps * settings.trained_samples(group) / group


def try_attention(
    blueprint: Blueprint,
    model: DiffusionModel,
    row: Conditioning,
    forward: ForwardRecord,
    passes: Sequence[PassKind],
) -> dict[PassKind, dict[Kernel, float]]:
    """The seconds of attention kernels by kind of pass; none on a CPU, and for models with little attention."""
    if model.device.type != "cuda" or sum(call.flop for call in forward.attention) < SMALLEST_FLOP:
        return {}
    plain = tuple(call for call in forward.attention if call.mask is None)  # a text encoder's part may have a mask
    calls: dict[PassKind, Sequence[AttentionCall]] = {kind: plain for kind in passes if kind != "masked"}
    if "masked" in passes:
        # Two prompts of different length, as in a batch of held-out prompts.
        rows = Conditioning.joined([model.shortened_prompt(row), row])
        held_out = _recorded(blueprint, model, rows, blueprint.held_out_size, blueprint.held_out_guidance)
        calls["masked"] = tuple(call for call in held_out.attention if call.mask is not None)
    torch.cuda.empty_cache()  # the trial is another process
    return try_kernels(calls, model.device)


def _recorded(
    blueprint: Blueprint, model: DiffusionModel, rows: Conditioning, size: SampleSize, guidance: float
) -> ForwardRecord:
    rows = model.compact(rows).to(model.device)
    noise_B = torch.randn(len(rows), *model.noise_shape(size), generator=torch.Generator().manual_seed(0))
    latents_BL = model.initial_latents(noise_B.to(model.device), size)
    timesteps_B = blueprint.schedule(model).timesteps[:1].repeat(len(rows)).to(model.device)
    autocast = blueprint.recipe.training.autocast == "bf16"

    def forward() -> None:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
            model.velocity(latents_BL, timesteps_B, rows, guidance, size)

    return record_forward(forward)
