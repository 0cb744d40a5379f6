"""Trains on scored groups as they arrive, and takes an optimizer step once an update's groups are complete."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from digenrl.config.recipes.training import TrainerSettings
from digenrl.models.contract import DiffusionModel
from digenrl.models.objective import Objective
from digenrl.models.trajectory import ScoredGroup, ScoredSamples
from digenrl.training.advantage_scale import AdvantageScale
from digenrl.training.gradients.accumulator import GradientAccumulator
from digenrl.training.gradients.fixed_point_sums import FixedPointSums
from digenrl.training.gradients.share import GradientShare
from digenrl.training.gradients.sharing import add_share, check_share, check_sharing, make_sums, take_share
from digenrl.training.gradients.sums import Gradients
from digenrl.training.last_version import LastVersion
from digenrl.training.metrics import UpdateMetrics, update_metrics
from digenrl.training.offload.host_copies import HostCopies
from digenrl.training.offload.switching import Switching
from digenrl.training.open_batch import BatchShape, GroupEntry, OpenBatch, check_shape
from digenrl.training.packing.memory_plan import PackPlan
from digenrl.training.packing.noise_levels import DrawNoise
from digenrl.training.packing.pack_size import RetryCounter
from digenrl.training.packing.packed_passes import PackedPasses, PassContext
from digenrl.training.packing.packs import ReplayInputs, calibration_terms
from digenrl.training.packing.replay import Replay
from digenrl.training.ranks.rank_consensus import Consensus, UpdateFacts, reach_consensus
from digenrl.training.ranks.rank_group import RankGroup
from digenrl.training.ranks.sharding import ShardSpec
from digenrl.training.sample_jobs import SampleJob
from digenrl.training.skipped_steps import SkippedSteps
from digenrl.training.trainable_state import TrainableState
from digenrl.training.trainer_state import TrainerState


class Trainer:
    """One rank's trainer. All ranks must add the same samples in the same order; each replays its share of terms.

    Each rank holds the whole model, and gradients are summed when an update is committed. Or the model is sharded
    (see `digenrl.training.ranks.sharding`): each rank holds its shards of weights, gradients and moments, and none
    can generate on its own. Or the model is in stages (see `digenrl.models.parallel.staged_blocks`): ranks hold
    their own blocks and all adapters or, in full fine-tuning, what trains these blocks, and run all terms
    together. An update is committed on all ranks or on none.

    A trainer that `helps` also generates: it keeps the last version's weights inside a batch and, if the settings
    say so, offloads what only training needs while it generates. `switching` starts such a switch in advance.

    Trainers that have the same weights can share the gradient of an update (`shares_gradients`): each trains some
    of its jobs, and one of them adds the others' shares and commits. The others never commit (`commits=False`).
    They get the new version as published weights, and the trained weights before each update that does not start
    with the published ones: later updates of a batch and, if the version lags, the first one too.
    """

    def __init__(
        self,
        model: DiffusionModel,
        objective: Objective,
        settings: TrainerSettings,
        batch_shape: BatchShape,
        draw_noise: DrawNoise,
        *,
        ranks: RankGroup | None = None,
        helps: bool = False,
        shares_gradients: bool = False,
        commits: bool = True,
    ) -> None:
        check_shape(batch_shape, objective, settings)
        check_sharing(model, ranks, shares_gradients=shares_gradients, commits=commits)
        self.ranks = ranks
        self._objective, self._settings, self._shape = objective, settings, batch_shape
        self._shares_gradients, self._commits = shares_gradients, commits
        self._scale = scale = AdvantageScale(objective)
        self._open = OpenBatch(batch_shape, objective, scale, batch_shape.job_split(settings))
        self._trainable = TrainableState(model, objective, settings, ranks, helps, commits)
        self.policies = self._trainable.policies
        host = HostCopies(model.device)
        self._last_version = LastVersion(self._trainable, objective, host)
        self._sums = make_sums(model, self.policies, settings, scale, ranks, shares_gradients=shares_gradients)
        self.switching = Switching(
            self._trainable,
            self._sums.tensors,
            scale.sums_per_parameter,
            host,
            model.device,
            enabled=helps and settings.offloads(model.device.type),
            sums_dtype=self._sums.dtype,
        )
        replay = Replay(model, objective, self.policies, draw_noise, settings)
        self._passes = PackedPasses(replay, scale, settings, self.switching, ranks, self._bytes_to_come)
        self._gradients = GradientAccumulator(scale, self._passes, self._sums, self.switching)
        self._gradients.begin_update(self._open)
        self._retries = RetryCounter(model.device)
        self._skipped = SkippedSteps(settings.skipped_steps)

    @property
    def batch(self) -> int:
        """The open batch; also the version of the weights that fresh samples are generated with."""
        return self._open.index

    @property
    def update(self) -> int:
        """The open update of this batch."""
        return self._open.update

    @property
    def shard(self) -> ShardSpec | None:
        """What this rank holds of a model that is sharded or in stages; None if it holds all that is trained."""
        return self._trainable.shard

    @property
    def plan(self) -> PackPlan | None:
        """How terms are packed; None before it is set or measured."""
        return self._passes.planner.plan

    @property
    def later_updates_differ(self) -> bool:
        """Whether updates after a batch's first one need forwards that the first does not."""
        return self._settings.old_log_probs == "recomputed" and self._objective.updates_per_batch > 1

    @property
    def version_lags(self) -> bool:
        """Whether the published version follows the trained weights slowly, and differs from them now."""
        return self.batch > 0 and self._objective.old_policy_decay(self.batch - 1) != 0

    # --- Training -----------------------------------------------------------------------------------------------

    def add_group(self, group: ScoredGroup, place: int | None = None) -> None:
        """Adds all samples of a group; see `add_samples`."""
        self.add_samples(group, place)

    def add_samples(self, samples: ScoredSamples, place: int | None = None) -> None:
        """Adds the gradient of whole jobs of a group to the open update; what later updates train of it is held.

        `place` is the group's place in the batch, by default its index. If this raises, the trainer is unchanged.
        Trainers that never commit hold nothing, and take only what the open update trains. If trainers share
        updates of samples, jobs are added again for every update, to any of them.
        """
        place = samples.index if place is None else place
        entry = self._open.checked(samples, place)
        if not self._sums.takes_jobs and len(samples.trajectories) < self._shape.group_size:
            raise ValueError(
                f"got {len(samples.trajectories)} samples of group {samples.index}, but this trainer adds up whole"
                f" groups of {self._shape.group_size}; make it with shares_gradients=True to add some samples"
            )
        if not self._commits:
            self._open.check_open(samples.index, place)
        if place in self._open.places():
            self._train(place, entry, ReplayInputs.of(samples))
        self._open.add(place, entry, samples, hold=self._replays_again(place))

    def calibrate(self, group: ScoredGroup, *, later: bool = False) -> float:
        """Replays a group of any step and size and discards the result: measures the pack size and warms caches.

        Rewards are ignored. Weights, optimizer, open gradient and counters do not change. `later` replays as in
        the updates after a batch's first. Returns the work relative to that of a whole group.
        """
        split = self._open.split
        jobs = calibration_terms(group, self._objective, split.job_samples)
        all_terms = sum(map(len, jobs))
        job_terms = self._open.most_terms_of_a_job(self._open.steps_of(group.trajectories))
        self.reserve_version()
        context = PassContext(
            group.conditioning,
            denominator=all_terms,
            before_updates=self.update == 0 and not later,
            job_terms=job_terms,
        )
        jobs = [terms[:job_terms] for terms in jobs]
        for first, terms in enumerate(jobs):
            self._sums.of_job(SampleJob(0, first), self._passes.run(terms, context))
        self._retries.since_last()  # not attributed to an update
        whole_group = [all_terms * split.job_samples // len(group.trajectories)] * split.jobs_per_group
        return self._passes.work_share([*map(len, jobs)], whole_group)

    def can_commit(self) -> bool:
        """Whether the open update is complete, including all rewards that its scale depends on."""
        return self._commits and not self._open.missing()

    def commit(self) -> UpdateMetrics:
        """Takes the optimizer step of the open update, and starts the next one with the groups held for it.

        If the gradient is not finite, all ranks skip the step, and the weights stay as they are. Raises
        FloatingPointError after too many of those in a row.
        """
        if not self._commits:
            raise RuntimeError("this trainer never commits; give its gradient (take_share) to the one that does")
        if self._open.missing():
            raise RuntimeError(
                f"update {self.update} of batch {self.batch} is not complete: the groups at places "
                f"{self._open.missing()} are missing; add them before the commit"
            )
        gradient, problem = self._gradient_or_problem()
        consensus = self._reach_consensus(math.nan if problem else self._trainable.norm_of(gradient))
        takes_step = math.isfinite(consensus.norm)
        if not takes_step:  # on all ranks
            found = f"gradient norm of update {self.update} of batch {self.batch} is {consensus.norm}"
            self._skipped.skip(self.batch, problem or f"{found}; the weights are unchanged")
        self._passes.planner.pack_size = consensus.pack_size
        self._keep_version_if_needed()  # others may have trained everything
        if self.update == 0:
            self.policies.begin_updates()
        self._last_version.before_change()
        if takes_step:
            with self.switching.stepping():
                self._trainable.step(gradient, consensus.norm)
        metrics = self._metrics(consensus)
        if self._passes.links is not None:
            self._passes.links.note_mismatch(metrics.log_prob_mismatch)
        self._begin_next_update()
        return metrics

    def gradient(self) -> Gradients:
        """The gradient of the complete open update, over all ranks and before clipping.

        For a sharded model, this rank's shards of it; for a model in stages, that of its own weights.
        """
        return self._gradients.gradient(self._open)

    # --- Sharing the gradient of an update ----------------------------------------------------------------------

    def take_share(self) -> GradientShare:
        """The gradient of all jobs that were added to the open update, which are not part of it here any more.

        If it is not finite, the update that it is added to is skipped. Not for one of several ranks.
        """
        if self.ranks is not None:
            raise RuntimeError(
                f"{self.ranks.rank} has only a part of the gradient; share it between whole trainers"
            )
        with self.switching.reading_sums():
            return take_share(self._open, self._fixed_point_sums())

    def add_share(self, share: GradientShare) -> None:
        """Adds jobs that another trainer has trained. If this raises, the trainer is unchanged.

        All ranks must add the same shares.
        """
        sums = self._fixed_point_sums()
        check_share(share, self._open, self.policies.parameters)
        with self.switching.adding_to_sums():
            add_share(share, self._open, sums, self.policies.parameters)

    def add_rewards(self, place: int, index: int, rewards: Sequence[float]) -> None:
        """Records the rewards of a group. Its samples may be trained by other trainers, in any update.

        They can be given again. If this raises, the trainer is unchanged.
        """
        self._open.entries[place] = self._open.checked_rewards(place, index, tuple(rewards))

    def places_to_replay(self) -> list[int]:
        """The places of groups that must be held before the commit, because samples of them are replayed.

        These samples exceed the clamp, and were trained elsewhere. It is known once all rewards are.
        """
        if self._open.without_rewards():
            raise RuntimeError(f"the rewards of the groups at places {self._open.without_rewards()} are not known")
        return self._gradients.places_to_replay(self._open)

    def hold_group(self, group: ScoredGroup, place: int | None = None) -> None:
        """Holds a group of the open update, to be replayed at the commit.

        If this raises, the trainer is unchanged.
        """
        place = group.index if place is None else place
        entry = self._open.checked_group(group, place)
        self._open.check_open(group.index, place)
        self._open.hold(place, entry, group)

    def use_pack_size(self, pack_size: int) -> None:
        """Packs as the trainer that commits does: packs of another size round differently."""
        self._passes.planner.pack_size = pack_size

    def start_version(self, version: int, weights: Mapping[str, Tensor] | None = None) -> None:
        """Opens the batch of a version, and discards the open one.

        For a trainer that does not commit. `weights` are the published ones; None if they were just loaded into
        the model. If the version lags, `start_update` must follow.
        """
        self._check_never_commits()
        with self.switching.overwriting():
            if weights is not None:
                self.policies.load_trained(weights)
            self.policies.finish_batch(decay=0.0)
        self._begin_batch(version)

    def start_update(self, update: int, weights: Mapping[str, Tensor] | None = None) -> None:
        """Opens an update of the open batch, and discards everything that was added to the batch.

        For a trainer that does not commit. `weights` are the `trained_weights` of the one that does; None, for
        update 0 of a version that does not lag, stands for those of the version. If this raises, the trainer is
        unchanged.
        """
        self._check_never_commits()
        updates = self._objective.updates_per_batch
        if not 0 <= update < updates:
            raise ValueError(f"no update {update} to start: a batch has {updates}, counted from 0")
        if weights is None and (update > 0 or self.version_lags):
            before = f"update {update - 1}" if update else f"batch {self.batch - 1}"
            raise ValueError(f"update {update} starts with the trained weights after {before}; pass them")
        with self.switching.overwriting():
            if weights is None:
                self.policies.restore_version()
            else:
                self.policies.load_trained(weights)
        self._begin_batch(self.batch, update)

    def trained_weights(self) -> dict[str, Tensor]:
        """The weights after the last commit, also between two updates of a batch, named as those of `published`.

        Other trainers need them for the open update. For a sharded model this is a collective.
        """
        self.switching.synchronize()
        return self.policies.trained()

    def trained_at_version(self) -> dict[str, Tensor]:
        """The trained weights when the open batch began, named and valid as those of `published`."""
        self._keep_version_if_needed()
        self.switching.synchronize()
        return self._last_version.trained()

    # --- Generating and versions --------------------------------------------------------------------------------

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Inside, the model has the last version's weights, and what only training needs is being offloaded.

        It is loaded again by the next replay, or earlier by `switching.load`.
        """
        self.switching.offload()
        with self.policies.generating():
            yield

    def published(self) -> dict[str, Tensor]:
        """The last version's weights by their published names; valid until the open batch is committed.

        For a sharded model this is a collective: rank 0 gets whole weights on its CPU, the others get none.
        """
        self._keep_version_if_needed()
        return self._last_version.published()

    def published_average(self) -> dict[str, Tensor]:
        """The moving average at the last version, named and valid as the weights that `published` returns.

        For a sharded model this is a collective too.
        """
        self.switching.synchronize()
        return self.policies.published(self._last_version.average())

    def keep_version(self) -> None:
        """Starts copying the last version's state to the host, unless it is kept or updates were committed since.

        `published` and `state_at_last_version` then read it from there.
        """
        if self.update == 0 and self._commits:
            self._last_version.keep(self.batch, self._pack_size)

    def reserve_version(self) -> None:
        """Allocates host memory for a kept version in advance, in addition to everything allocated now."""
        self._last_version.reserve()

    def state_at_last_version(self, *, copied: bool = True) -> TrainerState:
        """The state when the open batch began, whatever was added and committed since.

        Valid until the batch is committed: its memory may be reused for the next one. If not `copied`, tensors on
        the host may be the trainer's own, and the state is valid until its next job.
        """
        self.switching.synchronize()
        state = self._last_version.state(self.batch, self._pack_size, copied=copied)
        return state if self._passes.links is None else replace(state, links=self._passes.links.state())

    def load_state(self, state: TrainerState) -> None:
        """Continues from a saved state; discards the open batch. A state that does not fit changes nothing.

        A sharded trainer also accepts whole states, and shards of the same rank among as many.
        """
        fitted = self._trainable.fitted(state)
        with self.switching.overwriting():
            self._trainable.load(fitted)
        if state.pack_size is not None:
            self._passes.planner.pack_size = state.pack_size  # packs of another size round differently
        if self._passes.links is not None:
            self._passes.links.load(state.links)
        self._begin_batch(state.batch)

    # --- Internals ----------------------------------------------------------------------------------------------

    def _gradient_or_problem(self) -> tuple[Gradients, str]:
        """The gradient, or why it is out of range, which all ranks agree about."""
        try:
            return self.gradient(), ""
        except FloatingPointError as error:
            return {}, str(error)

    def _train(self, place: int, entry: GroupEntry, inputs: ReplayInputs) -> None:
        self._keep_version_if_needed()
        self._gradients.add(self._open, place, entry, inputs)

    def _keep_version_if_needed(self) -> None:
        if self._last_version.must_be_kept:
            self.keep_version()

    def _check_never_commits(self) -> None:
        if self._commits:
            raise RuntimeError(
                "this trainer commits, and starts its versions and updates itself; use load_state to replace one"
            )

    @property
    def _adds_jobs_again(self) -> bool:
        """Whether a job is added again for every update, which trains some of its samples, perhaps elsewhere."""
        return self._shares_gradients and self._objective.updates_of == "samples"

    def _replays_again(self, place: int) -> bool:
        """Whether samples at this place are replayed after the open update has trained them: for the clamp too."""
        later = self._open.is_replayed_later(place) and not self._adds_jobs_again
        return later or (self._scale.over_batch and self._commits)

    def _fixed_point_sums(self) -> FixedPointSums:
        if not self._shares_gradients or not isinstance(self._sums, FixedPointSums):
            raise RuntimeError("this trainer does not share gradients; make it with shares_gradients=True")
        return self._sums

    def _reach_consensus(self, norm: float) -> Consensus:
        entries = sorted(self._open.entries.items())
        facts = UpdateFacts(
            batch=self.batch,
            update=self.update,
            updates_done=self._trainable.updates_done,
            groups=[(place, entry.index, entry.rewards) for place, entry in entries],
            norm=norm,
            pack_size=self._pack_size,
            tally=self._sums.tally(),
        )
        return reach_consensus(facts, self.ranks, sharded=self.shard is not None)

    def _metrics(self, consensus: Consensus) -> UpdateMetrics:
        entries, steps = self._open.open_entries(), self._open.steps
        assert steps is not None, "samples were trained"
        return update_metrics(
            consensus.tally,
            batch=self.batch,
            update=self.update,
            rewards=[reward for entry in entries for reward in entry.rewards],
            gradient_norm=consensus.norm,
            memory_retries=self._retries.since_last(),
            skipped=int(not math.isfinite(consensus.norm)),
            zero_spread_groups=self._open.zero_spread_groups(),
            terms=round(self._open.denominator(steps) / self._open.mean_factor()),
            pack_size=self._pack_size or 0,
        )

    def _begin_next_update(self) -> None:
        self._open.begin_next_update()
        if self.update == self._objective.updates_per_batch:
            self.policies.finish_batch(self._objective.old_policy_decay(self.batch))
            if self._passes.links is not None:
                self._passes.links.finish_batch(self._objective.clip_range)
            self._begin_batch(self.batch + 1)
            return
        self._gradients.begin_update(self._open)
        if self._adds_jobs_again:
            self._open.await_all_jobs()
            return
        for place in self._open.places():
            entry = self._open.entries.get(place)
            if entry is not None and entry.held is not None:
                self._train(place, entry, entry.held)
                entry.held = entry.held if self._replays_again(place) else None

    def _begin_batch(self, index: int, update: int = 0) -> None:
        self._open = self._open.of_step(index, update)
        self._gradients.begin_update(self._open)
        self._last_version.discard()

    def _bytes_to_come(self) -> int:
        """What training will allocate in addition to a pass: moments, and the sums of earlier groups and jobs."""
        parameters = self.policies.parameters.values()
        dtype = self._sums.dtype
        sum_bytes = sum(p.nbytes if dtype is None else p.numel() * dtype.itemsize for p in parameters)
        earlier_groups = len(self._open.places()) > 1 and not self._sums.tensors()
        earlier_jobs = self._open.split.jobs_per_group > 1  # of the group that is being added
        sums = self._scale.sums_per_parameter * (earlier_groups + earlier_jobs)
        return self._trainable.missing_moment_bytes() + sums * sum_bytes

    @property
    def _pack_size(self) -> int | None:
        return self._passes.planner.pack_size
