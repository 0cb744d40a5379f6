"""A virtual cluster that behaves like a real one.

Durations differ from what is expected, timestamps are a little older than their arrival, versions arrive lane by
lane, results come late or twice, workers, jobs and artifacts are lost, and measured costs are reported at times.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from heapq import heapify, heappop, heappush
from typing import Any, ClassVar

from digenrl.records import (
    NO_LANE,
    Action,
    ArtifactLost,
    Commit,
    Committed,
    CostsMeasured,
    Encode,
    Encoded,
    Evaluate,
    Evaluated,
    Event,
    Export,
    Exported,
    Generate,
    Generated,
    GradientsSent,
    Job,
    JobFailed,
    LaneOffer,
    Publish,
    Published,
    Restore,
    Restored,
    Result,
    RoleSwitched,
    Save,
    Saved,
    Score,
    Scored,
    SendGradients,
    Slice,
    SwitchRole,
    Tick,
    Train,
    Trained,
    WorkerJoined,
    WorkerLost,
    WorkerRestarted,
)
from digenrl.scheduling import SchedulerState

SECOND = 1_000_000_000
FACTORS = (0.7, 1.5)
MOST_FAILED_SCORES = 5
MOST_LOST_ARTIFACTS = 6
TRAINER_JOBS = (Commit, Save, SwitchRole, Restore, Export)


def losable_lanes(initial: SchedulerState) -> int:
    """The lanes that can be lost one by one, which are the first ones.

    If lanes train on their own, those of the trainer are lost with it and come back with it.
    """
    return sum(not lane.helper or not initial.terms.shares_work for lane in initial.lanes)


class NoisyCluster:
    """Lanes, reward lanes and a trainer with random times and faults. The same seed gives the same run.

    `also` are further events, each reported after this many others.
    """

    def __init__(self, initial: SchedulerState, seed: int, also: Mapping[int, Event] | None = None) -> None:
        self.now_ns = 0
        self._terms, self._costs = initial.terms, initial.costs
        self._dice = random.Random(seed)
        self._offers = {lane.index: lane.offer for lane in initial.lanes}
        self._helpers = {lane.index for lane in initial.lanes if lane.helper}
        self._lost: set[int] = set()
        self._held: dict[int, Generate] = {}
        self._generated: dict[tuple[int, int], set[Slice]] = defaultdict(set)  # artifacts, by step and group
        self._measured: dict[str, list[int]] = defaultdict(list)
        self._due: list[tuple[int, int, Event]] = []
        self._also, self._reported = also or {}, 0
        self._submitted = self._failed_scores = self._lost_artifacts = 0
        self._needs_tick = True
        self._plan_losses(losable_lanes(initial))

    def _plan_losses(self, lanes: int) -> None:
        """Workers are lost and replaced. In the end a fast lane stays, so that every run can finish."""
        dice = self._dice
        for _ in range(dice.randrange(4)):
            self._report(dice.randrange(15 * SECOND), WorkerLost(0, dice.randrange(lanes)))
        for number in range(dice.randrange(3)):
            offer = LaneOffer(f"new-{number}", SECOND)
            if self._terms.shares_work and dice.random() < 0.7:
                offer = replace(offer, train_sample_ns=Fraction(SECOND))
            self._report(dice.randrange(15 * SECOND), WorkerJoined(0, offer))
        self._report(16 * SECOND, WorkerJoined(0, LaneOffer("last", SECOND)))
        for _ in range(dice.randrange(3) if self._terms.scorers else 0):
            self._report(dice.randrange(15 * SECOND), WorkerLost(0, dice.randrange(self._terms.scorers), "reward"))
        for _ in range(dice.randrange(3)):
            self._report(dice.randrange(15 * SECOND), WorkerLost(0, 0, "trainer"))
        if self._terms.encodes and dice.random() < 0.3:
            self._report(dice.randrange(15 * SECOND), WorkerLost(0, 0, "encoder"))

    # --- What the driver sees --------------------------------------------------------------------------------

    def next_event(self) -> Event:
        """Events as they arrive; a tick before time passes, and now and then between two events."""
        self._reported += 1
        if self._reported in self._also:
            self._needs_tick = True
            self._note(self._also[self._reported])
            return replace(self._also[self._reported], at_ns=self.now_ns)
        quiet = not self._due or self._due[0][0] > self.now_ns
        if self._needs_tick and (quiet or self._dice.random() < 0.5):
            self._needs_tick = False
            return Tick(self.now_ns)
        self._needs_tick = True
        if self._dice.random() < 0.1:
            return self._measurements()
        assert self._due, f"no job is under way at {self.now_ns} ns"
        at_ns, _, event = heappop(self._due)
        self.now_ns = max(self.now_ns, at_ns)
        self._note(event)
        return replace(event, at_ns=max(0, self.now_ns - self._dice.randrange(SECOND // 1000)))

    def submit(self, action: Action) -> None:
        """Starts a job now."""
        start = self._START.get(type(action))
        if start is not None:
            start(self, action)

    # --- How jobs end ----------------------------------------------------------------------------------------

    def _generate(self, job: Generate) -> None:
        self._held[job.lane] = job
        if job.lane in self._lost and self._dice.random() < 0.5:
            return
        piece, offer = job.slice, self._offers[job.lane]
        done = Generated(0, job, job.version)
        result: Event = done
        if self._dice.random() < 0.05:
            result = JobFailed(0, job, "out of luck")
        elif self._loses_artifact():
            result = ArtifactLost(0, job, prompts=((piece.step, piece.group),))
        elif not self._terms.scorers and self._fails_score():
            result = replace(done, score_failure="no number")
        elif job.stale and self._dice.random() < 0.1:
            result = replace(done, version=piece.step)  # a newer version arrived before the job started
        slices = self._terms.slices_in(piece.size)
        what = f"lane {job.lane}" if slices == offer.slices_at_once else "smaller take"
        self._answer(what, offer.expected_ns(slices), result)
        if self._dice.random() < 0.1:
            self._answer("doubled", 2 * offer.expected_ns(slices), done)

    def _evaluate(self, job: Evaluate) -> None:
        result: Event = Evaluated(0, job)
        if self._dice.random() < 0.03:
            result = JobFailed(0, job, "out of luck")
        elif self._loses_artifact():
            result = ArtifactLost(0, job, prompts=((-1, job.chunk.index),))
        self._answer("evaluate", self._costs.evaluate_ns, result)

    def _score(self, job: Score) -> None:
        if not isinstance(job.piece, Slice):
            failed = JobFailed(0, job, "no number")
            lost = ArtifactLost(0, job)
            chunk_result: Event = failed if self._dice.random() < 0.03 else Scored(0, job)
            self._answer("chunk", self._costs.score_chunk_ns, lost if self._loses_artifact() else chunk_result)
            return
        duration_ns = self._costs.score_batch_ns(job.piece.size)
        scored: Event = Scored(0, job)
        if self._fails_score():
            scored = JobFailed(0, job, "no number")
        elif self._loses_slice():
            scored = ArtifactLost(0, job, slices=self._artifacts_of(job.piece))
        self._answer("score", duration_ns, scored, job.piece.size)
        if self._dice.random() < 0.1:
            self._answer("doubled", 2 * duration_ns + 1, Scored(0, job))

    def _train(self, job: Train) -> None:
        trained: Event = Trained(0, job)
        if self._loses_slice():
            artifacts = self._artifacts_of(job.slice)
            lost = tuple(piece for piece in artifacts if self._dice.random() < 0.5)  # none: the job is tried again
            trained = ArtifactLost(0, job, slices=lost)
        if job.lane == NO_LANE:
            self._answer("train", self._costs.train_ns(job.slice.size), trained, job.slice.size)
        elif job.lane not in self._lost or self._dice.random() < 0.5:
            expected_ns = round(job.slice.size * self._offers[job.lane].train_sample_ns)
            self._answer(f"train {job.lane}", expected_ns, trained, job.slice.size)
            if self._dice.random() < 0.1:
                self._answer("doubled", 2 * expected_ns, Trained(0, job))

    def _send_gradients(self, job: SendGradients) -> None:
        if job.lane not in self._lost or self._dice.random() < 0.5:
            self._answer("send", SECOND // 10, GradientsSent(0, job))

    def _publish(self, job: Publish) -> None:
        for lane in job.lanes:
            lost = ArtifactLost(0, job, weights=True)
            result = lost if self._loses_artifact() else Published(0, job, (lane,))
            self._answer("publish", self._costs.publish_ns, result)

    def _commit(self, job: Commit) -> None:
        result: Event = Committed(0, job)
        if job.gradients and self._loses_artifact():
            result = ArtifactLost(0, job, gradients=self._some(job.gradients))
        self._answer("commit", self._costs.commit_ns, result)

    def _some(self, job_ids: tuple[int, ...]) -> tuple[int, ...]:
        """A part of them, or none."""
        return tuple(job_id for job_id in job_ids if self._dice.random() < 0.5)

    def _save(self, job: Save) -> None:
        self._answer("save", self._costs.save_ns, Saved(0, job))

    def _switch(self, job: SwitchRole) -> None:
        what, expected_ns = ("switch_in", self._costs.switch_in_ns)
        if job.role == "train":
            what, expected_ns = ("switch_out", self._costs.switch_out_ns)
        self._answer(what, expected_ns, RoleSwitched(0, job))

    def _restore(self, job: Restore) -> None:
        self._answer("restore", SECOND // 2, Restored(0, job))

    def _export(self, job: Export) -> None:
        self._answer("export", SECOND // 10, Exported(0, job))

    def _encode(self, job: Encode) -> None:
        self._answer("encode", SECOND // 10, Encoded(0, job))

    _START: ClassVar[dict[type[Action], Callable[[NoisyCluster, Any], None]]] = {
        Generate: _generate,
        Evaluate: _evaluate,
        Score: _score,
        Train: _train,
        SendGradients: _send_gradients,
        Commit: _commit,
        Publish: _publish,
        Save: _save,
        SwitchRole: _switch,
        Restore: _restore,
        Export: _export,
        Encode: _encode,
    }

    def _fails_score(self) -> bool:
        failed = self._failed_scores < MOST_FAILED_SCORES and self._dice.random() < 0.05
        self._failed_scores += failed
        return failed

    def _loses_artifact(self) -> bool:
        lost = self._lost_artifacts < MOST_LOST_ARTIFACTS and self._dice.random() < 0.05
        self._lost_artifacts += lost
        return lost

    def _loses_slice(self) -> bool:
        """Not where single samples are streamed, which is possible in simulations only."""
        return self._terms.stream != "sample" and self._loses_artifact()

    def _artifacts_of(self, piece: Slice) -> tuple[Slice, ...]:
        """The generated slices of which these samples are part, as they were generated."""
        generated = self._generated[piece.step, piece.group]
        return tuple(sorted(each for each in generated if each.mask() & piece.mask()))

    def _answer(self, what: str, expected_ns: int, event: Event, samples: int = 1) -> None:
        took_ns = round(expected_ns * self._dice.uniform(*FACTORS))
        self._measured[what].append(took_ns // samples)
        self._report(self.now_ns + took_ns, event)

    def _report(self, at_ns: int, event: Event) -> None:
        self._submitted += 1
        heappush(self._due, (at_ns, self._submitted, event))

    def _note(self, event: Event) -> None:
        if isinstance(event, WorkerJoined):
            self._offers[len(self._offers)] = event.offer
        elif isinstance(event, WorkerLost) and event.pool == "generator":
            self._lost.add(event.lane)
            self._held.pop(event.lane, None)
        elif isinstance(event, WorkerLost) and event.pool == "reward":
            self._report(self.now_ns + self._dice.randrange(3 * SECOND), WorkerRestarted(0, event.lane))
        elif isinstance(event, WorkerLost) and event.pool == "trainer":
            self._lose_trainer()
        elif isinstance(event, WorkerLost) and event.pool == "encoder":
            self._forget_results(lambda job: isinstance(job, Encode))
        elif isinstance(event, Generated) and self._held.get(event.job.lane) == event.job:
            del self._held[event.job.lane]
            piece = event.job.slice
            artifacts = self._generated[piece.step, piece.group]
            self._generated[piece.step, piece.group] = {
                each for each in artifacts if not each.mask() & piece.mask()
            } | {piece}

    def _lose_trainer(self) -> None:
        """Its results never arrive. Those of its lanes may arrive late."""
        self._forget_results(
            lambda job: isinstance(job, TRAINER_JOBS) or (isinstance(job, Train) and job.lane == NO_LANE)
        )
        for lane in [*self._held] if self._terms.colocated else self._helpers:
            self._held.pop(lane, None)

    def _forget_results(self, is_lost: Callable[[Job], bool]) -> None:
        self._due = [entry for entry in self._due if not isinstance(entry[2], Result) or not is_lost(entry[2].job)]
        heapify(self._due)

    def _measurements(self) -> CostsMeasured:
        """Running medians, or expected costs where nothing has been measured yet."""
        costs = self._costs
        return CostsMeasured(
            self.now_ns,
            train_sample_ns=Fraction(self._median("train", round(costs.train_sample_ns))),
            commit_ns=self._median("commit", costs.commit_ns),
            publish_ns=self._median("publish", costs.publish_ns),
            switch_in_ns=self._median("switch_in", costs.switch_in_ns),
            switch_out_ns=self._median("switch_out", costs.switch_out_ns),
            score_ns=self._median("score", costs.score_ns),
            evaluate_ns=self._median("evaluate", costs.evaluate_ns),
            save_ns=self._median("save", costs.save_ns),
            lane_slice_ns=tuple(
                (lane, self._median(f"lane {lane}", offer.slice_ns)) for lane, offer in self._offers.items()
            ),
            lane_train_ns=tuple(
                (lane, Fraction(self._median(f"train {lane}", round(offer.train_sample_ns))))
                for lane, offer in self._offers.items()
                if offer.train_sample_ns
            ),
        )

    def _median(self, what: str, expected_ns: int) -> int:
        measured = self._measured[what]
        return int(statistics.median(measured)) if measured else expected_ns
