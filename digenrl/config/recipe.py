"""A recipe: everything that one training run is told, validated before anything is loaded.

What depends on other rooms (an algorithm's options, a family's name) is checked by them, still before any weights
are read; see `digenrl.worker.blueprint`. docs/recipes.md lists every key.
"""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, ValidationInfo, field_validator, model_validator

from digenrl.config.algorithms import AlgorithmSettings, read_algorithm_settings
from digenrl.config.cluster import ClusterSettings
from digenrl.config.generator_pools import check_pool_slice, check_slice, slice_sizes
from digenrl.config.prompts import PromptSettings
from digenrl.config.reading import Frozen, complaints_about
from digenrl.config.recipe_paths import RANDOM
from digenrl.config.rewards import Rewards
from digenrl.config.spec import DispatchRule, HelpRule, ScheduleRules
from digenrl.config.topology import TOPOLOGIES, Mode, Topology
from digenrl.config.training import TrainerSettings
from digenrl.config.windows import Window, read_window

NoiseKind = Literal["flow", "dance", "cps", "truncated_flow"]  # no `ddim`: every family predicts velocities
Share = Annotated[float, Field(ge=0, le=1)]


class ModelSettings(Frozen):
    """A pretrained diffusers pipeline. `source` is a directory, a hub id, or `demo`, which comes with DigenRL.

    `random` is the family's published model with random weights, `random:SIZE` another of its sizes: it needs no
    download and learns nothing, but takes the time and the memory of the real one. With `compile` the
    transformer's blocks are compiled; `auto` does it on CUDA cards.
    """

    family: str
    source: str = Field(min_length=1)
    compile: bool | Literal["auto"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    guidance: float | None = Field(default=None, ge=0, description="the family's own by default")
    negative_prompt: str | None = None

    @property
    def random(self) -> bool:
        """Whether it has random weights."""
        return self.source.partition(":")[0] == RANDOM

    @property
    def random_size(self) -> str | None:
        """Which of the family's sizes a random model has; None for the first."""
        return self.source.partition(":")[2] or None

    def compiles(self, device: str) -> bool:
        """Whether it is compiled on this device, as `cuda:0`."""
        return device.partition(":")[0] == "cuda" if self.compile == "auto" else self.compile


class NoiseSettings(Frozen):
    """How stochastic steps draw their noise: the kind, and its level (a or eta)."""

    kind: NoiseKind = "flow"
    level: float = Field(default=0.7, gt=0)

    @field_validator("level")
    @classmethod
    def _fits_the_kind(cls, level: float, info: ValidationInfo) -> float:
        if info.data.get("kind") == "cps" and level > 1:
            raise ValueError(f"the level of cps noise is a share, at most 1, got {level}; lower it")
        return level


class SampleSettings(Frozen):
    """What one sample is and how it is denoised for training.

    `window` says which steps are stochastic and kept; the algorithm's own by default.
    `shift` moves the noise levels up: evenly spaced ones, s, become shift * s / (1 + (shift - 1) * s), whatever
    the size of a sample; samples of an evaluation likewise. By default the family's scheduler shifts as its
    configuration says.
    """

    height: PositiveInt
    width: PositiveInt
    frames: PositiveInt = 1
    denoising_steps: int = Field(default=10, ge=2)
    shift: float | None = Field(default=None, gt=0, description="a fixed shift; the scheduler's own by default")
    noise: NoiseSettings = NoiseSettings()
    window: dict[str, Any] | None = None  # as written: the fingerprint of a recipe has no defaults in it
    decode_rows: PositiveInt | None = Field(default=None, description="rows decoded at once; all by default")

    @field_validator("window")
    @classmethod
    def _window_is_known(cls, window: dict[str, Any] | None) -> dict[str, Any] | None:
        if window is not None:
            read_window(window)
        return window


class BatchSettings(Frozen):
    """One optimizer step's samples: `prompts` groups of `samples_per_prompt`, generated in slices."""

    prompts: PositiveInt
    samples_per_prompt: int = Field(ge=2)
    slice: PositiveInt | Literal["auto"] = "auto"

    @field_validator("slice")
    @classmethod
    def _slices_are_equal(cls, size: int | str, info: ValidationInfo) -> int | str:
        group = info.data.get("samples_per_prompt")
        if isinstance(size, int) and group is not None:
            check_slice(size, group)
        return size

    def slice_sizes(self) -> tuple[int, ...]:
        """Every slice size that cuts a group into equal slices, in ascending order."""
        return slice_sizes(self.samples_per_prompt)


class AlgorithmChoice(Frozen):
    """An algorithm by name, or by the import path of a class (`my_package.module:MyAlgorithm`).

    `options` are its settings. Those of a class outside the package are checked when it is imported.
    """

    name: str
    options: dict[str, Any] = Field(default={})

    @model_validator(mode="after")
    def _options_fit(self) -> AlgorithmChoice:
        if ":" not in self.name:
            self.settings()
        return self

    def settings(self) -> AlgorithmSettings:
        """The algorithm's settings; raises ConfigError if the algorithm or an option is unknown."""
        return read_algorithm_settings(self.name, self.options)


class Techniques(Frozen):
    """What keeps cards from idling; each can be switched off alone. Only `tcss` changes what is computed.

    `gap`: groups stream to the trainer as they complete (off: the whole batch is generated first).
    `tsp`: many (sample, time-step) pairs in one forward (off: one at a time).
    `tag`: the trainer helps to generate: by a search that predicts whether it pays, or none.
    `tcss`: the largest share of a batch that may be made with weights one version old (off: 0).
    """

    gap: bool = True
    tsp: bool = True
    tag: HelpRule = "auto"
    tcss: Share = 0.0
    dispatch: DispatchRule = "earliest_finish"

    @field_validator("tcss", mode="before")
    @classmethod
    def _off_is_no_share(cls, share: Any) -> Any:
        return 0.0 if share is False else share

    def schedule_rules(self, colocated: bool) -> ScheduleRules:
        """The scheduling rules of these techniques."""
        return ScheduleRules(
            order="generation" if self.gap else "batch",
            stream="group" if self.gap else "batch",
            help=self.tag,
            dispatch=self.dispatch,
            stale_fraction=Decimal(repr(self.tcss)),
            colocated=colocated,
        )


def technique_keys(rules: ScheduleRules) -> dict[str, Any]:
    """The keys of `techniques` that select these scheduling rules."""
    return {
        "gap": rules.stream == "group",
        "tag": rules.help,
        "tcss": float(rules.stale_fraction),
        "dispatch": rules.dispatch,
    }


class LaneSettings(Frozen):
    """Which devices do what: a number of lanes, placed on free devices, or the devices by name.

    With `rewards: 0` the lane that generated a sample scores it. `ranks` processes train together, each on a
    device of its own. `threads` are of each worker on a CPU. In mode ray numbers count, and `cluster` says where.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    trainer: str = "auto"
    ranks: PositiveInt = 1
    generators: PositiveInt | tuple[str, ...] = 1
    rewards: Annotated[int, Field(ge=0)] | tuple[str, ...] = 1
    encoder: str = Field(default="auto", description="where prompts are encoded; the trainer's device by default")
    threads: PositiveInt | Literal["auto"] = "auto"
    exchange: Path | None = Field(
        default=None, description="where workers leave tensors for each other; shared memory by default"
    )
    restarts: int = Field(default=3, ge=0, description="how often a worker that ended is replaced")
    patience_s: float = Field(
        default=120.0, gt=0, description="a worker without a sign of life for so long is taken for dead"
    )

    @field_validator("generators", "rewards")
    @classmethod
    def _some_devices(cls, lanes: int | tuple[str, ...]) -> int | tuple[str, ...]:
        if lanes == ():
            raise ValueError("an empty list of devices; give a number of lanes, or at least one device")
        return lanes


class EvaluationSettings(Frozen):
    """Held-out prompts, sampled without noise in the steps, always from the same initial noise."""

    prompts: PromptSettings
    every: PositiveInt = Field(default=10, description="optimizer steps; also before the first and after the last")
    count: PositiveInt | None = Field(default=None, description="so many of the prompts; all by default")
    denoising_steps: PositiveInt = 20
    guidance: float | None = Field(default=None, ge=0, description="that of training by default")
    seed: int = Field(default=0, ge=0)
    batch: PositiveInt = Field(default=8, description="samples denoised together")
    shown: PositiveInt = Field(default=16, description="images in the grid")

    @property
    def chunk(self) -> int:
        """The prompts of one Evaluate job."""
        return 4 * self.batch


class CheckpointSettings(Frozen):
    """Complete or absent on disk. One is also written at the end, and when the run is interrupted."""

    every: PositiveInt = 10
    keep: PositiveInt = 3
    in_memory: bool = Field(
        default=True, description="every commit's state is also kept in memory, for a trainer that takes its place"
    )


class LoggingSettings(Frozen):
    """Where numbers go besides `metrics.jsonl`. `wandb` is a project's name; it needs the extra of that name."""

    tensorboard: bool = True
    wandb: str | None = Field(default=None, min_length=1)
    verbose: bool = Field(default=False, description="log files also get debug messages")

    @field_validator("wandb", mode="before")
    @classmethod
    def _off_is_no_project(cls, project: Any) -> Any:
        return None if project is False else project


class Recipe(Frozen):
    """One run. See `digenrl/recipes/*.yaml`."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(default=0, ge=0)
    steps: PositiveInt
    mode: Mode = "local"
    model: ModelSettings
    prompts: PromptSettings
    rewards: Rewards
    sample: SampleSettings
    batch: BatchSettings
    algorithm: AlgorithmChoice
    training: TrainerSettings = TrainerSettings()
    techniques: Techniques = Techniques()
    lanes: LaneSettings = LaneSettings()
    cluster: ClusterSettings = ClusterSettings()
    evaluation: EvaluationSettings | None = None
    checkpoint: CheckpointSettings = CheckpointSettings()
    logging: LoggingSettings = LoggingSettings()
    shuffled_rewards: bool = Field(
        default=False, description="a control: permuted within each group, so that there is nothing to learn"
    )

    @model_validator(mode="after")
    def _stale_share_needs_two_pools(self) -> Recipe:
        if self.topology.shares_cards and self.techniques.tcss > 0:
            raise ValueError(
                f"techniques.tcss: {self.techniques.tcss} in mode colocated, where generation and training take "
                "turns and nothing is stale; set it to 0, or mode to local"
            )
        return self

    @model_validator(mode="after")
    def _several_ranks_have_a_mode_for_it(self) -> Recipe:
        if self.topology.one_process and self.lanes.ranks > 1:
            raise ValueError(
                f"lanes.ranks: {self.lanes.ranks} in mode colocated, which is one process; set it to 1, or mode "
                "to local"
            )
        return self

    @model_validator(mode="after")
    def _sharded_weights_cannot_help(self) -> Recipe:
        if self.sharded and self.techniques.tag not in ("none", "auto"):
            raise ValueError(
                f"techniques.tag: {self.techniques.tag}, but no rank of lanes.ranks = {self.lanes.ranks} has all "
                "weights to generate with; set it to none, or train adapters (training.lora)"
            )
        return self

    @model_validator(mode="after")
    def _sharded_weights_stay(self) -> Recipe:
        if self.sharded and self.training.offload is True:
            raise ValueError(
                f"training.offload: true, but lanes.ranks = {self.lanes.ranks} share the weights and none of them "
                "generates; set it to auto"
            )
        return self

    @model_validator(mode="after")
    def _pools_cut_groups_evenly(self) -> Recipe:
        unit = 1 if self.batch.slice == "auto" else self.batch.slice
        for index, pool in enumerate(self.cluster.generators):
            if pool.slice is not None:
                with complaints_about(f"cluster.generators[{index}].slice"):
                    check_pool_slice(pool.slice, unit, self.batch.samples_per_prompt)
        return self

    @property
    def window(self) -> Window:
        """Which steps are stochastic and kept: the recipe's choice, or the algorithm's default."""
        chosen = self.sample.window
        return self.algorithm.settings().window if chosen is None else read_window(chosen)

    @property
    def topology(self) -> Topology:
        """The processes and cards that the recipe's mode stands for."""
        return TOPOLOGIES[self.mode]

    @property
    def sharded(self) -> bool:
        """Whether the trained weights are spread over the trainer's ranks: full fine-tuning by several."""
        return self.training.lora is None and self.lanes.ranks > 1
