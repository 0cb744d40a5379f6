"""Full fine-tuning holds as many copies of the weights during a pass as the memory plan accounts for."""

from __future__ import annotations

import pytest
import torch
from scored_groups import Rollout, scored_groups, toy, trainer_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from digenrl.algorithms.registry import build_algorithm
from digenrl.config.recipes.training import EmaSettings, TrainerSettings

PACK_SIZE = "digenrl.training.packing.pack_size"
KINDS = {
    "one group an update": ("flow_grpo", {"updates_per_batch": 4}),
    "several groups": ("mix_grpo", {"updates_per_batch": 2}),
    "a frozen reference": ("flow_grpo", {"updates_per_batch": 2, "kl_weight": 0.1}),
    "a part that waits for the batch": ("flow_grpo", {"updates_per_batch": 1, "kl_weight": 0.1}),
    "an old policy": ("diffusion_nft", {"updates_per_batch": 2, "kl_weight": 0.1}),
}


class Census(TorchDispatchMode):
    """Measures live tensors of a shape, or flat, that were allocated inside; views of others do not count."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self._shapes = (shape, (shape.numel(),))
        self._kept: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, (list, tuple)) else (result,):
            if not isinstance(each, torch.Tensor) or each.shape not in self._shapes:
                continue
            if each.untyped_storage().nbytes() == each.nbytes:
                reference = StorageWeakRef(each.untyped_storage())
                self._kept[reference.cdata] = (reference, each.nbytes)
        return result

    def bytes(self) -> int:
        """The size of all that live."""
        self._kept = {key: kept for key, kept in self._kept.items() if not kept[0].expired()}
        return sum(size for _, size in self._kept.values())


def watch(model, observe):
    """Calls `observe` before every forward."""
    velocity = model.velocity

    def observed(*arguments):
        observe()
        return velocity(*arguments)

    model.velocity = observed


@pytest.mark.parametrize(("number", "kind"), list(enumerate(KINDS)))
def test_a_pass_shares_memory_with_exactly_what_the_plan_accounts_for(number, kind):
    late = number % 2 == 1  # held for a later update
    name, options = KINDS[kind]
    old_log_probs = "recomputed" if late and name != "diffusion_nft" else "rollout"
    settings = TrainerSettings(pack_size=2, ema=EmaSettings(), old_log_probs=old_log_probs)
    seen, planned = seen_and_planned_bytes(name, options, settings, late)
    assert max(seen) == planned, "an overestimate would waste memory"


@pytest.mark.parametrize("job_samples", [2, 4])
@pytest.mark.parametrize("kind", ["several groups", "a part that waits for the batch"])
def test_the_plan_accounts_for_the_eight_bytes_of_shared_sums_and_for_several_jobs_of_a_group(
    kind, job_samples, monkeypatch
):
    monkeypatch.setattr("digenrl.training.gradients.joined.MOST_VALUES", 1)  # the census goes by shapes
    name, options = KINDS[kind]
    settings = TrainerSettings(pack_size=2, ema=EmaSettings(), job_samples=job_samples)
    options = options | {"updates_per_batch": 1}
    seen, planned = seen_and_planned_bytes(name, options, settings, shares_gradients=True)
    assert max(seen) == planned, "an overestimate would waste memory"


def seen_and_planned_bytes(name, options, settings, late=False, **more):
    """The memory of tensors shaped like the largest parameter before each forward, and what is planned for it."""
    algorithm, model = build_algorithm(name, options), toy(torch.float32, lora=False)
    steps = 5 if name == "mix_grpo" else 3  # its window has four
    rollouts = [Rollout(groups=4, steps=steps, step=number, version=number) for number in range(2)]
    batches = [scored_groups(model, algorithm, rollout) for rollout in rollouts]
    seen: list[int] = []
    parameters = list(model.transformer.parameters())
    largest = max((each.shape for each in parameters), key=torch.Size.numel)
    with Census(largest) as census:
        trainer = trainer_of(model, algorithm, batches[0], settings, **more)
        to_come = trainer._bytes_to_come() + trainer._passes.gradient_bytes()
        weights = to_come // sum(each.nbytes for each in parameters)
        planned = census.bytes() + weights * sum(p.nbytes for p in parameters if p.shape == largest)
        watch(model, lambda: seen.append(census.bytes()))
        for groups in batches:
            for group in groups:
                trainer.add_group(group)
                while not late and trainer.can_commit():
                    trainer.commit()
            while trainer.can_commit():
                trainer.commit()
    assert trainer.batch == 2
    return seen, planned


def test_allocator_retries_are_reported_per_update(monkeypatch):
    algorithm, model = build_algorithm("flow_grpo", {"updates_per_batch": 1}), toy()
    groups = scored_groups(model, algorithm, Rollout())
    trainer = trainer_of(model, algorithm, groups, TrainerSettings(pack_size=2))
    reported = []
    monkeypatch.setattr(f"{PACK_SIZE}.allocation_retries", lambda device: 1)
    trainer.calibrate(groups[0])
    for step, retries in enumerate((3, 3, 8, None)):
        monkeypatch.setattr(f"{PACK_SIZE}.allocation_retries", lambda device, now=retries: now)
        for group in scored_groups(model, algorithm, Rollout(step=step, version=step)):
            trainer.add_group(group)
        reported.append(trainer.commit().memory_retries)
    assert reported == [2, 0, 5, None]
