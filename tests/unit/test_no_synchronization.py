"""Neither generating a slice nor training on a group synchronizes with the GPU.

Here it is about rollouts and the trainer; the contract of families says the same of the forwards of each.
"""

from __future__ import annotations

import pytest
from host_visits import HostVisits, without_autocast
from scored_groups import Rollout, lively, scored_groups, trainer_of, trajectories_of
from source_pictures import encoded
from tiny_pipelines import tiny_model

from digenrl.config.recipes.training import TrainerSettings
from digenrl.models.adapters.lora import add_lora
from digenrl.models.contract import DiffusionModel
from digenrl.models.registry import FAMILIES
from digenrl.models.trajectory import ScoredGroup
from digenrl.testing.tiny_models import tiny_size

REWARDS = (0.0, 1.0, 5.0, 2.0)
FAMILY_KINDS = ("sd3", "flux", "sdxl", "wan")  # with negative prompts, without, a UNet and videos
ALGORITHM_KINDS = ("flow_grpo", "dance_grpo", "diffusion_nft", "flow_dpo")
CASES = [*(("sd3", name) for name in ALGORITHM_KINDS), *((family, "flow_grpo") for family in FAMILY_KINDS[1:])]


def adapted(family: str) -> DiffusionModel:
    model = tiny_model(family)
    add_lora(model, rank=2, alpha=4, seed=0)
    return model


@pytest.mark.parametrize(("family", "algorithm_name"), CASES)
def test_a_group_is_trained_without_synchronizing(
    family: str, algorithm_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_autocast(monkeypatch)
    model, algorithm = adapted(family), lively(algorithm_name)
    rollout = Rollout(groups=2, steps=3, size=tiny_size(family))
    generated = scored_groups(model, algorithm, rollout, rewards=[REWARDS] * 2)
    groups = [ScoredGroup(model.compact(g.conditioning).to("meta"), g.trajectories, g.rewards) for g in generated]
    model.transformer.to("meta")
    settings = TrainerSettings(pack_size=32, gradient_checkpointing=False, old_log_probs="recomputed")
    trainer = trainer_of(model, algorithm, groups, settings)
    trainer.add_group(groups[0])
    with HostVisits() as visits:
        trainer.add_group(groups[1])
    assert not visits.found, visits.found[0]


@pytest.mark.parametrize("family", FAMILY_KINDS)
def test_a_slice_is_denoised_without_synchronizing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_autocast(monkeypatch)
    model, algorithm = adapted(family), lively("flow_grpo")
    rollout = Rollout(steps=2, size=tiny_size(family), guidance=FAMILIES[family].default_guidance)
    prompts = [f"prompt {group}" for group in range(2)]
    rows = {each: model.compact(encoded(model, [each], rollout.size)).to("meta") for each in prompts}
    monkeypatch.setattr("scored_groups.encoded", lambda model, prompts, size: rows[prompts[0]])
    model.transformer.to("meta")
    trajectories_of(model, algorithm, rollout, group=0)
    with HostVisits() as visits:
        trajectories_of(model, algorithm, rollout, group=1)
    assert not visits.found, visits.found[0]
