"""The SPEC of a schedule: what a run has to do, on which lanes, at which costs, under which policy.

Times are seconds, kept as the exact decimals that were written.
"""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from digenrl.config.profile_filling import filled_in
from digenrl.config.profiles import read_profile
from digenrl.config.reading import ConfigError, Frozen, parse_model, read_mapping

Order = Literal["generation", "batch"]
Stream = Literal["group", "batch", "sample"]
Help = Literal["none", "greedy", "search", "auto"]
Dispatch = Literal["eager", "earliest_finish"]


def _exact(value: Any) -> Any:
    """A number as the decimal that was typed: 0.1 is one tenth, not its nearest float."""
    if isinstance(value, bool):
        raise ValueError(f"expected a number, got {value}")
    return Decimal(repr(value)) if isinstance(value, float) else value


def _whole(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"expected a whole number, got {value}")
    return value


Number = Annotated[Decimal, BeforeValidator(_exact)]
Duration = Annotated[Number, Field(ge=0)]
PositiveDuration = Annotated[Number, Field(gt=0)]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
CountOrNone = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
SliceTable = Annotated[dict[Count, PositiveDuration], Field(min_length=1)]


class GeneratorPool(Frozen):
    """`count` equal generator lanes; `seconds` maps a slice size to the time one lane takes for it.

    `slice` is what a lane of this pool generates together where that is more than the SPEC's `slice`: a multiple
    of it. A lane takes less where its group has less left, in multiples of the SPEC's `slice`.
    """

    name: str = "generator"
    count: Count = 1
    seconds: SliceTable
    slice: Count | None = None


class RewardPool(Frozen):
    """Lanes that score; no lanes, or no seconds, is an instant reward.

    A lane takes up to `batch` waiting samples of one slice together, `seconds` for each of them.
    """

    lanes: CountOrNone = 0
    seconds: Duration = Decimal(0)
    batch: Count = 1


class Helper(Frozen):
    """The trainer's own lanes, seen as generators, and what changing its role costs."""

    lanes: Count = 1
    seconds: SliceTable
    switch_in: Duration = Decimal(0)
    switch_out: Duration = Decimal(0)


class Trainer(Frozen):
    """The trainer group as one unit. Without a `helper` it cannot generate."""

    seconds_per_sample: PositiveDuration
    commit: Duration = Decimal(0)
    helper: Helper | None = None


class Policy(Frozen):
    """Which techniques are on. `colocated` ignores all the others."""

    order: Order = "generation"
    stream: Stream = "group"
    help: Help = "none"
    dispatch: Dispatch = "eager"
    stale_fraction: Annotated[Number, Field(ge=0, le=1)] = Decimal(0)
    colocated: bool = False


class Colocate(Frozen):
    """What one change of role costs when generators and trainer share their cards."""

    switch: Duration = Decimal(0)


class Spec(Frozen):
    """One run to schedule. See `examples/*.yaml`."""

    steps: Count
    prompts: Count
    samples_per_prompt: Count
    slice: Count | Literal["auto"]
    generators: tuple[GeneratorPool, ...]
    reward: RewardPool = RewardPool()
    trainer: Trainer
    publish: Duration = Decimal(0)
    policy: Policy = Policy()
    colocate: Colocate = Colocate()

    @field_validator("slice", mode="before")
    @classmethod
    def _slice_is_a_number_or_auto(cls, value: Any) -> Any:
        if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
            return value
        raise ValueError(f"expected a number of samples, at least 1, or 'auto', got {value!r}")

    @field_validator("generators")
    @classmethod
    def _some_generators(cls, pools: tuple[GeneratorPool, ...]) -> tuple[GeneratorPool, ...]:
        if not pools:
            raise ValueError("no generators; give at least one pool, as {name: a100, count: 4, seconds: {1: 1.0}}")
        return pools

    @model_validator(mode="after")
    def _parts_fit_together(self) -> Spec:
        if isinstance(self.slice, int) and self.samples_per_prompt % self.slice:
            divisors = ", ".join(map(str, self.slice_sizes()))
            raise ValueError(
                f"slice: {self.slice} does not divide samples_per_prompt = {self.samples_per_prompt}; "
                f"choose one of {divisors}, or auto"
            )
        for index, pool in enumerate(self.generators):
            if pool.slice is not None:
                self._check_pool_slice(f"generators[{index}].slice", pool.slice, max(pool.seconds))
        if self.trainer.helper is None:
            self._check_needs_no_helper()
        return self

    def _check_pool_slice(self, where: str, own: int, largest_timed: int) -> None:
        unit = 1 if self.slice == "auto" else self.slice
        fitting = [size for size in self.slice_sizes() if size % unit == 0]
        if own not in fitting:
            wanted = f"divides samples_per_prompt = {self.samples_per_prompt}"
            if unit > 1:
                wanted = f"is a multiple of slice = {unit} and {wanted}"
            known = ", ".join(map(str, fitting))
            raise ValueError(f"{where}: expected a number that {wanted}, got {own}; choose one of {known}")
        if own > largest_timed:
            raise ValueError(
                f"{where}: {own} is beyond its table of seconds, which ends at {largest_timed}; "
                f"add the time of a slice of {own}, or choose {largest_timed} or less"
            )

    def _check_needs_no_helper(self) -> None:
        if self.policy.colocated:
            raise ValueError(
                "policy.colocated: needs trainer.helper, which says how the trainer's lanes generate; add it"
            )
        if self.policy.help in ("greedy", "search"):
            raise ValueError(
                f"policy.help: '{self.policy.help}' needs trainer.helper, which is absent; "
                f"add trainer.helper, or set help to none (auto helps only where there is a helper)"
            )

    def slice_sizes(self) -> tuple[int, ...]:
        """Every slice size that cuts a group into equal slices, smallest first."""
        group = self.samples_per_prompt
        return tuple(size for size in range(1, group + 1) if group % size == 0)

    def unit_sizes(self) -> tuple[int, ...]:
        """The sizes that `slice` may have beside the pools' own: every pool's own is a multiple of it."""
        own = [pool.slice for pool in self.generators if pool.slice is not None]
        return tuple(size for size in self.slice_sizes() if not any(each % size for each in own))

    def with_policy(self, **changes: Any) -> Spec:
        """The same run under another policy, validated again."""
        return self.with_changes(policy={**self.policy.model_dump(), **changes})

    def with_changes(self, **changes: Any) -> Spec:
        """The same run with other top-level values, validated again."""
        return parse_model(Spec, {**self.model_dump(), **changes})


def read_spec(path: Path, profile: str | None = None) -> Spec:
    """The SPEC in a YAML or JSON file; raises ConfigError with one line about the first mistake.

    Times that it leaves out come from the profile that it names (`profile: NAME_OR_FILE`, relative to its own
    folder), or from the one given here in its place.
    """
    content = read_mapping(path)
    named, folder = content.pop("profile", None), path.parent
    if profile is not None:
        named, folder = profile, Path()
    try:
        if named is None:
            return parse_model(Spec, content)
        if not isinstance(named, str):
            raise ConfigError(f"profile: expected a name or a file, got {named!r}", "profile")
        return parse_model(Spec, filled_in(content, read_profile(named, folder), named))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", error.where) from None
