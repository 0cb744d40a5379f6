"""Accumulates the gradient of the open update job by job, and finishes it when the update is complete.

The scalar of an update is L = (1 / Z) sum of w * l over its terms, with Z counted before any forward. No statistic
crosses terms, so the gradient does not depend on the order of groups, the size of packs or jobs, or the number of
ranks: not even in its last bit on the order (see `sum_in_order`), and only by rounding on the others.
"""

from __future__ import annotations

from dataclasses import replace

from digenrl.training.advantage_scale import AdvantageScale
from digenrl.training.gradients.job_sums import JobSums, UpdateSums
from digenrl.training.gradients.sums import Gradients, scaled
from digenrl.training.offload.switching import Switching
from digenrl.training.open_batch import GroupEntry, OpenBatch
from digenrl.training.packing.packed_passes import PackedPasses, PassContext, PassResult
from digenrl.training.packing.packs import ReplayInputs, Term
from digenrl.training.sample_jobs import SampleJob


class GradientAccumulator:
    """Replays the jobs of the open update and adds up their gradients."""

    def __init__(
        self, scale: AdvantageScale, passes: PackedPasses, sums: UpdateSums, switching: Switching
    ) -> None:
        self._scale, self._passes, self._sums, self._switching = scale, passes, sums, switching

    def begin_update(self, batch: OpenBatch) -> None:
        """Discards all sums and starts the batch's open update."""
        self._sums.reset(batch.places())

    def add(self, batch: OpenBatch, place: int, entry: GroupEntry, inputs: ReplayInputs) -> None:
        """Adds the jobs of these samples of a group of the open update. If it raises, nothing was added."""
        added, jobs = JobSums(), batch.split.jobs(place, inputs.trajectories)
        for job in jobs:
            terms = batch.terms(place, entry, inputs, batch.split.samples(job))
            added.add(self._sums.of_job(job, self._run(batch, job, inputs, terms)))
        with self._switching.adding_to_sums():
            self._sums.add(place, added)
        batch.trained.update(jobs)

    def gradient(self, batch: OpenBatch) -> Gradients:
        """The gradient of the complete open update, over all ranks; for a sharded model this rank's shards.

        Raises RuntimeError if samples have to be replayed that are not held here.
        """
        if self.places_to_replay(batch):
            raise RuntimeError(
                f"update {batch.update} of batch {batch.index} needs samples beyond the clamp again: hold the "
                f"groups at places {self.places_to_replay(batch)} (hold_group) before the commit"
            )
        factor = self._scale.factor(batch.rewards_by_group())
        corrections = self._clamp_corrections(batch, factor)
        with self._switching.reading_sums():
            total = self._sums.gradient(factor, corrections)
        mean_factor = batch.mean_factor()
        return total if mean_factor == 1 else scaled(total, mean_factor)

    def places_to_replay(self, batch: OpenBatch) -> list[int]:
        """The places with samples that `gradient` has to replay, and that are not held here."""
        if not self._scale.over_batch:
            return []
        factor = self._scale.factor(batch.rewards_by_group())
        return [
            place for place in batch.places() if not batch.holds(place, batch.samples_to_replay(place, factor))
        ]

    def _clamp_corrections(self, batch: OpenBatch, factor: float) -> JobSums:
        """Replays the samples that exceed the clamp once scaled, with the difference as their weight."""
        corrections = JobSums()
        for place in batch.places() if self._scale.over_batch else ():
            entry = batch.entries[place]
            if entry.held is None:
                continue  # nothing to correct, as `places_to_replay` says
            weights = self._scale.correction_weights(entry.advantages, factor)
            for job in batch.split.jobs(place):
                terms = [
                    replace(term, weight=weights[term.trajectories[0].sample.index])
                    for term in batch.terms(place, entry, entry.held, weights.keys() & batch.split.samples(job))
                ]
                result = self._run(batch, job, entry.held, terms, only_unscaled=True)
                corrections.add(self._sums.of_job(job, result))
        return corrections

    def _run(
        self,
        batch: OpenBatch,
        job: SampleJob,
        inputs: ReplayInputs,
        terms: list[Term],
        only_unscaled: bool = False,
    ) -> PassResult:
        steps = batch.steps_of(inputs.trajectories.values())
        context = PassContext(
            conditioning=inputs.conditioning,
            denominator=batch.denominator(steps),
            before_updates=batch.update == 0,
            job_terms=batch.most_terms_of_a_job(steps),
            only_unscaled=only_unscaled,
            offset=job.place + job.first // batch.split.job_samples,
        )
        return self._passes.run(terms, context)
