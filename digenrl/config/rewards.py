"""What a recipe says about rewards: one settings model per reward, and the one dictionary of all rewards.

A recipe names rewards in any of these ways; the last two mean the same:

    rewards: ocr
    rewards: [{name: ocr, weight: 0.7}, {name: pickscore, model: weights/pickscore, weight: 0.3}]
    rewards: ["my_package.rewards:smile"]
    rewards: [{name: function, target: "my_package.rewards:smile"}]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, SerializeAsAny, field_validator

from digenrl.config.reading import ConfigError, Frozen, nearest, parse_model

LAION_CLIP_H = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
OPENAI_CLIP_L = "openai/clip-vit-large-patch14"


class RewardSettings(Frozen):
    """What every reward has: the sum of all rewards is taken with `weight`, of the raw scores."""

    name: str
    weight: float = Field(default=1.0, allow_inf_nan=False)
    label: str | None = Field(default=None, min_length=1, description="its name in metrics; its own by default")

    @property
    def shown_as(self) -> str:
        """The label it has in metrics and errors."""
        return self.label or self.name


class FrameRewardSettings(RewardSettings):
    """A reward of single images. A video scores the mean over every `frame_stride`-th frame, from the first on."""

    frame_stride: PositiveInt = 1


class ModelRewardSettings(FrameRewardSettings):
    """A reward with weights. `model` is a directory, or a hub id."""

    model: str = Field(min_length=1)
    device: str = Field(default="auto", description="as torch names it; auto: cuda where there is one")
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    batch_size: PositiveInt = Field(default=16, description="images in one forward")


class ClipRewardSettings(ModelRewardSettings):
    """A reward built on CLIP. `processor` holds tokenizer and image processor where `model` has none."""

    processor: str | None = Field(default=None, min_length=1)


class OcrSettings(FrameRewardSettings):
    """How well the wanted text can be read.

    With `detect`, text is looked for all over the image, upright or upside down. Without, the whole image is taken
    as one upright line of text and all images are read in one go: many times faster.
    """

    name: Literal["ocr"] = "ocr"
    exact_bonus: float = Field(
        default=0.0, ge=0.0, allow_inf_nan=False, description="added where every letter fits"
    )
    detect: bool = True
    shorter_side: int = Field(
        default=256,
        ge=32,
        le=2000,
        description="smaller images are upscaled to it, in pixels, before text is looked for; only with `detect`",
    )
    width: int = Field(
        default=320,
        ge=48,
        le=3200,
        description="pixels that a line of text, scaled to 48 high, is padded to; one that is wider stays so",
    )
    threads: PositiveInt = 1


class JpegCompressibilitySettings(FrameRewardSettings):
    """Small JPEG files are good."""

    name: Literal["jpeg_compressibility"] = "jpeg_compressibility"
    quality: int = Field(default=95, ge=1, le=100)


class JpegIncompressibilitySettings(FrameRewardSettings):
    """Large JPEG files are good."""

    name: Literal["jpeg_incompressibility"] = "jpeg_incompressibility"
    quality: int = Field(default=95, ge=1, le=100)


class ClipScoreSettings(ClipRewardSettings):
    """Cosine of image and prompt under CLIP."""

    name: Literal["clip_score"] = "clip_score"
    model: str = Field(default=OPENAI_CLIP_L, min_length=1)


class PickScoreSettings(ClipRewardSettings):
    """Human preference, a fine-tuned CLIP-H."""

    name: Literal["pickscore"] = "pickscore"
    model: str = Field(default="yuvalkirstain/PickScore_v1", min_length=1)


class HpsV2Settings(ClipRewardSettings):
    """Human preference score v2, a fine-tuned CLIP-H.

    Either `model` is a converted checkpoint, or `model` is the CLIP-H it was tuned from and `checkpoint` the
    published file.
    """

    name: Literal["hpsv2"] = "hpsv2"
    checkpoint: str | None = Field(
        default=None, min_length=1, description="a .pt or .safetensors file, open_clip names"
    )


class ImageRewardSettings(ModelRewardSettings):
    """Human preference, BLIP with a head. `model` holds ImageReward.pt and med_config.json, as published."""

    name: Literal["image_reward"] = "image_reward"
    model: str = Field(default="THUDM/ImageReward", min_length=1)
    tokenizer: str | None = Field(
        default=None, min_length=1, description="a directory or hub id of BERT's tokenizer"
    )


class AestheticSettings(ClipRewardSettings):
    """LAION's aesthetic predictor: a head over CLIP-L."""

    name: Literal["aesthetic"] = "aesthetic"
    model: str = Field(default=OPENAI_CLIP_L, min_length=1)
    head: str = Field(min_length=1, description="the head's file, .pth or .safetensors")


class FunctionSettings(RewardSettings):
    """A function of the user's own."""

    name: Literal["function"] = "function"
    target: str = Field(description="package.module:function")
    arguments: dict[str, Any] = Field(default={}, description="given to the function by name")

    @field_validator("target")
    @classmethod
    def _names_a_function(cls, target: str) -> str:
        module, _, function = target.partition(":")
        if not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
            raise ValueError(f"expected package.module:function, got {target!r}")
        return target

    @property
    def shown_as(self) -> str:
        """The label, or the function's name."""
        return self.label or self.target.partition(":")[2]


class HttpSettings(RewardSettings):
    """A reward served elsewhere. The token is read from the environment, so that no recipe holds it."""

    name: Literal["http"] = "http"
    url: str
    token_env: str = Field(default="DIGENRL_REWARD_TOKEN", min_length=1)
    timeout_s: PositiveFloat = 120.0
    retries: int = Field(default=3, ge=0, le=20)
    backoff_s: PositiveFloat = Field(default=0.5, description="before the first retry; doubles with each")
    max_backoff_s: PositiveFloat = 8.0
    batch_size: PositiveInt = Field(default=16, description="samples in one request")
    frame_stride: PositiveInt = Field(default=1, description="only every so-many-th frame is sent")

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected http://host:port or https://host, got {url!r}")
        if parts.username or parts.password:
            raise ValueError("holds a password; put the token into the environment variable of `token_env`")
        return url.rstrip("/")


# Every reward there is. Each is built by `build(settings)` of digenrl/rewards/<name>.py.
REWARDS: dict[str, type[RewardSettings]] = {
    "aesthetic": AestheticSettings,
    "clip_score": ClipScoreSettings,
    "function": FunctionSettings,
    "hpsv2": HpsV2Settings,
    "http": HttpSettings,
    "image_reward": ImageRewardSettings,
    "jpeg_compressibility": JpegCompressibilitySettings,
    "jpeg_incompressibility": JpegIncompressibilitySettings,
    "ocr": OcrSettings,
    "pickscore": PickScoreSettings,
}


def parse_reward(content: Any) -> RewardSettings:
    """One reward from a name, a `package.module:function` or a mapping; raises ConfigError in one line."""
    if isinstance(content, RewardSettings):
        return content
    if isinstance(content, str):
        content = {"name": "function", "target": content} if ":" in content else {"name": content}
    if not isinstance(content, Mapping):
        raise ConfigError(f"a reward is a name or a mapping with the key 'name', got {content!r}")
    if "name" not in content:
        raise ConfigError(f"a reward needs the key 'name'; known: {', '.join(REWARDS)}")
    name = content["name"]
    if name not in REWARDS:
        raise ConfigError(
            f"unknown reward {name!r}; {nearest(str(name), list(REWARDS))}; add digenrl/rewards/{name}.py"
        )
    try:
        return parse_model(REWARDS[name], dict(content))
    except ConfigError as error:
        raise ConfigError(f"reward '{name}': {error}") from None


def parse_rewards(content: Any) -> tuple[RewardSettings, ...]:
    """All rewards of a recipe, at least one, each with a label of its own."""
    several = content if isinstance(content, list | tuple) else [content]
    if not several:
        raise ConfigError(f"at least one reward is needed, got none; known: {', '.join(REWARDS)}")
    rewards = tuple(parse_reward(one) for one in several)
    labels = [reward.shown_as for reward in rewards]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"two rewards are called '{label}'; give one of them a `label` of its own")
    return rewards


# The type of a recipe's field: `rewards: Rewards`.
Rewards = Annotated[tuple[SerializeAsAny[RewardSettings], ...], BeforeValidator(parse_rewards)]
