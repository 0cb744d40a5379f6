"""Settings of the rewards that have weights, one model each. `table.py` has the table of all rewards."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from digenrl.config.devices import DeviceOrAuto
from digenrl.config.limits import Text, Weight
from digenrl.config.rewards.base import FrameRewardSettings, RewardSettings
from digenrl.config.rewards.geneval_tasks import Task
from digenrl.config.token_variables import TokenVariable

LAION_CLIP_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
OPENAI_CLIP_L = "openai/clip-vit-large-patch14"
TRANSFORMERS = ("transformers>=5.17",)  # the library that holds the models
COMMIT = re.compile("[0-9a-f]{40}")


class ModelRewardSettings(FrameRewardSettings):
    """A reward with weights. `model` is a directory or a hub id."""

    needed_packages: ClassVar[tuple[str, ...]] = TRANSFORMERS

    model: Text
    device: DeviceOrAuto = Field(default="auto", description="a torch device; auto: cuda if available")
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    batch_size: PositiveInt = Field(default=16, description="images in one forward")


class ClipRewardSettings(ModelRewardSettings):
    """A reward built on CLIP. `processor` holds tokenizer and image processor if `model` has none."""

    processor: Text | None = None


class ClipScoreSettings(ClipRewardSettings):
    """Cosine similarity of image and prompt under CLIP."""

    name: Literal["clip_score"] = "clip_score"
    model: Text = OPENAI_CLIP_L


class PickScoreSettings(ClipRewardSettings):
    """Human preference: a fine-tuned CLIP-H."""

    name: Literal["pickscore"] = "pickscore"
    model: Text = "yuvalkirstain/PickScore_v1"


class HpsV2Settings(ClipRewardSettings):
    """Human preference score v2: a fine-tuned CLIP-H.

    `model` is a converted checkpoint, or the CLIP-H base if `checkpoint` is the published file.
    """

    name: Literal["hpsv2"] = "hpsv2"
    checkpoint: Text | None = Field(default=None, description="a .pt or .safetensors file with open_clip's names")


class HpsV3Settings(FrameRewardSettings):
    """Human preference score v3: Qwen2-VL with a head, run by the authors' package in its own environment."""

    # The package, and what it imports without saying so.
    needed_packages: ClassVar[tuple[str, ...]] = ("hpsv3==1.0.0", "matplotlib", "tensorboard")

    name: Literal["hpsv3"] = "hpsv3"
    checkpoint: Text | None = Field(
        default=None, description="the published HPSv3.safetensors; from the hub by default"
    )
    config: Text | None = Field(
        default=None, description="a YAML file instead of the package's, which names the base model"
    )
    device: DeviceOrAuto = Field(default="auto", description="a torch device; auto: cuda if available")
    batch_size: PositiveInt = Field(default=8, description="images in one forward")


class DeqaSettings(ModelRewardSettings):
    """DeQA-Score's quality of an image: mPLUG-Owl2 with code from the model's repository, which is executed.

    No library has the class, so that the code must be allowed, and of a hub id pinned to one commit.
    """

    # The transformers that the code was written for, and what both import.
    needed_packages: ClassVar[tuple[str, ...]] = (
        *("transformers==4.36.1", "numpy<2", "sentencepiece"),
        *("protobuf", "accelerate", "icecream"),
    )

    name: Literal["deqa"] = "deqa"
    model: Text = "zhiyuanyou/DeQA-Score-Mix3"
    trust_remote_code: bool = Field(default=False, description="allow the code of the model's repository to run")
    revision: Text | None = Field(default=None, description="full hash of the commit of a hub id")
    dtype: Literal["float32", "float16", "bfloat16"] = "float16"

    @model_validator(mode="after")
    def _code_is_allowed_and_pinned(self) -> DeqaSettings:
        on_hub = not self.model.startswith((".", "/", "~")) and not Path(self.model).is_dir()
        if on_hub and not COMMIT.fullmatch(self.revision or ""):
            raise ValueError(
                f"revision: expected the 40 digits of a commit's hash, got {self.revision}; code of the model is "
                "executed, and a branch or tag may have other code tomorrow: read the code at "
                f"https://huggingface.co/{self.model}/commits/main and copy the full hash of its commit"
            )
        if self.revision is not None and not on_hub:
            raise ValueError(f"revision: {self.revision}, but {self.model} is a directory; leave it out")
        if not self.trust_remote_code:
            raise ValueError(
                f"trust_remote_code: code in {self.model} would be executed; read it, and set this key to true"
            )
        return self


class ImageRewardSettings(ModelRewardSettings):
    """Human preference: BLIP with a head. `model` holds ImageReward.pt and med_config.json, as published."""

    name: Literal["image_reward"] = "image_reward"
    model: Text = "THUDM/ImageReward"
    tokenizer: Text | None = Field(default=None, description="a directory or hub id of BERT's tokenizer")


class AestheticSettings(ClipRewardSettings):
    """LAION's aesthetic predictor: a head on CLIP-L."""

    name: Literal["aesthetic"] = "aesthetic"
    model: Text = OPENAI_CLIP_L
    head: Text = Field(description="file of the head, .pth or .safetensors")


class GenevalSettings(ClipRewardSettings):
    """Counts, colors and positions of detected objects, by the metadata of GenEval's prompts.

    `detector` is a directory or hub id of a model for object detection, or the URL of a detector's server.
    `model` is the CLIP that names colors.
    """

    name: Literal["geneval"] = "geneval"
    model: Text = OPENAI_CLIP_L
    detector: Text = Field(description="weights of a detector, or http://host:port/path")
    token_env: TokenVariable | None = Field(default=None, description="token of the detector's server")
    score: Literal["partial", "correct", "strict"] = Field(
        default="partial", description="partial: Flow-GRPO's; correct: 1 or 0 by GenEval's rules; strict: exactly"
    )

    def wanted(self, prompt: str, metadata: Mapping[str, Any]) -> Task:
        """The objects that the metadata asks for."""
        content = {key: metadata[key] for key in ("tag", "include", "exclude") if metadata.get(key) is not None}
        try:
            return Task.model_validate(content)
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in reason["loc"]) or "metadata"
            raise ValueError(f"not GenEval's metadata: {where}: {reason['msg']}") from None


class VideoAlignSettings(RewardSettings):
    """VideoAlign's qualities of a video: visual (`vq`), of motion (`mq`) and agreement with the prompt (`ta`).

    The score is their sum with these weights. `model` is the Qwen2-VL that `checkpoint` was trained from.
    """

    needed_packages: ClassVar[tuple[str, ...]] = TRANSFORMERS
    least_frames: ClassVar[int] = 2

    name: Literal["videoalign"] = "videoalign"
    model: Text = "Qwen/Qwen2-VL-2B-Instruct"
    checkpoint: Text = Field(description="directory of the published VideoReward")
    prompt: Text = Field(description="prompt_template.py of the authors' repository; read, not run")
    frames_per_s: PositiveFloat = Field(
        default=16.0, description="of the samples; the model looks at 2 of them per second"
    )
    vq: Weight = 1.0
    mq: Weight = 1.0
    ta: Weight = 1.0
    device: DeviceOrAuto = Field(default="auto", description="a torch device; auto: cuda if available")
    dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"
