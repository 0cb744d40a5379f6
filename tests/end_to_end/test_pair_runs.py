"""Runs that train on pairs of images in a file: with processes and without, with several ranks, resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from live_runs import TINY, LiveRuns, lines_of, metric, trained, weights
from PIL import Image
from source_pictures import picture

from digenrl.run_folder.folder import RunFolder, Status
from digenrl.testing.tiny_models import make_tiny_pipeline

PAIRS = {
    **TINY,
    "prompts": {"path": "noisy.jsonl", "pair_columns": ["chosen", "rejected"]},
    "rewards": "preference",
    "sample": {"height": 16, "width": 16, "denoising_steps": 3},  # one is trained: a term for two samples
    "batch": {"prompts": 2, "samples_per_prompt": 2, "slice": 1},
    "algorithm": {"name": "flow_dpo", "options": {"levels": "random", "trained_fraction": 0.5}},
    "steps": 2,
    "checkpoint": {"every": 1, "keep": 3},
}


def noisy(index: int, chosen: bool) -> Image.Image:
    return picture(index, *((16, 16) if chosen else (24, 24)))


def plain(index: int, chosen: bool) -> Image.Image:
    return Image.new("RGB", (16, 16), (240, 240, 240 - index) if chosen else (20, 20, 20 + index))


class PairRuns(LiveRuns):
    def __init__(self, root: Path) -> None:
        self.root, self._finished, self._count = root, {}, 0
        make_tiny_pipeline("sd3", root / "model")
        for kind, image_of in (("noisy", noisy), ("plain", plain)):
            lines = []
            for index in range(3):
                images = {column: f"{kind}-{column}-{index}.png" for column in ("chosen", "rejected")}
                for column, name in images.items():
                    image_of(index, column == "chosen").save(root / name)
                lines.append(json.dumps({"prompt": f"a cat {index}", **images}))
            (root / f"{kind}.jsonl").write_text("\n".join(lines) + "\n")
        (root / "tiny.yaml").write_text(yaml.safe_dump(PAIRS))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> PairRuns:
    return PairRuns(tmp_path_factory.mktemp("pairs"))


def test_processes_and_one_process_train_on_the_same_pairs(live: PairRuns) -> None:
    apart, together = live.finished(), live.finished("mode=colocated")
    assert trained(apart, 2)["weights.safetensors"] == trained(together, 2)["weights.safetensors"]
    for line in lines_of(apart.metrics):
        assert line["reward_mean"] == 0.5 and line["zero_spread_groups"] == 0 and 0 <= line["preferred"] <= 1


def test_two_ranks_give_the_weights_of_one(live: PairRuns) -> None:
    one, two = weights(live.finished(), 2), weights(live.finished("lanes.ranks=2"), 2)
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-6


def test_a_resumed_run_continues_with_the_next_pairs(live: PairRuns, tmp_path: Path) -> None:
    whole, first = live.finished("mode=colocated"), live.finished("mode=colocated", "steps=1")
    folder = RunFolder.open(Path(shutil.copytree(first.path, tmp_path / "run")))
    assert live.resume(folder.path, "steps=2") is Status.FINISHED
    assert trained(folder, 2) == trained(whole, 2)


def test_a_swapped_pair_trains_in_the_opposite_direction(live: PairRuns) -> None:
    """The second matrix of an adapter starts at 0, where the policy is the reference."""
    one_step = ("mode=colocated", "steps=1")
    swapped_columns = "prompts.pair_columns=[rejected, chosen]"
    ours, swapped = (weights(live.finished(*one_step, *more), 1) for more in ((), (swapped_columns,)))
    one, other = (
        torch.cat([value.flatten() for name, value in moved.items() if "lora_B" in name])
        for moved in (ours, swapped)
    )
    assert torch.cosine_similarity(one, other, dim=0) < -0.9


def test_the_policy_learns_to_prefer_the_chosen_images(live: PairRuns) -> None:
    options = (f"prompts.path={live.root / 'plain.jsonl'}", "steps=15", "training.learning_rate=3e-3")
    run = live.finished("mode=colocated", *options)
    preferred = metric(run, "preferred")
    assert preferred[0] == 0, "at first, the policy is the reference"
    assert sum(preferred[-5:]) / 5 >= 0.9
