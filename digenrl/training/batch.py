"""The open batch of a trainer: its shape, its groups in their places, and what it cannot be."""

from __future__ import annotations

from dataclasses import dataclass, field

from digenrl.config.reading import ConfigError
from digenrl.config.training import TrainerSettings
from digenrl.models.objective import Advantages, Objective
from digenrl.models.trajectory import ScoredGroup
from digenrl.training.ordered_sums import OrderedSums
from digenrl.training.policy_weights import PolicyWeights
from digenrl.training.ranks.rank_group import RankGroup


@dataclass(frozen=True, slots=True)
class BatchShape:
    """How many groups a batch has, and how many samples a group has."""

    groups: int
    group_size: int

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ValueError(f"a batch needs at least 1 group, got {self.groups}")
        if self.group_size < 2:
            raise ValueError(
                f"group_size must be at least 2, so that samples can be compared; got {self.group_size}"
            )


@dataclass(slots=True)
class GroupEntry:
    """A group in its place of the batch; its sums stay apart until all its samples are in them."""

    group: ScoredGroup | None  # None once nothing more is replayed of it, so that its trajectories are freed
    index: int
    rewards: tuple[float, ...]
    advantages: Advantages
    terms: int  # that it counts in the denominator
    sums: OrderedSums  # over its samples
    held: list[set[int]] = field(default_factory=list)  # slices of a later update, not trained yet
    trained: set[int] = field(default_factory=set)

    def added(self) -> set[int]:
        """The samples that are trained or held."""
        return self.trained.union(*self.held)


def check_shape(shape: BatchShape, objective: Objective, settings: TrainerSettings) -> None:
    """Raises ConfigError if the objective cannot train a batch of this shape with these settings."""
    if shape.groups < objective.updates_per_batch:
        raise ConfigError(
            f"algorithm.options.updates_per_batch: {objective.updates_per_batch} updates need as many prompts, "
            f"got batch.prompts = {shape.groups}; use more prompts or fewer updates"
        )
    if objective.needs.recomputed_log_probs and settings.old_log_probs != "recomputed":
        raise ConfigError(
            f"training.old_log_probs: the algorithm needs 'recomputed', got '{settings.old_log_probs}'; change it"
        )


def check_sharding(policies: PolicyWeights, ranks: RankGroup | None, helps: bool) -> None:
    """Raises ValueError where spread weights are asked for what only whole ones can do."""
    if policies.sharded and ranks is None:
        raise ValueError("a sharded model is trained by the ranks that it is spread over; hand them over")
    if policies.sharded and helps:
        raise ValueError(
            "a sharded trainer cannot generate: no rank holds all weights; use helps=False, or train adapters"
        )
