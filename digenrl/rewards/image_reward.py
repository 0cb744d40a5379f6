"""ImageReward: BLIP encodes the prompt with attention to the image, and a head scores the first token.

The published file has the authors' names for BLIP's weights. Sizes are derived from the weights and, for the rest,
from med_config.json; the modules are transformers' BLIP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer
from transformers.models.blip.configuration_blip import BlipTextConfig, BlipVisionConfig
from transformers.models.blip.modeling_blip import BlipVisionModel
from transformers.models.blip.modeling_blip_text import BlipTextModel

from digenrl.config.reading import ConfigError
from digenrl.config.rewards.models import ImageRewardSettings
from digenrl.rewards.contract import FrameReward, Metadata, RewardBatch, as_pil
from digenrl.rewards.parts.score_head import ScoreHead
from digenrl.rewards.parts.weights import (
    find_file,
    is_directory,
    load_into,
    load_pretrained,
    pick_device,
    read_state_dict,
)

CHECKPOINT = "ImageReward.pt"
TEXT_CONFIG = "med_config.json"
BERT_TOKENIZER = "google-bert/bert-base-uncased"
PROMPT_TOKENS = 35
RAW_MEAN, RAW_STD = 0.16717362830052426, 1.0333394966054072  # published; they give scores mean 0 and std 1
COLOR_MEAN, COLOR_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
VISION_HEAD_WIDTH = 64  # of both ViT-B and ViT-L
VISION_NAMES = (
    (r"^cls_token$", "embeddings.class_embedding"),
    (r"^pos_embed$", "embeddings.position_embedding"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^norm\.", "post_layernorm."),
    (r"^blocks\.(\d+)\.norm([12])\.", r"encoder.layers.\1.layer_norm\2."),
    (r"^blocks\.(\d+)\.attn\.proj\.", r"encoder.layers.\1.self_attn.projection."),
    (r"^blocks\.(\d+)\.attn\.", r"encoder.layers.\1.self_attn."),
    (r"^blocks\.(\d+)\.mlp\.", r"encoder.layers.\1.mlp."),
)


class ImageRewardScorer(FrameReward):
    """Human preference for an image given its prompt, with mean 0 and std 1."""

    def __init__(self, settings: ImageRewardSettings) -> None:
        super().__init__(settings.shown_as, settings.frame_stride)
        self.batch_size = settings.batch_size
        self.device = pick_device(settings.device)
        dtype = getattr(torch, settings.dtype)
        self._tokenizer = load_pretrained(AutoTokenizer.from_pretrained, _tokenizer_of(settings))
        source = find_file(settings.model, CHECKPOINT)
        text_settings = _read_text_config(find_file(settings.model, TEXT_CONFIG))
        state = read_state_dict(source)
        vision_state = {
            _vision_name(name): tensor for name, tensor in _below(state, "blip.visual_encoder.").items()
        }
        text_state = _below(state, "blip.text_encoder.")
        text_state.pop("embeddings.position_ids", None)  # a constant
        self.vision = _load_vision(vision_state, source).to(self.device, dtype).eval().requires_grad_(False)
        width = self.vision.config.hidden_size
        self.text = _load_text(text_state, text_settings, width, source).to(self.device, dtype)
        self.text.eval().requires_grad_(False)
        head_state = _below(state, "mlp.")
        self.head = ScoreHead.from_state(head_state, self.text.config.hidden_size, source).to(self.device)

    @torch.inference_mode()
    def score_frames(
        self, frames_NCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]
    ) -> RewardBatch:
        scores: list[float] = []
        for start in range(0, len(prompts), self.batch_size):
            rows = slice(start, start + self.batch_size)
            scores += self._scores(frames_NCHW[rows], prompts[rows]).tolist()
        return RewardBatch(tuple(scores))

    def _scores(self, frames_NCHW: Tensor, prompts: Sequence[str]) -> Tensor:
        pixels = preprocessed(frames_NCHW, self.vision.config.image_size).to(self.device, self.vision.dtype)
        image_NPD = self.vision(pixel_values=pixels).last_hidden_state
        tokens = self._tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=PROMPT_TOKENS, return_tensors="pt"
        ).to(self.device)
        seen_NTD = self.text(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            encoder_hidden_states=image_NPD,
            encoder_attention_mask=torch.ones(image_NPD.shape[:2], dtype=torch.long, device=self.device),
        ).last_hidden_state
        raw_N: Tensor = self.head(seen_NTD[:, 0].float())
        return (raw_N - RAW_MEAN) / RAW_STD


def preprocessed(frames_NCHW: Tensor, side: int) -> Tensor:
    """uint8 frames with the shorter side scaled to `side`, center-cropped, with CLIP's color normalization."""
    cut_NCHW = torch.stack([_square(image, side) for image in as_pil(frames_NCHW)])
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (COLOR_MEAN, COLOR_STD))
    return (cut_NCHW - mean) / std


def _square(image: Image.Image, side: int) -> Tensor:
    """The middle of an image, (3, side, side) in [0, 1]."""
    shorter = min(image.size)
    size = (int(side * image.width / shorter), int(side * image.height / shorter))
    left, top = (round((length - side) / 2) for length in size)
    cut = image.resize(size, Image.Resampling.BICUBIC).crop((left, top, left + side, top + side))
    return torch.from_numpy(numpy.array(cut)).permute(2, 0, 1).float() / 255


def _tokenizer_of(settings: ImageRewardSettings) -> str:
    if settings.tokenizer is not None:
        return settings.tokenizer
    if is_directory(settings.model):
        directory = Path(settings.model).expanduser()
        if any((directory / name).is_file() for name in ("tokenizer.json", "vocab.txt")):
            return settings.model
    return BERT_TOKENIZER


def _below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def _vision_name(name: str) -> str:
    for pattern, replacement in VISION_NAMES:
        changed, count = re.subn(pattern, replacement, name)
        if count:
            return changed
    return name


def _read_text_config(path: Path) -> dict[str, int]:
    """The sizes of the text half that its weights do not tell."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {key: int(content[key]) for key in ("num_attention_heads", "max_position_embeddings")}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not the config of ImageReward's text half: {error!r}") from None


def _load_vision(state: dict[str, Tensor], source: Path) -> BlipVisionModel:
    try:
        width, _, patch, _ = state["embeddings.patch_embedding.weight"].shape
        positions = state["embeddings.position_embedding"].shape[1]
        mlp_width = state["encoder.layers.0.mlp.fc1.weight"].shape[0]
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{source}: not ImageReward's weights: {error} is missing in its image half") from None
    config = BlipVisionConfig(
        hidden_size=width,
        intermediate_size=mlp_width,
        num_hidden_layers=_layers(state, "encoder.layers."),
        num_attention_heads=width // VISION_HEAD_WIDTH,
        image_size=patch * round((positions - 1) ** 0.5),
        patch_size=patch,
        layer_norm_eps=1e-6,  # as in BLIP's training; not transformers' default
    )
    model = BlipVisionModel(config)
    load_into(model, state, source)
    return model


def _load_text(
    state: dict[str, Tensor], settings: dict[str, int], image_width: int, source: Path
) -> BlipTextModel:
    try:
        words, width = state["embeddings.word_embeddings.weight"].shape
        mlp_width = state["encoder.layer.0.intermediate.dense.weight"].shape[0]
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{source}: not ImageReward's weights: {error} is missing in its text half") from None
    config = BlipTextConfig(
        vocab_size=words,
        hidden_size=width,
        encoder_hidden_size=image_width,
        intermediate_size=mlp_width,
        num_hidden_layers=_layers(state, "encoder.layer."),
        is_decoder=True,  # gives every layer its cross-attention; the mask stays bidirectional
        **settings,
    )
    model = BlipTextModel(config, add_pooling_layer=False)
    load_into(model, state, source)
    return model


def _layers(state: Mapping[str, Tensor], prefix: str) -> int:
    return 1 + max(int(name.removeprefix(prefix).partition(".")[0]) for name in state if name.startswith(prefix))


build = ImageRewardScorer
