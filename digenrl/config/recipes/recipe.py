"""A recipe: all settings of one training run, validated before anything is loaded.

Settings that depend on the model family are checked by `digenrl.worker.blueprint`, still before any weights are
read. docs/recipes.md lists every key.
"""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, ValidationInfo, field_validator, model_validator

from digenrl.config.algorithms import AlgorithmSettings, read_algorithm_settings
from digenrl.config.devices import Device, DeviceOrAuto
from digenrl.config.generator_pools import check_slice, slice_sizes
from digenrl.config.limits import (
    DenoisingSteps,
    Frames,
    GroupSize,
    Lanes,
    LanesOrNone,
    OptimizerSteps,
    Pixels,
    PromptsPerStep,
    Rows,
    Text,
    check_samples,
)
from digenrl.config.reading import Frozen
from digenrl.config.recipes.attention import fixed_kernels
from digenrl.config.recipes.base_precision import UNQUANTIZED, BasePrecision, EncoderPrecision
from digenrl.config.recipes.cards import cards_as_lanes
from digenrl.config.recipes.cluster import ClusterSettings
from digenrl.config.recipes.conflicts import check_conflicts
from digenrl.config.recipes.paths import RANDOM
from digenrl.config.recipes.prompts import HeldOutPromptSettings, PromptSettings
from digenrl.config.recipes.topology import TOPOLOGIES, Mode, Topology
from digenrl.config.recipes.training import PublishSettings, TrainerSettings
from digenrl.config.recipes.windows import Window, read_window
from digenrl.config.rewards.base import RewardSettings
from digenrl.config.rewards.table import PreferenceSettings, Rewards
from digenrl.config.spec import ScheduleRules
from digenrl.config.token_variables import HUB_TOKENS, check_token_variable
from digenrl.records import AssistName, DispatchRuleName, HelpRuleName, Kernel, PassKind

TERMS_PER_JOB = 8  # loss terms of a Train job, at least, if every card trains alone
TOKEN_VARIABLE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")

Share = Annotated[float, Field(ge=0, le=1)]
Expert = Literal["high", "low", "both"]  # of two transformers, by the noise levels
SourceSize = Literal["crop", "area"]  # how source images are resized


class ModelSettings(Frozen):
    """A pretrained diffusers pipeline. `source` is a directory, a hub id, or `demo`, the model in the package.

    It can also be a single .safetensors file with the weights of the transformer; all other components then come
    from `base_source`. `revision`, `variant` and `subfolder` select files of the pipeline.

    `random` is the family's published model with random weights, `random:SIZE` another of its sizes: it needs no
    download and learns nothing, but has the speed and memory footprint of the real one. With `compile` the
    transformer's blocks are compiled; `auto` compiles on CUDA cards. With `attention: auto` kernels are tried on
    CUDA cards, and the run's recipe names those that were chosen.
    """

    family: str
    source: Text
    base_source: Text | None = Field(
        default=None, description="the pipeline around a single file; the family's published one"
    )
    revision: Text | None = Field(default=None, description="branch, tag or commit of a hub id")
    variant: Text | None = Field(default=None, description="weight files of this variant, as fp16")
    subfolder: Text | None = Field(default=None, description="the pipeline's folder in the source")
    token: str | None = Field(default=None, description="env:NAME, a variable with an access token of the hub")
    compile: bool | Literal["auto"] = "auto"
    attention: Literal["auto"] | Kernel | dict[PassKind, Kernel] = Field(
        default="auto", description="attention kernel, for all passes or by kind of pass; the fastest by default"
    )
    deterministic: bool = Field(
        default=False, description="whether GPUs use only kernels that round in the same way in every run"
    )
    dtype: Literal["float32", "bfloat16"] = "float32"
    base: BasePrecision = Field(
        default=UNQUANTIZED, description="format of the frozen weights under adapters; they compute in dtype"
    )
    encoder_base: EncoderPrecision = Field(default=UNQUANTIZED, description="likewise, of the text encoders")
    vae_dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="samples are decoded in it")
    text_tokens: PositiveInt | None = Field(
        default=None, description="length to which prompts are padded or cut; the family's default if absent"
    )
    guidance: float | None = Field(default=None, ge=0, description="the family's default if absent")
    negative_prompt: str | None = None
    train_expert: Expert | None = Field(
        default=None, description="of two transformers, the one for high or low noise levels, or both, the default"
    )

    @field_validator("token")
    @classmethod
    def _token_is_a_variable(cls, token: str | None) -> str | None:
        if token is not None and TOKEN_VARIABLE.fullmatch(token) is None:
            raise ValueError(
                "expected env:NAME, the name of an environment variable with the token, as env:HF_TOKEN; a token "
                "itself is refused, because recipes are saved with the run; or log in with: hf auth login"
            )
        if token is not None:
            check_token_variable(token.removeprefix("env:"), HUB_TOKENS)
        return token

    @field_validator("subfolder")
    @classmethod
    def _subfolder_is_inside(cls, subfolder: str | None) -> str | None:
        if subfolder is not None and (subfolder.startswith("/") or ".." in subfolder.split("/")):
            raise ValueError(f"expected a folder inside of model.source, got {subfolder}")
        return subfolder

    @property
    def pipeline_folder(self) -> Path:
        """The folder of the pipeline, or of the one around a single file, if it is local."""
        return Path(self.base_source or self.source) / (self.subfolder or "")

    @property
    def random(self) -> bool:
        return self.source.partition(":")[0] == RANDOM

    @property
    def random_size(self) -> str | None:
        """The size of a random model, one of the family's; None is the first."""
        return self.source.partition(":")[2] or None

    @property
    def kernels(self) -> dict[PassKind, Kernel] | None:
        """The attention kernels that the recipe names; None if they are to be tried."""
        return None if self.attention == "auto" else fixed_kernels(self.attention)

    def compiles(self, device: str) -> bool:
        """Whether the model is compiled on this device, such as `cuda:0`."""
        return device.partition(":")[0] == "cuda" if self.compile == "auto" else self.compile


class NoiseSettings(Frozen):
    """The noise of stochastic steps: its kind, its level (a or eta), and how its steps are scored.

    `log_prob: squared_error` leaves all constants out of the log-prob: it is -(x' - mean)^2 without 1 / 2 s^2, as
    Flow-GRPO has it for `cps`.
    """

    kind: Literal["flow", "dance", "cps", "truncated_flow", "linear", "ddim"] = "flow"
    level: float = Field(default=0.7, gt=0)
    log_prob: Literal["normal", "squared_error"] = "normal"

    @field_validator("level")
    @classmethod
    def _level_fits_the_kind(cls, level: float, info: ValidationInfo) -> float:
        kind = info.data.get("kind")
        if kind in ("cps", "ddim") and level > 1:
            raise ValueError(f"the level of {kind} noise is a share, at most 1, got {level}; lower it")
        return level


class SampleSettings(Frozen):
    """The size of a sample and how it is denoised.

    `window` selects the steps that are stochastic and kept for training; by default the algorithm's. `shift`
    raises the noise levels: evenly spaced levels s become shift * s / (1 + (shift - 1) * s), for samples of any
    size, and also in evaluations that set no other. By default the family's scheduler applies its own shift. With
    `same_initial_noise` all samples of a group start from the same noise; by default as the algorithm's
    publication does. `last_step_noise` adds noise in the last step too, which is never trained.

    Source images get the size of the samples: they are scaled to cover it and cropped to their center. With
    `source_size: area` they keep their aspect ratio, and have about as many pixels as a sample.
    """

    height: Pixels
    width: Pixels
    frames: Frames = 1
    source_size: SourceSize = Field(default="crop", description="how source images are resized: crop or area")
    denoising_steps: DenoisingSteps = Field(default=10, ge=2)
    shift: float | None = Field(default=None, gt=0, description="a fixed shift; the scheduler's by default")
    noise: NoiseSettings = NoiseSettings()
    window: dict[str, Any] | None = None  # kept as written, so that the fingerprint does not depend on defaults
    same_initial_noise: bool | None = None
    last_step_noise: bool = False
    precision: Literal["fp8"] | None = Field(
        default=None, description="format of the frozen weights that generate; model.base by default"
    )
    decode_rows: PositiveInt | None = Field(default=None, description="rows decoded at once; all by default")

    @field_validator("window")
    @classmethod
    def _window_is_known(cls, window: dict[str, Any] | None) -> dict[str, Any] | None:
        if window is not None:
            read_window(window)
        return window


class BatchSettings(Frozen):
    """The samples of one training step: `prompts` groups of `samples_per_prompt`, generated in slices."""

    prompts: PromptsPerStep
    samples_per_prompt: GroupSize = Field(ge=2)
    slice: PositiveInt | Literal["auto"] = "auto"

    @field_validator("slice")
    @classmethod
    def _slice_divides_the_group(cls, size: int | str, info: ValidationInfo) -> int | str:
        group = info.data.get("samples_per_prompt")
        if isinstance(size, int) and group is not None:
            check_slice(size, group)
        return size

    @model_validator(mode="after")
    def _step_is_not_too_large(self) -> BatchSettings:
        check_samples(self.prompts, self.samples_per_prompt)
        return self

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
    """The techniques that reduce idle time; each can be switched off. Only `tcss` changes what is computed.

    `gap`: groups stream to the trainer as they complete (off: the whole batch is generated first).
    `tsp`: many (sample, time-step) pairs in one forward (off: one at a time).
    `tag`: the trainer helps to generate if a search predicts that it pays off (off: `none`).
    `assist`: `both` also lets generators train, so that every card does both; `none` switches all help off.
    `tcss`: the largest share of a batch that may come from weights one version old (off: 0).
    """

    gap: bool = True
    tsp: bool = True
    tag: HelpRuleName = "auto"
    assist: AssistName = "trainer"
    tcss: Share = 0.0
    dispatch: DispatchRuleName = "earliest_finish"

    @field_validator("tcss", mode="before")
    @classmethod
    def _off_is_no_share(cls, share: Any) -> Any:
        return 0.0 if share is False else share

    def schedule_rules(self, colocated: bool) -> ScheduleRules:
        return ScheduleRules(
            order="generation" if self.gap else "batch",
            stream="group" if self.gap else "batch",
            help=self.tag,
            assist=self.assist,
            dispatch=self.dispatch,
            stale_fraction=Decimal(repr(self.tcss)),
            colocated=colocated,
        )


def technique_keys(rules: ScheduleRules) -> dict[str, Any]:
    """The keys of `techniques` that select these scheduling rules."""
    return {
        "gap": rules.stream == "group",
        "tag": rules.help,
        "assist": rules.assist,
        "tcss": float(rules.stale_fraction),
        "dispatch": rules.dispatch,
    }


class LaneSettings(Frozen):
    """The lanes of a run: a number of lanes, placed on free devices, or a list of devices.

    With `rewards: 0` the lane that generated a sample scores it. `ranks` processes train together, each on its own
    device. With several `cards_per_replica` or `cards_per_generator`, that many cards compute each sample
    together: each has some of its tokens (context parallelism). `threads` is the number of threads per worker on a
    CPU. `mode: ray` takes only numbers of lanes; `cluster` says where they go.

    `mode: colocated` with several `cards` is short for `mode: local` with one generator less than that, which all
    generate, score and train (`techniques.assist: both`).
    """

    cards: Lanes = Field(default=1, description="cards that do everything, in mode colocated")

    device: Literal["auto", "cpu", "cuda"] = "auto"
    trainer: DeviceOrAuto = "auto"
    ranks: Lanes = 1
    shard_base: bool = Field(
        default=False, description="with LoRA, each of the ranks holds a shard of the frozen weights, not a copy"
    )
    cards_per_replica: Lanes = Field(default=1, description="ranks that train each sample together")
    cards_per_generator: Lanes = Field(default=1, description="cards that generate each sample together")
    generators: Lanes | tuple[Device, ...] = 1
    rewards: LanesOrNone | tuple[Device, ...] = 1
    encoder: DeviceOrAuto = Field(
        default="auto", description="where prompts are encoded; the trainer's device by default"
    )
    threads: Lanes | Literal["auto"] = "auto"
    memory_gib: float | None = Field(
        default=None, gt=0, description="most memory of a CUDA card that a worker may reserve; all by default"
    )
    exchange: Path | None = Field(
        default=None, description="folder through which workers exchange tensors; shared memory by default"
    )
    restarts: int = Field(default=3, ge=0, description="how often a worker that died is replaced within 100 steps")
    patience_s: float = Field(
        default=120.0, gt=0, description="a worker that is silent for this long counts as dead"
    )
    hedge_after: float = Field(
        default=3.0,
        ge=0,
        description="times its expected time, after which a slice is also given to an idle lane; 0: never",
    )

    @field_validator("generators", "rewards")
    @classmethod
    def _list_is_not_empty(cls, lanes: int | tuple[str, ...]) -> int | tuple[str, ...]:
        if lanes == ():
            raise ValueError("an empty list of devices; give a number of lanes, or at least one device")
        return lanes


class EvaluationSettings(Frozen):
    """Evaluation on held-out prompts: deterministic sampling, always from the same initial noise.

    Size, shift, guidance and rewards are those of training unless they are set here. `weights` are the moving
    average (`training.ema`) or those that generate; `auto` is the average if there is one. With
    `base: unquantized`, adapters are evaluated on the original frozen weights although generators have quantized
    ones; these are in host memory between evaluations.
    """

    prompts: HeldOutPromptSettings
    rewards: Rewards | None = Field(default=None, description="those of training by default")
    every: PositiveInt = Field(default=10, description="optimizer steps; also before the first and after the last")
    count: Rows | None = Field(default=None, description="number of prompts; all by default")
    height: Pixels | None = None
    width: Pixels | None = None
    frames: Frames | None = None
    denoising_steps: DenoisingSteps = 20
    shift: float | None = Field(default=None, gt=0)
    guidance: float | None = Field(default=None, ge=0, description="the same as in training by default")
    seed: int = Field(default=0, ge=0)
    batch: Rows = Field(default=8, description="samples denoised together")
    shown: Rows = Field(default=16, description="images in the grid")
    weights: Literal["auto", "ema", "trained"] = "auto"
    base: Literal["unquantized"] | None = Field(
        default=None, description="format of the frozen weights; that of generators by default"
    )

    @property
    def chunk(self) -> int:
        """The prompts of one Evaluate job."""
        return 4 * self.batch


class CheckpointSettings(Frozen):
    """Checkpoints are atomic. One is also written at the end and when the run is interrupted."""

    every: PositiveInt = 10
    keep: PositiveInt = 3
    in_memory: bool = Field(
        default=True, description="keep the state of the last commit in memory, to replace a trainer that died"
    )
    other_base_weights: bool = Field(
        default=False, description="resume even if the weights in model.source are not those of the checkpoint"
    )


class LoggingSettings(Frozen):
    """Where metrics go besides `metrics.jsonl`. `wandb` is the name of a project and needs the extra `wandb`."""

    tensorboard: bool = True
    wandb: Text | None = None
    verbose: bool = Field(default=False, description="log files also get debug messages")

    @field_validator("wandb", mode="before")
    @classmethod
    def _off_is_no_project(cls, project: Any) -> Any:
        return None if project is False else project


class Recipe(Frozen):
    """One run. See `digenrl/recipes/*.yaml`."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(default=0, ge=0, lt=2**64)
    steps: OptimizerSteps
    mode: Mode = "local"
    model: ModelSettings
    prompts: PromptSettings
    rewards: Rewards
    reward_sum: Literal["raw", "normalized"] = Field(
        default="raw", description="training adds up raw scores, or scores normalized within their group (GDPO)"
    )
    sample: SampleSettings
    batch: BatchSettings
    algorithm: AlgorithmChoice
    training: TrainerSettings = TrainerSettings()
    techniques: Techniques = Techniques()
    lanes: LaneSettings = LaneSettings()
    cluster: ClusterSettings = ClusterSettings()
    publish: PublishSettings = PublishSettings()
    evaluation: EvaluationSettings | None = None
    checkpoint: CheckpointSettings = CheckpointSettings()
    logging: LoggingSettings = LoggingSettings()
    python_path: tuple[Path, ...] = Field(
        default=(), description="folders with the modules of rewards, algorithms and families given by import path"
    )
    shuffled_rewards: bool = Field(
        default=False,
        description="control experiment: permutes rewards within groups, so that nothing is learned",
    )

    @model_validator(mode="before")
    @classmethod
    def _several_cards_are_lanes(cls, content: Any) -> Any:
        return cards_as_lanes(content) if isinstance(content, dict) else content

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Recipe:
        check_conflicts(self)
        return self

    @property
    def trains_on_pairs(self) -> bool:
        """Whether samples are pairs of images in a file, and not generated."""
        return self.prompts.pair_columns is not None

    @property
    def rewards_are_given(self) -> bool:
        """Whether the file of the prompts has the rewards, whose mean then says nothing about the policy."""
        return all(isinstance(reward, PreferenceSettings) for reward in self.rewards)

    @property
    def shares_work(self) -> bool:
        """Whether generators also train, and the trainer also generates."""
        return self.techniques.assist == "both" and self.techniques.tag != "none"

    @property
    def trainer_helps(self) -> bool:
        """Whether the trainer also generates."""
        alone = not self.shards_model and self.lanes.cards_per_replica == 1
        alike = self.sample.precision is None  # else a sample would depend on the lane that generates it
        return self.techniques.tag != "none" and self.techniques.assist != "none" and alone and alike

    @property
    def job_samples(self) -> int:
        """The samples of a group that are replayed together: by default all of them.

        If cards train alone, these are as few as still fill a pack, so that the work can be spread evenly.
        """
        chosen, group = self.training.job_samples, self.batch.samples_per_prompt
        if chosen != "auto":
            return chosen
        algorithm = self.algorithm.settings()
        if not self.shares_work or algorithm.rows_per_term > 1:
            return group
        steps = algorithm.trained_steps(self.sample.denoising_steps, self.window)
        pack = 0 if self.training.pack_size == "auto" else self.training.pack_size
        wanted = max(pack, TERMS_PER_JOB) * self.updates_per_group
        return next((size for size in slice_sizes(group) if size * steps >= wanted), group)

    @property
    def updates_per_group(self) -> int:
        """The optimizer updates of a step that train samples of a group, each an equal part of them."""
        algorithm = self.algorithm.settings()
        return algorithm.updates_per_batch if algorithm.updates_of == "samples" else 1

    @property
    def calibrated_samples(self) -> int:
        """The samples with which training is timed before the run."""
        return max(min(self.batch.samples_per_prompt, 4), self.job_samples if self.shares_work else 2)

    @property
    def sample_size(self) -> tuple[int, int, int]:
        """Height, width and frames of the samples that are trained on."""
        return self.sample.height, self.sample.width, self.sample.frames

    @property
    def held_out_size(self) -> tuple[int, int, int]:
        """Height, width and frames of an evaluation's samples: its own, or those of training."""
        own, (height, width, frames) = self.evaluation, self.sample_size
        if own is None:
            return height, width, frames
        return own.height or height, own.width or width, own.frames or frames

    @property
    def held_out_rewards(self) -> tuple[RewardSettings, ...]:
        """The rewards of an evaluation: its own, or those of training."""
        own = None if self.evaluation is None else self.evaluation.rewards
        return self.rewards if own is None else own

    @property
    def token_variables(self) -> tuple[str, ...]:
        """The environment variables with tokens that the recipe names: the hub's and those of servers."""
        rewards = [getattr(reward, "token_env", None) for reward in (*self.rewards, *self.held_out_rewards)]
        hub = None if self.model.token is None else self.model.token.removeprefix("env:")
        return tuple(dict.fromkeys(name for name in (hub, *rewards) if name is not None))

    @property
    def scoring_limit_s(self) -> float:
        """How long samples may be scored by the limits that rewards have; 0 if none has any."""
        several = (self.rewards, self.held_out_rewards)
        return max(sum(reward.time_limit_s for reward in rewards) for rewards in several)

    @property
    def window(self) -> Window:
        """The window of the recipe, or the default one of its algorithm."""
        chosen = self.sample.window
        return self.algorithm.settings().window if chosen is None else read_window(chosen)

    @property
    def topology(self) -> Topology:
        """What the recipe's mode means for processes and cards."""
        return TOPOLOGIES[self.mode]

    def evaluates(self, version: int) -> bool:
        """Whether a version is evaluated: every few versions, and the last one."""
        return self.evaluation is not None and (version % self.evaluation.every == 0 or version == self.steps)

    def keeps_published(self, version: int) -> bool:
        """Whether the trainer keeps the weights of a published version for the checkpoint of the next one.

        A resumed run may need them: samples of its first step may be stale, and the version's evaluation may be
        unfinished. For an evaluation alone only adapters are kept, since a copy of all weights takes much memory.
        """
        evaluated_adapters = self.training.lora is not None and self.evaluates(version)
        return self.topology.publishes and (self.techniques.tcss > 0 or evaluated_adapters)

    @property
    def evaluates_average(self) -> bool:
        """Whether evaluations use the moving average of the trained weights."""
        chosen = "trained" if self.evaluation is None else self.evaluation.weights
        return chosen != "trained" and self.training.ema is not None

    @property
    def generating_base(self) -> BasePrecision:
        """The format of the frozen weights of workers that only generate."""
        return self.sample.precision or self.model.base

    @property
    def held_out_base(self) -> BasePrecision:
        """The format of the frozen weights with which held-out samples are generated."""
        own = None if self.evaluation is None else self.evaluation.base
        return own or self.generating_base

    def from_checkpoint(self) -> Recipe:
        """The recipe for loading a checkpoint, which does not need the LoRA that training has started from."""
        if self.training.lora is None:
            return self
        lora = self.training.lora.model_copy(update={"start_from": None})
        return self.model_copy(update={"training": self.training.model_copy(update={"lora": lora})})

    @property
    def sharded(self) -> bool:
        """Whether each of the trainer's ranks trains a part of the weights: full fine-tuning on several ranks."""
        return self.training.lora is None and self.lanes.ranks > 1

    @property
    def shards_model(self) -> bool:
        """Whether no rank holds the whole model: all weights or a frozen base are sharded, or it is in stages."""
        return self.sharded or self.lanes.shard_base or self.training.stages is not None
