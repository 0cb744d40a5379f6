"""A trainer in stages: the weights and metrics of one process, to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_processes import on_ranks
from staged_training import StagedCase, all_trained, trained

CASES = [
    StagedCase("flow_grpo", batches=2),
    StagedCase("grpo_guard", settings={"gradient_checkpointing": 1}),  # two parts of the gradient
    StagedCase("dance_grpo", {"updates_per_batch": 2}, {"old_log_probs": "recomputed", "pack_size": "auto"}),
    StagedCase("diffusion_nft"),  # forwards of three policies
]


@pytest.mark.parametrize("bounds", [(0, 2, 3), (0, 1, 2, 3)])
def test_stages_train_to_the_weights_and_metrics_of_one_process(bounds: tuple[int, ...], tmp_path: Path) -> None:
    cases = CASES if len(bounds) == 3 else CASES[1:2]
    stages = on_ranks(len(bounds) - 1, tmp_path, all_trained, cases, bounds)
    for index, case in enumerate(cases):
        expected, metrics = trained(None, case)
        for weights, theirs in (stage[index] for stage in stages):
            assert weights.keys() == expected.keys()
            assert theirs == metrics, case.algorithm
            for name, value in expected.items():
                assert torch.equal(weights[name], value), (case.algorithm, name)
