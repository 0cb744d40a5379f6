"""Tiny random weights of every reward model, saved in the published layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BertTokenizer, CLIPConfig, CLIPModel, CLIPTokenizer, YolosConfig, YolosForObjectDetection
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.yolos.image_processing_pil_yolos import YolosImageProcessorPil

from digenrl.config.rewards.base import RewardSettings
from digenrl.config.rewards.table import REWARDS, parse_reward

CLIP_SIDE = 32
BLIP_SIDE = 32
HEAD_WIDTHS = {0: 1024, 2: 128, 4: 64, 6: 16, 7: 1}
CLIP_SPECIAL = ("<|startoftext|>", "<|endoftext|>")
BERT_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789!,."


def save_clip(directory: Path, seed: int = 0, projection: int = 24) -> Path:
    """A CLIPModel of two layers per tower, with tokenizer and image processor."""
    vocabulary = {token: at for at, token in enumerate((*LETTERS, *(f"{c}</w>" for c in LETTERS), *CLIP_SPECIAL))}
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": vocabulary[CLIP_SPECIAL[0]], "eos_token_id": vocabulary[CLIP_SPECIAL[1]]}
    config = CLIPConfig(
        text_config={
            **tower,
            **ends,
            "vocab_size": len(vocabulary),
            "max_position_embeddings": 40,
            "hidden_act": "gelu",
        },
        vision_config={**tower, "image_size": CLIP_SIDE, "patch_size": 8, "hidden_act": "gelu"},
        projection_dim=projection,
    )
    torch.manual_seed(seed)
    model = CLIPModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim():  # the untrained biases and norms would hide a mix-up
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    CLIPTokenizer(vocab=vocabulary, merges=[]).save_pretrained(directory)
    sizes = {"size": {"shortest_edge": CLIP_SIDE}, "crop_size": {"height": CLIP_SIDE, "width": CLIP_SIDE}}
    CLIPImageProcessorPil(**sizes).save_pretrained(directory)
    return directory


def to_open_clip(model: CLIPModel) -> dict[str, Tensor]:
    """The weights of a CLIPModel in open_clip's names, by hand, to check the conversion in the other direction."""
    mine = model.state_dict()
    theirs = {
        "logit_scale": mine["logit_scale"],
        "token_embedding.weight": mine["text_model.embeddings.token_embedding.weight"],
        "positional_embedding": mine["text_model.embeddings.position_embedding.weight"],
        "text_projection": mine["text_projection.weight"].T,
        "ln_final.weight": mine["text_model.final_layer_norm.weight"],
        "ln_final.bias": mine["text_model.final_layer_norm.bias"],
        "visual.class_embedding": mine["vision_model.embeddings.class_embedding"],
        "visual.conv1.weight": mine["vision_model.embeddings.patch_embedding.weight"],
        "visual.positional_embedding": mine["vision_model.embeddings.position_embedding.weight"],
        "visual.proj": mine["visual_projection.weight"].T,
    }
    for kind in ("weight", "bias"):
        theirs[f"visual.ln_pre.{kind}"] = mine[f"vision_model.pre_layrnorm.{kind}"]
        theirs[f"visual.ln_post.{kind}"] = mine[f"vision_model.post_layernorm.{kind}"]
        for theirs_tower, mine_tower in (("visual.", "vision_model"), ("", "text_model")):
            for layer in range(2):
                source, target = (
                    f"{mine_tower}.encoder.layers.{layer}",
                    f"{theirs_tower}transformer.resblocks.{layer}",
                )
                qkv = [mine[f"{source}.self_attn.{letter}_proj.{kind}"] for letter in ("q", "k", "v")]
                theirs[f"{target}.attn.in_proj_{kind}"] = torch.cat(qkv)
                theirs[f"{target}.attn.out_proj.{kind}"] = mine[f"{source}.self_attn.out_proj.{kind}"]
                theirs[f"{target}.ln_1.{kind}"] = mine[f"{source}.layer_norm1.{kind}"]
                theirs[f"{target}.ln_2.{kind}"] = mine[f"{source}.layer_norm2.{kind}"]
                theirs[f"{target}.mlp.c_fc.{kind}"] = mine[f"{source}.mlp.fc1.{kind}"]
                theirs[f"{target}.mlp.c_proj.{kind}"] = mine[f"{source}.mlp.fc2.{kind}"]
    return {name: tensor.clone().contiguous() for name, tensor in theirs.items()}


def head_state(width: int, seed: int = 1) -> dict[str, Tensor]:
    """The head of LAION's predictor and of ImageReward, in the published names."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for at, outputs in HEAD_WIDTHS.items():
        state[f"layers.{at}.weight"] = torch.randn(outputs, width, generator=generator) / width**0.5
        state[f"layers.{at}.bias"] = torch.randn(outputs, generator=generator) * 0.1
        width = outputs
    return state


def save_image_reward(directory: Path, seed: int = 2) -> Path:
    """ImageReward.pt, med_config.json and BERT's tokenizer: a ViT of width 128 and a text half of width 32."""
    directory.mkdir(parents=True, exist_ok=True)
    words = [*BERT_SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    torch.save(_image_reward_state(len(words), seed), directory / "ImageReward.pt")
    config = {"num_attention_heads": 2, "max_position_embeddings": 40, "hidden_size": 32, "model_type": "bert"}
    (directory / "med_config.json").write_text(json.dumps(config))
    BertTokenizer(vocab={word: at for at, word in enumerate(words)}).save_pretrained(directory)
    return directory


def _image_reward_state(words: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}

    def add(name: str, *shape: int, around: float = 0.0) -> None:
        state[name] = around + torch.randn(*shape, generator=generator) * (0.3 if len(shape) == 1 else 0.15)

    def linear(name: str, outputs: int, inputs: int) -> None:
        add(f"{name}.weight", outputs, inputs)
        add(f"{name}.bias", outputs)

    def norm(name: str, width: int) -> None:
        add(f"{name}.weight", width, around=1.0)
        add(f"{name}.bias", width)

    wide, narrow = 128, 32
    eye, text = "blip.visual_encoder", "blip.text_encoder"
    add(f"{eye}.cls_token", 1, 1, wide)
    add(f"{eye}.pos_embed", 1, 1 + (BLIP_SIDE // 16) ** 2, wide)
    add(f"{eye}.patch_embed.proj.weight", wide, 3, 16, 16)
    add(f"{eye}.patch_embed.proj.bias", wide)
    norm(f"{eye}.norm", wide)
    add(f"{text}.embeddings.word_embeddings.weight", words, narrow)
    add(f"{text}.embeddings.position_embeddings.weight", 40, narrow)
    norm(f"{text}.embeddings.LayerNorm", narrow)
    state[f"{text}.embeddings.position_ids"] = torch.arange(40)[None]
    for layer in range(2):
        block = f"{eye}.blocks.{layer}"
        for name, outputs, inputs in (
            ("attn.qkv", 3 * wide, wide),
            ("attn.proj", wide, wide),
            ("mlp.fc1", 256, wide),
        ):
            linear(f"{block}.{name}", outputs, inputs)
        linear(f"{block}.mlp.fc2", wide, 256)
        norm(f"{block}.norm1", wide)
        norm(f"{block}.norm2", wide)
        block = f"{text}.encoder.layer.{layer}"
        for attention, inputs in (("attention", narrow), ("crossattention", wide)):
            linear(f"{block}.{attention}.self.query", narrow, narrow)
            linear(f"{block}.{attention}.self.key", narrow, inputs)
            linear(f"{block}.{attention}.self.value", narrow, inputs)
            linear(f"{block}.{attention}.output.dense", narrow, narrow)
            norm(f"{block}.{attention}.output.LayerNorm", narrow)
        linear(f"{block}.intermediate.dense", 64, narrow)
        linear(f"{block}.output.dense", narrow, 64)
        norm(f"{block}.output.LayerNorm", narrow)
    return {**state, **{f"mlp.{name}": tensor for name, tensor in head_state(narrow, seed).items()}}


def save_detector(directory: Path, seed: int = 3) -> Path:
    """A YOLOS with one layer that knows three classes."""
    config = YolosConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=[32, 32],
        patch_size=16,
        num_detection_tokens=6,
        id2label={0: "cat", 1: "dog", 2: "keyboard"},
    )
    torch.manual_seed(seed)
    model = YolosForObjectDetection(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)  # else every class is equally likely
    model.save_pretrained(directory)
    YolosImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(directory)
    return directory


def brightness(pixels: Tensor, prompts: Any, metadata: Any) -> Tensor:
    """A user's own reward: the mean of all pixels."""
    return pixels.flatten(1).mean(dim=1)


def tiny_settings(name: str, directory: Path, server_url: str = "http://127.0.0.1:9") -> RewardSettings:
    """Settings of the reward `name` with tiny weights saved below `directory`."""
    needed: dict[str, Any] = {}
    if name in ("clip_score", "pickscore", "hpsv2", "aesthetic", "geneval"):
        needed["model"] = str(save_clip(directory / "clip"))
    if name == "aesthetic":
        needed["head"] = str(directory / "head.pth")
        torch.save(head_state(24), needed["head"])
    if name == "geneval":
        needed["detector"] = str(save_detector(directory / "detector"))
    if name == "image_reward":
        needed["model"] = str(save_image_reward(directory / "image_reward"))
    if name == "function":
        needed["target"] = "tiny_rewards:brightness"
    if name == "http":
        needed["url"] = server_url
    if name == "judge":
        judge = {"name": name, "url": server_url, "model": "tiny", "template": "video_quality", "token_env": None}
        return parse_reward(judge)
    assert name in REWARDS
    return parse_reward({"name": name, **needed, **({"device": "cpu"} if "model" in needed else {})})
