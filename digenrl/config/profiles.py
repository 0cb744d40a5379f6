"""Profiles: the costs of a recipe's work on one device, measured by `digenrl profile`. Needs no torch.

`digenrl plan` and `digenrl simulate` read a profile by the name of a shipped one or by path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, NonNegativeInt, PositiveInt

from digenrl.config.limits import LONGEST_S
from digenrl.config.reading import Frozen, read_model
from digenrl.config.recipes.base_precision import UNQUANTIZED
from digenrl.config.recipes.paths import PACKAGE, find_file
from digenrl.records import Kernel, PassKind

SHIPPED = PACKAGE / "profiles"
DIGITS = 4  # significant digits of a measured time

NonNegativeSeconds = Annotated[float, Field(ge=0, le=LONGEST_S)]
PositiveSeconds = Annotated[float, Field(gt=0, le=LONGEST_S)]


class DeviceFacts(Frozen):
    """The device. Its rate is that of a large matrix product: in bf16 on a card, in fp32 on a CPU."""

    name: str
    memory_bytes: PositiveInt
    bf16_tflops: float | None = Field(default=None, gt=0)
    fp32_tflops: float | None = Field(default=None, gt=0)
    torch: str


class PlannedWork(Frozen):
    """The work that a plan was made for. A recipe that differs in any of it needs another plan.

    `pairs` of images are encoded, not generated.
    """

    family: str
    model: str
    height: PositiveInt
    width: PositiveInt
    frames: PositiveInt
    denoising_steps: PositiveInt
    prompts: PositiveInt
    samples_per_prompt: PositiveInt
    algorithm: str
    lora_rank: PositiveInt | None
    lora_targets: tuple[str, ...] | str | None = None
    pairs: bool = False


class ProfiledWork(PlannedWork):
    """The work that was measured. A recipe that differs in more than its batch has other costs.

    `trained_steps` counts the denoising steps of a sample that are trained; `trained_share` is the fraction of
    samples that are trained.
    """

    recipe: str
    dtype: str
    base: str = UNQUANTIZED
    generating_base: str | None = None
    vae_dtype: str
    text_tokens: PositiveInt | None = None
    guidance: float | None
    slice: PositiveInt | Literal["auto"]
    trained_steps: PositiveInt
    trained_share: float = Field(gt=0, le=1)
    updates_per_batch: PositiveInt
    reference_forward: bool
    old_log_probs: str
    autocast: str
    packed: bool


class SliceCost(Frozen):
    """A slice after warm-up: seconds on one lane, and peak memory with weights; 0 on a CPU."""

    seconds: PositiveSeconds
    peak_bytes: NonNegativeInt = 0


class TrainingCost(Frozen):
    """The cost of training, per generated sample, and the packing that the trainer chose.

    `peak_bytes` is the peak memory, `planned_bytes` the budget that the trainer planned with, and
    `predicted_bytes` its prediction from a single pair, before it tried a pack; 0 on a CPU.
    """

    seconds_per_sample: PositiveSeconds
    pack_size: PositiveInt
    checkpointed_blocks: NonNegativeInt = 0
    peak_bytes: NonNegativeInt = 0
    planned_bytes: NonNegativeInt = 0
    predicted_bytes: NonNegativeInt = 0


class Profile(Frozen):
    """The costs of one recipe's work on one device. `remarks` explain what could not be measured.

    `commit_seconds`: all optimizer steps of a batch. `export_seconds`: exporting the new weights for generators.
    `publish_seconds`: loading them on a lane of the same machine. `switch_in_seconds`: switching a trainer to
    generation, which offloads `switched_bytes`; `switch_out_seconds`: switching it back. `score_seconds`: scoring
    one sample. `weights_bytes` is the size of the transformer, `published_bytes` that of an exported version.
    `attention` are the attention kernels by kind of pass, if they were tried or given.
    """

    device: DeviceFacts
    work: ProfiledWork
    weights_bytes: PositiveInt
    published_bytes: PositiveInt | None = None
    slices: dict[PositiveInt, SliceCost]
    training: TrainingCost | None = None
    commit_seconds: NonNegativeSeconds | None = None
    export_seconds: NonNegativeSeconds | None = None
    publish_seconds: NonNegativeSeconds | None = None
    switch_in_seconds: NonNegativeSeconds | None = None
    switch_out_seconds: NonNegativeSeconds | None = None
    switched_bytes: NonNegativeInt = 0
    score_seconds: NonNegativeSeconds | None = None
    attention: dict[PassKind, Kernel] | None = None
    remarks: tuple[str, ...] = ()

    @property
    def slice_seconds(self) -> dict[int, float]:
        """Seconds on one lane by slice size, in ascending order."""
        return {size: self.slices[size].seconds for size in sorted(self.slices)}

    @property
    def switch_seconds(self) -> float | None:
        """The mean cost of one role switch, for models that have one cost for both directions."""
        if self.switch_in_seconds is None or self.switch_out_seconds is None:
            return None
        return (self.switch_in_seconds + self.switch_out_seconds) / 2

    @property
    def shared_commit_seconds(self) -> float | None:
        """The cost of a commit if generators elsewhere need the weights: it includes the export."""
        return None if self.commit_seconds is None else self.commit_seconds + (self.export_seconds or 0.0)

    def covers(self, size: int) -> bool:
        """Whether this slice size was measured or lies between two that were."""
        return bool(self.slices) and min(self.slices) <= size <= max(self.slices)


def find_profile(where: str, folder: Path | None = None) -> Path:
    """The path of a profile in a file or of a shipped name; a relative path is relative to `folder`."""
    return find_file("profile", where, SHIPPED, folder or Path())


def read_profile(where: str, folder: Path | None = None) -> Profile:
    """The profile in a file or of a shipped name; a relative path is relative to `folder`."""
    return read_model(Profile, find_profile(where, folder))


def write_profile(profile: Profile, by: str | None = None) -> str:
    """The profile as YAML that reads back equal, without absent values; `by` is the command that measured it."""
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
    """A measured time, rounded to its significant digits and to microseconds."""
    return float(f"{round(seconds, 6):.{DIGITS}g}")


def shown_value(value: object) -> str:
    """A value of the work in messages."""
    return "none" if value is None else str(value)
