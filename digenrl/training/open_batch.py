"""The open batch of a trainer: its shape, its groups by place, and what its open update trains."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from digenrl.config.generator_pools import check_slice
from digenrl.config.reading import ConfigError, errors_about
from digenrl.config.recipes.training import TrainerSettings
from digenrl.models.objective import Advantages, Objective
from digenrl.models.trajectory import ScoredSamples, Trajectory
from digenrl.training.advantage_scale import AdvantageScale
from digenrl.training.packing.packs import ReplayInputs, Term, rows_of_terms, terms_of
from digenrl.training.sample_jobs import JobSplit, SampleJob
from digenrl.training.update_split import UpdateSplit

JOB_SAMPLES = "training.job_samples"


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The number of groups in a batch, and of samples in a group.

    Samples of the first `stale_groups` may come from weights one version old.
    """

    groups: int
    group_size: int
    stale_groups: int = 0

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ValueError(f"a batch needs at least 1 group, got {self.groups}")
        if self.group_size < 2:
            raise ValueError(
                f"group_size must be at least 2, so that samples can be compared; got {self.group_size}"
            )

    def job_split(self, settings: TrainerSettings) -> JobSplit:
        """How groups are cut into jobs: by `job_samples`, or not at all."""
        chosen = settings.job_samples
        return JobSplit(self.group_size, self.group_size if chosen == "auto" else chosen)


@dataclass(slots=True)
class GroupEntry:
    """A group at its place in the batch: its rewards, and the samples that are held to be replayed later."""

    index: int
    rewards: tuple[float, ...]
    advantages: Advantages
    held: ReplayInputs | None = None

    @property
    def has_spread(self) -> bool:
        return any(self.advantages.values)


class OpenBatch:
    """The groups of one batch. What an update trains of a place is fixed, whenever its samples arrive.

    `arrived` are the jobs that were added, `trained` those of them that the open update has trained. `steps` are
    the terms of each sample, or of each pair that is compared; None before the first arrived.
    """

    def __init__(
        self,
        shape: BatchShape,
        objective: Objective,
        scale: AdvantageScale,
        jobs: JobSplit,
        index: int = 0,
        update: int = 0,
    ) -> None:
        self._shape, self._objective, self._scale, self.split = shape, objective, scale, jobs
        self._updates = UpdateSplit(
            shape.groups,
            objective.units_per_group(shape.group_size),
            objective.updates_per_batch,
            objective.updates_of,
            shape.stale_groups,
        )
        self.index = index
        self.update = update
        self.entries: dict[int, GroupEntry] = {}
        self.arrived: set[SampleJob] = set()
        self.trained: set[SampleJob] = set()
        self.steps: int | None = None

    def of_step(self, index: int, update: int = 0) -> OpenBatch:
        """An empty batch of another step, with this update open."""
        return OpenBatch(self._shape, self._objective, self._scale, self.split, index, update)

    def begin_next_update(self) -> None:
        """Opens the next update, which has trained nothing yet."""
        self.update += 1
        self.trained = set()

    def await_all_jobs(self) -> None:
        """The open update needs all its samples, also those that arrived for an earlier one."""
        self.arrived = set()
        for entry in self.entries.values():
            entry.held = None

    # --- Checks, which raise ValueError and change nothing ------------------------------------------------------

    def checked(self, samples: ScoredSamples, place: int) -> GroupEntry:
        """The entry of the samples' group, new or known. Raises unless these can be added at this place."""
        entry = self.checked_group(samples, place)
        name, size = f"group {samples.index} of step {samples.step}", len(samples.trajectories)
        if not self.split.is_whole(samples.first, size):
            raise ValueError(
                f"{name}: samples {samples.first} to {samples.first + size - 1} are not whole jobs of "
                f"{self.split.job_samples} samples; add whole jobs, or change {JOB_SAMPLES}"
            )
        for job in self.split.jobs(place, range(samples.first, samples.first + size)):
            if job in self.arrived:
                raise ValueError(f"{name}: sample {job.first} at place {place} was added before")
        return entry

    def checked_group(self, samples: ScoredSamples, place: int) -> GroupEntry:
        """The entry of the samples' group, new or known. Raises unless the group belongs to this place."""
        name = f"group {samples.index} of step {samples.step}"
        if samples.step != self.index:
            raise ValueError(f"{name} does not belong to the open batch, which is of step {self.index}")
        if 0 <= place < self._shape.groups and self._updates.last_update(place) < self.update:
            raise ValueError(
                f"{name}: place {place} was trained by update {self._updates.last_update(place)}, and update "
                f"{self.update} is open"
            )
        self.check_steps(name, self.steps_of(samples.trajectories))
        return self.checked_rewards(place, samples.index, samples.rewards)

    def checked_rewards(self, place: int, index: int, rewards: tuple[float, ...]) -> GroupEntry:
        """The entry of a group with these rewards, new or known. Raises unless it belongs to this place."""
        name = f"group {index} of step {self.index}"
        if not 0 <= place < self._shape.groups:
            raise ValueError(f"{name} has no place {place}: a batch has {self._shape.groups} groups")
        if len(rewards) != self._shape.group_size:
            raise ValueError(f"{name} has {len(rewards)} samples, expected {self._shape.group_size}")
        entry = self.entries.get(place)
        if entry is None:
            return GroupEntry(index, rewards, self._scale.trained_advantages(rewards))
        if (entry.index, entry.rewards) != (index, rewards):
            raise ValueError(
                f"{name} with rewards {rewards}: "
                f"place {place} already has group {entry.index} with {entry.rewards}"
            )
        return entry

    def check_steps(self, name: str, steps: int) -> None:
        """Raises unless all samples of the batch are trained on equally many steps."""
        if self.steps not in (None, steps):
            raise ValueError(f"{name} trains {steps} steps per sample, unlike the other groups of the batch")

    def check_open(self, index: int, place: int) -> None:
        """Raises unless the open update trains the group at a place."""
        if place not in self.places():
            raise ValueError(
                f"group {index} of step {self.index}: update {self.update} is open, which trains places "
                f"{self.places()} and not place {place}; wait for the update that does"
            )

    # --- Changes ------------------------------------------------------------------------------------------------

    def add(self, place: int, entry: GroupEntry, samples: ScoredSamples, *, hold: bool) -> None:
        """Records samples that were checked, and holds those that are replayed later."""
        inputs = ReplayInputs.of(samples)
        self.entries[place] = entry
        self.arrived.update(self.split.jobs(place, inputs.trajectories))
        self.steps = self.steps_of(samples.trajectories)
        if hold:
            entry.held = inputs.joined(entry.held)

    def hold(self, place: int, entry: GroupEntry, group: ScoredSamples) -> None:
        """Holds samples that were checked, to be replayed later, without training them."""
        self.entries[place] = entry
        self.steps = self.steps_of(group.trajectories)
        entry.held = ReplayInputs.of(group).joined(entry.held)

    def forget(self, jobs: Collection[SampleJob]) -> None:
        """Makes these jobs as if they had not arrived. Their groups' rewards stay known."""
        self.arrived.difference_update(jobs)
        self.trained.difference_update(jobs)
        for place in {job.place for job in jobs} & self.entries.keys():
            self.entries[place].held = None

    # --- What the open update trains ----------------------------------------------------------------------------

    def most_terms_of_a_job(self, steps: int) -> int:
        """The most terms that one update trains of one job."""
        return min(self._updates.most_units(), self.split.job_samples) * steps

    def steps_of(self, trajectories: Iterable[Trajectory]) -> int:
        """On how many steps each of these samples is trained."""
        counts = {len(self._objective.trained_steps(trajectory.plan)) for trajectory in trajectories}
        assert len(counts) == 1, "the samples of a group are trained on equally many steps"
        return counts.pop()

    def terms(self, place: int, entry: GroupEntry, inputs: ReplayInputs, samples: Collection[int]) -> list[Term]:
        """The terms of some samples of a group that the open update trains."""
        units = self._updates.units(place, self.update)
        return terms_of(inputs, entry.advantages, self._objective, units=units, samples=samples)

    def samples_to_replay(self, place: int, factor: float) -> set[int]:
        """The samples that exceed the clamp once scaled, and those that the open update compares them with."""
        entry = self.entries[place]
        beyond = self._scale.correction_weights(entry.advantages, factor)
        units = self._updates.units(place, self.update)
        rows = rows_of_terms(entry.advantages, self._objective, units=units, samples=beyond)
        return {index for row in rows for index in row}

    def holds(self, place: int, samples: Collection[int]) -> bool:
        """Whether these samples of the group at a place are held."""
        held = self.entries[place].held
        return not samples or (held is not None and held.trajectories.keys() >= set(samples))

    def places(self) -> list[int]:
        """The places of the open update."""
        return self._updates.places(self.update)

    def is_replayed_later(self, place: int) -> bool:
        """Whether a later update trains another part of the group at this place."""
        return self._updates.last_update(place) > self.update

    def open_entries(self) -> list[GroupEntry]:
        """The entries of the open update that have arrived, in the order of places."""
        return [self.entries[place] for place in self.places() if place in self.entries]

    def missing(self) -> list[int]:
        """The places whose groups the open update still needs: for training, or for the batch's scale."""
        trained = {place for place in self.places() if self.trained.issuperset(self.split.jobs(place))}
        return sorted(set(self.places()) - trained | set(self.without_rewards()))

    def without_rewards(self) -> list[int]:
        """The places whose rewards the open update still needs."""
        needed = range(self._shape.groups) if self._scale.over_batch else self.places()
        return [place for place in needed if place not in self.entries]

    def denominator(self, steps: int) -> int:
        """Z of the open update, if each sample is trained on `steps` steps."""
        return steps * self._units(self.places())

    def zero_spread_groups(self) -> int:
        """Groups of equal rewards in the open update, without those that a later update trains too."""
        finished = [place for place in self.places() if not self.is_replayed_later(place)]
        return sum(not self.entries[place].has_spread for place in finished)

    def mean_factor(self) -> float:
        """The factor that makes a sum over all terms divided by Z the mean that the objective wants.

        It is above 1 if groups of equal rewards are left out, which is known once the update is complete.
        """
        if self._objective.zero_spread_groups != "left_out":
            return 1.0
        counted = [place for place in self.places() if self.entries[place].has_spread]
        return self._units(self.places()) / self._units(counted) if counted else 1.0

    def rewards_by_group(self) -> list[tuple[float, ...]]:
        """The rewards of all groups that are known, in the order of places."""
        return [self.entries[place].rewards for place in sorted(self.entries)]

    def _units(self, places: Iterable[int]) -> int:
        return sum(len(self._updates.units(place, self.update)) for place in places)


def check_shape(shape: BatchShape, objective: Objective, settings: TrainerSettings) -> None:
    """Raises ConfigError if the objective cannot train a batch of this shape with these settings."""
    updates = objective.updates_per_batch
    if objective.updates_of == "groups" and shape.groups < updates:
        raise ConfigError(
            f"algorithm.options.updates_per_batch: {updates} updates need as many prompts, "
            f"got batch.prompts = {shape.groups}; use more prompts or fewer updates"
        )
    units = objective.units_per_group(shape.group_size)
    if objective.updates_of == "samples" and shape.groups + units <= updates:
        raise ConfigError(
            f"algorithm.options.updates_per_batch: {updates} updates of {shape.groups} groups, each with {units} "
            "trained samples or pairs, leave some update empty; use fewer updates"
        )
    if objective.needs.recomputed_log_probs and settings.old_log_probs != "recomputed":
        raise ConfigError(
            f"training.old_log_probs: the algorithm needs 'recomputed', got '{settings.old_log_probs}'; change it"
        )
    _check_jobs(shape.job_split(settings), objective)


def _check_jobs(split: JobSplit, objective: Objective) -> None:
    with errors_about(JOB_SAMPLES):
        check_slice(split.job_samples, split.group_size)
    if objective.rows_per_term > 1 and split.jobs_per_group > 1:
        raise ConfigError(
            f"{JOB_SAMPLES}: {split.job_samples}, but the algorithm compares samples of a whole group of "
            f"{split.group_size}; set it to {split.group_size}, or auto",
            JOB_SAMPLES,
        )
