"""One forward of a worker's model: its operations, and the attention kernels that could compute it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from digenrl.models.attention_trial import try_kernels
from digenrl.models.contract import Conditioning, DiffusionModel, SampleSize
from digenrl.models.forward_record import AttentionCall, ForwardRecord, record_forward
from digenrl.records import Kernel, PassKind
from digenrl.worker.blueprint import Blueprint

SMALLEST_FLOP = 1e11  # attention of a forward below this is not worth a trial


def sample_forward(blueprint: Blueprint, model: DiffusionModel, row: Conditioning) -> ForwardRecord:
    """The forward of one sample at the recipe's size, with all its guidance branches."""
    return _recorded(blueprint, model, row, blueprint.size, blueprint.guidance)


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
    calls: dict[PassKind, Sequence[AttentionCall]] = {
        kind: forward.attention for kind in passes if kind != "masked"
    }
    if "masked" in passes:
        # Two prompts of different length, as in a batch of held-out prompts.
        rows = Conditioning.joined([model.shortened_prompt(row), row])
        held_out = _recorded(blueprint, model, rows, blueprint.held_out_size, blueprint.held_out_guidance)
        masked = tuple(call for call in held_out.attention if call.mask is not None)
        if masked:
            calls["masked"] = masked
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
