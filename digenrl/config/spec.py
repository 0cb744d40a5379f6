"""The SPEC of a schedule: the work of a run, its lanes, their costs, and the scheduling rules.

Times are seconds, kept as the exact decimals that were written.
"""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from digenrl.config.generator_pools import Count, GeneratorPool, check_pool_slice, check_slice, slice_sizes
from digenrl.config.limits import (
    LONGEST_S,
    EvaluationChunks,
    GroupSize,
    Lanes,
    LanesOrNone,
    OptimizerSteps,
    PromptsPerStep,
    check_samples,
)
from digenrl.config.profile_filling import filled_in
from digenrl.config.profiles import find_profile, read_profile
from digenrl.config.reading import ConfigError, Frozen, errors_about, errors_in, parse_model, read_mapping
from digenrl.records import AssistName, DispatchRuleName, HelpRuleName, OrderRuleName, StreamRuleName


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"expected a number, got {value}")
    return value


def _exact(value: Any) -> Any:
    """A number as the decimal that was typed: 0.1 is one tenth, not its nearest float."""
    return Decimal(repr(value)) if isinstance(value, float) else _number(value)


Number = Annotated[Decimal, BeforeValidator(_exact)]
Duration = Annotated[Number, Field(ge=0, le=LONGEST_S)]
PositiveDuration = Annotated[Number, Field(gt=0, le=LONGEST_S)]
SliceTable = Annotated[dict[Annotated[Count, BeforeValidator(_number)], PositiveDuration], Field(min_length=1)]


class TimedGeneratorPool(GeneratorPool):
    """A pool of generators with costs: `seconds` maps a slice size to the time that one lane needs for it.

    A lane with `train_seconds` can train one sample in that time (with `assist: both`), and pays `switch` for each
    change of its role. `publish` is the time from a commit until these lanes can start a slice with the new
    version; by default it is that of the SPEC.
    """

    seconds: SliceTable
    train_seconds: PositiveDuration | None = None
    switch: Duration = Decimal(0)
    publish: Duration | None = None


class TimedRewardPool(Frozen):
    """Reward lanes. Without lanes, or with 0 seconds, scoring is instantaneous.

    A lane scores up to `batch` waiting samples of one slice together and needs `seconds` for each of them.
    """

    lanes: LanesOrNone = 0
    seconds: Duration = Decimal(0)
    batch: Count = 1


class HelperCosts(Frozen):
    """The trainer's own lanes as generators, and the cost of switching its role."""

    lanes: Lanes = 1
    seconds: SliceTable
    switch_in: Duration = Decimal(0)
    switch_out: Duration = Decimal(0)


class TrainerCosts(Frozen):
    """The trainer group as one unit. Without a `helper` it cannot generate.

    With `assist: both`, its lanes act alone: a complete group is trained in jobs of `job` samples, and `reduce` is
    the time to add up the gradients of all lanes before the commit.
    """

    seconds_per_sample: PositiveDuration
    commit: Duration = Decimal(0)
    helper: HelperCosts | None = None
    job: Count = 1
    reduce: Duration = Decimal(0)


class ScheduleRules(Frozen):
    """The techniques that are on. With `colocated` all other rules are ignored.

    `assist` says who helps: no lane, the trainer (by the `help` rule), or every lane that can (`both`).
    """

    order: OrderRuleName = "generation"
    stream: StreamRuleName = "group"
    help: HelpRuleName = "none"
    assist: AssistName = "trainer"
    dispatch: DispatchRuleName = "eager"
    stale_fraction: Annotated[Number, Field(ge=0, le=1)] = Decimal(0)
    colocated: bool = False


class ColocatedCosts(Frozen):
    """The cost of one role switch if generators and trainer share their cards."""

    switch: Duration = Decimal(0)


class EvaluationCosts(Frozen):
    """An evaluation after every `every` steps.

    It has `chunks` of held-out samples; a generator lane needs `chunk` seconds for each, and a reward lane `score`
    seconds. Without reward lanes scoring is instantaneous.
    """

    every: Count
    chunks: EvaluationChunks
    chunk: PositiveDuration
    score: Duration = Decimal(0)


class CheckpointCosts(Frozen):
    """A checkpoint after every `every` steps, which keeps the trainer busy for `seconds`."""

    every: Count
    seconds: Duration


class Spec(Frozen):
    """One run to schedule. See `examples/*.yaml`."""

    steps: OptimizerSteps
    prompts: PromptsPerStep
    samples_per_prompt: GroupSize
    slice: Count | Literal["auto"]
    generators: tuple[TimedGeneratorPool, ...]
    reward: TimedRewardPool = TimedRewardPool()
    trainer: TrainerCosts
    publish: Duration = Decimal(0)
    policy: ScheduleRules = ScheduleRules()
    colocate: ColocatedCosts = ColocatedCosts()
    evaluation: EvaluationCosts | None = None
    checkpoint: CheckpointCosts | None = None

    @field_validator("slice", mode="before")
    @classmethod
    def _is_a_number_or_auto(cls, value: Any) -> Any:
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            return value
        raise ValueError(f"expected a number of samples, at least 1, or 'auto', got {value!r}")

    @field_validator("generators")
    @classmethod
    def _has_generators(cls, pools: tuple[TimedGeneratorPool, ...]) -> tuple[TimedGeneratorPool, ...]:
        if not pools:
            raise ValueError("no generators; give at least one pool, as {name: a100, count: 4, seconds: {1: 1.0}}")
        return pools

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Spec:
        check_samples(self.prompts, self.samples_per_prompt)
        if isinstance(self.slice, int):
            with errors_about("slice"):
                check_slice(self.slice, self.samples_per_prompt)
        for index, pool in enumerate(self.generators):
            if pool.slice is not None:
                self._check_pool_slice(f"generators[{index}].slice", pool.slice, max(pool.seconds))
        if self.trainer.helper is None:
            self._check_needs_no_helper()
        if self.shares_work and self.policy.stream != "group":
            raise ValueError(
                f"policy.stream: assist 'both' trains complete groups, got '{self.policy.stream}'; "
                "set stream to group, or assist to trainer"
            )
        if self.samples_per_prompt % self.trainer.job:
            raise ValueError(
                f"trainer.job: {self.trainer.job} samples do not divide a group of {self.samples_per_prompt}; "
                "choose a divisor"
            )
        return self

    def _check_pool_slice(self, where: str, own: int, largest_timed: int) -> None:
        with errors_about(where):
            check_pool_slice(own, 1 if self.slice == "auto" else self.slice, self.samples_per_prompt)
            if own > largest_timed:
                raise ValueError(
                    f"{own} is beyond its table of seconds, which ends at {largest_timed}; "
                    f"add the time of a slice of {own}, or choose {largest_timed} or less"
                )

    def _check_needs_no_helper(self) -> None:
        if self.policy.colocated or self.policy.assist == "both":
            rule = "policy.colocated:" if self.policy.colocated else "policy.assist: 'both'"
            raise ValueError(f"{rule} needs trainer.helper, which says how the trainer's lanes generate; add it")
        if self.policy.help in ("greedy", "search"):
            raise ValueError(
                f"policy.help: '{self.policy.help}' needs trainer.helper, which is absent; "
                f"add trainer.helper, or set help to none (auto helps only if there is a helper)"
            )

    @property
    def shares_work(self) -> bool:
        """Whether lanes both generate and train, each on its own."""
        rules = self.policy
        return rules.assist == "both" and rules.help != "none" and not rules.colocated

    def slice_sizes(self) -> tuple[int, ...]:
        """Every slice size that cuts a group into equal slices, in ascending order."""
        return slice_sizes(self.samples_per_prompt)

    def unit_sizes(self) -> tuple[int, ...]:
        """The values of `slice` that divide every pool's own slice, in ascending order."""
        own = [pool.slice for pool in self.generators if pool.slice is not None]
        return tuple(size for size in self.slice_sizes() if not any(each % size for each in own))

    def with_rules(self, **changes: Any) -> Spec:
        """The same run with other scheduling rules, validated again."""
        return self.with_changes(policy={**self.policy.model_dump(), **changes})

    def with_changes(self, **changes: Any) -> Spec:
        """The same run with other top-level values, validated again."""
        return parse_model(Spec, {**self.model_dump(), **changes})


def files_of_spec(path: Path | None, profile: str | None = None) -> list[Path]:
    """The files that `read_spec` reads: the SPEC and its profile; without a SPEC, the profile."""
    named, folder = profile, Path()
    if path is not None and named is None:
        named, folder = read_mapping(path).get("profile"), path.parent
    profiles = [find_profile(named, folder)] if isinstance(named, str) else []
    return [*([] if path is None else [path]), *profiles]


def read_spec(path: Path, profile: str | None = None) -> Spec:
    """The SPEC in a YAML or JSON file; raises ConfigError with one line about the first mistake.

    Missing times come from the profile that the SPEC names (`profile: NAME_OR_FILE`, relative to the SPEC's
    folder), or from `profile` if it is given here.
    """
    content = read_mapping(path)
    named, folder = content.pop("profile", None), path.parent
    if profile is not None:
        named, folder = profile, Path()
    with errors_in(path):
        if named is None:
            return parse_model(Spec, content)
        if not isinstance(named, str):
            raise ConfigError(f"profile: expected a name or a file, got {named!r}", "profile")
        return parse_model(Spec, filled_in(content, read_profile(named, folder), named))
