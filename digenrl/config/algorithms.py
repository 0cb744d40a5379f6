"""Settings of the RL algorithms, and what each asks of rollouts and of the trainer. Needs no torch.

The losses are in `digenrl.algorithms`, one file per algorithm. To add an algorithm, write its settings here, list
them in `ALGORITHM_SETTINGS`, and write digenrl/algorithms/NAME.py. An algorithm outside this package is a class
with its own `settings_type`, which a recipe names by import path: `algorithm.name: my_package.module:MyAlgorithm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from digenrl.config.import_paths import import_object
from digenrl.config.reading import ConfigError, Frozen, errors_about, nearest, parse_model
from digenrl.config.recipes.windows import (
    AllSteps,
    EulerOnly,
    FastWindow,
    RandomSubset,
    SlidingWindow,
    SparseWindow,
    Window,
)

KlForm = Literal["exact", "flow_grpo_image"]
StdOver = Literal["group", "batch", "none"]
Levels = Literal["first", "random", "stratified", "logit_normal"]
TRAINING_LEVELS = 1000  # noise levels that logit-normal draws choose from


@dataclass(frozen=True, slots=True)
class Needs:
    """Optional inputs that an algorithm asks for."""

    step_means: bool = False  # the generating policy's step means, kept by the rollout
    final_latents: bool = False  # the denoised latents, kept by the rollout
    reference: bool = False  # the reference policy's means or velocities, from an extra forward of the trainer
    old_policy: bool = False  # the generating policy's velocities, whose weights the trainer keeps
    recomputed_log_probs: bool = False  # log-probs of the policy before the batch's first update, by the trainer


class AdvantageSettings(Frozen):
    """How rewards are normalized: by the std of a group or of the whole batch, then clamped to +-`clamp`.

    With `std_over: none`, advantages are the deviations from the group's mean. With `reward_sum: normalized`, they
    are then the sum of the advantages of several rewards.
    """

    std_over: StdOver = "group"
    ddof: Literal[0, 1] = 0
    eps: float = Field(default=1e-4, gt=0)
    clamp: float = Field(default=5.0, gt=0)


class WholeBatchStd(AdvantageSettings):
    """Flow-GRPO's defaults."""

    std_over: StdOver = "batch"


class GroupStd(WholeBatchStd):
    """GRPO-Guard's defaults: each group's own std."""

    std_over: StdOver = "group"


class GroupSampleStd(AdvantageSettings):
    """The defaults of DanceGRPO and MixGRPO: each group's own std, with G - 1 degrees of freedom."""

    ddof: Literal[0, 1] = 1
    eps: float = Field(default=1e-8, gt=0)


class AlgorithmSettings(Frozen):
    """Settings that every algorithm has, and the facts that follow from them.

    `replays` says what the trainer replays: the stochastic `steps` of the rollout, or the final latents,
    `renoised`. `needs_diffusion` says in words what needs steps of a diffusion, whose std is s = g sqrt(h), if
    anything does. A term of the loss has `rows_per_term` rows: 2 if it compares two samples. With
    `same_initial_noise` all samples of a group start from the same noise. `same_initial_noise` and `window` are
    the defaults of a recipe's `sample`.

    The loss of an update is a mean over its terms. Groups whose rewards are all equal are `counted` in it with a
    gradient of zero, `left_out` of it, or `trained` with advantages of zero: then parts of the loss that do not
    depend on advantages have a gradient. If a batch has several updates, each trains some of its groups or, with
    `updates_of: samples`, some samples of every group.
    """

    replays: ClassVar[Literal["steps", "renoised"]] = "steps"
    rows_per_term: ClassVar[Literal[1, 2]] = 1
    same_initial_noise: ClassVar[bool] = False
    window: ClassVar[Window] = AllSteps()
    needs_diffusion: ClassVar[str | None] = None

    advantage: AdvantageSettings = AdvantageSettings()
    updates_per_batch: int = Field(default=1, ge=1)
    updates_of: Literal["groups", "samples"] = "groups"
    zero_spread_groups: Literal["counted", "left_out", "trained"] = "counted"

    @property
    def needs(self) -> Needs:
        """The optional inputs of the loss."""
        return Needs()

    @property
    def needs_densities(self) -> str | None:
        """What needs log-probs that are logarithms of densities, in words; None if nothing does."""
        return None

    @property
    def corrects_precision(self) -> bool:
        """Whether samples may be generated in another precision than that of training."""
        return self.replays == "renoised"  # no log-probs of the rollout are used

    @property
    def generates_with_trained_weights(self) -> bool:
        """Whether samples are generated with the newest trained weights, and not with ones that follow slowly."""
        return not self.needs.old_policy

    def trained_samples(self, group_size: int) -> int:
        """How many samples of a group are trained, if its rewards differ."""
        return group_size

    def trained_steps(self, steps: int, window: Window | None = None) -> int:
        """How many of a sample's denoising steps are trained, with the recipe's window or the default one."""
        window = window or self.window
        with errors_about("sample.window"):
            window.check(steps)
            if window.kept_steps(steps) < 1:
                raise ValueError(f"'{window.kind}' keeps no step to train; choose another kind of window")
        return window.kept_steps(steps)


class RatioLossSettings(AlgorithmSettings):
    """The penalty of a loss of importance ratios, and the treatment of samples from older weights.

    `kl_form` is `exact`, (mu - mu_ref)^2 / 2 s^2, or `flow_grpo_image`: over 2 g^2 instead for noise whose std is
    s = g sqrt(h), the same for `cps`. `stale` is `plain` (the ratio to the generating policy covers it) or
    `decoupled`: the ratio to the policy before the update, weighted by min(w, `stale_weight_cap`). Here w is the
    probability of the whole step under that policy over its probability under the generating policy or, with
    `stale_weight_of: element`, the geometric mean of that over the elements of a sample. `weighted: all` also
    weighs samples of the current weights, which may have been generated in another precision.
    """

    kl_weight: float = Field(default=0.0, ge=0)
    kl_form: KlForm = "exact"
    stale: Literal["plain", "decoupled"] = "plain"
    stale_weight_cap: float = Field(default=2.0, ge=1)
    stale_weight_of: Literal["step", "element"] = "step"
    weighted: Literal["stale", "all"] = "stale"

    @property
    def needs(self) -> Needs:
        return Needs(reference=self.kl_weight > 0, recomputed_log_probs=self.stale == "decoupled")

    @property
    def needs_densities(self) -> str | None:
        return "algorithm.options.stale: decoupled" if self.stale == "decoupled" else None

    @property
    def corrects_precision(self) -> bool:
        return self.stale == "decoupled" and self.weighted == "all"


class PolicyLossSettings(RatioLossSettings):
    """Ratios are clipped to 1 -+ `clip`."""

    clip: float = Field(default=1e-4, gt=0, lt=1)


class FlowGrpoSettings(PolicyLossSettings):
    """The values of Flow-GRPO's image recipes."""

    advantage: WholeBatchStd = WholeBatchStd()
    updates_per_batch: int = Field(default=2, ge=1)
    kl_weight: float = Field(default=0.04, ge=0)
    kl_form: KlForm = "flow_grpo_image"


class FlowGrpoFastSettings(FlowGrpoSettings):
    """A tighter clip, no penalty, and a few steps in the first half of the schedule."""

    window: ClassVar[Window] = FastWindow(width=3)

    clip: float = Field(default=1e-5, gt=0, lt=1)
    kl_weight: float = Field(default=0.0, ge=0)


class BestOfN(Frozen):
    """Train only on the `top` best and the `bottom` worst samples of a group.

    Their advantages are still relative to the whole group.
    """

    top: int = Field(ge=1)
    bottom: int = Field(ge=1)


class DanceGrpoSettings(PolicyLossSettings):
    """All samples of a group are trained unless `best_of_n` selects; each on its own random subset of steps."""

    same_initial_noise: ClassVar[bool] = True
    window: ClassVar[Window] = RandomSubset(fraction=0.6)

    advantage: GroupSampleStd = GroupSampleStd()
    best_of_n: BestOfN | None = None

    def trained_samples(self, group_size: int) -> int:
        if self.best_of_n is None:
            return group_size
        count = self.best_of_n.top + self.best_of_n.bottom
        if count > group_size:
            raise ConfigError(
                f"algorithm.options.best_of_n: top and bottom are {count} samples, but a group has {group_size}"
            )
        return count


class MixGrpoSettings(PolicyLossSettings):
    """The std is a group's own, so that the gradient of a group is final as soon as it is scored."""

    same_initial_noise: ClassVar[bool] = True
    window: ClassVar[Window] = SlidingWindow(width=4, training_steps_per_shift=25)

    advantage: GroupSampleStd = GroupSampleStd()
    updates_per_batch: int = Field(default=4, ge=1)


class GrpoGuardSettings(FlowGrpoSettings):
    """The values of GRPO-Guard's recipes. The clip range is for the normalized ratio, which is much closer to 1.

    The ratio is recentered by the generating policy's means, so that stale samples are compared with that policy.
    """

    advantage: GroupStd = GroupStd()
    clip: float = Field(default=2e-6, gt=0, lt=1)
    kl_weight: float = Field(default=0.0, ge=0)
    stale: Literal["plain"] = "plain"

    @property
    def needs(self) -> Needs:
        return replace(super().needs, step_means=True)

    @property
    def needs_densities(self) -> str | None:
        return "grpo_guard"


class FlowDppoSettings(RatioLossSettings):
    """The values of Flow-DPPO's recipe. Terms whose KL to the generating policy reaches `kl_threshold` are masked.

    The KL is a mean over elements, as log-probs are. It is measured from the generating policy, so that stale
    samples are compared with that policy.
    """

    advantage: WholeBatchStd = WholeBatchStd()
    updates_per_batch: int = Field(default=2, ge=1)
    kl_threshold: float = Field(default=1e-5, gt=0)
    stale: Literal["plain"] = "plain"

    @property
    def needs(self) -> Needs:
        return replace(super().needs, step_means=True)


class FlashGrpoSettings(PolicyLossSettings):
    """The values of Flash-GRPO's recipe: one trained step per sample, the same for a group.

    A term is weighted by lambda / `mean_weight`, where lambda makes gradients of all steps comparable. Set
    `mean_weight` to the mean of lambda over the steps that the window can draw, so that weights are 1 on average.
    """

    window: ClassVar[Window] = SparseWindow()
    needs_diffusion: ClassVar[str | None] = "flash_grpo"

    advantage: WholeBatchStd = WholeBatchStd()
    clip: float = Field(default=1e-3, gt=0, lt=1)
    mean_weight: float = Field(default=1.0, gt=0)

    @property
    def needs_densities(self) -> str | None:
        return "flash_grpo"


class RenoisedSettings(AlgorithmSettings):
    """Training from the final latents of Euler rollouts, noised again to int(`trained_fraction` * N) levels.

    They are the `first` levels of the schedule without its last, a `random` subset of its levels per sample,
    `stratified`, one random level from each of as many equal parts, or drawn from a `logit_normal` distribution
    over `TRAINING_LEVELS` levels, anew for every term. `random` and `stratified` levels are drawn from the first
    int(`drawn_fraction` * N) levels.
    """

    replays: ClassVar[Literal["steps", "renoised"]] = "renoised"
    window: ClassVar[Window] = EulerOnly()

    trained_fraction: float = Field(default=0.99, gt=0, le=1)
    levels: Levels = "first"
    drawn_fraction: float = Field(default=1.0, gt=0, le=1)

    @model_validator(mode="after")
    def _a_fraction_is_drawn_from(self) -> RenoisedSettings:
        if self.drawn_fraction < 1 and self.levels not in ("random", "stratified"):
            raise ValueError(
                f"drawn_fraction: {self.drawn_fraction}, but with levels: {self.levels} nothing is drawn from the "
                "levels of the schedule; set levels to random or stratified, or leave it out"
            )
        return self

    def drawn_levels(self, steps: int) -> int:
        """From how many levels of a schedule, the first ones, those of a sample are drawn."""
        return int(self.drawn_fraction * steps)

    def trained_steps(self, steps: int, window: Window | None = None) -> int:
        count = min(int(self.trained_fraction * steps), steps - 1 if self.levels == "first" else steps)
        if count < 1:
            raise ConfigError(
                f"algorithm.options.trained_fraction: {self.trained_fraction} of {steps} steps leaves none to "
                "train; raise either"
            )
        if self.levels in ("random", "stratified") and count > self.drawn_levels(steps):
            raise ConfigError(
                f"algorithm.options.drawn_fraction: {self.drawn_fraction} of {steps} steps are "
                f"{self.drawn_levels(steps)} levels, and trained_fraction {self.trained_fraction} asks for {count}"
                " of them; raise the first or lower the second"
            )
        return count


class LaggingPolicySettings(RenoisedSettings):
    """Samples come from a policy that follows the trained one: after each batch, old <- d old + (1 - d) new.

    d = min(old_decay_growth * n, old_decay_max), where n counts the optimizer updates of the run beyond the first
    `old_decay_start`.
    """

    old_decay_start: int = Field(default=0, ge=0)
    old_decay_growth: float = Field(default=1e-3, ge=0)
    old_decay_max: float = Field(default=0.5, ge=0, lt=1)

    @property
    def generates_with_trained_weights(self) -> bool:
        return self.old_decay_growth == 0 or self.old_decay_max == 0


class DiffusionNftSettings(LaggingPolicySettings):
    """`advantage.clamp` is M."""

    advantage: WholeBatchStd = WholeBatchStd()
    beta: float = Field(default=1.0, gt=0)
    kl_weight: float = Field(default=1e-4, ge=0)

    @property
    def needs(self) -> Needs:
        return Needs(final_latents=True, old_policy=True, reference=self.kl_weight > 0)


class AwmSettings(LaggingPolicySettings):
    """The values of AWM's recipes: the newest policy generates, unless `old_decay_growth` is above 0.

    `power` is that of the matching error. Advantages are divided by `advantage.clamp`, so that they are at most 1.
    `kl_weight` is that of the distance to the reference, `old_kl_weight` to the generating policy.
    """

    advantage: WholeBatchStd = WholeBatchStd()
    clip: float = Field(default=1.0, gt=0, le=1)
    power: float = Field(default=0.25, gt=0, le=1)
    kl_weight: float = Field(default=1e-3, ge=0)
    old_decay_growth: float = Field(default=0.0, ge=0)
    old_decay_max: float = Field(default=0.3, ge=0, lt=1)
    old_kl_weight: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _the_old_policy_differs(self) -> AwmSettings:
        if self.old_kl_weight > 0 and not self._old_policy_differs:
            raise ValueError(
                f"old_kl_weight: {self.old_kl_weight}, but with one update per batch the generating policy is the "
                "trained one; set old_decay_growth above 0 (published: 0.001), or old_kl_weight to 0"
            )
        return self

    @property
    def needs(self) -> Needs:
        return Needs(final_latents=True, old_policy=self._old_policy_differs, reference=self.kl_weight > 0)

    @property
    def _old_policy_differs(self) -> bool:
        return self.updates_per_batch > 1 or not self.generates_with_trained_weights


class FlowDpoSettings(RenoisedSettings):
    """A term compares the best sample of a group with the worst. Only the order of rewards matters.

    The errors that are compared are those of the velocity or, with `error: noise`, of the predicted noise, as in
    Diffusion-DPO: these are (1 - sigma)^2 times as large.
    """

    rows_per_term: ClassVar[Literal[1, 2]] = 2

    beta: float = Field(default=100.0, gt=0)
    error: Literal["velocity", "noise"] = "velocity"

    @field_validator("advantage")
    @classmethod
    def _only_the_order_counts(cls, advantage: AdvantageSettings) -> AdvantageSettings:
        if advantage != AdvantageSettings():
            raise ValueError("flow_dpo compares the best sample with the worst; it takes no advantage settings")
        return advantage

    @field_validator("zero_spread_groups")
    @classmethod
    def _equal_rewards_have_no_order(cls, choice: str) -> str:
        if choice == "trained":
            raise ValueError("a group of equal rewards has no best sample; use 'counted' or 'left_out'")
        return choice

    @property
    def needs(self) -> Needs:
        return Needs(final_latents=True, reference=True)

    def trained_samples(self, group_size: int) -> int:
        return 2


ALGORITHM_SETTINGS: dict[str, type[AlgorithmSettings]] = {
    "flow_grpo": FlowGrpoSettings,
    "flow_grpo_fast": FlowGrpoFastSettings,
    "dance_grpo": DanceGrpoSettings,
    "mix_grpo": MixGrpoSettings,
    "grpo_guard": GrpoGuardSettings,
    "flow_dppo": FlowDppoSettings,
    "flash_grpo": FlashGrpoSettings,
    "diffusion_nft": DiffusionNftSettings,
    "awm": AwmSettings,
    "flow_dpo": FlowDpoSettings,
}


def read_algorithm_settings(name: str, options: Mapping[str, Any]) -> AlgorithmSettings:
    """The settings of an algorithm, by its name or import path; raises ConfigError with one line."""
    found = import_algorithm(name).settings_type if ":" in name else ALGORITHM_SETTINGS.get(name)
    if found is None:
        raise ConfigError(
            f"algorithm.name: unknown algorithm '{name}'; {nearest(name, list(ALGORITHM_SETTINGS))}; for your "
            f"own, give an import path (my_package.module:MyAlgorithm) or add digenrl/algorithms/{name}.py",
            "algorithm.name",
        )
    settings_type: type[AlgorithmSettings] = found
    try:
        return parse_model(settings_type, dict(options))
    except ConfigError as error:
        hint = f"; to leave out the options of another algorithm, write 'algorithm={{name: \"{name}\"}}'"
        about = f"algorithm.options.{error}{hint if ':' in name else ''}"  # else `blame` knows the override
        raise ConfigError(about, f"algorithm.options.{error.where}") from None


def import_algorithm(path: str) -> Any:
    """The algorithm class at an import path; raises ConfigError if it does not declare its settings."""
    found = import_object(path, what="algorithm", kind="class")
    settings_type = getattr(found, "settings_type", None)
    if not (isinstance(settings_type, type) and issubclass(settings_type, AlgorithmSettings)):
        raise ConfigError(
            f"algorithm.name: '{path}': expected a class with a `settings_type`, got {found!r}; derive it from "
            "digenrl.algorithms.contract.GroupRelative or one of the algorithms there"
        )
    return found
