"""What a trainer of all weights holds beside a pass: as many copies of the weights as its plan leaves room for."""

from __future__ import annotations

import gc

import pytest
import torch
from scored_groups import Rollout, scored_groups, toy, trainer_of

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.training import EmaSettings, TrainerSettings

KINDS = {
    "one group an update": ("flow_grpo", {"updates_per_batch": 4}),
    "several groups": ("mix_grpo", {"updates_per_batch": 2}),
    "a frozen reference": ("flow_grpo", {"updates_per_batch": 2, "kl_weight": 0.1}),
    "a part that waits for the batch": ("flow_grpo", {"updates_per_batch": 1, "kl_weight": 0.1}),
    "an old policy": ("diffusion_nft", {"updates_per_batch": 2, "kl_weight": 0.1}),
}


def copies_held(parameter: torch.nn.Parameter) -> int:
    """Tensors in memory as large as the parameter, each once."""
    gc.collect()
    return len(
        {
            each.data_ptr()
            for each in gc.get_objects()
            if issubclass(type(each), torch.Tensor)
            and each.shape == parameter.shape
            and each.dtype == parameter.dtype
        }
    )


def watched(trainer, look):
    """Calls `look` whenever a pack is about to be run."""
    passes = trainer._passes
    run_pack = passes._run_pack

    def looking(*arguments, **named):
        look()
        return run_pack(*arguments, **named)

    passes._run_pack = looking


@pytest.mark.parametrize("late", [False, True], ids=["in time", "held for a later update"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_pass_finds_no_more_beside_it_than_the_plan_foresees(kind, late):
    name, options = KINDS[kind]
    algorithm, model = build_algorithm(name, options), toy(torch.float32, lora=False)
    settings = TrainerSettings(pack_size=2, ema=EmaSettings(), old_log_probs="recomputed" if late else "rollout")
    if name == "diffusion_nft":
        settings = settings.model_copy(update={"old_log_probs": "rollout"})
    batches = [scored_groups(model, algorithm, Rollout(groups=4, step=step, version=step)) for step in range(2)]
    before = sum(each.shape == largest(model).shape for each in model.transformer.parameters())
    elsewhere = copies_held(largest(model)) - before
    trainer = trainer_of(model, algorithm, batches[0], settings)
    parameter = largest(model)
    sums = trainer._passes.sums_bytes // sum(p.nbytes for p in trainer.policies.parameters.values())
    at_plan = copies_held(parameter) - elsewhere
    planned = at_plan + before * (trainer._bytes_to_come() // total(trainer) + sums)
    seen = []
    watched(trainer, lambda: seen.append(copies_held(parameter) - elsewhere))
    for groups in batches:
        for group in groups:
            trainer.add_group(group)
            while not late and trainer.can_commit():
                trainer.commit()
        while trainer.can_commit():
            trainer.commit()
    assert trainer.batch == 2
    assert max(seen) == planned, "less would be too much caution"


def test_the_allocators_retries_are_told_update_by_update(monkeypatch):
    algorithm, model = build_algorithm("flow_grpo", {"updates_per_batch": 1}), toy()
    groups = scored_groups(model, algorithm, Rollout())
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(pack_size=2))
    told = []
    for step, retries in enumerate((2, 2, 7, None)):
        monkeypatch.setattr("digenrl.training.trainer.allocation_retries", lambda device, now=retries: now)
        for group in scored_groups(model, algorithm, Rollout(step=step, version=step)):
            trainer.add_group(group)
        told.append(trainer.commit().memory_retries)
    assert told == [2, 0, 5, None]


def largest(model) -> torch.nn.Parameter:
    return max(model.transformer.parameters(), key=torch.Tensor.numel)


def total(trainer) -> int:
    return sum(p.nbytes for p in trainer.policies.parameters.values())
