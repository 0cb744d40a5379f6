"""The least a run can take, from its rates alone: never above what the scheduler will reach, so a plan whose bound
is worse than a plan in hand need not be simulated."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor

# A SPEC's durations are rounded to six digits: this room keeps the bound below what it bounds.
SAFETY = 1 - 1e-5


@dataclass(frozen=True, slots=True)
class Lanes:
    """Equal lanes, and the seconds one of them takes for a slice."""

    count: int
    slice_s: float


@dataclass(frozen=True, slots=True)
class Pace:
    """The numbers of a SPEC that bound its makespan; `helpers` is None where the trainer does not help."""

    steps: int
    samples_per_step: int
    slice_size: int
    unit_samples: int
    generators: tuple[Lanes, ...]
    helpers: Lanes | None
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
    def generator_rate(self) -> float:
        """Samples a second of all generator lanes."""
        return sum(lanes.count * self.slice_size / lanes.slice_s for lanes in self.generators)


def least_makespan(pace: Pace) -> float:
    """A lower bound of the makespan under any order of work: the larger of two readings.

    Fluid: all lanes busy from first to last. In turns: what a step generates after its version is published comes
    after the step before, and its last group is trained after that.
    """
    in_turns = _first_step_s(pace) + (pace.steps - 1) * _later_step_s(pace)
    return SAFETY * max(_fluid_s(pace), in_turns, _reward_bound_s(pace))


def finish_s(pools: tuple[Lanes, ...], slices: int) -> float:
    """When the last of `slices` equal slices can end at the earliest, all lanes free at 0."""
    if slices <= 0:
        return 0.0
    if len(pools) == 1:
        return -(-slices // pools[0].count) * pools[0].slice_s
    low = slices / sum(lanes.count / lanes.slice_s for lanes in pools)  # fluid: nothing ends sooner
    high = low + max(lanes.slice_s for lanes in pools)  # by then every lane has rounded up
    for _ in range(16):
        middle = (low + high) / 2
        done = sum(lanes.count * floor(middle / lanes.slice_s) for lanes in pools)
        low, high = (low, middle) if done >= slices else (middle, high)
    return low


def _fluid_s(pace: Pace) -> float:
    samples = pace.steps * pace.samples_per_step
    training_s = pace.steps * pace.step_training_s
    if pace.helpers is None:
        return max(training_s, samples / pace.generator_rate + _last_unit_s(pace))
    helper_rate = pace.helpers.count * pace.slice_size / pace.helpers.slice_s
    shared_s = (samples + helper_rate * training_s) / (pace.generator_rate + helper_rate)
    return max(training_s, shared_s)


def _last_unit_s(pace: Pace) -> float:
    """After the last sample is generated: it is scored, its unit trained, the step committed."""
    return pace.reward_s + pace.unit_samples * pace.seconds_per_sample + pace.commit_s


def _all_lanes(pace: Pace) -> tuple[Lanes, ...]:
    return pace.generators if pace.helpers is None else (*pace.generators, pace.helpers)


def _first_step_s(pace: Pace) -> float:
    lanes = _all_lanes(pace)
    generated_s = finish_s(lanes, pace.samples_per_step // pace.slice_size)
    first_sample_s = min(pool.slice_s for pool in lanes) + pace.reward_s
    return max(generated_s + _last_unit_s(pace), first_sample_s + pace.step_training_s)


def _later_step_s(pace: Pace) -> float:
    """From one commit to the next: at least what may not start before the version is published."""
    lanes = _all_lanes(pace)
    early = min(floor(pace.stale_share * pace.samples_per_step), pace.samples_per_step)
    fresh_slices = -(-(pace.samples_per_step - early) // pace.slice_size)
    if fresh_slices == 0:
        return pace.step_training_s
    opens_s = pace.publish_s if pace.helpers is None else 0.0  # the trainer's own lanes need no publication
    in_turn_s = opens_s + finish_s(lanes, fresh_slices) + _last_unit_s(pace)
    if early:
        return max(in_turn_s, pace.step_training_s)
    first_sample_s = opens_s + min(pool.slice_s for pool in lanes) + pace.reward_s
    return max(in_turn_s, first_sample_s + pace.step_training_s)


def _reward_bound_s(pace: Pace) -> float:
    if pace.reward_lanes == 0:
        return 0.0
    return pace.steps * pace.samples_per_step * pace.reward_s / pace.reward_lanes
