"""VideoAlign's reward against the authors' forward pass, written out, on a tiny model with peft's adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_videoalign import NORMAL, TinyVideoAlign, save_videoalign
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from digenrl.config.reading import ConfigError
from digenrl.config.rewards.models import VideoAlignSettings
from digenrl.config.rewards.table import parse_reward
from digenrl.rewards.building import build_reward
from digenrl.rewards.contract import RewardError
from digenrl.rewards.videoalign import VideoAlignReward, frame_indices, patched, resized

LETTERS = {"rate": 4, "cat": 5, "dog": 6, "a": 7, "VQ": 8, "MQ": 9, "TA": 10}
START, END, VIDEO = 2, 3, 1


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyVideoAlign:
    return save_videoalign(tmp_path_factory.mktemp("videoalign"))


@pytest.fixture(scope="module")
def reward(tiny: TinyVideoAlign) -> VideoAlignReward:
    built = build_reward(parse_reward({**tiny.settings, "vq": 1.0, "mq": 2.0, "ta": 0.5}))
    assert isinstance(built, VideoAlignReward)
    return built


def videos(count: int = 1, frames: int = 5, height: int = 32, width: int = 48) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.rand(count, frames, 3, height, width, generator=generator) * 255).round() / 255


@torch.no_grad()
def qualities(tiny: TinyVideoAlign, video_FCHW: Tensor, word: str) -> list[float]:
    """The authors' forward: embeddings, video features in place of their tokens, no position ids, head, norm."""
    model = tiny.model.get_base_model().model
    chosen = (video_FCHW * 255).round().to(torch.uint8)[frame_indices(len(video_FCHW), 16, 2)]
    patches, grid = patched(resized(chosen, 200704), model.config.vision_config)
    ids = [START] + [VIDEO] * (len(patches) // 4)
    ids += [LETTERS[one] for one in ("rate", "VQ", "a", "MQ", "rate", word, "TA", "a")] + [END]
    embeds = model.get_input_embeddings()(torch.tensor([ids]))
    features = model.visual(patches, grid_thw=torch.tensor([grid])).pooler_output
    embeds[0, 1 : 1 + len(features)] = features
    positions = torch.arange(len(ids)).expand(3, 1, -1)
    hidden = model.language_model(inputs_embeds=embeds, position_ids=positions).last_hidden_state[0]
    rows = [ids.index(LETTERS[name]) for name in ("VQ", "MQ", "TA")]
    raw = [float(hidden[row] @ tiny.head_weight[at]) for at, row in enumerate(rows)]
    return [
        (one - NORMAL[f"{name}_mean"]) / NORMAL[f"{name}_std"]
        for one, name in zip(raw, ("VQ", "MQ", "TA"), strict=True)
    ]


def test_the_qualities_are_those_of_the_authors_forward_with_unmerged_adapters(
    tiny: TinyVideoAlign, reward: VideoAlignReward
) -> None:
    given = videos(2)
    batch = reward.score(given, ["cat", "dog"], [{}, {}])
    for row, word in enumerate(("cat", "dog")):
        expected = qualities(tiny, given[row], word)
        assert [batch.parts[name][row] for name in ("VQ", "MQ", "TA")] == pytest.approx(expected, abs=1e-4)
        assert batch.values[row] == pytest.approx(expected[0] + 2 * expected[1] + 0.5 * expected[2], abs=1e-3)
    assert abs(batch.parts["TA"][0] - batch.parts["TA"][1]) > 1e-3


def test_patches_are_in_the_order_of_the_models_own_processor(reward: VideoAlignReward) -> None:
    picture = resized((videos(1, 1)[0] * 255).to(torch.uint8), 200704)
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 28 * 28, "longest_edge": 2**24})
    theirs = processor(images=[picture[0].permute(1, 2, 0).to(torch.uint8).numpy()], return_tensors="pt")
    ours, grid = patched(picture.expand(2, -1, -1, -1), reward.model.config.vision_config)
    assert [grid] == theirs["image_grid_thw"].tolist()
    torch.testing.assert_close(ours, theirs["pixel_values"].float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("total", "per_s", "expected"),  # values of the authors' `smart_nframes` and torch.linspace
    [
        (33, 16, [0, 11, 21, 32]),
        (81, 16, [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]),
        (5, 16, [0, 1, 3, 4]),
        (3, 16, [0, 2]),
    ],
)
def test_two_frames_per_second_are_looked_at(total: int, per_s: float, expected: list[int]) -> None:
    assert frame_indices(total, per_s, 2.0) == expected


@pytest.mark.parametrize(  # values of the authors' `smart_resize` with 128 * 28 * 28 to 256 * 28 * 28 pixels
    ("size", "expected"), [((480, 832), (336, 588)), ((240, 416), (252, 420)), ((64, 64), (336, 336))]
)
def test_frames_are_scaled_to_the_published_number_of_pixels(
    size: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert tuple(resized(torch.zeros(1, 3, *size, dtype=torch.uint8), 200704).shape[2:]) == expected


def test_an_image_has_no_motion_to_score(reward: VideoAlignReward) -> None:
    with pytest.raises(RewardError, match="2 frames"):
        reward.score(videos(frames=1), ["cat"], [{}])


def test_what_is_not_the_published_checkpoint_is_refused(tiny: TinyVideoAlign, tmp_path: Path) -> None:
    other = tmp_path / "prompt_template.py"
    other.write_text("PROMPT = 'x'")
    with pytest.raises(ConfigError, match=r"prompt_template\.py.*VQ_reward"):
        VideoAlignReward(VideoAlignSettings(**{**tiny.settings, "prompt": str(other)}))
    (tmp_path / "model_config.json").write_text(json.dumps({"model_config": {}}))
    with pytest.raises(ConfigError, match=r"model_config\.json"):
        VideoAlignReward(VideoAlignSettings(**{**tiny.settings, "checkpoint": str(tmp_path)}))
