"""A lower bound of a plan's makespan, from its rates alone.

A plan whose bound is worse than the best plan found so far need not be simulated.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

# A SPEC's durations are rounded to six digits; this margin keeps the bound below the rounded makespan.
ROUNDING_MARGIN = 1 - 1e-5


@dataclass(frozen=True, slots=True)
class EqualLanes:
    """A number of equal lanes, and the seconds that one of them needs for a slice."""

    count: int
    slice_s: float


@dataclass(frozen=True, slots=True)
class Rates:
    """The numbers of a SPEC that bound its makespan; `helpers` is None if the trainer does not help."""

    steps: int
    samples_per_step: int
    slice_size: int
    unit_samples: int
    generators: tuple[EqualLanes, ...]
    helpers: EqualLanes | None
    seconds_per_sample: float
    commit_s: float
    publish_s: float
    reward_s: float
    reward_lanes: int
    stale_share: float

    @property
    def step_training_s(self) -> float:
        return self.samples_per_step * self.seconds_per_sample + self.commit_s

    @property
    def samples_per_second(self) -> float:
        """The throughput of all generator lanes."""
        return sum(lanes.count * self.slice_size / lanes.slice_s for lanes in self.generators)

    @property
    def all_lanes(self) -> tuple[EqualLanes, ...]:
        return self.generators if self.helpers is None else (*self.generators, self.helpers)


def least_makespan(rates: Rates) -> float:
    """A lower bound of the makespan under any schedule, in seconds.

    The largest of three bounds. Fluid: all lanes are busy all the time. Sequential: samples that need the new
    weight version are generated after the previous step was published, and trained after that. Scoring: reward
    lanes only.
    """
    sequential_s = _first_step_s(rates) + (rates.steps - 1) * _later_step_s(rates)
    return ROUNDING_MARGIN * max(_fluid_s(rates), sequential_s, _scoring_s(rates))


def finish_s(pools: tuple[EqualLanes, ...], slices: int) -> float:
    """The earliest time at which `slices` equal slices can be complete, if all lanes are free at 0."""
    if slices <= 0:
        return 0.0
    if len(pools) == 1:
        return -(-slices // pools[0].count) * pools[0].slice_s
    low = slices / sum(lanes.count / lanes.slice_s for lanes in pools)  # the fluid limit
    high = low + max(lanes.slice_s for lanes in pools)  # every lane has completed its last slice by then
    for _ in range(16):
        middle = (low + high) / 2
        done = sum(lanes.count * floor(middle / lanes.slice_s) for lanes in pools)
        low, high = (low, middle) if done >= slices else (middle, high)
    return low


def _fluid_s(rates: Rates) -> float:
    samples = rates.steps * rates.samples_per_step
    training_s = rates.steps * rates.step_training_s
    if rates.helpers is None:
        return max(training_s, samples / rates.samples_per_second + _last_unit_s(rates))
    helper_rate = rates.helpers.count * rates.slice_size / rates.helpers.slice_s
    shared_s = (samples + helper_rate * training_s) / (rates.samples_per_second + helper_rate)
    return max(training_s, shared_s)


def _last_unit_s(rates: Rates) -> float:
    """The time after the last sample is generated: it is scored, its unit is trained, the step is committed."""
    return rates.reward_s + rates.unit_samples * rates.seconds_per_sample + rates.commit_s


def _first_step_s(rates: Rates) -> float:
    generated_s = finish_s(rates.all_lanes, rates.samples_per_step // rates.slice_size)
    first_sample_s = min(lanes.slice_s for lanes in rates.all_lanes) + rates.reward_s
    return max(generated_s + _last_unit_s(rates), first_sample_s + rates.step_training_s)


def _later_step_s(rates: Rates) -> float:
    """The least time between two commits: the work that has to wait for the new weight version."""
    early = min(floor(rates.stale_share * rates.samples_per_step), rates.samples_per_step)
    fresh_slices = -(-(rates.samples_per_step - early) // rates.slice_size)
    if fresh_slices == 0:
        return rates.step_training_s
    start_s = rates.publish_s if rates.helpers is None else 0.0  # the trainer's own lanes need no publication
    in_turn_s = start_s + finish_s(rates.all_lanes, fresh_slices) + _last_unit_s(rates)
    if early:
        return max(in_turn_s, rates.step_training_s)
    first_sample_s = start_s + min(lanes.slice_s for lanes in rates.all_lanes) + rates.reward_s
    return max(in_turn_s, first_sample_s + rates.step_training_s)


def _scoring_s(rates: Rates) -> float:
    if rates.reward_lanes == 0:
        return 0.0
    return rates.steps * rates.samples_per_step * rates.reward_s / rates.reward_lanes
