"""A tiny Qwen2-VL with VideoReward's adapters, head and config, in the published layout."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration

RANK, ALPHA = 2, 4
WORDS = ("<unk>", "<|video_pad|>", "<|im_start|>", "<|im_end|>", "rate", "cat", "dog", "a")
TEMPLATE = (
    "<|im_start|> {% for part in messages[0]['content'] %}"
    "{% if part['type'] == 'video' %}<|video_pad|>{% else %}{{ part['text'] }}{% endif %}{% endfor %} <|im_end|>"
)
PROMPT = "\nrate <|VQ_reward|> a <|MQ_reward|> rate\n{text_prompt} <|TA_reward|> a"
NORMAL = {
    f"{name}_{what}": 0.1 * at + 0.3 for at, name in enumerate(("VQ", "MQ", "TA")) for what in ("mean", "std")
}


@dataclass(frozen=True)
class TinyVideoAlign:
    """The settings of the reward, and the model before it was saved, with peft's adapters and the head."""

    settings: dict[str, Any]
    model: PeftModel
    head_weight: Tensor


def save_videoalign(root: Path) -> TinyVideoAlign:
    """Writes the base model, the checkpoint and prompt_template.py below `root`."""
    torch.manual_seed(0)
    base = root / "base"
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(WORDS) + 3,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        },
        vision_config={"depth": 1, "embed_dim": 8, "hidden_size": 16, "num_heads": 2},
        video_token_id=1,
        image_token_id=0,
    )
    model = Qwen2VLForConditionalGeneration(config)
    model.save_pretrained(base)
    _save_tokenizer(base)
    targets = [
        name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear) and "visual" not in name
    ]
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=[name for name in targets if name != "lm_head"])
    adapted = get_peft_model(model, lora)
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    head_weight = torch.randn(3, 16)
    _save_checkpoint(root / "videoreward", adapted, head_weight)
    (root / "prompt_template.py").write_text(
        f"DETAILED_PROMPT_WITH_SPECIAL_TOKEN = {PROMPT!r}\nraise SystemExit\n"
    )
    settings = {
        "name": "videoalign",
        "model": str(base),
        "checkpoint": str(root / "videoreward"),
        "prompt": str(root / "prompt_template.py"),
        "dtype": "float32",
        "device": "cpu",
    }
    return TinyVideoAlign(settings, adapted.eval(), head_weight)


def _save_tokenizer(folder: Path) -> None:
    words = Tokenizer(WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", chat_template=TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|video_pad|>", "<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(folder)


def _save_checkpoint(folder: Path, adapted: PeftModel, head_weight: Tensor) -> None:
    """Names as transformers 4.45 and peft give them; the newest of two steps counts."""
    step = folder / "checkpoint-20"
    step.mkdir(parents=True)
    (folder / "checkpoint-3").mkdir()
    state = {_old_name(name): tensor.clone() for name, tensor in adapted.state_dict().items()}
    adapters = {name.replace(".default", ""): one for name, one in state.items() if "lora_" in name}
    save_file({name: one.contiguous() for name, one in adapters.items()}, step / "adapter_model.safetensors")
    others = {name: one for name, one in state.items() if "lora_" not in name and "lm_head" not in name}
    torch.save({**others, "base_model.model.rm_head.weight": head_weight}, step / "non_lora_state_dict.pth")
    content = {
        "model_config": {"output_dim": 3, "use_special_tokens": True},
        "data_config": {"fps": 2.0, "max_frame_pixels": 200704},
        "peft_lora_config": {"lora_r": RANK, "lora_alpha": ALPHA, "use_rslora": False},
        "inference_config": NORMAL,
    }
    (folder / "model_config.json").write_text(json.dumps(content))


def _old_name(name: str) -> str:
    inner = name.removeprefix("base_model.model.")
    inner = inner.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    return f"base_model.model.{inner}"
