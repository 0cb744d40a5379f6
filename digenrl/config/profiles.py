"""A profile: what one device takes for one recipe's work, as `digenrl profile` measured it. Needs no torch.

`digenrl plan` and `digenrl simulate` read it, by the name of one that comes with DigenRL or as a file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, NonNegativeInt, PositiveInt

from digenrl.config.reading import ConfigError, Frozen, nearest, read_model
from digenrl.config.recipe_paths import PACKAGE

SHIPPED = PACKAGE / "profiles"
FILE_ENDINGS = (".yaml", ".yml", ".json")
DIGITS = 4  # of a measured time that are worth keeping

Seconds = Annotated[float, Field(ge=0)]
PositiveSeconds = Annotated[float, Field(gt=0)]


class DeviceFacts(Frozen):
    """The device. Its rate is that of a large product of matrices: in bf16 on a card, in fp32 on a CPU."""

    name: str
    memory_bytes: PositiveInt
    bf16_tflops: float | None = Field(default=None, gt=0)
    fp32_tflops: float | None = Field(default=None, gt=0)
    torch: str


class ProfiledWork(Frozen):
    """What was measured. Costs of a recipe that differs in more than its batch are others.

    `trained_steps` of a sample's denoising steps are trained, and `trained_share` of the samples.
    """

    recipe: str
    family: str
    model: str
    dtype: str
    height: PositiveInt
    width: PositiveInt
    frames: PositiveInt
    denoising_steps: PositiveInt
    guidance: float | None
    prompts: PositiveInt
    samples_per_prompt: PositiveInt
    slice: PositiveInt | Literal["auto"]
    algorithm: str
    trained_steps: PositiveInt
    trained_share: float = Field(gt=0, le=1)
    updates_per_batch: PositiveInt
    reference_forward: bool
    old_log_probs: str
    autocast: str
    packed: bool
    lora_rank: PositiveInt | None


class SliceCost(Frozen):
    """A warm slice: a lane's seconds, and the memory in use at its fullest, weights included; 0 on a CPU."""

    seconds: PositiveSeconds
    peak_bytes: NonNegativeInt = 0


class TrainingCost(Frozen):
    """Replaying a sample, for every sample that is generated, and how the trainer packed for it.

    `peak_bytes` is the memory in use at its fullest, `planned_bytes` what the trainer planned with, and
    `foreseen_bytes` what it had expected from one pair, before it tried a pack; 0 on a CPU.
    """

    seconds_per_sample: PositiveSeconds
    pack_size: PositiveInt
    checkpointed_blocks: NonNegativeInt = 0
    peak_bytes: NonNegativeInt = 0
    planned_bytes: NonNegativeInt = 0
    foreseen_bytes: NonNegativeInt = 0


class Profile(Frozen):
    """One device at one recipe's work. What could not be measured is absent, and `remarks` say why.

    `commit_seconds`: all optimizer steps of a batch. `lay_out_seconds`: the new version is laid out, where others
    generate with it. `publish_seconds`: a lane of the same machine loads it. `switch_in_seconds`: a trainer turns
    to generating, and `switched_bytes` leave the card; `switch_out_seconds`: back. `score_seconds`: one sample is
    scored. `weights_bytes` are the transformer's, `published_bytes` those of a version.
    """

    device: DeviceFacts
    work: ProfiledWork
    weights_bytes: PositiveInt
    published_bytes: PositiveInt | None = None
    slices: dict[PositiveInt, SliceCost]
    training: TrainingCost | None = None
    commit_seconds: Seconds | None = None
    lay_out_seconds: Seconds | None = None
    publish_seconds: Seconds | None = None
    switch_in_seconds: Seconds | None = None
    switch_out_seconds: Seconds | None = None
    switched_bytes: NonNegativeInt = 0
    score_seconds: Seconds | None = None
    remarks: tuple[str, ...] = ()

    @property
    def slice_seconds(self) -> dict[int, float]:
        """A lane's seconds by the size of the slice, smallest first."""
        return {size: self.slices[size].seconds for size in sorted(self.slices)}

    @property
    def switch_seconds(self) -> float | None:
        """One change of role, where both ways have to cost the same: their mean."""
        if self.switch_in_seconds is None or self.switch_out_seconds is None:
            return None
        return (self.switch_in_seconds + self.switch_out_seconds) / 2

    @property
    def shared_commit_seconds(self) -> float | None:
        """A commit of a trainer whose weights others generate with: it lays them out, too."""
        return None if self.commit_seconds is None else self.commit_seconds + (self.lay_out_seconds or 0.0)

    def covers(self, size: int) -> bool:
        """Whether a slice of this size was measured, or lies between two that were."""
        return bool(self.slices) and min(self.slices) <= size <= max(self.slices)


def shipped_profiles() -> list[str]:
    """The names of the profiles that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def find_profile(where: str, folder: Path | None = None) -> Path:
    """A file, if it is written as one (with an ending or a folder); else the shipped profile of this name.

    A relative path is relative to `folder`, the current one by default.
    """
    path = Path(where)
    if path.suffix in FILE_ENDINGS or "/" in where or os.sep in where:
        return path if folder is None else folder / path
    known = shipped_profiles()
    if where not in known:
        or_a_file = f"or name a file, which ends in {', '.join(FILE_ENDINGS)}"
        hint = nearest(where, known) if known else "none comes with DigenRL"
        raise ConfigError(f"unknown profile '{where}'; {hint}; {or_a_file}")
    return SHIPPED / f"{where}.yaml"


def read_profile(where: str, folder: Path | None = None) -> Profile:
    """The profile of a file or of a shipped name; raises ConfigError with one line."""
    return read_model(Profile, find_profile(where, folder))


def write_profile(profile: Profile, by: str | None = None) -> str:
    """The profile as YAML; read again, it is an equal one. What is absent is left out. `by`: how it was taken."""
    content = profile.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    content["work"] = profile.work.model_dump(mode="json")
    content["slices"] = {
        size: cost.model_dump(mode="json", exclude_defaults=True) for size, cost in sorted(profile.slices.items())
    }
    by = by or f"digenrl profile {profile.work.recipe}"
    heading = f"# {profile.device.name} at {profile.work.recipe}, by: {by}\n"
    text: str = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=115, allow_unicode=True)
    return heading + text


def rounded(seconds: float) -> float:
    """A measured time without the digits that mean nothing; nothing is finer than a microsecond."""
    return float(f"{round(seconds, 6):.{DIGITS}g}")
