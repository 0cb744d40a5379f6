"""Tiny pipelines in the layout of the families' published repositories.

Unlike a pipeline that diffusers saves today, a published one has the configuration fields of the library versions
of its time, tokenizers in their authors' formats, sharded weights and parameter names that have since changed.
Vocabularies are small and trained here; weights are random.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from published_configs import CONFIGS, INDEXES
from published_tokenizers import (
    write_clip_tokenizer,
    write_llama_tokenizer,
    write_qwen_tokenizer,
    write_t5_tokenizer,
    write_umt5_tokenizer,
)
from safetensors.torch import load_file, save_file

from digenrl.models.contract import SampleSize
from digenrl.models.loading.pipelines import without_progress_bars
from digenrl.testing.tiny_models import TINY_MODELS, seeded_weights

SINGLE_FILE = ("CLIPTextModel", "Autoencoder")  # how the names of small components' classes begin
SHARD_BYTES = 150_000


@dataclass(frozen=True, slots=True)
class RepositoryLayout:
    """How a family's repository stores its tokenizers, and which of them its tiny pipeline is built from."""

    tokenizers: Mapping[str, Callable[[Path], Any]]  # each writes a folder and returns the tokenizer
    built_from: tuple[str, ...]


LAYOUTS: dict[str, RepositoryLayout] = {
    "sd3": RepositoryLayout(
        {
            "tokenizer": write_clip_tokenizer,
            "tokenizer_2": lambda folder: write_clip_tokenizer(folder, pad_token="!"),
            "tokenizer_3": write_t5_tokenizer,
        },
        ("tokenizer", "tokenizer_3"),
    ),
    "flux": RepositoryLayout(
        {"tokenizer": write_clip_tokenizer, "tokenizer_2": write_t5_tokenizer}, ("tokenizer", "tokenizer_2")
    ),
    "qwen_image": RepositoryLayout({"tokenizer": write_qwen_tokenizer}, ("tokenizer",)),
    "wan": RepositoryLayout({"tokenizer": write_umt5_tokenizer}, ("tokenizer",)),
    "hunyuan_video": RepositoryLayout(
        {"tokenizer": write_llama_tokenizer, "tokenizer_2": write_clip_tokenizer}, ("tokenizer", "tokenizer_2")
    ),
}


def make_published_layout(family: str, directory: Path, seed: int = 0, variant: str | None = None) -> Any:
    """Writes a tiny pipeline as the family's repository has it, and returns the pipeline that was written.

    With a `variant` such as fp16, all weights are in files of this variant, in half precision.
    """
    layout = LAYOUTS[family]
    tokenizers = {name: write(directory / name) for name, write in layout.tokenizers.items()}
    with seeded_weights(seed), without_progress_bars():
        pipeline = TINY_MODELS[family].build(*(tokenizers[name] for name in layout.built_from))
        for name, component in pipeline.components.items():
            if name not in tokenizers and component is not None:
                _write_component(component, directory / name, variant)
    _write_json(directory / "model_index.json", INDEXES[family])
    return pipeline


def drop_t5(directory: Path) -> None:
    """Removes T5 from an SD3 pipeline, as repositories do that save 9 GB."""
    index = json.loads((directory / "model_index.json").read_text(encoding="utf-8"))
    for name in ("text_encoder_3", "tokenizer_3"):
        shutil.rmtree(directory / name)
        index[name] = [None, None]
    _write_json(directory / "model_index.json", index)


def layout_size(family: str) -> SampleSize:
    """The size of a sample of a family's tiny pipeline."""
    return TINY_MODELS[family].size


def _write_component(component: Any, folder: Path, variant: str | None) -> None:
    class_name = type(component).__name__
    if not hasattr(component, "parameters"):  # a scheduler
        component.save_pretrained(folder)
        _rewrite_config(folder / "scheduler_config.json", class_name)
        return
    weights = component.half() if variant == "fp16" else component
    limit = "1GB" if class_name.startswith(SINGLE_FILE) else SHARD_BYTES
    weights.save_pretrained(folder, max_shard_size=limit, variant=variant)
    if class_name == "CLIPTextModel":  # transformers 5 has dropped the prefix
        (path,) = folder.glob("*.safetensors")
        named = {f"text_model.{name}": value for name, value in load_file(path).items()}
        save_file(named, path, metadata={"format": "pt"})
    _rewrite_config(folder / "config.json", class_name)
    (folder / "generation_config.json").unlink(missing_ok=True)


def _rewrite_config(path: Path, class_name: str) -> None:
    """Replaces a configuration by one with the published fields."""
    _write_json(path, CONFIGS[class_name](json.loads(path.read_text(encoding="utf-8"))))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
