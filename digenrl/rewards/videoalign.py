"""VideoAlign's VideoReward: visual quality, motion quality and text alignment by Qwen2-VL with a linear head.

After https://github.com/KwaiVGI/VideoAlign (inference.py, trainer.py, vision_process.py): the prompt has a special
token for each quality, and the head is read there. Token positions are sequential, not Qwen2-VL's own for images:
the authors' forward passes none. The prompt is read from the authors' prompt_template.py, which is not run.

Shape legend: F = frames, C = 3 colors, H, W = height and width, T = tokens, D = width of the model.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from transformers import AutoTokenizer, Qwen2VLForConditionalGeneration

from digenrl.config.reading import ConfigError
from digenrl.config.rewards.models import VideoAlignSettings
from digenrl.rewards.contract import Metadata, Reward, RewardBatch, as_uint8
from digenrl.rewards.parts.videoalign_weights import load_checkpoint
from digenrl.rewards.parts.weights import load_pretrained, load_whole_model, pick_device

QUALITIES = ("VQ", "MQ", "TA")
TOKENS = tuple(f"<|{quality}_reward|>" for quality in QUALITIES)
VIDEO_TOKEN = "<|video_pad|>"
PROMPT = "DETAILED_PROMPT_WITH_SPECIAL_TOKEN"  # its name in prompt_template.py
COLOR_MEAN, COLOR_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
LEAST_PIXELS = 128 * 28 * 28  # of a frame
LEAST_FRAMES, MOST_FRAMES = 4, 768


class VideoAlignReward(Reward):
    """The weighted sum of the three qualities, each normalized by the published mean and std."""

    def __init__(self, settings: VideoAlignSettings) -> None:
        super().__init__(settings.shown_as)
        self.settings, self.prompt = settings, read_prompt(Path(settings.prompt).expanduser())
        self.published = read_config(Path(settings.checkpoint).expanduser() / "model_config.json")
        self.device, dtype = pick_device(settings.device), getattr(torch, settings.dtype)
        self._tokenizer = load_pretrained(AutoTokenizer.from_pretrained, settings.model)
        self._tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)})
        model = load_whole_model(Qwen2VLForConditionalGeneration.from_pretrained, settings.model, dtype=dtype)
        model.resize_token_embeddings(len(self._tokenizer))
        head = nn.Linear(model.config.text_config.hidden_size, len(QUALITIES), bias=False).to(dtype)
        load_checkpoint(model, head, Path(settings.checkpoint).expanduser(), self.published["peft_lora_config"])
        self.model = model.model.to(self.device).eval().requires_grad_(False)
        self.head = head.to(self.device).requires_grad_(False)
        self._special = torch.tensor(self._tokenizer.convert_tokens_to_ids(list(TOKENS)), device=self.device)

    @torch.inference_mode()
    def _score(self, pixels_BFCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> RewardBatch:
        rows = [self._qualities(as_uint8(one), prompt) for one, prompt in zip(pixels_BFCHW, prompts, strict=True)]
        weights = (self.settings.vq, self.settings.mq, self.settings.ta)
        values = tuple(math.fsum(weight * one for weight, one in zip(weights, row, strict=True)) for row in rows)
        return RewardBatch(values, {name: tuple(row[at] for row in rows) for at, name in enumerate(QUALITIES)})

    def _qualities(self, frames_FCHW: Tensor, prompt: str) -> list[float]:
        """The normalized qualities of one video."""
        data = self.published["data_config"]
        chosen = frames_FCHW[frame_indices(len(frames_FCHW), self.settings.frames_per_s, data["fps"])]
        patches, grid = patched(resized(chosen, data["max_frame_pixels"]), self.model.config.vision_config)
        ids_T = self._tokens(
            prompt, video_tokens=len(patches) // self.model.config.vision_config.spatial_merge_size**2
        )
        positions = torch.arange(len(ids_T), device=self.device).expand(3, 1, -1)
        hidden_TD = self.model(
            input_ids=ids_T[None],
            attention_mask=torch.ones_like(ids_T)[None],
            position_ids=positions,
            pixel_values_videos=patches.to(self.device, self.model.dtype),
            video_grid_thw=torch.tensor([grid], device=self.device),
        ).last_hidden_state[0]
        at_tokens = self.head(hidden_TD[torch.isin(ids_T, self._special)]).diagonal().float().tolist()
        normal = self.published["inference_config"]
        return [
            (raw - normal[f"{name}_mean"]) / normal[f"{name}_std"]
            for raw, name in zip(at_tokens, QUALITIES, strict=True)
        ]

    def _tokens(self, prompt: str, video_tokens: int) -> Tensor:
        question = {"type": "text", "text": self.prompt.format(text_prompt=prompt)}
        messages = [{"role": "user", "content": [{"type": "video"}, question]}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        before, found, after = text.partition(VIDEO_TOKEN)
        if not found:
            raise ConfigError(f"{self.settings.model}: its chat template has no {VIDEO_TOKEN}; is it Qwen2-VL?")
        ids = self._tokenizer(before + VIDEO_TOKEN * video_tokens + after)["input_ids"]
        return torch.tensor(ids, device=self.device)


def frame_indices(total: int, frames_per_s: float, wanted_per_s: float) -> list[int]:
    """Evenly spaced frames, an even number of them.

    >>> frame_indices(33, 16, 2), frame_indices(5, 16, 2)
    ([0, 11, 21, 32], [0, 1, 3, 4])
    """
    if total < 2:
        raise ValueError(f"a video of at least 2 frames is needed, got {total}")
    most = min(MOST_FRAMES, total) // 2 * 2
    wanted = min(max(total / frames_per_s * wanted_per_s, LEAST_FRAMES), most)
    count = min(round(wanted / 2) * 2, total)
    return [int(at) for at in torch.linspace(0, total - 1, count).round()]


def resized(frames_FCHW: Tensor, most_pixels: int) -> Tensor:
    """uint8 frames, scaled to multiples of 28 between the least and the most pixels; fp32, from 0 to 255."""
    height, width = frames_FCHW.shape[2:]
    size = [max(28, round(side / 28) * 28) for side in (height, width)]
    if size[0] * size[1] > most_pixels:
        shrink = math.sqrt(height * width / most_pixels)
        size = [math.floor(side / shrink / 28) * 28 for side in (height, width)]
    elif size[0] * size[1] < LEAST_PIXELS:
        grow = math.sqrt(LEAST_PIXELS / (height * width))
        size = [math.ceil(side * grow / 28) * 28 for side in (height, width)]
    scaled = interpolate(frames_FCHW.float(), size=size, mode="bicubic", antialias=True, align_corners=False)
    return scaled.clamp(0, 255).round()


def patched(frames_FCHW: Tensor, config: Any) -> tuple[Tensor, list[int]]:
    """Rows of patches in the order of Qwen2-VL, and their grid: pairs of frames, rows, columns."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (COLOR_MEAN, COLOR_STD))
    normal = (frames_FCHW / 255 - mean) / std
    side, merge, depth = config.patch_size, config.spatial_merge_size, config.temporal_patch_size
    count, colors, height, width = normal.shape
    grid = [count // depth, height // side, width // side]
    cut = normal.reshape(grid[0], depth, colors, grid[1] // merge, merge, side, grid[2] // merge, merge, side)
    return cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(math.prod(grid), -1), grid


def read_prompt(path: Path) -> str:
    """The prompt in the authors' prompt_template.py; the file is parsed, not run."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; expected prompt_template.py of VideoAlign") from None
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == PROMPT:
            text = ast.literal_eval(node.value)
            if isinstance(text, str) and all(token in text for token in TOKENS) and "{text_prompt}" in text:
                return text
    raise ConfigError(
        f"{path}: has no {PROMPT} with {', '.join(TOKENS)}; expected prompt_template.py of VideoAlign"
    )


def read_config(path: Path) -> dict[str, Any]:
    """The published model_config.json; raises ConfigError if it is of another kind of model."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kinds = (content["model_config"]["output_dim"], content["model_config"]["use_special_tokens"])
        needed = [content["data_config"][key] for key in ("fps", "max_frame_pixels")]
        needed += [content["inference_config"][f"{name}_{what}"] for name in QUALITIES for what in ("mean", "std")]
        needed += [content["peft_lora_config"][key] for key in ("lora_r", "lora_alpha")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not VideoReward's model_config.json: {error!r}") from None
    if kinds != (len(QUALITIES), True):
        raise ConfigError(
            f"{path}: expected 3 outputs at special tokens, got output_dim, use_special_tokens = {kinds}"
        )
    return dict(content)


build = VideoAlignReward
