"""How many slices of a step each lane should generate, so that all lanes finish the step together.

Within a given time, a lane can do some pairs of (slices to generate, jobs to train): each further Train job costs
it some slices. Starting from the most training, slices are added where they cost the least training, until all are
generated. The least time in which all Train jobs still fit gives the quotas. Lanes that generate well compared
with how they train generate more, and few lanes end with time for half a job.

What a plan leaves out is that samples can be trained only when their group is complete. `head_ns` is a time before
which nothing is trained, `tail_ns` a time before the end in which nothing is generated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from digenrl.simulation.step_forecast import LaneTimes, StepForecast

BISECTIONS = 20


@dataclass(frozen=True, slots=True)
class Margins:
    """Times at the beginning without training, and at the end without generating."""

    head_ns: int = 0
    tail_ns: int = 0


@dataclass(frozen=True, slots=True)
class _Move:
    """More slices and fewer Train jobs, on one lane of a class."""

    cost: float  # jobs per slice
    lane_class: int
    slices: int
    jobs: int


class QuotaPlanner:
    """Plans quotas for lanes that generate `slices` and train `jobs` in a step."""

    def __init__(self, lanes: Sequence[LaneTimes], *, slices: int, jobs: int, jobs_per_group: int) -> None:
        self._lanes = lanes
        self.slices = slices
        self.jobs = jobs
        self._jobs_per_group = jobs_per_group
        self._classes = list(Counter(lanes).items())
        self._generating_ns = [_generating_ns(times, slices) for times, _ in self._classes]

    @classmethod
    def of_forecast(cls, forecast: StepForecast) -> QuotaPlanner:
        return cls(
            forecast.lanes,
            slices=forecast.groups * forecast.slices_per_group,
            jobs=forecast.groups * forecast.jobs_per_group,
            jobs_per_group=forecast.jobs_per_group,
        )

    @cached_property
    def first_piece_ns(self) -> int:
        """When every lane has generated a full job: at the latest then, groups are complete."""
        return max(times.starts_ns + times.switch_in_ns + times.full_ns for times, _ in self._classes)

    @cached_property
    def last_group_ns(self) -> int:
        """The least time in which all lanes together train one group."""
        able = [(times.train_ns, count) for times, count in self._classes if times.train_ns]

        def fits(time_ns: int) -> bool:
            return sum(count * (time_ns // train_ns) for train_ns, count in able) >= self._jobs_per_group

        return least_time_ns(fits)

    def least_ns(self, margins: Margins) -> int:
        """The least time of a step, without its commit, in which everything fits."""
        high_ns = margins.head_ns + margins.tail_ns + self.first_piece_ns
        while not self._assigned(high_ns, margins)[1]:
            high_ns *= 2
        low_ns = high_ns // 2
        for _ in range(BISECTIONS):
            middle_ns = (low_ns + high_ns) // 2
            if self._assigned(middle_ns, margins)[1]:
                high_ns = middle_ns
            else:
                low_ns = middle_ns
        return high_ns

    def quotas(self, time_ns: int, margins: Margins) -> tuple[int, ...]:
        """What each lane should generate if the step is to take this time."""
        per_class, _ = self._assigned(time_ns, margins)
        return tuple(per_class[times].pop() for times in self._lanes)

    def _assigned(self, time_ns: int, margins: Margins) -> tuple[dict[LaneTimes, list[int]], bool]:
        """Quotas by class, largest last, and whether all slices and all Train jobs fit."""
        least, moves = self._moves(time_ns, margins)
        quotas = [[each[0]] * count for (_, count), each in zip(self._classes, least, strict=True)]
        slices = sum(map(sum, quotas))
        jobs = sum(count * each[1] for (_, count), each in zip(self._classes, least, strict=True))
        for move in moves:
            of_class = quotas[move.lane_class]
            for lane in range(len(of_class)):
                if slices >= self.slices:
                    break
                of_class[lane] += move.slices
                slices += move.slices
                jobs -= move.jobs
        fits = slices >= self.slices and jobs >= self.jobs
        return {times: sorted(of_class) for (times, _), of_class in zip(self._classes, quotas, strict=True)}, fits

    def _moves(self, time_ns: int, margins: Margins) -> tuple[list[tuple[int, int]], list[_Move]]:
        """For each class the pair with the most training, and all moves from there, the cheapest first."""
        least: list[tuple[int, int]] = []
        moves: list[_Move] = []
        for index, (times, _) in enumerate(self._classes):
            pairs = _pairs(times, self._generating_ns[index], time_ns, margins)
            least.append(pairs[0])
            for (fewer, more_jobs), (more, fewer_jobs) in pairwise(pairs):
                lost = more_jobs - fewer_jobs
                moves.append(_Move(lost / (more - fewer), index, more - fewer, lost))
        moves.sort(key=lambda move: move.cost)
        return least, moves


def least_time_ns(fits: Callable[[int], bool]) -> int:
    """The least time that fits, if every longer one does."""
    low_ns, high_ns = -1, 1
    while not fits(high_ns):
        low_ns, high_ns = high_ns, 2 * high_ns
    while high_ns - low_ns > 1:
        middle_ns = (low_ns + high_ns) // 2
        low_ns, high_ns = (low_ns, middle_ns) if fits(middle_ns) else (middle_ns, high_ns)
    return high_ns


def _generating_ns(times: LaneTimes, slices: int) -> list[int]:
    """The least time for at least 0, 1, 2, ... slices, in jobs of any size that the lane takes."""
    at_least_ns = [*accumulate(reversed(times.take_ns), min)][::-1]  # a larger job may be faster
    least = [0]
    for count in range(1, slices + 1):
        least.append(min(least[max(0, count - size)] + ns for size, ns in enumerate(at_least_ns, start=1)))
    return least


def _pairs(times: LaneTimes, generating_ns: list[int], time_ns: int, margins: Margins) -> list[tuple[int, int]]:
    """Pairs of (slices, Train jobs) that fit: more and more slices at an ever higher price."""
    most_slices: dict[int, int] = {}  # by number of jobs
    for slices, takes_ns in enumerate(generating_ns):
        end_ns = times.starts_ns + takes_ns + (times.switch_in_ns if slices else 0)
        if slices and end_ns > time_ns - margins.tail_ns:
            break
        begin_ns = max(margins.head_ns, end_ns + (times.switch_out_ns if slices else 0))
        jobs = max(0, (time_ns - begin_ns) // times.train_ns) if times.train_ns else 0
        most_slices[jobs] = slices
    hull: list[tuple[int, int]] = []
    for jobs, slices in most_slices.items():  # ascending in slices
        while len(hull) > 1 and _is_below(hull[-2], hull[-1], (slices, jobs)):
            hull.pop()
        hull.append((slices, jobs))
    return hull


def _is_below(left: tuple[int, int], middle: tuple[int, int], right: tuple[int, int]) -> bool:
    """Whether a mix of the outer pairs is at least as good as the middle one."""
    return (middle[1] - left[1]) * (right[0] - left[0]) <= (right[1] - left[1]) * (middle[0] - left[0])
