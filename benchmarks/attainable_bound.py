"""A lower bound of the makespan of lanes that do both, for samples and Train jobs that cannot be divided.

The fluid bound (`answer.bound_seconds`) counts work as divisible. This one also uses what no schedule can avoid.
Let T be the time from the start of a step, when the trainer's lanes have its version, until all of it is trained.

1. A lane generates whole pieces, each of one group, and trains whole jobs, one thing at a time. If it does both in
   a step, it changes its role at least once.
2. Nothing is trained before all lanes together could have generated and scored one group: the *head*.
3. When the last piece is generated and scored, its whole group is still untrained. All lanes together need a
   certain time for that, in whole jobs: the *tail*. So nothing is generated in the last part of T.

A lane thus trains at most floor((T - max(head, generating + switch)) / job) jobs beside what it generates, and all
of that generates before T - tail. If the best numbers for all lanes, mixed in any proportion, do not add up to the
step's samples and jobs, then T is too short. After T, the step is added up and committed, and on-policy the next
one begins. Stale samples may be generated before their step, at no cost here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from digenrl.config.spec import Spec
from digenrl.scheduling import SchedulerState, SharedWorkRule
from digenrl.simulation.answer import bound_seconds
from digenrl.simulation.both_directions import initial_shared_state
from digenrl.simulation.quotas import Margins, QuotaPlanner, least_time_ns
from digenrl.simulation.step_forecast import LaneTimes, lane_times
from digenrl.units import NS_PER_SECOND


class BoundPlanner(QuotaPlanner):
    """What no division of a step's work among lanes can do."""

    def generated_ns(self, slices: int) -> int:
        """The least time in which all lanes together generate this many slices, if they do nothing else."""

        def fits(time_ns: int) -> bool:
            most = (
                count * (bisect_right(generating_ns, time_ns - times.starts_ns) - 1)
                for (times, count), generating_ns in zip(self._classes, self._generating_ns, strict=True)
                if time_ns >= times.starts_ns
            )
            return sum(most) >= slices

        return least_time_ns(fits)

    def could_fit(self, time_ns: int, margins: Margins) -> bool:
        """Whether everything fits if equal lanes may mix what they do in any proportion: else, nothing can."""
        least, moves = self._moves(time_ns, margins)
        counts = [count for _, count in self._classes]
        missing = self.slices - sum(count * slices for count, (slices, _) in zip(counts, least, strict=True))
        jobs = float(sum(count * most for count, (_, most) in zip(counts, least, strict=True)))
        for move in moves:
            if missing <= 0:
                break
            taken = min(missing, counts[move.lane_class] * move.slices)
            missing -= taken
            jobs -= taken * move.cost
        return missing <= 0 and jobs >= self.jobs * (1 - 1e-12)


def attainable_seconds(spec: Spec) -> float:
    """No schedule in which the lanes of this SPEC do both is faster. It is never below the fluid bound."""
    at_once = SharedWorkRule(slices_at_once=spec.samples_per_prompt if spec.slice == "auto" else 1)
    initial = initial_shared_state(spec, at_once)
    lanes = [
        replace(lane, switch_in_ns=0, switch_out_ns=min(lane.switch_in_ns, lane.switch_out_ns))
        for lane in lane_times(initial)
    ]
    first = least_step_ns(initial, [replace(lane, starts_ns=0) for lane in lanes], early_samples=0)
    later = least_step_ns(initial, lanes, early_samples=initial.terms.stale_budget)
    return max(bound_seconds(spec), (first + (spec.steps - 1) * later) / NS_PER_SECOND)


def least_step_ns(initial: SchedulerState, lanes: Sequence[LaneTimes], early_samples: int) -> int:
    """A lower bound of the time between two commits, if some samples were generated before the first of them."""
    terms, costs = initial.terms, initial.costs
    early = min(early_samples, terms.samples_per_step) // terms.slice_size
    planner = BoundPlanner(
        lanes,
        slices=terms.slices_per_step - early,
        jobs=terms.samples_per_step // terms.train_unit,
        jobs_per_group=terms.samples_per_prompt // terms.train_unit,
    )
    margins = Margins()
    if planner.slices:
        score_ns = costs.score_ns if terms.scorers else 0
        first_group = max(0, terms.slices_per_group - early)
        margins = Margins(
            head_ns=planner.generated_ns(first_group) + score_ns if first_group else 0,
            tail_ns=planner.last_group_ns + score_ns,
        )
    trained_ns = least_time_ns(lambda time_ns: planner.could_fit(time_ns, margins))
    return trained_ns + costs.reduce_ns + costs.commit_ns
