"""What the settings of all rewards share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field, PositiveInt

from digenrl.config.limits import Text, Weight
from digenrl.config.reading import ConfigError, Frozen

# The metadata key of a sample's source images, if there are any: a tuple of tensors (3, H, W), fp32 in [0, 1].
SOURCE_IMAGES = "source_images"


class RewardSettings(Frozen):
    """Settings of every reward. The total reward is the sum of raw scores times `weight`.

    `needed_packages` are what the reward imports besides the server's own packages. A sample must have
    `least_frames` frames.
    """

    needed_packages: ClassVar[tuple[str, ...]] = ()
    least_frames: ClassVar[int] = 1

    name: str
    weight: Weight = 1.0
    label: Text | None = Field(default=None, description="name in metrics; the reward's name by default")

    @property
    def shown_as(self) -> str:
        """The name in metrics and errors."""
        return self.label or self.name

    def wanted(self, prompt: str, metadata: Mapping[str, Any]) -> Any:
        """What samples of a prompt are compared with; raises ValueError if the prompt and its metadata lack it.

        All prompts of a recipe are checked with it before a run. Rewards without a target return None.
        """
        return None

    @property
    def source_image_key(self) -> str | None:
        """The metadata key of an image file. The trainer reads it, as the source image of a prompt without any."""
        return None

    @property
    def needs_whole_groups(self) -> bool:
        """Whether a call must have exactly the samples of one group."""
        return False

    @property
    def time_limit_s(self) -> float:
        """How long it waits for scores before it gives up, retries included; 0 if it has no limit."""
        return 0.0

    @property
    def packages(self) -> tuple[str, ...]:
        """What `digenrl reward serve --env` installs for it."""
        return self.needed_packages


class FrameRewardSettings(RewardSettings):
    """A reward of single images. A video scores the mean over every `frame_stride`-th frame."""

    frame_stride: PositiveInt = 1


def source_image_key(rewards: Sequence[RewardSettings]) -> str | None:
    """The metadata key of source images that these rewards have in common; raises ConfigError if they differ."""
    keys = {reward.source_image_key: reward.shown_as for reward in rewards if reward.source_image_key is not None}
    if len(keys) > 1:
        named = ", ".join(f"'{key}' ('{reward}')" for key, reward in keys.items())
        raise ConfigError(
            f"rewards: source images have different metadata keys: {named}; set `source_image` to one"
        )
    return next(iter(keys), None)


def check_source_image(key: str | None, metadata: Mapping[str, Any]) -> None:
    """Raises ValueError if there is a key, and a prompt has neither source images nor the path of one under it."""
    if key is None or SOURCE_IMAGES in metadata:
        return
    path = metadata.get(key)
    if not isinstance(path, str) or not path:
        raise ValueError(
            f"the prompt has no source image, and metadata '{key}' is not the path of one, got {path!r}"
        )
